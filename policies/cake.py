"""CAKE (Qin et al., ICLR 2025, arXiv 2503.12491): layers whose attention spreads and shifts keep more tokens.

The prompt's last `window` queries vote. A token's score is the mean of its probabilities plus `gamma` times their
variance over these queries, pooled over neighbours. How much a layer needs is P = H^(1/tau1) V^(1/tau2): H the entropy
of the probabilities, V the sum of their variances, both of the tokens before the window. Beside the window the budget
of all layers is shared out in proportion to P. It is a cascade: after each layer of a prompt the layers so far share
the whole budget, and are cut back again, so that no more than the budget and the layer that is computed is stored.

The authors tune both exponents for each model and publish the values of few; here they are 1 unless given. What a layer
has no room for goes to the others in proportion to P, in published code in equal parts. Generated tokens are all kept,
where that code drops one for each. Rows of a batch have needs of their own. Pieces of a prompt (`prefill.chunk_tokens`)
are stored whole until the last one, which has to hold the window; so does the last chunk of several ranks.
"""

# Legend: B batch, N query heads, K kv heads, n stored slots of a layer, m kept slots.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from policies.base import LayerView, Phase, budget_tokens, require
from policies.row_values import row_values
from policies.snapkv import Pooling, SnapKV
from policies.zigzagkv import limited_shares


@dataclass(kw_only=True)
class CAKE(SnapKV, name="cake"):
    """SnapKV by mean and variance of the votes, with a budget per layer by their entropy and variance.

    Attributes:
        gamma: weight of the variance in a token's score.
        tau1, tau2: a layer's needs are its entropy to the power 1 / tau1 times its variance to the power 1 / tau2.
    """

    keeps_ragged: ClassVar[bool] = True  # rows have needs of their own
    scores_attention: ClassVar[bool] = False  # a wrapper would take the scores without the budgets
    decides_on_all: ClassVar[bool] = True
    cascades: ClassVar[bool] = True

    kernel: int = 5
    pooling: Pooling = field(default=Pooling.avg, metadata={"formerly": "pool"})
    gamma: float = 200.0
    tau1: float = 1.0
    tau2: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.window >= 2, "window", self.window, "must be at least 2 tokens, of which there is a variance")
        require(self.gamma >= 0, "gamma", self.gamma, "must not be negative")
        for option in ("tau1", "tau2"):
            require(getattr(self, option) > 0, option, getattr(self, option), "must be above 0")

    def most_slots(self, num_layers: int, phase: Phase) -> int | None:
        return None

    def keep(self, view: LayerView) -> Tensor | None:
        return None

    def carry(self, view: LayerView) -> Tensor | None:
        """Scores of the tokens, in a unit in which the best one of each head, and the window, have what a layer needs.

        So the order of a head's tokens and the needs of a layer are in one tensor, whichever tokens are dropped.
        """
        if not self.drops_of(view.prompt_tokens):
            return None
        before = max(0, view.num_slots - self.window)
        mean_BNn = view.signals.votes(self.window)
        squares_BNn = view.signals.mean_of(torch.square, self.window)
        variance_BNn = (squares_BNn - mean_BNn.square()).clamp_min_(0) * (self.window / (self.window - 1))
        entropy_BNn = view.signals.mean_of(torch.special.entr, self.window)
        entropy_B, variance_B = (
            view.mean_over_heads(x_BNn[..., :before]).sum(dim=-1) for x_BNn in (entropy_BNn, variance_BNn)
        )
        needs_B = entropy_B.double() ** (1 / self.tau1) * variance_B.double() ** (1 / self.tau2)
        needs_B11 = needs_B.float().clamp_min(torch.finfo(torch.float32).tiny)[:, None, None]
        scores_BKn = self.pooled(view.by_kv_head(mean_BNn + self.gamma * variance_BNn))
        best_BK1 = scores_BKn[..., :before].amax(dim=-1, keepdim=True) if before else scores_BKn[..., :1]
        scores_BKn = scores_BKn / best_BK1.clamp_min(torch.finfo(torch.float32).tiny) * needs_B11
        scores_BKn[..., before:] = needs_B11
        return scores_BKn

    def drops_of(self, prompt_tokens: int) -> bool:
        return prompt_tokens > budget_tokens(self.budget, prompt_tokens)

    def keep_in_all(self, scores: Sequence[Tensor], prompt_tokens: int) -> list[Tensor | None]:
        return self.keep_so_far(scores, prompt_tokens, len(scores))

    def keep_so_far(self, scores: Sequence[Tensor], prompt_tokens: int, num_layers: int) -> list[Tensor | None]:
        m = budget_tokens(self.budget, prompt_tokens)
        least = min(m, self.sinks + self.recent)
        needs_BL = torch.stack([each_BKn.amax(dim=(1, 2)) for each_BKn in scores], dim=1)
        tokens_BL = torch.stack([(~each_BKn[:, 0].isneginf()).sum(dim=-1) for each_BKn in scores], dim=1)
        found = torch.stack([needs_BL.double(), tokens_BL.double()]).tolist()  # the host waits once
        kept_BL, stored_BL = list[list[int]](), [[int(tokens) for tokens in stored_L] for stored_L in found[1]]
        for needs_L, stored_L in zip(found[0], stored_BL, strict=True):
            shares_L = self._kept(needs_L, max(stored_L), least=least, total=(m - least) * num_layers)
            kept_BL.append([min(each) for each in zip(shares_L, stored_L, strict=True)])
        return [
            None if kept_B == stored_B else self._best(each_BKn, kept_B, least=least)
            for each_BKn, kept_B, stored_B in zip(scores, _by_layer(kept_BL), _by_layer(stored_BL), strict=True)
        ]

    @staticmethod
    def _kept(needs_L: Sequence[float], tokens: int, *, least: int, total: int) -> list[int]:
        """Number of tokens that each layer of a row keeps, never more than with fewer layers: shares rounded down."""
        room = max(0, tokens - least)
        shares_L = limited_shares(needs_L, min(total, room * len(needs_L)), room)
        return [least + math.floor(share + 1e-6) for share in shares_L]

    def _best(self, scores_BKn: Tensor, kept_B: Sequence[int], *, least: int) -> Tensor:
        """The slots of a layer that stay in each row: sinks and the last tokens, then those with the best scores."""
        is_token_BKn, num_slots = ~scores_BKn.isneginf(), scores_BKn.shape[2]
        order_BKn = scores_BKn.masked_fill(is_token_BKn.cumsum(dim=-1) <= min(self.sinks, least), math.inf)
        order_BKn[..., num_slots - min(self.recent, least) :] = math.inf
        order_BKn.masked_fill_(~is_token_BKn, -math.inf)
        best_BKm = order_BKn.sort(dim=-1, descending=True, stable=True).indices[..., : max(kept_B)]
        if len(set(kept_B)) > 1:
            places_m = torch.arange(best_BKm.shape[2], device=best_BKm.device)
            best_BKm = best_BKm.masked_fill(places_m >= row_values(kept_B, best_BKm.device)[:, None, None], -1)
        return best_BKm.sort(dim=-1).values


def _by_layer(numbers_BL: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(numbers_B) for numbers_B in zip(*numbers_BL, strict=True)]
