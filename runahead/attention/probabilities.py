"""Signals of queries to cache policies: attention probabilities of stored keys, their sum or maximum over new queries.

These are recomputed from queries and keys, a few queries at a time, since fused kernels do not return them.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, C new tokens, q of them, n stored keys, H head dim.

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import cached_property, partial

import torch
from torch import Tensor

from policies.gumbel import gumbel
from runahead.attention.answers import Answers
from runahead.attention.partial import AttentionTerms, biased

BLOCK_SCORES = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Scores per block by device, over all rows and heads: few enough for a core's cache, enough to keep a GPU busy. One
query's scores, as many as the sums, are the least."""

NOISE_COST = 8
"""Memory of noise while it is made, 64-bit integers, as multiple of that of the probabilities."""
UNSEEN = -1e30
"""Logit of a key that a query does not see: finite after division by any temperature."""


class QuerySignals:
    """Signals of the new tokens' queries about all stored keys; see `policies.layer_view.Signals`.

    Args:
        q_BNCH: queries, rotated.
        k_BKnH: keys, the new tokens' among them.
        queries_BC: positions of the queries in their rows, below 0 on padding.
        keys_BKn: positions of the keys, or (B, 1, n) for all KV heads alike.
        biased_BKn: positions by which keys have the family's bias, if others.
        lse_BNC: log-sum-exp of each query's scores, where it sees more keys than these; without sinks.
        project: order -> `projected_lengths`, if a policy asks for them.
        layer: index of the layer.
        first_head: number of the first of these query heads in the whole model.
        ahead: number of positions -> mean and covariance of the queries there, as expected, if a policy asks for them.
        answers: what was computed for these queries and keys before, which is not computed again.
        of_keys: the keys that are asked about, if not all of them.
    """

    def __init__(
        self,
        q_BNCH: Tensor,
        k_BKnH: Tensor,
        terms: AttentionTerms,
        *,
        queries_BC: Tensor,
        keys_BKn: Tensor,
        biased_BKn: Tensor | None = None,
        lse_BNC: Tensor | None = None,
        ahead: Callable[[int], tuple[Tensor, Tensor]] | None = None,
        project: Callable[[int], Tensor] | None = None,
        layer: int = 0,
        first_head: int = 0,
        answers: Answers | None = None,
        of_keys: slice | None = None,
    ) -> None:
        self._q_BNCH, self._k_BKnH, self._terms = q_BNCH, k_BKnH, terms
        self._queries_BC, self._keys_BKn, self._lse_BNC = queries_BC, keys_BKn, lse_BNC
        self._biased_BKn = keys_BKn if biased_BKn is None else biased_BKn
        self._project, self._of_keys = project, of_keys
        self._ahead, self._layer, self._first_head = ahead, layer, first_head
        self._answers = Answers() if answers is None else answers
        self._readers = list[QuerySignals]()

    @property
    def num_kv_heads(self) -> int:
        return self._k_BKnH.shape[1]

    @cached_property
    def _voters(self) -> Tensor:
        """Whether a query counts in a head: if it is none of padding, and sees a key that is left.

        (B, 1, C) for all heads alike. By the log-sum-exp of all its scores a query gives nothing to keys elsewhere.
        """
        queries_B1C = self._queries_BC[:, None]
        if self._lse_BNC is not None:
            return queries_B1C >= 0
        none = torch.iinfo(self._keys_BKn.dtype).max
        first_BK1 = self._keys_BKn.masked_fill(self._keys_BKn < 0, none).amin(dim=-1, keepdim=True)
        counts_BKC = queries_B1C >= first_BK1
        group = self._q_BNCH.shape[1] // self.num_kv_heads
        return counts_BKC if counts_BKC.shape[1] == 1 else counts_BKC.repeat_interleave(group, dim=1)

    @cached_property
    def _bias_BNn(self) -> Tensor:  # noqa: N802
        """The family's bias of the keys; of padding, which counts nowhere, any."""
        assert self._terms.key_bias is not None
        return biased(self._terms.key_bias, self._biased_BKn, self._q_BNCH.shape[1]).float()

    def add_reader(self, layer: int, q_BNCH: Tensor, terms: AttentionTerms, *, lse_BNC: Tensor | None = None) -> None:
        """Count the queries of another layer, of the last of these tokens, too: a KV head's group gets their heads."""
        signals = QuerySignals(
            q_BNCH,
            self._k_BKnH,
            terms,
            queries_BC=self._queries_BC[:, -q_BNCH.shape[2] :],
            keys_BKn=self._keys_BKn,
            biased_BKn=self._biased_BKn,
            lse_BNC=lse_BNC,
            layer=layer,
        )
        self._readers.append(signals)

    def _of_group(self, of: Callable[[QuerySignals], Tensor]) -> Tensor:
        """What `of` these queries is, and of those of other layers, as of more heads of each KV head's group."""
        if not self._readers:
            return of(self)
        groups = [of(each).unflatten(1, (self.num_kv_heads, -1)) for each in (self, *self._readers)]
        return torch.cat(groups, dim=2).flatten(1, 2)

    def _answered(self, asked: Hashable, of: Callable[[QuerySignals], Tensor]) -> Tensor:
        """`_of_group`, computed once."""
        return self._answers.get(asked, partial(self._of_group, of))

    def votes(self, num_queries: int, newest: float = 1.0, of: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Implements `policies.layer_view.Signals.votes`."""
        return self._answered(("votes", num_queries, newest, of), lambda each: each._votes(num_queries, newest, of))

    def _votes(self, num_queries: int, newest: float, of: Callable[[Tensor], Tensor] | None) -> Tensor:
        num_queries = min(num_queries, self._q_BNCH.shape[2])
        weights_w = torch.linspace(1.0, newest, num_queries, device=self._q_BNCH.device)
        if num_queries == 1:
            weights_w.fill_(newest)
        voters_BN1 = (weights_w * self._voters[..., -num_queries:]).sum(dim=-1, keepdim=True)
        summed = self._sum_over(weights_w, lambda each_BNqn, *_: each_BNqn if of is None else of(each_BNqn))
        return summed / voters_BN1.clamp_min(torch.finfo().tiny)

    def received(self, *, temperature: float = 1.0, seed: int | None = None) -> Tensor:
        """Implements `policies.layer_view.Signals.received`."""
        return self._answered(("received", temperature, seed), lambda each: each._received(temperature, seed))

    def _received(self, temperature: float, seed: int | None) -> Tensor:
        ones_C = torch.ones(self._q_BNCH.shape[2], device=self._q_BNCH.device)
        if temperature == 1.0 and seed is None:
            return self._sum_over(ones_C)
        return self._sum_over(ones_C, partial(self._redistributed, temperature, seed), cost=NOISE_COST)

    def _redistributed(
        self, temperature: float, seed: int | None, attention_BNqn: Tensor, first: int, last: int
    ) -> Tensor:
        """Probabilities (B, N, q, n) at a temperature and with noise; their sum stays that of `attention_BNqn`.

        Logarithms of probabilities are logits but for a constant, which softmax ignores.
        """
        logits_BNqn = attention_BNqn.log().clamp_min_(UNSEEN)
        if seed is not None:
            queries_Bq, num_heads = self._queries_BC[:, first:last], self._q_BNCH.shape[1]
            logits_BNqn += gumbel(seed, self._layer, self._first_head, num_heads, queries_Bq, self._keys_BKn)
        shares_BNqn = logits_BNqn.div_(temperature).softmax(dim=-1)
        return shares_BNqn.mul_(attention_BNqn.sum(dim=-1, keepdim=True))

    def neglects(self, num_queries: int) -> Tensor:
        """Implements `policies.layer_view.Signals.neglects`."""
        return self._answered(("neglects", num_queries), lambda each: each._neglects(num_queries))

    def _neglects(self, num_queries: int) -> Tensor:
        ones_w = torch.ones(min(num_queries, self._q_BNCH.shape[2]), device=self._q_BNCH.device)
        return self._sum_over(ones_w, self._neglected)

    def projected_lengths(self, order: int = 1) -> Tensor:
        """Implements `policies.layer_view.Signals.projected_lengths`."""
        return self._of_group(lambda each: each._projected_lengths(order))

    def _projected_lengths(self, order: int) -> Tensor:
        assert self._project is not None, "a policy that asks for these declares needs_output_projection"
        return self._project(order)

    def highest(self, weights_BC: Tensor | None = None) -> Tensor:
        """Implements `policies.layer_view.Signals.highest`."""
        return self._of_group(lambda each: each._highest(weights_BC))

    def _highest(self, weights_BC: Tensor | None) -> Tensor:
        highest_BNn = self._zeros()
        for first, last in self._blocks(0):
            attention_BNqn = self._probabilities(first, last).mul_(self._voters[..., first:last, None])
            if weights_BC is not None:
                attention_BNqn.mul_(weights_BC[:, None, first:last, None])
            highest_BNn = torch.maximum(highest_BNn, attention_BNqn.amax(dim=2))
        return self._asked(highest_BNn)

    def next_queries(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Implements `policies.layer_view.Signals.next_queries`, of the layer that stores the keys alone."""
        assert self._ahead is not None, "a policy that asks for these declares queries_from"
        mean_BNH, covariance_BNHH = self._ahead(num_positions)
        return mean_BNH * self._terms.scaling, covariance_BNHH * self._terms.scaling**2

    def _neglected(self, attention_BNqn: Tensor, first: int, last: int) -> Tensor:
        """Whether queries see a token, and give it less than their mean (B, N, q, n)."""
        group = attention_BNqn.shape[1] // self._k_BKnH.shape[1]
        seen_BNqn = self._seen(first, last).expand(-1, self._k_BKnH.shape[1], -1, -1).repeat_interleave(group, dim=1)
        number_BNq1, total_BNq1 = (x.sum(dim=-1, keepdim=True) for x in (seen_BNqn, attention_BNqn))
        return ((attention_BNqn * number_BNq1 < total_BNq1) & seen_BNqn).to(attention_BNqn.dtype)

    def _sum_over(
        self,
        weights_w: Tensor,
        what: Callable[[Tensor, int, int], Tensor] = lambda attention_BNqn, *_: attention_BNqn,
        *,
        cost: int = 1,
    ) -> Tensor:
        """Weighted sum (B, N, n) of probabilities over the last w queries.

        Args:
            what: probabilities of the new tokens [first, last), and these two -> what is added up instead.
            cost: memory that this takes, as multiple of a block of probabilities.
        """
        total_BNn, before = self._zeros(), self._q_BNCH.shape[2] - len(weights_w)
        for first, last in self._blocks(before, cost):
            weights_BNq = weights_w[first - before : last - before] * self._voters[..., first:last]
            values_BNqn = what(self._probabilities(first, last), first, last)
            total_BNn += (weights_BNq[:, :, None].to(values_BNqn.dtype) @ values_BNqn).squeeze(2)
        return self._asked(total_BNn)

    def _asked(self, of_all_BNn: Tensor) -> Tensor:
        return of_all_BNn if self._of_keys is None else of_all_BNn[..., self._of_keys]

    def _zeros(self) -> Tensor:
        return torch.zeros(*self._q_BNCH.shape[:2], self._k_BKnH.shape[2], device=self._q_BNCH.device)

    def _blocks(self, first: int, cost: int = 1) -> Iterator[tuple[int, int]]:
        """The new tokens from `first` on, a few at a time."""
        (batch, num_heads, num_new, _), device = self._q_BNCH.shape, self._q_BNCH.device
        step = max(1, BLOCK_SCORES[device.type] // (cost * batch * num_heads * self._k_BKnH.shape[2]))
        for start in range(first, num_new, step):
            yield start, min(start + step, num_new)

    def _seen(self, first: int, last: int) -> Tensor:
        """Whether the new tokens [first, last) see a key (B, K, q, n), or (B, 1, q, n) for all KV heads alike."""
        keys_BKn, queries_Bq = self._keys_BKn, self._queries_BC[:, first:last]
        return (keys_BKn[:, :, None] <= queries_Bq[:, None, :, None]) & (keys_BKn >= 0)[:, :, None]

    def _probabilities(self, first: int, last: int) -> Tensor:
        """Attention probabilities (B, N, q, n) of the new tokens [first, last); arbitrary where these do not count."""
        num_kv_heads, terms = self._k_BKnH.shape[1], self._terms
        q_BKGqH = self._q_BNCH[:, :, first:last].unflatten(1, (num_kv_heads, -1)) * terms.scaling
        scores_BKXn = q_BKGqH.flatten(2, 3) @ self._k_BKnH.transpose(-1, -2)  # X: a group's heads x queries
        scores_BKGqn = scores_BKXn.unflatten(2, q_BKGqH.shape[2:4]).float()
        if terms.softcap is not None:
            scores_BKGqn = terms.softcap * torch.tanh(scores_BKGqn / terms.softcap)
        if terms.key_bias is not None:
            scores_BKGqn += self._bias_BNn.unflatten(1, (num_kv_heads, -1)).unsqueeze(3)
        # Adding the least number gives just that, and takes a CPU a fifth of the time of filling by a mask.
        bias_BKqn = torch.where(self._seen(first, last), 0.0, torch.finfo(torch.float32).min)
        scores_BKGqn += bias_BKqn[:, :, None]
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
