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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from policies.kept_slots import best_first, first_slots
from policies.layer_view import LayerView
from policies.options import budget_tokens, require, require_least
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
        require_least(self, window=2, gamma=0)  # one query has no variance
        for option in ("tau1", "tau2"):
            require(getattr(self, option) > 0, option, getattr(self, option), "must be above 0")
        super().__post_init__()

    def carry(self, view: LayerView) -> Tensor | None:
        """Scores of the tokens, in a unit in which the best one of each head, and the window, have what a layer needs.

        So the order of a head's tokens and the needs of a layer are in one tensor, whichever tokens are dropped.
        """
        if not self.drops_of(view.prompt_tokens):
            return None
        before = max(0, view.num_slots - self.window)
        mean_BNn = view.signals.votes(self.window)
        squares_BNn = view.signals.votes(self.window, of=torch.square)
        variance_BNn = (squares_BNn - mean_BNn.square()).clamp_min_(0) * (self.window / (self.window - 1))
        entropy_BNn = view.signals.votes(self.window, of=torch.special.entr)
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

    def keep_so_far(self, scores: Sequence[Tensor], prompt_tokens: int, num_layers: int) -> list[Tensor | None]:
        m = budget_tokens(self.budget, prompt_tokens)
        least = min(m, self.sinks + self.recent_of(m))
        needs_BL = torch.stack([each_BKn.amax(dim=(1, 2)) for each_BKn in scores], dim=1)
        tokens_BL = torch.stack([(~each_BKn[:, 0].isneginf()).sum(dim=-1) for each_BKn in scores], dim=1)
        needs, stored = torch.stack([needs_BL.double(), tokens_BL]).tolist()  # the host waits once
        total = (m - least) * num_layers
        kept = [self._kept(*of_row, least=least, total=total) for of_row in zip(needs, stored, strict=True)]
        slots = list[Tensor | None]()
        for each_BKn, kept_B, stored_B in zip(scores, zip(*kept, strict=True), zip(*stored, strict=True), strict=True):
            _, slots_BKn = best_first(each_BKn, sinks=min(self.sinks, least), recent=min(self.recent_of(m), least))
            of_heads = [[number] for number in kept_B], [[number] for number in stored_B]
            slots.append(None if kept_B == stored_B else first_slots(slots_BKn, *of_heads))
        return slots

    @staticmethod
    def _kept(needs_L: Sequence[float], stored_L: Sequence[float], *, least: int, total: int) -> list[int]:
        """Number of tokens that each layer of a row keeps, never more than with fewer layers: shares rounded down."""
        room = max(0, int(max(stored_L)) - least)
        shares_L = limited_shares(needs_L, min(total, room * len(needs_L)), room)
        return [min(int(stored), least + int(share + 1e-6)) for stored, share in zip(stored_L, shares_L, strict=True)]
