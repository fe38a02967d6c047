"""The memory that a tier takes: a view keeps its whole allocation alive, so bytes are counted per allocation."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from runahead.reuse.tiers.entry import Entry, Tier
from runahead.reuse.tiers.layer_rows import LayerRows

AnyEntry = TypeVar("AnyEntry", bound=Entry)


@dataclass(eq=False, repr=False, kw_only=True)
class Allocation(Generic[AnyEntry]):
    """Memory in which the rows of some entries lie, and perhaps other rows.

    Attributes:
        tier: in which it is.
        num_bytes: allocated.
        live_bytes: of the entries' rows.
    """

    tier: Tier
    num_bytes: int
    live_bytes: int = 0
    owners: set[AnyEntry] = field(default_factory=set)

    @property
    def is_wasted(self) -> bool:
        """Whether less than half of it is in use, and nobody reads it: a copy would not free what is read."""
        if 2 * self.live_bytes >= self.num_bytes or any(owner.holds for owner in self.owners):
            return False
        return 2 * sum(owner.places[self.tier].least_bytes for owner in self.owners) < self.num_bytes


class TierMemory(Generic[AnyEntry]):
    """The allocations of one tier.

    Args:
        limit_bytes: most bytes of all allocations.

    Attributes:
        num_bytes: bytes of all allocations, each once.
        pinned_bytes: of these, bytes of entries that never leave.
    """

    def __init__(self, tier: Tier, limit_bytes: float) -> None:
        self.tier, self.limit_bytes = tier, limit_bytes
        self.num_bytes = self.pinned_bytes = 0
        self._allocations: dict[Hashable, Allocation[AnyEntry]] = {}

    def takes(self, num_bytes: int) -> bool:
        """Whether an entry of this size has room, if others leave."""
        return num_bytes + self.pinned_bytes <= self.limit_bytes

    def place(self, entry: AnyEntry, rows: LayerRows) -> None:
        """Let an entry be here, in place of where it was in this tier."""
        self.remove(entry)
        entry.places[self.tier] = rows
        if not rows:
            return
        if rows.memory.where not in self._allocations:
            self._allocations[rows.memory.where] = Allocation(tier=self.tier, num_bytes=rows.memory.num_bytes)
            self.num_bytes += rows.memory.num_bytes
        allocation = self._allocations[rows.memory.where]
        allocation.owners.add(entry)
        allocation.live_bytes += rows.num_bytes
        self.pinned_bytes += rows.num_bytes if entry.is_pinned else 0

    def share(self, entry: AnyEntry, new: AnyEntry) -> None:
        """Let `new` own some of the rows that were counted for an entry."""
        if (allocation := self.allocation(entry)) is not None:
            allocation.owners.add(new)

    def remove(self, entry: AnyEntry) -> None:
        """Let an entry be here no longer, if it is."""
        rows, allocation = entry.places.pop(self.tier, None), None
        if rows:
            allocation = self._allocations[rows.memory.where]
            allocation.owners.remove(entry)
            allocation.live_bytes -= rows.num_bytes
            self.pinned_bytes -= rows.num_bytes if entry.is_pinned else 0
            if not allocation.owners:
                self.num_bytes -= allocation.num_bytes
                del self._allocations[rows.memory.where]

    def allocation(self, entry: AnyEntry) -> Allocation[AnyEntry] | None:
        """Where an entry's rows lie; None if it has none here."""
        rows = entry.places.get(self.tier)
        return self._allocations[rows.memory.where] if rows else None

    def entries(self) -> Iterator[AnyEntry]:
        """All entries that are here, each once."""
        for allocation in self._allocations.values():
            yield from allocation.owners

    def entries_in(self, where: Hashable) -> list[AnyEntry]:
        """The entries in this allocation."""
        return list(self._allocations[where].owners) if where in self._allocations else []

    def wasted(self) -> list[Allocation[AnyEntry]]:
        """The allocations of which it pays to copy what is left."""
        return [each for each in self._allocations.values() if each.is_wasted]
