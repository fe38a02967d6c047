"""Metrics of tasks: what a score means, and how those of several cases are combined."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

Combine = Callable[[Sequence[float], Sequence[float]], float]
"""Scores and weights of several cases -> one score."""


def weighted_mean(scores: Sequence[float], weights: Sequence[float]) -> float:
    return sum(score * weight for score, weight in zip(scores, weights, strict=True)) / sum(weights)


def perplexity(scores: Sequence[float], weights: Sequence[float]) -> float:
    """Perplexity over all tokens of the cases, whose numbers are the weights."""
    return math.exp(weighted_mean([math.log(score) for score in scores], weights))


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Name of a score, its range, and how scores of cases are combined.

    Attributes:
        name: with its unit, as in tables and lines.
        is_share: whether it is a share, from 0 to 1.
    """

    name: str
    lower_is_better: bool = False
    is_share: bool = False
    combine: Combine = weighted_mean


FOUND = Metric(name="found", is_share=True)
RECALL = Metric(name="recall", is_share=True)
EXACT_MATCH = Metric(name="exact match", is_share=True)
CONTAINED = Metric(name="contained", is_share=True)
F1 = Metric(name="F1", is_share=True)
PERPLEXITY = Metric(name="perplexity", lower_is_better=True, combine=perplexity)
COPY_NLL = Metric(name="copy-NLL, nats", lower_is_better=True)
THROUGHPUT = Metric(name="tokens/s", combine=lambda scores, _: median(scores))

METRICS = {
    metric.name: metric for metric in (FOUND, RECALL, EXACT_MATCH, CONTAINED, F1, PERPLEXITY, COPY_NLL, THROUGHPUT)
}
