"""R-KV (Cai et al., NeurIPS 2025, arXiv 2505.24133): keep important tokens that are not like later ones.

A model that reasons repeats itself, and repetitions attend to each other. So, whenever 128 tokens were generated, a
token's score is the votes of the last queries for it, less the similarity of its key to the other keys.

Scores are as published, with SnapKV's rule for the query heads of a group, the mean of their probabilities (published:
the maximum of their logits); lambda is 0.1 as in the paper (0.07 in the code). Of keys that are alike the latest is not
held against itself. In the published code it is as redundant as the others, and a batch takes the redundancy of its
first row. The similarities of a prompt are computed in blocks, n x n in all for n tokens.
"""

# Legend: B batch, K kv heads, q keys at a time, n stored slots, H key dim.

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from policies.layer_view import LayerView, Phase
from policies.options import require
from policies.precision import widened
from policies.scorer import Scorer
from policies.snapkv import SnapKV

BLOCK_COSINES = 1 << 20
"""Cosines at a time, over all rows and heads, which bounds the memory that they take."""


@dataclass(kw_only=True)
class RKV(SnapKV, name="r_kv"):
    """Score: `importance` times the token's share of the pooled votes, minus the rest times its redundancy.

    The queries that vote are the last `window` ones before a layer is cut back. These tokens are kept.

    Attributes:
        importance: weight of the votes, lambda in the paper; redundancy has the rest of 1.
        similar: cosine above which two keys are alike.
    """

    while_decoding: ClassVar[bool] = True
    scores_attention: ClassVar[bool] = False

    window: int = 8
    evict_every: int = 128
    importance: float = 0.1
    similar: float = 0.5

    def __post_init__(self) -> None:
        require(0 <= self.importance <= 1, "importance", self.importance, "must be a weight in [0, 1]")
        require(-1 <= self.similar <= 1, "similar", self.similar, "must be a cosine in [-1, 1]")
        super().__post_init__()

    def most_slots(self, num_layers: int, phase: Phase) -> int | None:
        return Scorer.most_slots(self, num_layers, phase)

    def carry(self, view: LayerView) -> Tensor | None:
        def votes_of(num_queries: int) -> Tensor:
            return view.by_kv_head(view.signals.votes(num_queries))

        return self.over_last(self.window, view, votes_of)

    def score(self, view: LayerView) -> Tensor:
        assert view.carried_BKn is not None
        before = max(0, view.num_slots - self.window)
        votes_BKn = view.carried_BKn.clone()
        total_BK1 = votes_BKn[..., :before].sum(dim=-1, keepdim=True).clamp_min(torch.finfo(votes_BKn.dtype).tiny)
        shares_BKn = self.pooled(votes_BKn / total_BK1)
        return self.importance * shares_BKn - (1 - self.importance) * self.redundancy(view)

    def redundancy(self, view: LayerView) -> Tensor:
        """Mean cosine of each key to the row's other keys, as softmax over the row (B, K, n).

        The latest of the keys that are alike is not held against itself: for each key the cosine to the latest one like
        it, which may be itself, does not count.
        """
        is_token_BKn = view.is_token_BKn()
        unit_BKnH = normalize(widened(view.k_BKnH), dim=-1) * is_token_BKn[..., None]
        total_BKn = torch.zeros_like(unit_BKnH[..., 0])
        slots_n = torch.arange(view.num_slots, device=unit_BKnH.device)
        step = max(1, BLOCK_COSINES // total_BKn.numel())
        for first in range(0, view.num_slots, step):
            own_q1 = slots_n[first : first + step, None]
            cosines_BKqn = unit_BKnH[:, :, first : first + step] @ unit_BKnH.mT
            itself_qn = own_q1 == slots_n
            alike_BKqn = (cosines_BKqn > self.similar) | itself_qn
            latest_BKq1 = torch.where(alike_BKqn, slots_n, 0).amax(dim=-1, keepdim=True)
            total_BKn += cosines_BKqn.masked_fill_(itself_qn | (slots_n == latest_BKq1), 0.0).sum(dim=2)
        mean_BKn = total_BKn / is_token_BKn.sum(dim=-1, keepdim=True).clamp_min(1)
        return mean_BKn.masked_fill(~is_token_BKn, torch.finfo(mean_BKn.dtype).min).softmax(dim=-1)
