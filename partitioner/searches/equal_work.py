"""Partition with equal compute on every rank: close to the best on fast links, a seed for searches otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from partitioner.cost.compute import ComputeCost, layer_s
from runahead.context import ContextPartition

PRECISION = 1e-4
"""Precision of a chunk's length in tokens, far below the rounding to whole tokens."""
ROUNDS = 60
"""Most rounds of the outer bisection, more than a double has bits."""


def equal_work(
    num_tokens: int, num_ranks: int, cost: ComputeCost, speed: Sequence[float] | None = None
) -> ContextPartition:
    """Split a prompt so that a place takes every rank equally long in the mean (`layer_s`), to the token.

    Where all places attend, no rank then waits while communication is free: rank i has sent a layer's KV when rank
    i + 1 has its own. For states ranks wait on any link, and the split is a start of a search. With T the common time,
    rank i's chunk c solves layer_s(c, P) = T * speed[i], which is between(c) + own(c) + prefix(c, P) where all places
    attend, and P are the tokens of the ranks before it; bisection finds the T for which all chunks together are the
    prompt.

    Args:
        speed: per rank, relative to the device of `cost`; all alike by default.

    Raises:
        ValueError: no tokens or ranks, or not one speed per rank.
    """
    speeds = [1.0] * num_ranks if speed is None else list(speed)
    if num_tokens < 1 or num_ranks < 1 or len(speeds) != num_ranks:
        raise ValueError(f"{num_tokens} tokens cannot be split evenly over {num_ranks} ranks with speeds {speeds}")
    low_s, high_s = 0.0, max(layer_s(cost, num_tokens, num_tokens) / each for each in speeds)
    for _ in range(ROUNDS):
        middle_s = (low_s + high_s) / 2
        if middle_s in (low_s, high_s):
            break
        if _ends(middle_s, num_tokens, speeds, cost)[-1] < num_tokens:
            low_s = middle_s
        else:
            high_s = middle_s
    ends = _ends(high_s, num_tokens, speeds, cost)
    return ContextPartition(boundaries=(0, *(round(end) for end in ends[:-1]), num_tokens))


def dynamic_chunks(
    num_tokens: int, first: int, cost: ComputeCost, *, smooth: float = 0.75, multiple: int = 64
) -> ContextPartition:
    """Chunks of a pipeline as SGLang sizes them (`--enable-dynamic-chunking`): each takes about as long as the first.

    The next chunk c after P tokens solves Runtime(P + c) - Runtime(P) = Runtime(first), which is layer_s(c, P) =
    layer_s(first, 0). Of the difference to the first chunk it takes the share `smooth`, and it has a quarter of the
    first chunk at least, as a multiple of some tokens.

    Args:
        first: tokens of the first chunk.
        smooth: SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR.

    Raises:
        ValueError: no tokens, or a first chunk shorter than a multiple.
    """
    if num_tokens < 1 or first < multiple:
        raise ValueError(f"{num_tokens} tokens cannot be split into chunks from {first} tokens on, in {multiple}s")
    budget_s, ends = layer_s(cost, first, 0), [0]
    while ends[-1] < num_tokens:
        exact = _chunk(budget_s, ends[-1], first, cost)
        smoothed = max(int(first + smooth * (exact - first)), first // 4)
        ends.append(min(num_tokens, ends[-1] + max(multiple, smoothed // multiple * multiple)))
    return ContextPartition(boundaries=tuple(ends))


def _ends(common_s: float, num_tokens: int, speeds: Sequence[float], cost: ComputeCost) -> list[float]:
    """Ends of the chunks whose layers take `common_s`, at most the end of the prompt."""
    ends: list[float] = []
    end = 0.0
    for speed in speeds:
        end += _chunk(common_s * speed, end, num_tokens - end, cost)
        ends.append(end)
    return ends


def _chunk(budget_s: float, prefix: float, longest: float, cost: ComputeCost) -> float:
    """Length of the longest chunk after a prefix whose layer takes at most `budget_s`."""
    if longest <= 0 or layer_s(cost, longest, prefix) <= budget_s:
        return max(longest, 0.0)
    low, high = 0.0, longest
    low_s, high_s = layer_s(cost, 0, prefix), layer_s(cost, longest, prefix)
    if low_s >= budget_s:
        return 0.0
    bisect = False
    while high - low > PRECISION:
        # Time grows a little faster than linearly, so false position is close at once; every second step bisects.
        middle = (low + high) / 2 if bisect else low + (high - low) * (budget_s - low_s) / (high_s - low_s)
        middle_s = layer_s(cost, middle, prefix)
        if abs(middle_s - budget_s) <= 1e-12 * budget_s:
            return middle
        if middle_s < budget_s:
            low, low_s = middle, middle_s
        else:
            high, high_s = middle, middle_s
        bisect = not bisect
    return low
