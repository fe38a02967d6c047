"""Which ranks work at all: searches a chain of ranks, then shorter chains as long as that may pay.

No small move of a boundary leads from a short chunk to none, yet with one rank fewer the K,V travel one hop less: on
slow links, or with a slow rank in between, that is a large step down.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

from partitioner.evaluations import Evaluations, on_grid

PROMISING = 1.2
"""A shorter chain is searched if a rough split over it costs at most this much more than the best so far."""


class Chain:
    """The cost of partitions in which only these ranks work, by the boundaries of their chunks alone."""

    def __init__(self, evaluations: Evaluations, ranks: list[int], num_ranks: int) -> None:
        self.evaluations, self.ranks, self.num_ranks = evaluations, ranks, num_ranks

    def __call__(self, boundaries: tuple[int, ...]) -> float:
        return self.evaluations(self.whole(boundaries))

    def whole(self, boundaries: tuple[int, ...]) -> tuple[int, ...]:
        """The boundaries of all ranks' chunks."""
        ends = dict(zip(self.ranks, boundaries[1:], strict=True))
        whole = [0]
        for rank in range(self.num_ranks):
            whole.append(ends.get(rank, whole[-1]))
        return tuple(whole)


def search_chains(
    evaluations: Evaluations,
    start: tuple[int, ...],
    min_stride: int,
    descend: Callable[[Chain, tuple[int, ...]], None],
) -> None:
    """Search from `start`, then leave out one rank at a time.

    Args:
        start: boundaries of all ranks' chunks.
        descend: searches the partitions of a chain, from a split of it; what it finds is in the evaluations.
    """
    num_ranks = len(start) - 1
    descend(Chain(evaluations, list(range(num_ranks)), num_ranks), start)
    searched = {tuple(range(num_ranks))}
    while True:
        chunks = {rank: b - a for rank, (a, b) in enumerate(pairwise(evaluations.best)) if a < b}
        searched.add(tuple(chunks))
        before = evaluations.best_s
        cheapest = {}
        for each in _neighbours(chunks, num_ranks):
            if tuple(each) in searched:
                continue
            chain = Chain(evaluations, list(each), num_ranks)
            split = on_grid((*map(round, accumulate(each.values(), initial=0)),), min_stride)
            c = chain(split)
            if c < cheapest.get(tuple(each), (1e99,))[0]:
                cheapest[tuple(each)] = (c, split, chain)
        for ranks, (c, split, chain) in sorted(cheapest.items(), key=lambda kv: kv[1][0])[:TRIES]:
            if c > PROMISING * before:
                break
            searched.add(ranks)
            descend(chain, split)
        if evaluations.best_s >= before:
            return


TRIES = 2


def _neighbours(chunks, num_ranks):
    total = sum(chunks.values())
    out = []
    for rank in range(num_ranks):
        out.append({rank: total})
    for k in chunks:
        ranks = [r for r in chunks if r != k]
        if not ranks:
            continue
        kept = total - chunks[k]
        out.append({r: chunks[r] * total / kept for r in ranks})
        at = list(chunks).index(k)
        for to in (at - 1, at):
            if 0 <= to < len(ranks):
                out.append({r: chunks[r] + (chunks[k] if r == ranks[to] else 0) for r in ranks})
    for r in range(num_ranks):
        if r in chunks:
            continue
        for k in chunks:
            d = {x: n for x, n in chunks.items() if x != k}
            d[r] = chunks[k]
            out.append(dict(sorted(d.items())))
            for part in {chunks[k] / 2, min(256, chunks[k] / 2)}:
                d = dict(chunks)
                d[k] = chunks[k] - part
                d[r] = part
                out.append(dict(sorted(d.items())))
    return out
