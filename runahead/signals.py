"""What new queries tell about stored keys, for cache policies: attention probabilities, summed over queries.

Computed again from queries and keys, block by block, since fused kernels do not give probabilities away: first the
log-sum-exp of each query, then its probabilities, added up.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, C new tokens, n stored keys, H head dim, q, s: blocks of both.

from __future__ import annotations

import math

import torch
from torch import Tensor

from runahead.attention import AttentionTerms

QUERY_BLOCK = 128
BLOCK_SCORES = 1 << 23
"""Scores of one block, all rows and heads together: what a signal needs in memory does not grow with the prompt."""


class QuerySignals:
    """Of new tokens' queries to all stored keys.

    Args:
        q_BNCH: queries, rotated.
        k_BKnH: keys, the new tokens' among them.
        queries_BC: positions of the queries in their rows, below 0 on padding.
        keys_BKn: positions of the keys, or (B, 1, n) for all KV heads alike.
    """

    def __init__(
        self, q_BNCH: Tensor, k_BKnH: Tensor, terms: AttentionTerms, *, queries_BC: Tensor, keys_BKn: Tensor
    ) -> None:
        assert terms.key_bias is None, "key biases are not part of these scores"
        self._q_BNCH, self._k_BKnH, self._terms = q_BNCH, k_BKnH, terms
        self._queries_BC, self._keys_BKn = queries_BC, keys_BKn
        self._votes: dict[tuple[int, float], Tensor] = {}

    def votes(self, num_queries: int, newest: float = 1.0) -> Tensor:
        """As `policies.base.Signals.votes`."""
        asked = num_queries, newest
        if asked not in self._votes:
            self._votes[asked] = self._mean_over(min(num_queries, self._q_BNCH.shape[2]), newest)
        return self._votes[asked]

    def _mean_over(self, num_queries: int, newest: float) -> Tensor:
        weights_w = torch.linspace(1.0, newest, num_queries, device=self._q_BNCH.device)
        if num_queries == 1:
            weights_w.fill_(newest)
        voters_B = (weights_w * (self._queries_BC[:, -num_queries:] >= 0)).sum(dim=1)
        return self._sum_over(weights_w) / voters_B.clamp_min(torch.finfo().tiny)[:, None, None]

    def received(self) -> Tensor:
        """As `policies.base.Signals.received`."""
        return self._sum_over(torch.ones(self._q_BNCH.shape[2], device=self._q_BNCH.device))

    def _sum_over(self, weights_w: Tensor) -> Tensor:
        """Probabilities (B, N, n) summed over the last w queries."""
        batch, num_heads, num_new, _ = self._q_BNCH.shape
        total_BNn = torch.zeros(batch, num_heads, self._k_BKnH.shape[2], device=self._q_BNCH.device)
        before = num_new - len(weights_w)
        for first in range(before, num_new, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, num_new)
            self._add(first, last, weights_w[first - before : last - before], total_BNn)
        return total_BNn

    def _add(self, first: int, last: int, weights_q: Tensor, total_BNn: Tensor) -> None:
        """Add the probabilities of the new tokens [first, last)."""
        batch, num_heads, n = total_BNn.shape
        width = max(1, BLOCK_SCORES // (batch * num_heads * (last - first)))
        spans = [(start, min(start + width, n)) for start in range(0, n, width)]
        only = self._scores(first, last, *spans[0]) if len(spans) == 1 else None
        lse_BNq1 = total_BNn.new_full((batch, num_heads, last - first, 1), -math.inf)
        for span in spans:
            scores = self._scores(first, last, *span) if only is None else only
            lse_BNq1 = torch.logaddexp(lse_BNq1, scores.logsumexp(dim=-1, keepdim=True))
        if self._terms.sinks_N is not None:
            lse_BNq1 = torch.logaddexp(lse_BNq1, self._terms.sinks_N.float()[None, :, None, None])
        lse_BNq1 = lse_BNq1.nan_to_num(neginf=0.0)  # a query that is padding sees nothing
        for start, stop in spans:
            scores = self._scores(first, last, start, stop) if only is None else only
            total_BNn[:, :, start:stop] += weights_q.to(scores.dtype) @ (scores - lse_BNq1).exp_()

    def _scores(self, first: int, last: int, start: int, stop: int) -> Tensor:
        """Scores (B, N, q, s) of the new tokens [first, last) with the keys [start, stop), -inf where unseen."""
        q_BKGqH = self._q_BNCH[:, :, first:last].unflatten(1, (self._k_BKnH.shape[1], -1))
        scores = (q_BKGqH @ self._k_BKnH[:, :, start:stop].unsqueeze(2).transpose(-1, -2)).float()
        scores *= self._terms.scaling
        if self._terms.softcap is not None:
            scores = self._terms.softcap * torch.tanh(scores / self._terms.softcap)
        keys_BKs, queries_Bq = self._keys_BKn[:, :, start:stop], self._queries_BC[:, first:last]
        seen_BKqs = (keys_BKs[:, :, None] <= queries_Bq[:, None, :, None]) & (keys_BKs >= 0)[:, :, None]
        return scores.masked_fill_(~seen_BKqs[:, :, None], -math.inf).flatten(1, 2)
