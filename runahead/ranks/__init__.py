"""Ranks, the processes of a job: rendezvous, devices, control messages, waiting, heartbeats and fault reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runahead.ranks.ranks import Ranks

__all__ = ["Ranks"]


def __getattr__(name: str) -> Any:
    """Import `Ranks` on first use, since its module needs torch."""
    if name == "Ranks":
        from runahead.ranks.ranks import Ranks

        return Ranks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
