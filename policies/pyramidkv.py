"""PyramidKV (Cai et al., 2024, arXiv 2406.02069): SnapKV whose budget falls from layer to layer.

Lower layers spread their attention over many tokens, upper ones gather it on few. Budgets fall linearly over the layers
and have the given budget as their mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.base import LayerView, budget_tokens
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
        """A share is the mean over layers, of which none has more than the prompt. A number of tokens is not fitted to
        the prompt: a row keeps the same whatever other prompts it is padded to."""
        budget = budget_tokens(self.budget, view.prompt_tokens)
        most = None if isinstance(self.budget, int) else view.prompt_tokens
        return self.slots_of(budget, view.layer, view.num_layers, most)

    def slots_of(self, budget: int, layer: int, num_layers: int, most: int | None = None) -> int:
        """Eq. 6 of the paper: from 2k - k / beta in the first layer to k / beta in the last, without the window.

        Where the first layer would get more than `most`, it gets that, and the last one the more.
        """
        mean = budget - self.recent
        if mean <= 0 or num_layers == 1:
            return budget
        last = mean / self.beta
        first = 2 * mean - last
        if most is not None and first > most - self.recent:
            first = most - self.recent
            last = 2 * mean - first
        return self.recent + round(first + (last - first) * layer / (num_layers - 1))
