"""Lookup table of partitions: the best split found per prompt length and number of ranks (Sec. 4.2 of the paper).

The paper's names of partitions: KVR-E even, KVR-S searched (an entry of the table), KVR-P predicted (between entries).
"""

from __future__ import annotations

import math
import os
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise

from partitioner.table.entry import TableEntry, from_shares, scaled
from partitioner.table.fingerprint import Fingerprint
from partitioner.table.format import parse_table, table_json
from runahead.context import ContextPartition, places
from runahead.files import read_user_file, write_whole

SHORTEST_CHUNK = 16
"""Shortest chunk in tokens for a prompt shorter than all of a table's: ranks that would get less get none, since their
hop would take longer than they save."""

WORTHWHILE = 0.05
"""Share by which the first token must be earlier for each doubling of the ranks.

On slow links more ranks always gain a little by taking a few tokens each. But the error of a replayed TTFT is about as
large, and a prompt may have to wait for each further rank and link if it is busy.
"""

REMEDY = "search splits for this model and device with python -m partitioner.search {options}table=<another file>"


class TableWarning(UserWarning):
    """Warning that a table is used for something that it was not made for."""


def warn(sentence: str) -> None:
    """Give a `TableWarning`."""
    warnings.warn(sentence, TableWarning, stacklevel=3)


@dataclass
class LookupTable:
    """Entries by length and number of ranks, at most one for each pair, in ascending order.

    Attributes:
        fingerprint: the model, device and links that the entries are valid for.
        entries: in any order; they are sorted.
        source: name of the table in messages, with its file.
        tell: receives a sentence where the table is used for something that it was not made for. `warnings` are not for
            threads, so a server gives a function of its own.

    Raises:
        ValueError: two entries for one length and number of ranks.
    """

    fingerprint: Fingerprint
    entries: list[TableEntry]
    source: str = "lookup table"
    tell: Callable[[str], object] = field(default=warn, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.entries = sorted(self.entries, key=lambda entry: (entry.length, entry.ranks))
        for before, entry in pairwise(self.entries):
            if (before.length, before.ranks) == (entry.length, entry.ranks):
                raise ValueError(f"{self.source} has two entries for {entry.length} tokens on {entry.ranks} ranks")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LookupTable:
        """Read a table.

        Raises:
            ValueError: it does not exist, or anything in it is wrong; one line that names the file and the mistake.
        """
        name = f"lookup table {' '.join(os.fspath(path).splitlines())}"
        try:
            data = read_user_file(path)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"{name} cannot be read: {reason}; python -m partitioner.search writes tables") from error
        try:
            return cls(*parse_table(data), source=name)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table atomically.

        Raises:
            OSError: it cannot be written.
        """
        write_whole(path, table_json(self.fingerprint, self.entries))

    def check_fits(self, fingerprint: Fingerprint, *, force: bool = False, remedy: str = REMEDY) -> None:
        """Check that the table is valid for this model and device; with `force`, only warn if it is not.

        Raises:
            ValueError: it is not; the message has all differences and the `remedy`, where {options} stands for the
                options of a search whose table fits.
        """
        differences = self.fingerprint.differences(fingerprint)
        if not differences:
            return
        problem = f"{self.source} is for {'; '.join(differences)}"
        if not force:
            options = "".join(f"{option} " for option in self.fingerprint.search_options(fingerprint))
            raise ValueError(f"{problem}; {remedy.format(options=options)}")
        self.tell(f"{problem}; used nevertheless, its splits may be far from the best")

    def merge(self, other: LookupTable) -> LookupTable:
        """Merge the entries of both tables.

        For one length and number of ranks one entry is kept: measured before replayed before modelled, then the newer
        one, then the one with the lower TTFT. So the order of merging does not matter.

        Raises:
            ValueError: the tables are for different models or devices.
        """
        other.check_fits(self.fingerprint, remedy="tables for different models or devices cannot be merged")
        kept: dict[tuple[int, int], TableEntry] = {}
        for entry in (*self.entries, *other.entries):
            at = entry.length, entry.ranks
            kept[at] = max(kept.get(at, entry), entry, key=lambda each: each.preference)
        return LookupTable(self.fingerprint.joined(other.fingerprint), list(kept.values()), self.source)

    def ranks(self) -> list[int]:
        """Numbers of ranks for which there are entries, ascending."""
        return sorted({entry.ranks for entry in self.entries})

    def entries_for(self, ranks: int) -> list[TableEntry]:
        """Entries for one number of ranks, by ascending length."""
        return [entry for entry in self.entries if entry.ranks == ranks]

    def lookup(self, length: int, ranks: int) -> ContextPartition:
        """Look up the split of a prompt over exactly so many ranks.

        An entry for that length is used as it is (KVR-S). Between two lengths every rank's ratio is interpolated
        linearly (KVR-P). If different ranks are idle at the two lengths, they cannot be interpolated, and the ratios of
        the nearer one are used, unless ranks are alike and as many work at both. Beyond the table the ratios of its
        first or last length are used, with a warning.

        Raises:
            ValueError: there is no entry for this number of ranks, or the prompt has no tokens.
        """
        if length < 1:
            raise ValueError(f"a prompt of {length} tokens cannot be split")
        entries = self.entries_for(ranks)
        if not entries:
            raise ValueError(self._no_entries(self._places(ranks)))
        below, above = _neighbours(entries, length)
        if below is above:
            if below.length != length:
                shortest_and_longest = f"{entries[0].length} to {entries[-1].length} tokens on {self._places(ranks)}"
                self.tell(
                    f"{self.source} has splits for {shortest_and_longest}; a prompt of {length} tokens is split as one "
                    f"of {below.length} is"
                )
            return _clamped(below, length)
        return _between(below, above, length, ranks_alike=self.fingerprint.speeds == ())

    def best_ranks(self, length: int, max_ranks: int | None = None) -> int:
        """The best number of ranks for a prompt, at most `max_ranks`, as `worthwhile` defines it.

        TTFT per token is interpolated between lengths. Only numbers of ranks that have entries around this length are
        compared; if none has, those with the nearest entries.

        Raises:
            ValueError: the table has no entry for any number of ranks up to `max_ranks`.
        """
        allowed = [ranks for ranks in self.ranks() if max_ranks is None or ranks <= max_ranks]
        if not allowed:
            raise ValueError(self._no_entries(f"up to {self._places(max_ranks or 0)}"))
        distances, costs = {}, {}
        for ranks in allowed:
            below, above = _neighbours(self.entries_for(ranks), length)
            nearest = min(max(length, below.length), above.length)
            distances[ranks] = abs(math.log(length / nearest))
            share = _share(below, above, nearest)
            costs[ranks] = (1 - share) * below.ttft_s / below.length + share * above.ttft_s / above.length
        comparable = [ranks for ranks in allowed if distances[ranks] == min(distances.values())]
        return worthwhile({ranks: costs[ranks] for ranks in comparable})

    def best_entries(self) -> list[TableEntry]:
        """The entry with the best number of ranks, for every length in the table."""
        best = []
        for _, group in groupby(self.entries, key=lambda entry: entry.length):
            entries = {entry.ranks: entry for entry in group}
            best.append(entries[worthwhile({ranks: entry.ttft_s for ranks, entry in entries.items()})])
        return best

    def partition(self, num_tokens: int, num_ranks: int) -> ContextPartition:
        """Split a prompt over the best number of ranks; the others are idle, with empty chunks."""
        most = max(self.ranks(), default=num_ranks)
        if num_ranks > most:
            self.tell(
                f"{self.source} has splits for up to {self._places(most)}; {num_ranks - most} of {num_ranks} stay idle"
            )
        best = self.lookup(num_tokens, self.best_ranks(num_tokens, num_ranks))
        return ContextPartition(boundaries=best.boundaries + (num_tokens,) * (num_ranks - best.num_ranks))

    def kvr_name(self, length: int, num_ranks: int) -> str:
        """The paper's name of the split that `partition` gives: "KVR-S" for an entry of the table, else "KVR-P"."""
        below, _ = _neighbours(self.entries_for(self.best_ranks(length, num_ranks)), length)
        return "KVR-S" if below.length == length else "KVR-P"

    def _places(self, ranks: int) -> str:
        return places(ranks, self.fingerprint.tensor)

    def _no_entries(self, wanted: str) -> str:
        have = ", ".join(map(str, self.ranks()))
        if not have:
            return f"{self.source} has no entries; fill it with python -m partitioner.search"
        remedy = f"start as many as it has entries for ({have}), use partition=even, or search again"
        return f"{self.source} has no split for {wanted}; {remedy}"


def worthwhile(costs: Mapping[int, float]) -> int:
    """The best of several numbers of ranks with their TTFTs: each doubling must lower TTFT by at least `WORTHWHILE`.

    So 8 ranks are preferred to 2 if their TTFT is lower by that share twice over; of equals, the fewest ranks.
    """
    return min(costs, key=lambda ranks: (costs[ranks] * (1 - WORTHWHILE) ** -math.log2(ranks), ranks))


def _neighbours(entries: Sequence[TableEntry], length: int) -> tuple[TableEntry, TableEntry]:
    """The entries around a length; the same entry twice if it is for this length, or the length is beyond the table."""
    at = bisect_left(entries, length, key=lambda entry: entry.length)
    if at == len(entries):
        return entries[-1], entries[-1]
    if at == 0 or entries[at].length == length:
        return entries[at], entries[at]
    return entries[at - 1], entries[at]


def _share(below: TableEntry, above: TableEntry, length: int) -> float:
    """Position of a length between two entries, in [0, 1]."""
    return 0.0 if below is above else (length - below.length) / (above.length - below.length)


def _between(below: TableEntry, above: TableEntry, length: int, *, ranks_alike: bool) -> ContextPartition:
    share = _share(below, above, length)
    nearer = below if share < 0.5 else above
    chains = below.partition.chain, above.partition.chain
    if chains[0] != chains[1] and not (ranks_alike and len(chains[0]) == len(chains[1])):
        return scaled(nearer.partition, length)
    ends = [0.0] * (nearer.ranks + 1)
    for rank, *theirs in zip(nearer.partition.chain, *chains, strict=True):
        first, second = (
            entry.boundaries[r + 1] / entry.length for entry, r in zip((below, above), theirs, strict=True)
        )
        ends[rank + 1] = (1 - share) * first + share * second
    return from_shares(accumulate(ends, max), length)


def _clamped(entry: TableEntry, length: int) -> ContextPartition:
    """Split in an entry's ratios; if the prompt is shorter than the entry's, chunks that would be shorter than
    `SHORTEST_CHUNK` (or the entry's shortest) are merged into the chunk before."""
    partition = scaled(entry.partition, length)
    if length >= entry.length:
        return partition
    shortest = min(SHORTEST_CHUNK, *(chunk for chunk in entry.partition.chunk_lengths if chunk))
    chunks = partition.chunk_lengths
    while len(chain := [rank for rank, chunk in enumerate(chunks) if chunk]) > 1:
        rank = min(chain, key=lambda rank: chunks[rank])
        if chunks[rank] >= shortest:
            break
        at = chain.index(rank)
        chunks[chain[at - 1] if at else chain[1]] += chunks[rank]
        chunks[rank] = 0
    return ContextPartition(boundaries=(0, *accumulate(chunks)))
