"""Base of policies that choose by the scores of another one."""

# Legend: B batch, K kv heads, n stored slots.

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from policies.base import ModelFacts, Policy
from policies.layer_view import LayerView, PromptPart
from policies.scorer import Scorer
from policies.snapkv import SnapKV


def no_scorer(given: str) -> ValueError:
    """The error of what is given as scorer, and cannot be one."""
    return ValueError(f"{given} does not score tokens; use snapkv or another that does")


@dataclass(kw_only=True)
class Wrapper(Policy):
    """Base of policies that choose by the scores of another one, and need what it needs.

    Attributes:
        scorer: the policy whose budget, sinks, recent tokens and scores these are.

    Raises:
        ValueError: the scorer is no policy that scores tokens.
    """

    scorer: Scorer = field(default_factory=SnapKV)

    def __post_init__(self) -> None:
        if not isinstance(self.scorer, Scorer):
            raise no_scorer(f"policy.scorer={getattr(self.scorer, 'label', self.scorer)}")

    @property
    def queries_from(self) -> int | None:
        return self.scorer.queries_from

    @property
    def last_queries(self) -> int | None:
        return self.scorer.last_queries

    @property
    def carries_generated(self) -> bool:  # type: ignore[override]
        return self.scorer.carries_generated

    @property
    def needs_attention_input(self) -> bool:  # type: ignore[override]
        return self.scorer.needs_attention_input

    @property
    def needs_output_projection(self) -> bool:  # type: ignore[override]
        return self.scorer.needs_output_projection

    @property
    def needs_token_kinds(self) -> bool:  # type: ignore[override]
        return self.scorer.needs_token_kinds

    @property
    def reads(self) -> str | None:
        return self.scorer.reads

    def require(self, model: ModelFacts) -> None:
        self.scorer.require(model)

    def of_part(self, part: PromptPart) -> Self:
        other = copy(self)
        other.scorer = self.scorer.of_part(part)
        return other

    def no_room(self, prompt_tokens: int) -> str:
        return self.scorer.no_room(prompt_tokens)

    def carry(self, view: LayerView) -> Tensor | None:
        return self.scorer.carry(view)
