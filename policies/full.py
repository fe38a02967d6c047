"""Keep all tokens."""

from __future__ import annotations

from dataclasses import dataclass

from policies.base import Policy


@dataclass(kw_only=True)
class Full(Policy, name="full"):
    """The whole KV cache, which other policies are compared with."""
