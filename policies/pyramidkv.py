"""PyramidKV (Cai et al., 2024, arXiv 2406.02069): SnapKV with a budget that falls from layer to layer.

Lower layers spread their attention over many tokens, upper layers concentrate it on few. Budgets fall linearly over the
layers, and their mean is the given budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.layer_view import LayerView
from policies.options import budget_tokens, require_least
from policies.snapkv import SnapKV


@dataclass(kw_only=True)
class PyramidKV(SnapKV, name="pyramidkv"):
    """SnapKV with a budget per layer.

    Attributes:
        beta: slope; the last layer gets the mean budget divided by beta, plus the window.
    """

    beta: float = 20.0

    def __post_init__(self) -> None:
        require_least(self, beta=1)
        super().__post_init__()

    def has_room(self, budget: int, most: int | None = None) -> bool:
        return super().has_room(self.slots_of(budget, 1, 2, most))  # of the last layer, which has least

    @property
    def stays(self) -> str:
        return f"{super().stays} in the last layer, which policy.beta={self.beta} gives least"

    def slots(self, view: LayerView) -> int:
        """Number of slots to keep in this layer.

        A share is the mean over layers, none of which gets more than the prompt. A number of tokens is not limited by
        the prompt, so that a row keeps the same tokens whatever other prompts it is padded to.
        """
        budget = budget_tokens(self.budget, view.prompt_tokens)
        most = None if isinstance(self.budget, int) else view.prompt_tokens
        return self.slots_of(budget, view.layer, view.num_layers, most)

    def slots_of(self, budget: int, layer: int, num_layers: int, most: int | None = None) -> int:
        """Eq. 6 of the paper: from 2k - k / beta in the first layer to k / beta in the last, plus the window.

        If the first layer would get more than `most`, it gets `most`, and the last layer gets correspondingly more.
        """
        recent = self.recent_of(budget)
        mean = budget - recent
        if mean <= 0 or num_layers == 1:
            return budget
        last = mean / self.beta
        first = 2 * mean - last
        if most is not None and first > most - recent:
            first = most - recent
            last = 2 * mean - first
        return recent + round(first + (last - first) * layer / (num_layers - 1))
