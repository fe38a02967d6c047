"""Context parallelism with a balanced split: zigzag chunks, as in Llama 3 (2024) and in zigzag ring attention.

Of 2p equal chunks a rank computes one early and one late chunk, so that all ranks attend to equally many keys with a
causal kernel. Usually rank i has the chunks i and 2p - 1 - i; here it has p - 1 - i and p + i, so that the last rank
gets the first token and decodes, as in the other prefills.

In every layer a rank first sends its keys and values, then attends to its own two chunks while those of other ranks
arrive: all at once (`all_gather`, `direct`) or step by step, each while the next one travels (`ring`). What arrives at
once takes at most two more calls: both chunks to the keys before the early one, the late chunk to those between the
two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from runahead.attention.op import Run, Span, Step, rows_by_pad
from runahead.cache.index import SlabIndex, Write
from runahead.cache.new_tokens import NewTokens
from runahead.cache.slabs import KVSlab
from runahead.context import ContextPartition, Partitioner, even
from runahead.kv_transfer.exchange import ExchangeSchedule
from runahead.prefill.exchanging import ExchangeRun, ExchangingPrefill


class ZigzagIndex(SlabIndex):
    """Index of one rank's chunks, which attend to each other, then to each group of the other ranks' as it arrives.

    Where order alone counts, the chunks attend together: to themselves and each other in one causal call, since they
    are in order, and to what comes before all of them. A bias depends on a key's position and a window on its distance,
    so with these each chunk attends alone.
    """

    is_whole = sees_last_alone = False

    def __init__(self, run: ExchangeRun, schedule: ExchangeSchedule) -> None:
        self._run, self._schedule, self._own = run, schedule, schedule.own
        ends = accumulate(map(len, self._own), initial=0)
        self._numbers = [range(first, end) for first, end in pairwise(ends)]
        self._indices = [index for own in self._own for index in own]

    def writes(self, tokens: NewTokens, num_new: int) -> Sequence[Write]:
        chunks = zip(self._own, self._numbers, strict=True)
        return [Write(own.start, slice(at.start, at.stop)) for own, at in chunks]

    def steps(self, layer: int, slab: KVSlab, tokens: NewTokens, num_new: int) -> Sequence[Step]:
        own, earlier = tokens.once((self, "own"), lambda: self._own_spans(tokens.row_pads))
        steps = [Step([Run(self._run.new, each)], arrives=False) for each in (own, earlier)]
        messages = self._schedule.steps(layer)
        for arriving, each in zip(self._run.arriving(layer, messages), messages, strict=True):
            # The tokens of these messages as the fewest contiguous ranges.
            ranges = sorted((range(message.start, message.end) for message in each), key=lambda tokens: tokens.start)
            for arrived in _joined(ranges):
                steps.append(Step([Run(arriving, self._spans(arrived, tokens.row_pads))], arrives=False))
        return steps

    def _chunks(self, pad: int, after: int = 0) -> list[tuple[range, range]]:
        """This rank's chunks from an index on without padding: numbers of the new tokens, and their indices."""
        chunks = zip(self._numbers, self._own, strict=True)
        clipped = [(at[max(0, pad - own.start) :], own[max(0, pad - own.start) :]) for at, own in chunks]
        return [(at, own) for at, own in clipped if own and own.start >= after]

    def _own_spans(self, pads: Sequence[int]) -> tuple[list[Span], list[Span]]:
        """Spans of all chunks together, and of the earlier one as the later one sees it where each attends alone."""
        together, earlier = list[Span](), list[Span]()
        for rows, pad in rows_by_pad(pads):
            if chunks := self._chunks(pad):
                first = chunks[0][0].start
                slots, at = range(first, len(self._indices)), self._indices[first:]
                together.append(_span(rows, pad, slots, at, chunks, has_new=True))
            for (numbers, own), later in pairwise(chunks):
                alone = _span(rows, pad, numbers, own, [later], has_new=False)
                earlier.append(replace(alone, slots=range(0), at=(), apart=[alone].copy))
        return together, earlier

    def _spans(self, arrived: range, pads: Sequence[int]) -> list[Span]:
        """Spans of tokens that other ranks computed, which the chunks after them see."""
        spans = list[Span]()
        for rows, pad in rows_by_pad(pads):
            slots, chunks = range(max(arrived.start, pad), arrived.stop), self._chunks(pad, arrived.stop)
            if slots and chunks:
                spans.append(_span(rows, pad, slots, slots, chunks, has_new=False))
        return spans


def _span(
    rows: slice, pad: int, slots: range, at: Sequence[int], chunks: list[tuple[range, range]], *, has_new: bool
) -> Span:
    """A span that all these chunks see, or that holds them; where positions count, spans for each chunk."""
    queries = range(chunks[0][0].start, chunks[-1][0].stop)
    start = chunks[0][1].start - pad
    span = Span(
        rows=rows,
        stored=rows,
        pad=pad,
        slots=slots,
        at=at,
        queries=queries,
        positions=range(start, start + len(queries)),
        has_new=has_new,
    )
    if len(chunks) == 1:
        return span

    def apart() -> list[Span]:
        of_chunks = [replace(span, queries=at, positions=range(own.start - pad, own.stop - pad)) for at, own in chunks]
        if not has_new:
            return of_chunks
        return [replace(each, slots=at, at=own) for each, (at, own) in zip(of_chunks, chunks, strict=True)]

    return replace(span, apart=apart)


class Zigzag(ExchangingPrefill):
    """Prefill of 2p even chunks, two per rank, whatever the user's partition. `split` returns their boundaries."""

    def split(self, num_tokens: int, num_stages: int, chosen: Partitioner) -> ContextPartition:
        return even(num_tokens, 2 * num_stages)

    def index(self, run: ExchangeRun, schedule: ExchangeSchedule) -> ZigzagIndex:
        return ZigzagIndex(run, schedule)

    def runs(self, partition: ContextPartition) -> list[list[range]]:
        p = partition.num_ranks // 2
        return [_joined([partition.chunk(p - 1 - rank), partition.chunk(p + rank)]) for rank in range(p)]


def _joined(ranges: list[range]) -> list[range]:
    """The same ranges, which are in order, with adjacent ones joined and empty ones left out."""
    joined: list[range] = []
    for each in filter(len, ranges):
        if joined and joined[-1].stop == each.start:
            each = range(joined.pop().start, each.stop)
        joined.append(each)
    return joined
