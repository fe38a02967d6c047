"""A store of keys and values in three tiers: the device, host memory, and files.

An entry may be in several tiers. Where a tier has no room the entries leave that a faster tier has as well, and then
those of the lowest precedence. One without a slower place goes down a tier, by a copy or a file; what has no place
left is lost. Copies and files are made by other threads; the store itself is used by one thread only.
"""

from __future__ import annotations

import heapq
import queue
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import count, takewhile
from math import inf
from typing import Generic

import torch

from runahead.cache.slabs import KVShape
from runahead.reuse.tiers.copies import TierCopies
from runahead.reuse.tiers.entry import FileRows, Tier
from runahead.reuse.tiers.files import FileAbout, TierFiles
from runahead.reuse.tiers.folder import TierFolder
from runahead.reuse.tiers.layer_rows import CopiedMemory, LayerRows, LostRows
from runahead.reuse.tiers.memory import Allocation, AnyEntry, TierMemory


class TieredStore(Generic[AnyEntry]):
    """Entries with their places. What has holds stays in its fastest tier, and may exceed the limits.

    Args:
        limits: most bytes of each memory tier that there is.
        folder: the disk tier.
        file_of: describes an entry for its file, given its numbers of rows before and after the entry's.
        is_right: whether metadata are those of a file of this name.
        lose: forgets an entry that has no place any more, and all that depends on it.
        lost_on_disk: what happens to entries that cannot be kept on disk, for messages.
    """

    def __init__(
        self,
        limits: Mapping[Tier, float],
        folder: TierFolder | None,
        *,
        file_of: Callable[[AnyEntry, tuple[int, int]], FileAbout],
        is_right: Callable[[dict[str, str], str], bool],
        lose: Callable[[AnyEntry], object],
        lost_on_disk: str,
    ) -> None:
        self._file_of, self._lose, self._lost_on_disk = file_of, lose, lost_on_disk
        self.memory = {tier: TierMemory[AnyEntry](tier, limit) for tier, limit in limits.items()}
        self.lost: queue.SimpleQueue[str | CopiedMemory] = queue.SimpleQueue()
        self.files = None if folder is None else TierFiles(folder, self.lost.put, is_right)
        self._in_file: dict[str, set[AnyEntry]] = {}
        self._all_copies: list[TierCopies] = []
        self._told: set[str] = set()
        self._used = 0

    def copies(self, device: torch.device, shapes: Sequence[KVShape], bits: int | None) -> TierCopies:
        """Copies of entries of these layers; see `TierCopies`."""
        self._all_copies.append(TierCopies(device, shapes, self.lost.put, bits))
        return self._all_copies[-1]

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes in use of the tiers that it has. Those on disk are of all processes that share the folder."""
        used = {tier.value: memory.num_bytes for tier, memory in self.memory.items()}
        if self.files is not None:
            used[Tier.disk.value] = self.files.num_bytes
        return used

    def now(self) -> int:
        """The time in ns, or the next moment that no use had."""
        self._used = max(self._used + 1, time.time_ns())
        return self._used

    def put(self, entry: AnyEntry, rows: LayerRows, *, everywhere: bool = False) -> None:
        """Store an entry on the device.

        Args:
            everywhere: at once in every tier that has room for it, of which the device may be none.
        """
        if not everywhere:
            self.memory[Tier.device].place(entry, rows)
            return
        assert entry.copies is not None
        self._place(entry, Tier.device, rows)
        stored = rows if entry.copies.is_direct else entry.copies.to_host(rows)
        self._place(entry, Tier.host, stored)
        if self.files is not None and self.files.is_behind(stored.num_bytes):
            self.files.wait()
        self.save(entry, stored)

    def file_found(self, entry: AnyEntry, file: FileRows) -> None:
        """Note that an entry is in a file."""
        entry.file = file
        self._in_file.setdefault(file.name, set()).add(entry)

    def entries_of_file(self, name: str) -> list[AnyEntry]:
        """The entries that are in a file."""
        return list(self._in_file.get(name, ()))

    def read(self, entry: AnyEntry) -> LayerRows | None:
        """Begin to bring an entry from disk to host memory; None if it is not there any more."""
        if self.files is None or entry.file is None:
            return None
        assert entry.copies is not None
        return self.files.read(entry.file, entry.num_tokens, entry.copies)

    def bring(self, entry: AnyEntry, *, needed: bool = False) -> LayerRows | None:
        """Begin to bring an entry to the device. A reader waits for each layer, and finds out if it is lost.

        Args:
            needed: it takes memory of the device, whatever there is.

        Returns:
            its rows there, which the tier has if it has room; None if it is known to be lost.
        """
        if Tier.device in entry.places:
            return entry.places[Tier.device]
        copies, rows = entry.copies, entry.places.get(Tier.host)
        is_read = rows is None
        if rows is None:
            rows = self.read(entry)
        if rows is None or rows.memory.is_lost:
            return None
        assert copies is not None
        has_device = Tier.device in self.memory
        is_there = copies.is_direct and (is_read or not has_device)  # else each tier has memory of its own
        if is_read and not (is_there and has_device):
            self._place(entry, Tier.host, rows)
        if not is_there:
            rows = copies.to_device(rows)
        self._place(entry, Tier.device, rows, needed=needed)
        return rows

    def to_host(self, entry: AnyEntry) -> bool:
        """Begin to bring an entry from disk to host memory. Returns whether it is not known to be lost."""
        rows = self.read(entry)
        if rows is not None:
            self._place(entry, Tier.host, rows)
        return rows is not None

    def _place(self, entry: AnyEntry, tier: Tier, rows: LayerRows, *, needed: bool = False) -> None:
        """Let an entry be in a tier too, if there is room for it."""
        memory = self.memory.get(tier)
        if memory is not None and (needed or memory.takes(rows.memory.num_bytes)):
            memory.place(entry, rows)

    def share(self, entry: AnyEntry, new: AnyEntry) -> None:
        """Let `new` have some of the rows of an entry, which is split without a copy."""
        for tier in new.places:
            self.memory[tier].share(entry, new)
        if new.file is not None:
            self._in_file[new.file.name].add(new)

    def remove(self, entry: AnyEntry) -> None:
        """Count an entry no longer. Who holds it can read it all the same, and its file stays."""
        places = dict(entry.places)
        for memory in self.memory.values():
            memory.remove(entry)
        entry.places = places
        if entry.file is not None:
            self._in_file.get(entry.file.name, set()).discard(entry)

    def make_room(self) -> None:
        """Free memory: move what is left of wasted allocations, and let entries go until the limits are kept."""
        for memory in self.memory.values():
            for wasted in memory.wasted():
                self._move(wasted)
            if memory.num_bytes <= memory.limit_bytes:
                continue
            order, tier = count(), memory.tier
            free = [entry for entry in memory.entries() if self._may_leave(entry, tier)]
            leaving = [(self._precedence(entry, tier), next(order), entry) for entry in free]
            heapq.heapify(leaving)
            while leaving and memory.num_bytes > memory.limit_bytes:
                _, _, entry = heapq.heappop(leaving)
                before, allocation = entry.before()[:-1], memory.allocation(entry)
                self._leave(entry, memory)
                if before and before[-1].tier is tier and self._may_leave(before[-1], tier):
                    heapq.heappush(leaving, (self._precedence(before[-1], tier), next(order), before[-1]))
                if allocation is not None and allocation.owners and allocation.is_wasted:
                    self._move(allocation)

    def _precedence(self, entry: AnyEntry, tier: Tier) -> tuple[int, ...]:
        return int(entry.tier is tier), *entry.precedence

    def _may_leave(self, entry: AnyEntry, tier: Tier) -> bool:
        if entry.tier is not tier:
            return not entry.is_pinned
        return not entry.is_pinned and entry.holds == 0 and entry.may_leave

    def _leave(self, entry: AnyEntry, memory: TierMemory[AnyEntry]) -> None:
        """Let an entry leave a tier, for the next one that has room if it is in no slower one, or be lost."""
        host, copies = self.memory.get(Tier.host), entry.copies
        if memory.tier is Tier.host or Tier.host in entry.places:
            host = None
        if host is not None and copies is not None and host.takes(entry.stored_bytes):
            host.place(entry, copies.to_host(entry.layers_TKX))
        if len(entry.places) == 1 and entry.file is None and not self.save(entry):
            self._lose(entry)
            return
        memory.remove(entry)
        faster = list(takewhile(lambda tier: tier is not entry.tier, self.memory))
        for each in entry.after():  # where the next tier had room for these, and not for this one
            if each.tier in faster:
                self._leave(each, self.memory[each.tier])

    def _move(self, allocation: Allocation[AnyEntry]) -> None:
        """Give the entries of an allocation memory of their own."""
        for entry in list(allocation.owners):
            rows = entry.places[allocation.tier]
            try:
                if allocation.tier is Tier.host:
                    assert entry.copies is not None
                    rows = entry.copies.to_host(rows)
                else:
                    rows = rows.cloned()
            except LostRows:
                continue  # it will be dropped
            self.memory[allocation.tier].place(entry, rows)

    def save(self, entry: AnyEntry, stored: LayerRows | None = None) -> bool:
        """Begin to write an entry, and those before it, to files. Returns whether they may be that large.

        Args:
            stored: the entry's rows in host memory, if it has no place there.
        """
        if self.files is None or entry.copies is None:
            return False
        unsaved = [each for each in entry.before() if each.file is None]
        num_bytes = sum(each.stored_bytes for each in unsaved) if stored is None else stored.whole.num_bytes
        if not self.files.takes(num_bytes) or self.files.is_behind(num_bytes):
            return False
        for each in unsaved:
            assert each.copies is not None
            rows = stored or each.places.get(Tier.host) or each.copies.to_host(each.layers_TKX)
            before, after = rows.start - rows.whole.start, rows.whole.stop - rows.stop
            about = self._file_of(each, (before, after))
            self.file_found(each, FileRows(name=about.name, num_tokens=rows.whole.num_tokens, first=before))
            self.files.save(about, rows.whole, each.file_times_ns())
        return True

    def touch(self, entry: AnyEntry) -> None:
        """Let other processes know which files are used."""
        if self.files is not None and (used_ns := entry.file_times_ns()):
            self.files.touch(used_ns)

    def wait_for_copies(self, timeout_s: float | None = None) -> None:
        """Wait until all copies and files that were begun are there, and drop what could not be kept."""
        end_s = inf if timeout_s is None else time.monotonic() + timeout_s
        for each in (*self._all_copies, self.files):
            if each is not None:
                each.wait(None if end_s == inf else max(0.0, end_s - time.monotonic()))
        self.collect()

    def collect(self) -> None:
        """Drop what other threads have found to be lost."""
        while True:
            try:
                lost = self.lost.get_nowait()
            except queue.Empty:
                break
            if isinstance(lost, CopiedMemory):
                for memory in self.memory.values():
                    for entry in memory.entries_in(lost):
                        if entry.tier is memory.tier:
                            self._lose(entry)
                        else:
                            memory.remove(entry)
            else:
                entries = self._in_file.pop(lost, set())
                for entry in entries:
                    entry.file = None
                for entry in entries:
                    if not entry.places:
                        self._lose(entry)
        if self.files is not None:
            for kind, sentence in dict(self.files.told).items():
                self.warn(kind, sentence)
            for kind, error in dict(self.files.errors).items():
                self.warn(kind, f"{error}: {self._lost_on_disk}")

    def warn(self, kind: str, sentence: str) -> None:
        """Warn, but once only of each kind of thing."""
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(sentence, stacklevel=4)
