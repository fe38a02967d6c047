"""The chunks of a prompt while the last stage also decodes: it enters the partition as a slower rank."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

from runahead.context import ContextPartition
from runahead.engine import Engine


def chunks(engine: Engine, num_tokens: int, speed: float, constants: tuple[float, float]) -> ContextPartition:
    """The chunks of a prompt that all stages compute, if the prefill lets the user choose them. Rank 0 asks.

    Args:
        speed: of the last stage, from 0 to 1.
        constants: seconds of a prefill per token and per squared token.
    """
    partition = engine.split(num_tokens)
    return with_slower_last(partition, speed, *constants) if engine.prefill.takes_partition else partition


def with_slower_last(
    partition: ContextPartition, speed: float, per_token: float, per_square: float
) -> ContextPartition:
    """The partition that is best if its last rank has only a share of its speed for the prompt.

    The first x tokens of a prompt take W(x) = a x + b x^2 seconds of compute. The ranks of a good partition compute
    equally long, so the work of each chunk is its rank's speed; the last one is made slower, and the boundaries divide
    W in proportion. With `speed` 1 it is the given partition, with 0 the last rank only gets the last token, as a rank
    does that only decodes. The last rank always has a token, so the KV cache is always there.

    Args:
        partition: of at least one token, for ranks at full speed.
        speed: of the last rank, from 0 to 1.
        per_token, per_square: a and b.
    """
    num_tokens, ends = partition.num_tokens, partition.boundaries[1:]
    if partition.num_ranks == 1:
        return partition
    if speed < 1:
        if per_token <= 0 and per_square <= 0:
            per_token = 1.0

        def work(x: float) -> float:
            return per_token * x + per_square * x * x

        def tokens(w: float) -> float:
            if per_square <= 0:
                return w / per_token
            return (math.sqrt(per_token**2 + 4 * per_square * w) - per_token) / (2 * per_square)

        works = [work(end) - work(start) for start, end in pairwise(partition.boundaries)]
        works[-1] *= max(0.0, speed)
        if sum(works) <= 0:  # the last rank had the whole prompt
            works = [1.0] * (partition.num_ranks - 1) + [0.0]
        scale = work(num_tokens) / sum(works)
        ends = tuple(round(tokens(scale * sofar)) for sofar in accumulate(works))
    most = num_tokens - 1
    return ContextPartition(boundaries=(0, *(min(end, most) for end in ends[:-1]), num_tokens))
