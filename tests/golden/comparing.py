"""Differences between answers: of now and as recorded, with noise and without, in bfloat16 and in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from tests.golden.combinations import Combination
from tests.golden.records import Record
from tests.golden.running import Answer, Noise, answers, arrangement

TOLERANCE = 1e-9
"""Tolerance of log-probabilities in float64, relative to the largest. Sums in another order make 1e-13."""

Run = Callable[..., list[list[Answer] | str]]
"""Runs a task on some ranks: their number, the task and its arguments -> the result of each rank."""


def answers_of(
    run: Run, combination: Combination, seed: int, dtype: torch.dtype = torch.float64, noise: Noise | None = None
) -> list[Answer] | str:
    """Answers on all ranks, which have the same, or why all of them refuse the combination."""
    stages, shares = arrangement(combination)
    results = [each for each in run(stages * shares, answers, combination, seed, dtype, noise) if each]
    assert all(each == results[0] for each in results), "ranks differ"
    return results[0]


def differing(found: list[Answer] | str, record: Record) -> str | None:
    """How answers differ from the recorded ones; None if they do not."""
    if isinstance(found, str):
        return f"is refused: {found}"
    for row, (ours, theirs) in enumerate(zip(found, record.answers, strict=True)):
        if ours.tokens != theirs.tokens:
            return f"row {row} has the tokens {ours.tokens} for {theirs.tokens}"
    worst, scale = largest_difference(found, record.answers), largest(record.answers)
    return f"log-probabilities differ by {worst:.1e}" if not worst <= TOLERANCE * scale else None


def largest(of: Sequence[Answer]) -> float:
    return max(abs(value) for answer in of for values in answer.logprobs for value in values)


def largest_difference(ours: Sequence[Answer], theirs: Sequence[Answer]) -> float:
    """Largest difference of log-probabilities, infinite where tokens differ, or which are the most probable ones."""
    if [each.tokens for each in ours] != [each.tokens for each in theirs]:
        return math.inf
    if [[*map(set, each.top_ids)] for each in ours] != [[*map(set, each.top_ids)] for each in theirs]:
        return math.inf
    found = [abs(each) for each in differences(ours, theirs)]
    return max(found) if all(map(math.isfinite, found)) else math.inf


def differences(ours: Sequence[Answer], theirs: Sequence[Answer]) -> Iterator[float]:
    """Differences of log-probabilities of the same tokens, as far as rows had the same tokens before."""
    for mine, other in zip(ours, theirs, strict=True):
        for place, (ids, values) in enumerate(zip(mine.top_ids, mine.logprobs, strict=True)):
            if mine.tokens[:place] != other.tokens[:place]:
                break
            known = dict(zip(other.top_ids[place], other.logprobs[place], strict=True))
            yield from (value - known[token] for token, value in zip(ids, values, strict=True) if token in known)


def root_mean_square(values: Iterator[float]) -> float:
    squares = [value * value for value in values]
    return math.sqrt(math.fsum(squares) / len(squares))
