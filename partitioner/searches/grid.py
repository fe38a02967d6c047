"""The paper's search (Sec. 4.2, App. D): binary search for two ranks, a hierarchical grid for more."""

from __future__ import annotations

from itertools import pairwise, product
from math import ceil, inf, log

from partitioner.searches.chains import Chain
from partitioner.searches.evaluations import Evaluations, SearchTask
from partitioner.searches.strategy import Strategy
from runahead.context import ContextPartition, even

OFFSETS = (-2, -1, 0, 1, 2)
"""Offsets of every inner boundary, in strides: 5 values, so 5^(p-1) partitions at each level."""
GOLDEN = (1 + 5**0.5) / 2
"""Factor by which one evaluation shortens the interval of a golden-section search."""


class Grid(Strategy):
    """The paper's search.

    Two ranks: golden-section search, a binary search that needs one new evaluation to shorten the interval. More ranks:
    all offsets of all inner boundaries at a coarse stride, then around the best at half of it, down to `min_stride`.
    The first stride is a quarter of an even chunk (8 in the paper's Fig. 6: 96 tokens, 3 chunks). Beyond the paper: a
    grid whose best point is on its edge is centred on that point again, since the best split of unlike ranks can be far
    from the even one, and `search_chains` tries shorter chains at the end.
    """

    takes_seed = False
    most_ranks: int = 5
    """5^4 = 625 partitions per level. The paper reports 33 hours for 8 ranks."""

    def evaluations_left(self, task: SearchTask, stride: int | None = None, at_stride: int = 0) -> int:
        if task.num_ranks == 1:
            return 0 if stride else 1
        if task.num_ranks == 2:
            return ceil(log(max(1, (stride or task.num_tokens) / task.min_stride), GOLDEN))
        stride = stride or task.coarse_stride(task.num_tokens / (4 * task.num_ranks))
        level = len(OFFSETS) ** (task.num_ranks - 1)
        return max(0, level - at_stride) + level * ((stride // task.min_stride).bit_length() - 1)

    def _start(self, evaluations: Evaluations, seed: ContextPartition | None) -> tuple[int, ...]:
        task = evaluations.task
        if task.num_ranks > self.most_ranks:
            raise ValueError(
                f"search.method=grid tries 5^{task.num_ranks - 1} splits per level for {task.num_ranks} ranks, and is "
                f"limited to {self.most_ranks} ranks; use search.method=seeded"
            )
        return even(task.num_tokens, task.num_ranks).boundaries

    def _descend(self, chain: Chain, start: tuple[int, ...]) -> None:
        if len(chain.ranks) == 2:
            _golden_section(chain)
        else:
            _hierarchical_grid(chain)


def _golden_section(chain: Chain) -> None:
    """Golden-section search on Fibonacci numbers of strides, so that points are multiples and are used again.

    The ends, at which one rank has all tokens, are left out: nothing is sent there, so the cost is discontinuous.
    """
    evaluations, task = chain.evaluations, chain.evaluations.task
    num_tokens, min_stride = task.num_tokens, task.min_stride
    num_points = max(1, (num_tokens - 1) // min_stride)  # inner boundaries 1 .. num_points, in strides
    lower, smaller, larger = 0, 1, 2  # the minimum is between `lower` and `lower + larger`
    while larger <= num_points:
        smaller, larger = larger, smaller + larger

    def at(point: int) -> float:
        return chain((0, min(point * min_stride, num_tokens), num_tokens)) if point <= num_points else inf

    while larger > 2:
        left, right = lower + larger - smaller, lower + smaller
        evaluations.stride = (right - left) * min_stride
        if at(left) > at(right):
            lower = left
        smaller, larger = larger - smaller, smaller
        evaluations.level += 1
    evaluations.stride = min_stride
    at(lower + 1)


def _hierarchical_grid(chain: Chain) -> None:
    evaluations, task = chain.evaluations, chain.evaluations.task
    num_tokens, num_ranks = task.num_tokens, len(chain.ranks)
    centre = best = task.on_grid(even(num_tokens, num_ranks).boundaries)
    evaluations.stride = task.coarse_stride(num_tokens / (4 * num_ranks))
    best_s = chain(centre)
    while True:
        stride = evaluations.stride
        for offsets in product(OFFSETS, repeat=num_ranks - 1):
            inner = [b + offset * stride for b, offset in zip(centre[1:-1], offsets, strict=True)]
            boundaries = (0, *inner, num_tokens)
            if all(a < b for a, b in pairwise(boundaries)) and (cost_s := chain(boundaries)) < best_s:
                best, best_s = boundaries, cost_s
        distance = max(abs(a - b) for a, b in zip(centre, best, strict=True)) // stride
        centre = best
        if stride == task.min_stride and not distance:
            return
        if stride > task.min_stride and distance < max(OFFSETS):
            evaluations.level, evaluations.stride = evaluations.level + 1, stride // 2
