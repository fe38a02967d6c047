"""Base of policies that keep the tokens with the highest scores."""

# Legend: B batch, K kv heads, n stored slots, m kept slots.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from policies.budgeted import Budgeted
from policies.kept_slots import best_slots, kept_by_row
from policies.layer_view import LayerView, Phase, PromptPart
from policies.options import Budget, budget_tokens, check_budget, require, require_default, require_least


@dataclass(kw_only=True)
class Scorer(Budgeted, ABC):
    """Base of policies that keep sink tokens, recent tokens, and of the others those with the highest scores.

    Attributes:
        budget: tokens to keep per layer and KV head: a number, or a share of the prompt.
        sinks: first tokens that always stay (Xiao et al., StreamingLLM).
        recent: last tokens that always stay.
        evict_every: while decoding, number of tokens by which a layer may exceed the budget before it is cut back,
            since cutting back copies what is kept.

    Raises:
        ValueError: an invalid budget, a negative number, or a budget without room for sinks and recent tokens.
    """

    scores_attention: ClassVar[bool] = False
    """Whether scores are shares of attention, summed or averaged: at least 0, and comparable within a KV head."""

    budget: Budget = 1024
    sinks: int = 0
    recent: int = 0
    evict_every: int = 16

    def __post_init__(self) -> None:
        check_budget(self.budget)
        require_least(self, sinks=0, recent=0, evict_every=1)
        rule = f"with {self.label}, which keeps all generated tokens; leave it out"
        require_default(self, "evict_every", given=not self.while_decoding, rule=rule)
        self.require_room()

    @abstractmethod
    def score(self, view: LayerView) -> Tensor:
        """Score of each slot, (B, K, n) or (B, 1, n); the scores of sinks, recent tokens and padding do not matter."""

    def of_part(self, part: PromptPart) -> Self:
        other = copy(self)  # not checked again: a share may be too small for what the whole has to hold
        other.budget = part.budget_of(self.budget)
        other.recent, other.evict_every = part.share_of(self.recent), part.share_of(self.evict_every)
        return other

    def slots(self, view: LayerView) -> int:
        """Number of slots to keep in this layer."""
        return self.slots_of(budget_tokens(self.budget, view.prompt_tokens), view.layer, view.num_layers)

    def slots_of(self, budget: int, layer: int, num_layers: int) -> int:
        """Number of slots to keep in a layer, for a budget in tokens."""
        return budget

    def limit(self, view: LayerView) -> int:
        """Number of slots beyond which this layer is cut back."""
        return self.slots(view) + view.phase.spare(self.evict_every)

    def over_last(self, num_queries: int, view: LayerView, values: Callable[[int], Tensor]) -> Tensor | None:
        """Sum of what the last `num_queries` queries before a layer is cut back say of each slot, for `carry`.

        A row of a layer is cut back after a prompt, or while decoding once it exceeds its limit. While decoding,
        queries before it was cut back last do not count. If the last chunk of a prompt has fewer queries, they are
        added to those before.

        Args:
            values: what the newest queries say (B, K, n), by their number.

        Returns:
            None while the queries of these tokens do not count.
        """
        before_BKn = view.carried_BKn
        if view.phase is Phase.prefill:
            values_BKn = values(num_queries)
            return values_BKn if before_BKn is None or view.num_new >= num_queries else before_BKn + values_BKn
        num_queries = min(num_queries, self.limit(view) + 1 - self.slots(view))
        left_B = [self.limit(view) + 1 - tokens for tokens in view.row_tokens]  # tokens until the row is cut back
        if min(left_B) >= num_queries:
            return None
        values_BKn = values(1)
        if before_BKn is None:
            return values_BKn

        if len(set(left_B)) == 1:
            return values_BKn if left_B[0] == num_queries - 1 else before_BKn + values_BKn
        # Counted where the slots are, since the host's numbers would wait for all that is queued on a GPU.
        tokens_B11 = view.is_token_BKn().sum(dim=2, keepdim=True).amax(dim=1, keepdim=True)
        left_B11 = self.limit(view) + 1 - tokens_B11
        sum_BKn = torch.where(left_B11 < num_queries, before_BKn + values_BKn, before_BKn)
        return torch.where(left_B11 == num_queries - 1, values_BKn, sum_BKn)

    def most_slots(self, num_layers: int, phase: Phase) -> int | None:
        if self.decides_on_all or not isinstance(self.budget, int):
            return None
        most = max(self.slots_of(self.budget, layer, num_layers) for layer in range(num_layers))
        return most + phase.spare(self.evict_every)

    def drops_of(self, prompt_tokens: int) -> bool:
        return prompt_tokens > budget_tokens(self.budget, prompt_tokens)

    def keep(self, view: LayerView) -> Tensor | None:
        return None if self.decides_on_all else self.keep_by(self.score, view)

    def tokens_after(self, view: LayerView) -> list[int] | None:
        if type(self).keep is not Scorer.keep or self.decides_on_all:  # a policy may keep other numbers
            return None
        return self.kept_tokens(view)

    def kept_tokens(self, view: LayerView) -> list[int] | None:
        """Number of tokens of each row that `keep_by` keeps; None if they are all."""
        return kept_by_row(view, self.slots(view), self.limit(view))

    def keep_by(self, score: Callable[[LayerView], Tensor], view: LayerView) -> Tensor | None:
        """Do what `keep` does, by other scores."""
        m, kept_B = self.slots(view), self.kept_tokens(view)
        if kept_B is None:
            return None
        sinks = [min(num, m) for num in view.sinks(self.sinks)]
        recent = min(self.recent_of(m), m - max(sinks))
        return best_slots(score(view).float(), kept_B, view, sinks=sinks, recent=recent)


@dataclass(kw_only=True)
class RecentShare(Scorer):
    """Base of those that keep a share of the budget for the last tokens.

    Attributes:
        recent_share: this share, unless `recent` says how many.
    """

    recent_share: float = 0.5

    def __post_init__(self) -> None:
        is_share = 0 <= self.recent_share <= 1
        require(is_share, "recent_share", self.recent_share, "must be a share of the budget in [0, 1]")
        rule = f"with policy.recent={self.recent}, which says how many stay; leave one of them out"
        require_default(self, "recent_share", given=self.recent > 0, rule=rule)
        super().__post_init__()

    def recent_of(self, num_kept: int) -> int:
        return self.recent or round(self.recent_share * num_kept)

    @property
    def stays(self) -> str:
        return self.staying("sinks", "recent" if self.recent else "recent_share")
