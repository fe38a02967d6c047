"""Sliding window: keep the last tokens only, as a baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from policies.layer_view import LayerView
from policies.options import require_default
from policies.scorer import Scorer


@dataclass(kw_only=True)
class Window(Scorer, name="window"):
    """Score: the position of the token."""

    chooses_alike: ClassVar[bool] = True

    def __post_init__(self) -> None:
        rule = f"with {self.label}, which keeps the last tokens anyway; use policy.budget"
        require_default(self, "recent", rule=rule)
        super().__post_init__()

    @property
    def last_queries(self) -> int:
        return 0

    def score(self, view: LayerView) -> Tensor:
        slots_n = torch.arange(view.num_slots, device=view.k_BKnH.device)
        return slots_n.float().expand(len(view.pads), 1, -1)  # exact, which half precision is not
