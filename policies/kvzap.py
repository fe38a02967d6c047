"""KVzap (Jegou and Jeblick, 2026, arXiv 2601.07891): a linear map of hidden states predicts the scores of KVzip+.

`python -m policies.fit_kvzap` fits the map of each layer for a model. Then a token's score, the logarithm of its KVzip+
score in each KV head, is known when the token is computed, in a prompt or an answer, and nothing is repeated. Either
all tokens below a threshold are dropped, so that heads, layers and prompts that need more keep more, or the best ones
of each head fill a budget. The last tokens stay until enough others have come.

The maps score contexts of texts as KVzip+ does, and are fitted by ridge regression in closed form. The program tells
how much of the variance they explain in contexts that it left out (R squared, by layer) and which thresholds keep which
share of these. The authors fit on 1.2 million tokens of many kinds and also have maps of two layers, which are not
here.
"""

# Legend: B batch, K kv heads, C new tokens, n stored slots.

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Self

from torch import Tensor

from policies.base import ModelFacts
from policies.kept_slots import first_slots
from policies.layer_view import LayerView, Phase, PromptPart
from policies.options import Budget, require, require_default
from policies.score_maps import FILES, ScoreMaps
from policies.scorer import Scorer


@dataclass(kw_only=True)
class KVzap(Scorer, name="kvzap"):
    """Score: predicted logarithm of a token's KVzip+ score in a KV head.

    Attributes:
        budget: tokens to keep per layer and KV head, if there is no threshold: a number, or a share of the prompt.
        recent: last tokens that always stay; at most half of a budget.
        predictor: file of python -m policies.fit_kvzap with the maps for this model.
        threshold: score below which tokens are dropped. The program that makes the file says what thresholds keep.
    """

    needs_keys: ClassVar[bool] = False
    carries_generated: ClassVar[bool] = True
    needs_attention_input: ClassVar[bool] = True
    replaces_budget: ClassVar[tuple[str, ...]] = ("threshold",)

    budget: Budget = 1024
    sinks: int = 4
    recent: int = 128
    evict_every: int = 128
    predictor: str | None = None
    threshold: float | None = None
    _maps: ScoreMaps | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.predictor is None:
            raise ValueError(
                "policy=kvzap needs policy.predictor=<file.safetensors>, made for the model; make it with "
                f"{FILES.remedy('<file.safetensors>')}"
            )
        if self.threshold is not None:
            require(math.isfinite(self.threshold), "threshold", self.threshold, "must be a number")
        ScoreMaps.load(self.predictor)  # finds mistakes in the file before the model is loaded

    def require_room(self) -> None:
        if self.threshold is None:
            super().require_room()
        else:
            rule = f"with policy.threshold={self.threshold}; leave one of them out"
            require_default(self, "budget", rule=rule)

    def has_room(self, budget: int, most: int | None = None) -> bool:
        return budget >= max(self.sinks + self.recent, 2 * self.recent)

    @property
    def stays(self) -> str:
        return f"{super().stays}, which are at most half of it" if self.recent else super().stays

    @property
    def keeps_ragged(self) -> bool:  # type: ignore[override]
        return self.threshold is not None

    @property
    def reads(self) -> str | None:
        return self.predictor

    def require(self, model: ModelFacts) -> None:
        assert self.predictor is not None
        maps = ScoreMaps.load(self.predictor, model.fingerprint).of_share(model.share, model.num_shares)
        for layer, weight_KD in maps.weights.items():
            known = layer < len(model.heads)
            if not known or weight_KD.shape != (model.heads[layer][0], model.input_dims[layer]):
                raise ValueError(
                    f"policy.predictor={self.predictor} is for other heads or hidden states than those of model "
                    f"{model.name}; make it again with {FILES.remedy(self.predictor)}"
                )
        self._maps = maps

    def of_part(self, part: PromptPart) -> Self:
        other = super().of_part(part)
        if self.threshold is not None:  # generated tokens are counted on all ranks alike
            other.evict_every = self.evict_every
        return other

    def recent_of(self, num_kept: int) -> int:
        return min(self.recent, num_kept // 2)

    def most_slots(self, num_layers: int, phase: Phase) -> int | None:
        return None if self.threshold is not None else super().most_slots(num_layers, phase)

    def predicted(self, view: LayerView) -> Tensor:
        """Scores (B, K, C) of the new tokens."""
        assert self._maps is not None and view.input_BCD is not None, "the policy was not checked against a model"
        return self._maps.scores(view.layer, view.input_BCD)

    def carry(self, view: LayerView) -> Tensor:
        """Scores of all slots: those that are predicted of new tokens, and of the others as they are."""
        is_known = view.carried_BKn is not None or view.num_slots <= view.num_new
        assert is_known or view.part is not None, "tokens of other ranks have no scores"
        return view.with_new(self.predicted(view))

    def score(self, view: LayerView) -> Tensor:
        assert view.carried_BKn is not None
        return view.carried_BKn

    def keep(self, view: LayerView) -> Tensor | None:
        if self.threshold is None:
            return super().keep(view)
        if view.phase is Phase.decode and view.num_generated % self.evict_every:
            return None
        is_token_BKn = view.is_token_BKn().expand(-1, view.num_kv_heads, -1)
        stays_BKn = self.score(view) >= self.threshold
        stays_BKn |= ~view.is_token_BKn(after=view.sinks(self.sinks))
        stays_BKn[..., max(0, view.num_slots - self.recent) :] = True
        stays_BKn &= is_token_BKn
        kept_BK: list[list[int]] = stays_BKn.sum(dim=-1).tolist()
        tokens_BK: list[list[int]] = is_token_BKn.sum(dim=-1).tolist()
        if kept_BK == tokens_BK:
            return None
        # Those that stay come first, padding last; a stable sort leaves each in the order of positions.
        order_BKn = stays_BKn.int() + is_token_BKn.int()
        slots_BKn = order_BKn.sort(dim=-1, descending=True, stable=True).indices
        return first_slots(slots_BKn, kept_BK, tokens_BK)
