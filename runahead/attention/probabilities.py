"""What queries tell cache policies of stored keys: attention probabilities, summed over the new queries.

These are recomputed from queries and keys, a few queries at a time, since fused kernels do not return them.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, C new tokens, q of them, n stored keys, H head dim.

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from runahead.attention.partial import AttentionTerms

BLOCK_SCORES = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Scores per block by device, over all rows and heads: few enough for a core's cache, enough to keep a GPU busy. One
query's scores, as many as the sums, are the least."""


class QuerySignals:
    """What the new tokens' queries tell of all stored keys; see `policies.base.Signals`.

    Args:
        q_BNCH: queries, rotated.
        k_BKnH: keys, the new tokens' among them.
        queries_BC: positions of the queries in their rows, below 0 on padding.
        keys_BKn: positions of the keys, or (B, 1, n) for all KV heads alike.
        lse_BNC: log-sum-exp of each query's scores, where it sees more keys than these; without sinks.
        ahead: number of positions -> mean and covariance of the queries there, as expected, if a policy asks for them.
    """

    def __init__(
        self,
        q_BNCH: Tensor,
        k_BKnH: Tensor,
        terms: AttentionTerms,
        *,
        queries_BC: Tensor,
        keys_BKn: Tensor,
        lse_BNC: Tensor | None = None,
        ahead: Callable[[int], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        assert terms.key_bias is None, "key biases are not part of these scores"
        self._q_BNCH, self._k_BKnH, self._terms = q_BNCH, k_BKnH, terms
        self._queries_BC, self._keys_BKn, self._lse_BNC = queries_BC, keys_BKn, lse_BNC
        self._ahead = ahead
        self._votes: dict[tuple[int, float], Tensor] = {}

    def votes(self, num_queries: int, newest: float = 1.0) -> Tensor:
        """Implements `policies.base.Signals.votes`."""
        asked = num_queries, newest
        if asked not in self._votes:
            num_queries = min(num_queries, self._q_BNCH.shape[2])
            weights_w = torch.linspace(1.0, newest, num_queries, device=self._q_BNCH.device)
            if num_queries == 1:
                weights_w.fill_(newest)
            voters_B = (weights_w * (self._queries_BC[:, -num_queries:] >= 0)).sum(dim=1)
            self._votes[asked] = self._sum_over(weights_w) / voters_B.clamp_min(torch.finfo().tiny)[:, None, None]
        return self._votes[asked]

    def received(self) -> Tensor:
        """Implements `policies.base.Signals.received`."""
        return self._sum_over(torch.ones(self._q_BNCH.shape[2], device=self._q_BNCH.device))

    def next_queries(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Implements `policies.base.Signals.next_queries`."""
        assert self._ahead is not None, "a policy that asks for these declares queries_from"
        mean_BNH, covariance_BNHH = self._ahead(num_positions)
        return mean_BNH * self._terms.scaling, covariance_BNHH * self._terms.scaling**2

    def _sum_over(self, weights_w: Tensor) -> Tensor:
        """Probabilities (B, N, n) summed over the last w queries."""
        batch, num_heads, num_new, _ = self._q_BNCH.shape
        total_BNn = torch.zeros(batch, num_heads, self._k_BKnH.shape[2], device=self._q_BNCH.device)
        before = num_new - len(weights_w)
        step = max(1, BLOCK_SCORES[total_BNn.device.type] // total_BNn.numel())
        for first in range(before, num_new, step):
            last = min(first + step, num_new)
            voting_Bq = self._queries_BC[:, first:last] >= 0
            weights_Bq = weights_w[first - before : last - before] * voting_Bq
            attention_BNqn = self._probabilities(first, last)
            total_BNn += (weights_Bq[:, None, None].to(attention_BNqn.dtype) @ attention_BNqn).squeeze(2)
        return total_BNn

    def _probabilities(self, first: int, last: int) -> Tensor:
        """Attention probabilities (B, N, q, n) of the new tokens [first, last); arbitrary for padding."""
        num_kv_heads, terms = self._k_BKnH.shape[1], self._terms
        q_BKGqH = self._q_BNCH[:, :, first:last].unflatten(1, (num_kv_heads, -1)) * terms.scaling
        scores_BKXn = q_BKGqH.flatten(2, 3) @ self._k_BKnH.transpose(-1, -2)  # X: a group's heads x queries
        scores_BKGqn = scores_BKXn.unflatten(2, q_BKGqH.shape[2:4]).float()
        if terms.softcap is not None:
            scores_BKGqn = terms.softcap * torch.tanh(scores_BKGqn / terms.softcap)
        keys_BKn, queries_Bq = self._keys_BKn, self._queries_BC[:, first:last]
        seen_BKqn = (keys_BKn[:, :, None] <= queries_Bq[:, None, :, None]) & (keys_BKn >= 0)[:, :, None]
        scores_BKGqn.masked_fill_(~seen_BKqn[:, :, None], torch.finfo(torch.float32).min)
        scores_BNqn = scores_BKGqn.flatten(1, 2)
        if self._lse_BNC is not None:
            lse_BNq = self._lse_BNC[:, :, first:last].to(scores_BNqn.dtype)
            if terms.sinks_N is not None:
                lse_BNq = torch.logaddexp(lse_BNq, terms.sinks_N.to(lse_BNq.dtype)[:, None])
            # A query that sees nothing is padding, and does not count.
            return scores_BNqn.sub_(lse_BNq.clamp_min(torch.finfo(torch.float32).min).unsqueeze(-1)).exp_()
        if terms.sinks_N is None:
            return scores_BNqn.softmax(dim=-1)
        sinks_BNq1 = terms.sinks_N.float()[None, :, None, None].expand(*scores_BNqn.shape[:3], 1)
        return torch.cat([scores_BNqn, sinks_BNq1], dim=-1).softmax(dim=-1)[..., :-1]
