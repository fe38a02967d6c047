"""Expected Attention (Devoto et al., 2025, arXiv 2510.00636): keep the tokens that future queries will attend to.

The queries so far, before RoPE, stand for those to come: normally distributed, with their mean m and covariance S,
each turned by the mean rotation of the next positions. The expected exponential of a score is then known in closed
form, exp(m k + k S k / 2), and no token is chosen for the sake of the prompt's last words. On several ranks the queries
are those of the rank that cuts its tokens back.

With N query heads of H dims, mean and covariance are N x H x (H + 1) numbers per row and layer, which the report counts
as bytes of the KV cache. `epsilon` is 0.01, as in kvpress's evaluations; with 0, the default of kvpress's class,
SmolLM2 answers much worse (docs/studies/quality.md). It needs a model whose rotations are known (not learned positions,
LongRoPE or dynamic NTK). A soft cap on scores (Gemma 2) is not part of the expectation.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, n stored slots, H key dim.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from policies.layer_view import LayerView
from policies.options import require, require_least
from policies.scorer import Scorer


@dataclass(kw_only=True)
class ExpectedAttention(Scorer, name="expected_attention"):
    """Score: expected attention probability, averaged over a KV head's group, times the length of the value.

    The first `sinks` tokens neither count as queries, as theirs are outliers, nor in the softmax. While decoding, the
    queries that count are those since the layer was last cut back: the last 128, by default.

    Attributes:
        future_tokens: number of next positions over which rotations are averaged.
        epsilon: added to each probability, so that tokens that expect none are told apart by their values.
    """

    compares_by_kv_head: ClassVar[bool] = True

    sinks: int = 4
    evict_every: int = 128
    future_tokens: int = 512
    epsilon: float = 0.01

    def __post_init__(self) -> None:
        require_least(self, future_tokens=1)
        require(0 <= self.epsilon < math.inf, "epsilon", self.epsilon, "must be a number of at least 0")
        super().__post_init__()

    @property
    def queries_from(self) -> int:
        return self.sinks

    def score(self, view: LayerView) -> Tensor:
        mean_BNH, covariance_BNHH = view.signals.next_queries(self.future_tokens)
        mean_BKGH = mean_BNH.unflatten(1, (view.num_kv_heads, -1))
        covariance_BKGHH = covariance_BNHH.unflatten(1, (view.num_kv_heads, -1))
        k_BKnH = view.k_BKnH.to(mean_BNH.dtype)
        # A head at a time: with all heads of a group at once the products would take G times the keys' memory.
        exponents = [
            (k_BKnH @ mean_BKGH[:, :, g, :, None]).squeeze(-1)
            + ((k_BKnH @ covariance_BKGHH[:, :, g]) * k_BKnH).sum(dim=-1) / 2
            for g in range(mean_BKGH.shape[2])
        ]
        exponents_BKGn = torch.stack(exponents, dim=2)
        compared_BKn = view.is_token_BKn(after=view.sinks(self.sinks))
        exponents_BKGn.masked_fill_(~compared_BKn[:, :, None], torch.finfo(exponents_BKGn.dtype).min)
        expected_BKn = exponents_BKGn.softmax(dim=-1).mean(dim=2)
        return (expected_BKn + self.epsilon) * view.v_BKnV.to(expected_BKn.dtype).norm(dim=-1)
