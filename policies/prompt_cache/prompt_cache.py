"""Prompt Cache: its options, and the cache for one schema and one model, which turns prompts into segments."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from policies.byte_size import num_bytes
from policies.prompt_cache.layout import Layout
from policies.prompt_cache.model_text import ModelText
from policies.prompt_cache.placement import LINK_TOKENS, PromptPlacement
from policies.prompt_cache.prompt import Prompt
from policies.prompt_cache.schema import Schema
from policies.prompt_cache.xml_reader import PMLError
from policies.reuse import ReusingPrompt, Segment

TIERS = ("device_bytes", "host_bytes", "disk_bytes")


@dataclass(kw_only=True)
class PromptCacheOptions:
    """Prompts reuse the keys and values of a schema's modules. See docs/prompt_cache.md.

    Attributes:
        schema: XML file with the modules; launch/serve.py takes a list of such files, or none.
        store: folder in which encoded modules stay; null keeps them in memory alone.
        link_tokens: first tokens of every run of reused ones that are computed again in context.
        recompute: share of the tokens after them that is computed again, those whose keys and values differ most; a
            mean over all layers but the first two, which compute all.
        sinks: first tokens of the schema that all modules see while they are encoded.
        retrieve: policy by which generated tokens retrieve clusters of keys, such as squeezed_attention, or
            {name: ..., option: ...}; the clusters of a module are made once and stored with it.
        device_bytes: memory of a GPU for encoded modules, such as 2GiB.
        host_bytes: memory of the host for them.
        disk_bytes: size of the store.

    Raises:
        ValueError: no file, no size, or a negative number.
    """

    schema: Any = None
    store: str | None = None
    link_tokens: int = LINK_TOKENS
    recompute: float = 0.0
    sinks: int = 0
    retrieve: Any = None
    device_bytes: Any = None
    host_bytes: Any = None
    disk_bytes: Any = None

    def __post_init__(self) -> None:
        if not all(isinstance(path, str) and path for path in self.schemas):
            raise ValueError(f"policy.schema={self.schema} is no XML file; name one, or [one,another] for a server")
        for name in ("link_tokens", "sinks"):
            check_not_negative(name, getattr(self, name))
        check_share("recompute", self.recompute)
        for name, size in self.limits.items():
            setattr(self, name, 0 if size == 0 else num_bytes(size, f"policy.{name}"))

    @property
    def schemas(self) -> list[Any]:
        """The files of `schema`."""
        if self.schema is None:
            return []
        return self.schema if isinstance(self.schema, list) else [self.schema]

    @property
    def limits(self) -> dict[str, Any]:
        """Bytes of each tier that has a limit."""
        return {name: getattr(self, name) for name in TIERS if getattr(self, name) is not None}


class PromptCache:
    """Turns prompts of a schema into prompts for the engine.

    Args:
        schema: schema of the prompts.
        tokenizer: the model's tokenizer of transformers.
        max_positions: number of positions of the model; None: no limit.
        link_tokens: number of first tokens of every run of reused tokens that are computed again in context.
        recompute: share of the tokens after them that is computed again.
        sinks: number of first tokens of the schema that all modules attend to while they are encoded.
        max_tokens: most tokens of all modules; None: no limit.

    Raises:
        PMLError: the schema does not fit the model.
        ValueError: a negative number of tokens, or no share.
    """

    def __init__(
        self,
        schema: Schema,
        tokenizer: Any,
        *,
        max_positions: int | None = None,
        link_tokens: int = LINK_TOKENS,
        recompute: float = 0.0,
        sinks: int = 0,
        max_tokens: int | None = None,
    ) -> None:
        for name, value in (("link_tokens", link_tokens), ("sinks", sinks)):
            check_not_negative(name, value)
        check_share("recompute", recompute)
        self.schema, self.link_tokens, self.recompute = schema, link_tokens, recompute
        self._text = ModelText(tokenizer)
        self.layout = Layout(schema, self._text, max_positions=max_positions, sinks=sinks, max_tokens=max_tokens)

    @property
    def segments(self) -> list[Segment]:
        """All segments of the schema."""
        return self.layout.segments

    def prompt(self, source: Prompt | str | os.PathLike[str], *, name: str = "prompt") -> ReusingPrompt:
        """Prompt for the engine.

        Args:
            source: prompt of a prompt program, path of a file, or XML in a string that begins with "<".
            name: name of XML that is not in a file, for messages.

        Raises:
            PMLError: the prompt does not fit the schema.
            PromptTooLong: it does not fit the model.
            OSError: the file cannot be read.
        """
        if not isinstance(source, Prompt):
            source = Prompt.from_xml(source, self.schema, name=name)
        if source.schema != self.schema.name:
            raise PMLError(source.source, source.line, "prompt", f"is of {source.schema}, not of {self.schema.name}")
        return PromptPlacement(source, self.layout, self._text).place(self.link_tokens, self.recompute)


def check_not_negative(name: str, value: int) -> None:
    """Check an option that is a number of tokens. Raises: ValueError."""
    if value < 0:
        raise ValueError(f"policy.{name}={value} must not be negative; 0 is none")


def check_share(name: str, value: float) -> None:
    """Check an option that is a share. Raises: ValueError."""
    if not 0 <= value <= 1:
        raise ValueError(f"policy.{name}={value} must be a share, from 0 to 1; 0 is none")
