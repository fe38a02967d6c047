"""Scissorhands (Liu et al., NeurIPS 2023, arXiv 2305.17118): a token that was important will be important.

Of the last queries those are counted that give a token less than their mean attention, 1/t for t tokens. When the
budget is exceeded while decoding, the tokens that most queries neglected are dropped, many at once.

It counts as published, in each query head, and averages the counts of a KV head's group, which the paper does not have.
All layers have the same budget (published: later layers more). After a prompt the whole budget is used; while decoding
a layer has between half of it (`drop_share`) and all of it. Queries count since the last cut, at most `window` of them.
If the last chunk of a prompt is shorter than that, the last ones of the chunk before count, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from policies.layer_view import LayerView, Phase, PromptPart
from policies.options import require, require_least
from policies.scorer import Scorer


@dataclass(kw_only=True)
class Scissorhands(Scorer, name="scissorhands"):
    """Score: minus the number of queries that neglected the token, averaged over a KV head's group.

    After a prompt the whole budget is used. Queries count since `window` tokens before a layer is cut back, or since it
    was cut back last if that is later.

    Attributes:
        window: number of queries that count.
        drop_share: share of the budget that is dropped at once while decoding.
    """

    compares_by_kv_head: ClassVar[bool] = True

    recent: int = 10
    evict_every: int = 1
    window: int = 400
    drop_share: float = 0.5

    def __post_init__(self) -> None:
        require_least(self, window=1)
        require(0 < self.drop_share < 1, "drop_share", self.drop_share, "must be a share of the budget in (0, 1)")
        super().__post_init__()

    def has_room(self, budget: int, most: int | None = None) -> bool:
        return super().has_room(self.rest_of(budget), most)

    @property
    def stays(self) -> str:
        return f"{super().stays} after policy.drop_share={self.drop_share}"

    def of_part(self, part: PromptPart) -> Self:
        other = super().of_part(part)
        other.window = part.share_of(self.window)
        return other

    def rest_of(self, budget: int) -> int:
        """Number of tokens that are left after the others were dropped at once."""
        return max(1, budget - max(1, int(self.drop_share * budget)))

    def slots(self, view: LayerView) -> int:
        budget = super().slots(view)
        return self.rest_of(budget) if view.phase is Phase.decode else budget

    def limit(self, view: LayerView) -> int:
        return super().slots(view) + view.phase.spare(self.evict_every)

    def carry(self, view: LayerView) -> Tensor | None:
        def neglects_of(num_queries: int) -> Tensor:
            return view.by_kv_head(view.signals.neglects(num_queries))

        return self.over_last(self.window, view, neglects_of)

    def score(self, view: LayerView) -> Tensor:
        assert view.carried_BKn is not None
        return -view.carried_BKn
