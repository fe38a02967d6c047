"""Options of policy=prompt_cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from policies.byte_size import num_bytes
from policies.prompt_cache.placement import LINK_TOKENS

TIERS = ("device_bytes", "host_bytes", "disk_bytes")


@dataclass(kw_only=True)
class PromptCacheOptions:
    """Prompts reuse the keys and values of a schema's modules. See docs/prompt_cache.md.

    Attributes:
        schema: XML file with the modules.
        store: folder in which encoded modules stay; null keeps them in memory alone.
        link_tokens: first tokens of every run of reused ones that are computed again in context.
        sinks: first tokens of the schema that all modules see while they are encoded.
        device_bytes: memory of a GPU for encoded modules, such as 2GiB.
        host_bytes: memory of the host for them.
        disk_bytes: size of the store.

    Raises:
        ValueError: no schema, or no size.
    """

    schema: str | None = None
    store: str | None = None
    link_tokens: int = LINK_TOKENS
    sinks: int = 0
    device_bytes: Any = None
    host_bytes: Any = None
    disk_bytes: Any = None

    def __post_init__(self) -> None:
        if not self.schema:
            raise ValueError("policy=prompt_cache needs policy.schema=<xml file>")
        for name, size in self.limits.items():
            setattr(self, name, 0 if size == 0 else num_bytes(size, f"policy.{name}"))

    @property
    def limits(self) -> dict[str, Any]:
        """Bytes of each tier that has a limit."""
        return {name: getattr(self, name) for name in TIERS if getattr(self, name) is not None}
