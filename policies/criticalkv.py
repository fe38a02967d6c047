"""CriticalKV (Feng et al., 2025, arXiv 2502.03805): of tokens that receive attention those that change the output most.

A wrapper around a policy whose scores are shares of attention. It chooses half of the budget; the rest goes to the
tokens with the largest product of score and length of the value after the output projection, which bounds how far
dropping the token moves the output of attention.

The length is the L1 norm, averaged over a KV head's group, as published. The published code counts the recent window as
part of the half.
"""

# Legend: B batch, K kv heads, n stored slots.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from policies.layer_view import LayerView, Phase
from policies.options import require
from policies.wrapper import Wrapper


@dataclass(kw_only=True)
class CriticalKV(Wrapper, name="criticalkv"):
    """Choose part of the budget by the scores of another policy times the length of the projected values.

    Attributes:
        scorer: as of `Wrapper`. Its scores have to be shares of attention.
        first_share: share of the budget that it chooses alone, beside sinks and recent tokens.
        epsilon: added to scores before values weigh them.
    """

    needs_output_projection: ClassVar[bool] = True
    compares_by_kv_head: ClassVar[bool] = True

    first_share: float = 0.5
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.scorer.scores_attention:
            raise ValueError(
                f"policy.scorer={self.scorer.label} does not score by shares of attention, which criticalkv "
                "weighs by values; use one that does, such as snapkv"
            )
        is_share = 0 <= self.first_share <= 1
        require(is_share, "first_share", self.first_share, "must be a share of the budget in [0, 1]")
        require(0 <= self.epsilon < math.inf, "epsilon", self.epsilon, "must be a number of at least 0")

    def most_slots(self, num_layers: int, phase: Phase) -> int | None:
        return self.scorer.most_slots(num_layers, phase)

    def keep(self, view: LayerView) -> Tensor | None:
        if view.phase is Phase.decode and not self.scorer.while_decoding:
            return None
        return self.scorer.keep_by(self.score, view)

    def tokens_after(self, view: LayerView) -> list[int] | None:
        return self.scorer.kept_tokens(view)

    def score(self, view: LayerView) -> Tensor:
        """Score of each slot (B, K, n): infinite for those that the policy chooses alone."""
        scores_BKn = self.scorer.score(view).float().expand(-1, view.num_kv_heads, -1)
        lengths_BKn = view.by_kv_head(view.signals.projected_lengths()).float()
        weighed_BKn = (scores_BKn + self.epsilon) * lengths_BKn
        m, num_slots = self.scorer.slots(view), view.num_slots
        num_sinks = view.sinks(self.scorer.sinks)
        for row, heads, pad in view.heads_by_pad():
            sinks = min(num_sinks[row], m)
            recent = min(self.scorer.recent_of(m), m - sinks)
            first, last = min(pad + sinks, num_slots), max(pad, num_slots - recent)
            num_alone = min(int(self.first_share * (m - sinks - recent)), max(0, last - first))
            if num_alone > 0:
                best_first_Kn = scores_BKn[row, heads, first:last].sort(dim=-1, descending=True, stable=True).indices
                alone_Ka = first + best_first_Kn[:, :num_alone]
                weighed_BKn[row, heads].scatter_(-1, alone_Ka, torch.finfo(weighed_BKn.dtype).max)
        return weighed_BKn
