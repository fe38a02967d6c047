"""Search over chains, that is over which ranks work at all: all ranks first, then chains that leave some out.

No small move of a boundary leads from a short chunk to none, yet with one rank fewer KV travel one hop less: on slow
links, or with a slow rank in between, that makes the first token much earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate, pairwise

from partitioner.searches.evaluations import Evaluations, OutOfEvaluations, SearchResult

PROMISING = 0.6
"""A chain is searched if a rough split over it costs less than 1 + PROMISING / (p - 1) times the best so far, where p
ranks work. Without one rank that does an equal share, the others take 1 + 1 / (p - 1) times as long."""
TRIED = 3
"""Chains that are searched, the most promising first, before the neighbours of the best one are determined again."""


class Chain:
    """Cost of partitions in which only these ranks work, as a function of the boundaries of their chunks."""

    def __init__(self, evaluations: Evaluations, ranks: tuple[int, ...], num_ranks: int) -> None:
        self.evaluations, self.ranks, self.num_ranks = evaluations, ranks, num_ranks

    def __call__(self, boundaries: tuple[int, ...]) -> float:
        ends = dict(zip(self.ranks, boundaries[1:], strict=True))
        whole = [0]
        for rank in range(self.num_ranks):
            whole.append(ends.get(rank, whole[-1]))
        return self.evaluations(tuple(whole))


Descend = Callable[[Chain, tuple[int, ...]], None]
"""Searches the partitions of a chain from a start. Its result is in the chain's evaluations."""


def search_chains(evaluations: Evaluations, start: tuple[int, ...], descend: Descend) -> SearchResult:
    """Search the chain of all ranks from `start`, and then others that leave ranks out, until none is cheaper.

    The task says whether others are searched, which differ from the best so far by one rank or have one rank only. If
    ranks are alike, only the number of ranks matters, and the leading ones work.
    """
    task, num_ranks = evaluations.task, evaluations.task.num_ranks
    searched = {tuple(range(num_ranks))}
    with suppress(OutOfEvaluations):
        descend(Chain(evaluations, tuple(range(num_ranks)), num_ranks), start)
        while task.leave_out:
            chunks = {rank: end - start for rank, (start, end) in enumerate(pairwise(evaluations.best)) if start < end}
            searched.add(tuple(chunks))
            before_s = evaluations.best_s
            limit_s = (1 + PROMISING / max(1, len(chunks) - 1)) * before_s
            cheapest: dict[tuple[int, ...], tuple[float, tuple[int, ...]]] = {}
            for lengths in _neighbours(chunks, num_ranks, task.min_stride):
                ranks = tuple(sorted(lengths))
                ends = accumulate((lengths[rank] for rank in ranks), initial=0.0)
                if task.ranks_alike:
                    ranks = tuple(range(len(ranks)))
                split = task.on_grid([round(end) for end in ends])
                cost_s = Chain(evaluations, ranks, num_ranks)(split)
                cheapest[ranks] = min(cheapest.get(ranks, (cost_s, split)), (cost_s, split))
            for ranks, (cost_s, split) in sorted(cheapest.items(), key=lambda item: item[1])[:TRIED]:
                if cost_s < before_s or (ranks not in searched and cost_s < limit_s):
                    searched.add(ranks)
                    descend(Chain(evaluations, ranks, num_ranks), split)
            if evaluations.best_s >= before_s:
                break
    return evaluations.result()


def _neighbours(chunks: dict[int, int], num_ranks: int, min_stride: int) -> Iterator[dict[int, float]]:
    """Rough splits over other chains: tokens by rank."""
    num_tokens = sum(chunks.values())
    idle = [rank for rank in range(num_ranks) if rank not in chunks]
    for rank in range(num_ranks):
        yield {rank: num_tokens}
    for out, length in chunks.items():
        others = {rank: float(each) for rank, each in chunks.items() if rank != out}
        if not others:
            continue
        # The chunk of the rank left out goes to all others, to the rank before or to the rank after.
        yield {rank: each * num_tokens / (num_tokens - length) for rank, each in others.items()}
        before = max((rank for rank in others if rank < out), default=None)
        after = min((rank for rank in others if rank > out), default=None)
        for heir in (before, after):
            if heir is not None:
                yield others | {heir: others[heir] + length}
    for new in idle:
        for rank, length in chunks.items():
            others = {each: float(tokens) for each, tokens in chunks.items() if each != rank}
            yield others | {new: length}
            # On slow links an additional rank helps only with a short chunk, if at all.
            for part in (length / 2, min_stride):
                if part < length:
                    yield others | {new: part, rank: length - part}
