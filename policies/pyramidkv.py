"""PyramidKV (Cai et al., 2024, arXiv 2406.02069): SnapKV whose budget falls from layer to layer.

Lower layers spread their attention over many tokens, upper ones gather it on few. Budgets fall linearly over the layers
and have the given budget as their mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.base import LayerView
from policies.snapkv import SnapKV


@dataclass(kw_only=True)
class PyramidKV(SnapKV):
    """SnapKV with a budget per layer.

    Attributes:
        beta: how steep; the last layer gets the budget divided by it, beside the window.
    """

    beta: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta >= 1:
            raise ValueError(f"policy.beta={self.beta} must be at least 1")

    def slots(self, view: LayerView) -> int:
        """Eq. 6 of the paper: from 2k - k / beta in the first layer to k / beta in the last, without the window."""
        mean = super().slots(view) - self.recent
        if mean <= 0 or view.num_layers == 1:
            return super().slots(view)
        last = mean / self.beta
        first = 2 * mean - last
        return self.recent + round(first + (last - first) * view.layer / (view.num_layers - 1))
