"""The partition lookup table: the best split found per prompt length and number of ranks (Sec. 4.2 of the paper).

Its names for partitions: KVR-E is even, KVR-S searched (an entry of the table), KVR-P predicted (between entries).
"""

from __future__ import annotations

import math
import os
import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from partitioner.table.entry import Entry, from_shares
from partitioner.table.fingerprint import Fingerprint
from partitioner.table.format import read_table, table_json, table_name
from runahead.context import ContextPartition, Partitioner
from runahead.files import write_whole

SHORTEST_CHUNK = 16
"""Tokens. Of a prompt shorter than all of a table's, ranks that would get less get none: their hop would cost more than
they save."""

WORTHWHILE = 0.05
"""Twice as many ranks are taken if the first token is earlier by at least this share.

On slow links more ranks always gain a little, by taking a few tokens each. But a replayed TTFT is off by about that
much itself, and each further rank and link is one more that a prompt waits for when it is busy.
"""

REMEDY = "search splits for this model and device with python -m partitioner.search table=<another file>"


class TableWarning(UserWarning):
    """A table is used for something that it was not made for."""


@dataclass
class LookupTable:
    """Entries by length and number of ranks, at most one for each pair, in ascending order.

    Attributes:
        fingerprint: what their times hold for.
        entries: brought into order.
        source: what messages call the table: its file.

    Raises:
        ValueError: two entries for one length and number of ranks.
    """

    fingerprint: Fingerprint
    entries: list[Entry]
    source: str = "lookup table"

    def __post_init__(self) -> None:
        self.entries = sorted(self.entries, key=lambda entry: (entry.length, entry.ranks))
        for before, entry in pairwise(self.entries):
            if (before.length, before.ranks) == (entry.length, entry.ranks):
                raise ValueError(f"{self.source} has two entries for {entry.length} tokens on {entry.ranks} ranks")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LookupTable:
        """Read a table.

        Raises:
            ValueError: it is not there, or anything in it is wrong; one line that names the file and says what.
        """
        return cls(*read_table(path), source=table_name(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        write_whole(path, table_json(self.fingerprint, self.entries))

    def check_fits(self, fingerprint: Fingerprint, *, force: bool = False, remedy: str = REMEDY) -> None:
        """Make sure that the table holds for this model and device; with `force`, warn if it does not.

        Raises:
            ValueError: it does not, with all that differs and the `remedy`.
        """
        differences = self.fingerprint.differences(fingerprint)
        if not differences:
            return
        problem = f"{self.source} holds for {'; '.join(differences)}"
        if not force:
            raise ValueError(f"{problem}; {remedy}")
        warnings.warn(f"{problem}; used nevertheless, its splits may be far from the best", TableWarning, stacklevel=2)

    def merge(self, other: LookupTable) -> LookupTable:
        """The entries of both tables.

        For one length and number of ranks the more trustworthy entry is kept: measured before replayed before modelled,
        then the newer one, then the one with the earlier first token. So the order of merging does not matter.

        Raises:
            ValueError: the tables hold for different models or devices.
        """
        other.check_fits(self.fingerprint, remedy="tables for different models or devices cannot be merged")
        kept: dict[tuple[int, int], Entry] = {}
        for entry in (*self.entries, *other.entries):
            at = entry.length, entry.ranks
            kept[at] = max(kept.get(at, entry), entry, key=lambda each: each.preference)
        return LookupTable(self.fingerprint.joined(other.fingerprint), list(kept.values()), self.source)

    def ranks(self) -> list[int]:
        """Numbers of ranks with entries, ascending."""
        return sorted({entry.ranks for entry in self.entries})

    def entries_for(self, ranks: int) -> list[Entry]:
        """Entries of one number of ranks, by length."""
        return [entry for entry in self.entries if entry.ranks == ranks]

    def lookup(self, length: int, ranks: int) -> ContextPartition:
        """The split of a prompt over exactly so many ranks.

        An entry of that length is taken as it is (KVR-S). Between two lengths every rank's ratio is interpolated
        linearly (KVR-P). If other ranks are idle at the two, nothing is between them, and the nearer one's ratios are
        taken; but where ranks are alike and as many work at both, it does not matter which. Beyond the table the ratios
        of its first or last length are taken, with a warning.

        Raises:
            ValueError: no entry for this number of ranks, or no tokens.
        """
        if length < 1:
            raise ValueError(f"a prompt of {length} tokens cannot be split")
        entries = self.entries_for(ranks)
        if not entries:
            raise ValueError(self._no_entries(f"{ranks} ranks" if ranks > 1 else "1 rank"))
        below, above = _neighbours(entries, length)
        if below is above:
            if below.length != length:
                shortest_and_longest = f"{entries[0].length} to {entries[-1].length} tokens on {ranks} ranks"
                warnings.warn(
                    f"{self.source} has splits for {shortest_and_longest}; a prompt of {length} tokens is split as one "
                    f"of {below.length} is",
                    TableWarning,
                    stacklevel=2,
                )
            return _clamped(below, length)
        return _between(below, above, length, ranks_alike=self.fingerprint.speeds == ())

    def best_ranks(self, length: int, max_ranks: int | None = None) -> int:
        """The number of ranks, at most `max_ranks`, whose first token is the earliest for what they are (`worthwhile`).

        TTFT per token is interpolated between lengths. Numbers of ranks are compared that have entries around this
        length; if none has, those that have the nearest.

        Raises:
            ValueError: the table has no entry for any number of ranks up to `max_ranks`.
        """
        allowed = [ranks for ranks in self.ranks() if max_ranks is None or ranks <= max_ranks]
        if not allowed:
            raise ValueError(self._no_entries(f"up to {max_ranks} ranks"))
        distances, costs = {}, {}
        for ranks in allowed:
            below, above = _neighbours(self.entries_for(ranks), length)
            nearest = min(max(length, below.length), above.length)
            distances[ranks] = abs(math.log(length / nearest))
            share = _share(below, above, nearest)
            costs[ranks] = (1 - share) * below.ttft_s / below.length + share * above.ttft_s / above.length
        comparable = [ranks for ranks in allowed if distances[ranks] == min(distances.values())]
        return worthwhile({ranks: costs[ranks] for ranks in comparable})

    def best_entries(self) -> list[Entry]:
        """For every length in the table, its entry with the best number of ranks."""
        best = []
        for _, group in groupby(self.entries, key=lambda entry: entry.length):
            entries = {entry.ranks: entry for entry in group}
            best.append(entries[worthwhile({ranks: entry.ttft_s for ranks, entry in entries.items()})])
        return best

    def partitioner(self, max_ranks: int | None = None) -> Partitioner:
        """For the runtime: the split over the best number of ranks; those beyond it are idle, with empty chunks.

        Args:
            max_ranks: use no more than these, however many were started.
        """

        def partition(num_tokens: int, num_ranks: int) -> ContextPartition:
            allowed = num_ranks if max_ranks is None else min(num_ranks, max_ranks)
            most = max(self.ranks(), default=allowed)
            if allowed > most:
                warnings.warn(
                    f"{self.source} has splits for up to {most} ranks; {num_ranks - most} of {num_ranks} stay idle",
                    TableWarning,
                    stacklevel=2,
                )
            best = self.lookup(num_tokens, self.best_ranks(num_tokens, allowed))
            return ContextPartition(boundaries=best.boundaries + (num_tokens,) * (num_ranks - best.num_ranks))

        return partition

    def kvr_name(self, length: int, num_ranks: int) -> str:
        """What the paper calls what `partitioner` gives: "KVR-S" for an entry of the table, otherwise "KVR-P"."""
        below, _ = _neighbours(self.entries_for(self.best_ranks(length, num_ranks)), length)
        return "KVR-S" if below.length == length else "KVR-P"

    def _no_entries(self, wanted: str) -> str:
        have = ", ".join(map(str, self.ranks()))
        if not have:
            return f"{self.source} has no entries; fill it with python -m partitioner.search"
        remedy = f"start as many as it has entries for ({have}), use partition=even, or search again"
        return f"{self.source} has no split for {wanted}; {remedy}"


def worthwhile(costs: Mapping[int, float]) -> int:
    """Of numbers of ranks and their TTFTs, the number from which doublings bring less than WORTHWHILE each.

    So 8 ranks are preferred to 2 if their first token is earlier by that share twice over; of equals, the fewest are.
    """
    return min(costs, key=lambda ranks: (costs[ranks] * (1 - WORTHWHILE) ** -math.log2(ranks), ranks))


def _neighbours(entries: Sequence[Entry], length: int) -> tuple[Entry, Entry]:
    """The entries around a length; twice the same where it has one, or is beyond the first or last."""
    at = bisect_left(entries, length, key=lambda entry: entry.length)
    if at == len(entries):
        return entries[-1], entries[-1]
    if at == 0 or entries[at].length == length:
        return entries[at], entries[at]
    return entries[at - 1], entries[at]


def _share(below: Entry, above: Entry, length: int) -> float:
    """How far a length is on the way from one entry to the next, in [0, 1]."""
    return 0.0 if below is above else (length - below.length) / (above.length - below.length)


def _between(below: Entry, above: Entry, length: int, *, ranks_alike: bool) -> ContextPartition:
    share = _share(below, above, length)
    nearer = below if share < 0.5 else above
    chains = below.partition.chain, above.partition.chain
    if chains[0] != chains[1] and not (ranks_alike and len(chains[0]) == len(chains[1])):
        return nearer.scaled(length)
    ends = [0.0] * (nearer.ranks + 1)
    for rank, *theirs in zip(nearer.partition.chain, *chains, strict=True):
        first, second = (
            entry.boundaries[r + 1] / entry.length for entry, r in zip((below, above), theirs, strict=True)
        )
        ends[rank + 1] = (1 - share) * first + share * second
    return from_shares(accumulate(ends, max), length)


def _clamped(entry: Entry, length: int) -> ContextPartition:
    """An entry's ratios; for a shorter prompt chunks that would be too short go to their neighbours."""
    partition = entry.scaled(length)
    if length >= entry.length:
        return partition
    shortest = min(SHORTEST_CHUNK, *(chunk for chunk in entry.partition.chunk_lengths if chunk))
    return _without_crumbs(partition, shortest)


def _without_crumbs(partition: ContextPartition, shortest: int) -> ContextPartition:
    """Every chunk empty or at least `shortest` tokens, if the prompt has as many: crumbs go to the rank before."""
    chunks = partition.chunk_lengths
    while len(chain := [rank for rank, chunk in enumerate(chunks) if chunk]) > 1:
        crumb = min(chain, key=lambda rank: chunks[rank])
        if chunks[crumb] >= shortest:
            break
        at = chain.index(crumb)
        chunks[chain[at - 1] if at else chain[1]] += chunks[crumb]
        chunks[crumb] = 0
    return ContextPartition(boundaries=(0, *accumulate(chunks)))
