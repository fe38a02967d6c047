"""Settings of the connector, from `kv_connector_extra_config` of vLLM's --kv-transfer-config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import urlsplit

LONGEST_S = 10**7
"""A socket's timeout cannot be infinite, nor some numbers of seconds that JSON can hold."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The fields of `kv_connector_extra_config`.

    Attributes:
        server: address of Runahead's server, as `http://127.0.0.1:8000`.
        api_key_file: file with the key that the server asks for; a key in the command line would be seen by others.
        folder: where this machine sees the server's folder; empty: where the server says.
        min_tokens: prompts of which fewer tokens are to be computed go to vLLM alone.
        wait_s: longest wait for a prompt; vLLM computes what is late.
        start_s: longest wait for the server at start.
        at_once: prompts that the server is asked for at a time; others wait, within `wait_s`.
        look_only: take files that are there, and ask for none: a proxy has asked already.
        trust_weights: go on where the server cannot say which checkpoint it has loaded.
    """

    server: str = ""
    api_key_file: str = ""
    folder: str = ""
    min_tokens: int = 1024
    wait_s: float = 300.0
    start_s: float = 120.0
    at_once: int = 16
    look_only: bool = False
    trust_weights: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Raises: ValueError: an unknown name, a value of another type or out of range."""
        kinds = get_type_hints(cls)
        for name, value in given.items():
            if name not in kinds:
                raise ValueError(
                    f"runahead: kv_connector_extra_config has {name}, which is none of {', '.join(sorted(kinds))}"
                )
            number = kinds[name] is float and type(value) is int
            if type(value) is not kinds[name] and not number:
                raise ValueError(
                    f"runahead: {name}={value!r} of kv_connector_extra_config must be {_shown(kinds[name])}"
                )
        made = cls(**given)
        for each in fields(made):
            value = getattr(made, each.name)
            if each.type in ("int", "float") and not value > 0:
                raise ValueError(f"runahead: {each.name}={value!r} of kv_connector_extra_config must be above 0")
            if each.type == "float" and value > LONGEST_S:
                raise ValueError(
                    f"runahead: {each.name}={value!r} of kv_connector_extra_config must be at most {LONGEST_S} seconds"
                )
        url = urlsplit(made.server)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(
                f"runahead: server={made.server!r} of kv_connector_extra_config must be the address of Runahead's "
                "server, as http://127.0.0.1:8000"
            )
        return made

    def api_key(self) -> str:
        """The key, or an empty text. Raises: ValueError: the file cannot be read or is empty."""
        if not self.api_key_file:
            return ""
        try:
            key = Path(self.api_key_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"runahead: api_key_file={self.api_key_file} cannot be read: {error}") from error
        if not key or "\n" in key:
            raise ValueError(f"runahead: api_key_file={self.api_key_file} must have one line, the key")
        return key


def _shown(kind: type) -> str:
    return {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}[kind]
