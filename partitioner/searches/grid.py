"""The paper's search (Sec. 4.2, App. D): binary search for two ranks, a hierarchical grid for more."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise, product
from math import inf

from partitioner.searches.chains import Chain, search_chains
from partitioner.searches.evaluations import Cost, Evaluations, SearchResult, Step, check_search, coarse_stride, on_grid
from runahead.context import even

OFFSETS = (-2, -1, 0, 1, 2)
"""Offsets of every inner boundary, in strides: 5 values, so 5^(p-1) partitions at each level."""
GOLDEN = (1 + 5**0.5) / 2
"""Factor by which one evaluation shortens the interval of a golden-section search."""
MAX_RANKS = 5
"""Most ranks: 5^4 = 625 partitions per level. The paper reports 33 hours for 8 ranks."""


def grid_search(
    cost: Cost,
    num_tokens: int,
    num_ranks: int,
    *,
    min_stride: int,
    leave_out: bool = True,
    ranks_alike: bool = False,
    max_evaluations: int | None = None,
    on_evaluation: Callable[[Step], None] | None = None,
) -> SearchResult:
    """Search the partition with the lowest cost as the paper does.

    Two ranks: golden-section search, a binary search that needs one new evaluation to shorten the interval. More ranks:
    all offsets of all inner boundaries at a coarse stride, then around the best at half of it, down to `min_stride`.
    The first stride is a quarter of an even chunk (8 in the paper's Fig. 6: 96 tokens, 3 chunks). Beyond the paper: a
    grid whose best point is on its edge is centred on that point again, since the best split of unlike ranks can be far
    from the even one, and `search_chains` tries shorter chains at the end.

    Args:
        min_stride: inner boundaries are multiples of it, in tokens.
        leave_out: also try to leave ranks out.
        ranks_alike: all ranks and all links are alike, so that the last ranks are left out.
        max_evaluations: stop after so many, with the best so far.
        on_evaluation: called after each evaluation.

    Raises:
        ValueError: too many ranks for a full grid, or numbers below 1.
    """
    check_search(num_tokens, num_ranks, min_stride)
    if num_ranks > MAX_RANKS:
        raise ValueError(
            f"search.method=grid tries 5^{num_ranks - 1} splits per level for {num_ranks} ranks, and is limited to "
            f"{MAX_RANKS} ranks; use search.method=seeded"
        )
    evaluations = Evaluations(cost, max_evaluations=max_evaluations, on_evaluation=on_evaluation)

    def descend(chain: Chain, _: tuple[int, ...]) -> None:
        if len(chain.ranks) == 2:
            _golden_section(chain, num_tokens, min_stride)
        else:
            _hierarchical_grid(chain, num_tokens, min_stride)

    start = even(num_tokens, num_ranks).boundaries
    return search_chains(evaluations, start, min_stride, descend, leave_out=leave_out, ranks_alike=ranks_alike)


def evaluations_left(
    num_tokens: int, num_ranks: int, *, min_stride: int, stride: int | None = None, at_stride: int = 0
) -> int:
    """Estimate how many evaluations a search still needs.

    Args:
        stride: the search's present stride; None before its start.
        at_stride: evaluations at that stride so far.
    """
    if num_ranks == 1:
        return 0 if stride else 1
    if num_ranks == 2:
        return math.ceil(math.log(max(1, (stride or num_tokens) / min_stride), GOLDEN))
    stride = stride or coarse_stride(num_tokens / (4 * num_ranks), min_stride)
    level = len(OFFSETS) ** (num_ranks - 1)
    return max(0, level - at_stride) + level * ((stride // min_stride).bit_length() - 1)


def _golden_section(chain: Chain, num_tokens: int, min_stride: int) -> None:
    """Golden-section search on Fibonacci numbers of strides, so that points are multiples and are used again.

    The ends, at which one rank has all tokens, are left out: nothing is sent there, so the cost is discontinuous.
    """
    evaluations = chain.evaluations
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


def _hierarchical_grid(chain: Chain, num_tokens: int, min_stride: int) -> None:
    num_ranks, evaluations = len(chain.ranks), chain.evaluations
    centre = best = on_grid(even(num_tokens, num_ranks).boundaries, min_stride)
    evaluations.stride = coarse_stride(num_tokens / (4 * num_ranks), min_stride)
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
        if stride == min_stride and not distance:
            return
        if stride > min_stride and distance < max(OFFSETS):
            evaluations.level, evaluations.stride = evaluations.level + 1, stride // 2
