"""KeyDiff (Park et al., 2025, arXiv 2504.15364): keep the tokens whose keys differ most from the others'.

Keys that point the same way as most keys hold little that the others do not; distinctive keys are those that receive
attention. No attention is computed: a choice needs the stored keys alone, after the prompt and while decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import normalize

from policies.layer_view import LayerView
from policies.scorer import Scorer


@dataclass(kw_only=True)
class KeyDiff(Scorer, name="keydiff"):
    """Score: minus the cosine of a key and the mean of all keys, each at unit length."""

    @property
    def last_queries(self) -> int:
        return 0

    def score(self, view: LayerView) -> Tensor:
        k_BKnH = view.k_BKnH.float()
        unit_BKnH = normalize(k_BKnH, dim=-1) * view.is_token_BKn()[..., None]
        # The sum has the mean's direction, whatever the number of tokens in a row.
        anchor_BK1H = normalize(unit_BKnH.sum(dim=2, keepdim=True), dim=-1)
        return -(unit_BKnH * anchor_BK1H).sum(dim=-1)
