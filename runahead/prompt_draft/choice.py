"""Choice of the tokens of a prompt that are computed, by how the tokens that a draft adds attend to them.

Speculative Prefill (Liu et al., ICML 2025, arXiv:2502.02789): a token's score is the largest attention probability that
any head of any layer gives it, smoothed over its neighbours, on average over the look-ahead tokens; the chunks with the
largest mean scores stay. The last chunk always does, since the answer follows from its last token.
"""

# Legend: B batch, N query heads, n tokens of a prompt.

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

NEIGHBOURS = 13
"""Tokens over which attention probabilities are smoothed, as published."""


LEAST_CHUNKS = 2
"""Chunks that stay at least, as the last one may be of a token."""


def smoothed(probabilities_Nn: Tensor) -> Tensor:
    """Mean over each token and its neighbours; those that are not there do not count."""
    pooled: Tensor = F.avg_pool1d(
        probabilities_Nn, NEIGHBOURS, stride=1, padding=NEIGHBOURS // 2, count_include_pad=False
    )
    return pooled


def num_kept(num_tokens: int, share: float, chunk: int) -> int:
    """Number of tokens of a prompt that are computed, whatever their scores.

    Args:
        share: of the chunks, rounded up.
        chunk: tokens of a chunk; the last one may be shorter.
    """
    chunks = math.ceil(num_tokens / chunk)
    last = num_tokens - (chunks - 1) * chunk
    return (_chunks_kept(chunks, share) - 1) * chunk + last


def kept_tokens(scores_n: Tensor, share: float, chunk: int) -> list[int]:
    """The tokens of a prompt that are computed, by their positions, ascending.

    Args:
        scores_n: of each token.
        share, chunk: as of `num_kept`.
    """
    num_tokens = len(scores_n)
    starts = range(0, num_tokens, chunk)
    means = torch.stack([scores_n[start : start + chunk].mean() for start in starts[:-1]] or [scores_n.mean()])
    others = _chunks_kept(len(starts), share) - 1
    best = means.sort(descending=True, stable=True).indices[:others].tolist()
    return [
        token
        for start in sorted([*(starts[each] for each in best), starts[-1]])
        for token in range(start, min(start + chunk, num_tokens))
    ]


def _chunks_kept(chunks: int, share: float) -> int:
    rounding = 1e-9  # of the product
    return min(chunks, max(LEAST_CHUNKS, math.ceil(chunks * share - rounding)))
