"""SnapKV (Li et al., NeurIPS 2024, arXiv 2404.14469): keep the tokens that the end of the prompt attends to.

The prompt's last `window` queries vote by their attention probabilities; votes are pooled over neighbours, so that
passages rather than single tokens are kept. Generated tokens are all kept, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Self

from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from policies.layer_view import LayerView, Phase, PromptPart
from policies.options import choice, require, require_default
from policies.scorer import Scorer


class Pooling(Enum):
    max = "max"
    avg = "avg"


@dataclass(kw_only=True)
class SnapKV(Scorer, name="snapkv"):
    """Score: pooled votes of the window, averaged over a KV head's group. The window itself is kept.

    Attributes:
        window: number of queries that vote.
        kernel: width of the pooling, an odd number of tokens.
        pooling: maximum or mean of the votes in that width.
    """

    compares_by_kv_head: ClassVar[bool] = True
    while_decoding: ClassVar[bool] = False
    scores_attention: ClassVar[bool] = True

    window: int = 32
    kernel: int = 7
    pooling: Pooling = field(default=Pooling.max, metadata={"formerly": "pool"})

    def __post_init__(self) -> None:
        self.pooling = choice("pooling", Pooling, self.pooling)
        require(self.window >= 1, "window", self.window, "must be at least 1 token")
        require(self.kernel >= 1 and self.kernel % 2 == 1, "kernel", self.kernel, "must be an odd number of tokens")
        rule = "with policy.kernel=1, which pools nothing; use policy.kernel=3 or more"
        require_default(self, "pooling", given=self.kernel == 1, rule=rule)
        rule = f"has no effect with policy.window={self.window}, which stays anyway; leave it out, or use more"
        require(not 0 < self.recent <= self.window, "recent", self.recent, rule)
        super().__post_init__()

    @property
    def last_queries(self) -> int:
        return self.window

    def recent_of(self, num_kept: int) -> int:
        return self.recent or self.window

    @property
    def stays(self) -> str:
        return self.staying("sinks", "recent" if self.recent else "window")

    def of_part(self, part: PromptPart) -> Self:
        other = super().of_part(part)
        other.window = part.share_of(self.window)
        return other

    def score(self, view: LayerView) -> Tensor:
        return self.pooled(view.by_kv_head(view.signals.votes(self.window)))

    def pooled(self, votes_BKn: Tensor) -> Tensor:
        """Votes pooled over neighbours, in place.

        Only tokens before the window are pooled: within it, later tokens had fewer voters.
        """
        before = max(0, votes_BKn.shape[-1] - self.window)
        pooled = max_pool1d if self.pooling is Pooling.max else avg_pool1d
        if before:
            votes_BKn[..., :before] = pooled(votes_BKn[..., :before], self.kernel, stride=1, padding=self.kernel // 2)
        return votes_BKn

    def most_slots(self, num_layers: int, phase: Phase) -> int | None:
        return None if phase is Phase.decode else super().most_slots(num_layers, phase)
