"""Keep everything."""

from __future__ import annotations

from dataclasses import dataclass

from policies.base import Policy


@dataclass(kw_only=True)
class Full(Policy):
    """The whole cache: what other policies are compared with."""
