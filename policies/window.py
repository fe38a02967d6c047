"""Sliding window: keep the last tokens only, as a baseline."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from policies.base import LayerView, Scorer


@dataclass(kw_only=True)
class Window(Scorer):
    """Score: the position of the token."""

    def score(self, view: LayerView) -> Tensor:
        return view.k_BKnH.new_ones(len(view.pads), 1, view.num_slots).cumsum(dim=-1)
