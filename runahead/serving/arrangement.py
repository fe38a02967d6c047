"""The chunks of a prompt while the last stage also decodes: it enters the partition as a slower rank."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

from runahead.context import ContextPartition
from runahead.engine import Engine


def chunks(
    engine: Engine, num_tokens: int, speed: float, constants: tuple[float, float], *, num_stored: int = 0
) -> ContextPartition:
    """The chunks of a prompt that all stages compute, if the prefill lets the user choose them. Rank 0 asks.

    Args:
        speed: of the last stage, from 0 to 1.
        constants: seconds of a prefill per token and per squared token.
        num_stored: tokens before the prompt that are stored.
    """
    partition = engine.split(num_tokens)
    if not engine.prefill_options.takes_partition:
        return partition
    return engine.in_blocks(with_slower_last(partition, speed, *constants, num_stored=num_stored))


def with_slower_last(
    partition: ContextPartition, speed: float, per_token: float, per_square: float, *, num_stored: int = 0
) -> ContextPartition:
    """The partition that is best if its last rank has only a share of its speed, or after tokens that are stored.

    The first x tokens of a prompt take W(x) = a x + b x^2 seconds of compute. The ranks of a good partition compute
    equally long, so the work of each chunk is its rank's speed; the last one is made slower, and the boundaries divide
    W in proportion. After P stored tokens, to which all attend, W(x) is a x + b ((P + x)^2 - P^2). With `speed` 1 and
    P = 0 it is the given partition, with `speed` 0 the last rank only gets the last token, as a rank does that only
    decodes. The last rank always has a token, so the KV cache is always there.

    Args:
        partition: of at least one token, for ranks at full speed and a prompt of which nothing is stored.
        speed: of the last rank, from 0 to 1.
        per_token, per_square: a and b.
        num_stored: P.
    """
    num_tokens, ends = partition.num_tokens, partition.boundaries[1:]
    if partition.num_ranks == 1:
        return partition
    if speed < 1 or num_stored:
        if per_token <= 0 and per_square <= 0:
            per_token = 1.0
        per_new = per_token + 2 * per_square * num_stored

        def work(x: float, per_token: float) -> float:
            return per_token * x + per_square * x * x

        def tokens(w: float) -> float:
            if per_square <= 0:
                return w / per_new
            return (math.sqrt(per_new**2 + 4 * per_square * w) - per_new) / (2 * per_square)

        works = [work(end, per_token) - work(start, per_token) for start, end in pairwise(partition.boundaries)]
        works[-1] *= max(0.0, speed)
        if sum(works) <= 0:  # the last rank had the whole prompt
            works = [1.0] * (partition.num_ranks - 1) + [0.0]
        scale = work(num_tokens, per_new) / sum(works)
        ends = tuple(round(tokens(scale * sofar)) for sofar in accumulate(works))
    most = num_tokens - 1
    return ContextPartition(boundaries=(0, *(min(end, most) for end in ends[:-1]), num_tokens))
