"""Entries of a tiered store: keys and values of some tokens, and all the places where they are."""

# Legend: T tokens, K kv heads, X = H + V key and value dims.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from runahead.reuse.tiers.copies import TierCopies
from runahead.reuse.tiers.layer_rows import NO_ROWS, LayerRows


class Tier(Enum):
    """Where keys and values may be, the fastest first."""

    device = "device"
    host = "host"
    disk = "disk"


@dataclass(frozen=True, kw_only=True)
class FileRows:
    """Rows of a file from `first` on, of which it has `num_tokens`."""

    name: str
    num_tokens: int
    first: int = 0


@dataclass(eq=False, repr=False, kw_only=True)
class Entry(ABC):
    """Keys and values of some tokens.

    Attributes:
        copies: makes their copies; None: they stay on the device.
        places: where they are in memory.
        file: where they are on disk; None: nowhere.
        holds: number of users. What is in use stays in its fastest tier.
        used: time of the last use in ns; no two uses have the same.
        is_pinned: it leaves no tier.
    """

    copies: TierCopies | None = None
    places: dict[Tier, LayerRows] = field(default_factory=dict)
    file: FileRows | None = None
    holds: int = 0
    used: int = 0
    is_pinned: bool = False

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Number of its tokens."""

    @property
    def may_leave(self) -> bool:
        """Whether no other entry keeps it in the fastest tier that has it."""
        return True

    @property
    def precedence(self) -> tuple[int, ...]:
        """Order in which entries leave a tier; the lowest goes first."""
        return (self.used,)

    def before(self) -> Sequence[Self]:
        """The entries without which this one is of no use, in order, and itself."""
        return [self]

    def after(self) -> Sequence[Self]:
        """The entries that are next of no use without this one, which is in no slower tier than they are."""
        return []

    @abstractmethod
    def file_times_ns(self) -> dict[str, int]:
        """Times of the last use of files by name: its own, and others that are in use with it."""

    @property
    def tier(self) -> Tier:
        """The fastest tier that has it."""
        return next((tier for tier in Tier if tier in self.places), Tier.disk)

    @property
    def layers_TKX(self) -> LayerRows:  # noqa: N802
        """Keys and values of each layer, (T, K, H + V), in the fastest memory that has them."""
        return self.places.get(self.tier, NO_ROWS)

    @property
    def num_bytes(self) -> int:
        """Bytes of `layers_TKX`."""
        return self.layers_TKX.num_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes in host memory of its own, or in a file."""
        assert self.copies is not None
        return self.copies.stored_token_bytes * self.layers_TKX.stored.whole.num_tokens
