"""`Speculator`: which drafter an engine's batches have, and whether their drafts can be made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from runahead.config import GenerationOptions, Speculate
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import Row
from runahead.decoding.speculative.drafts import Drafter, LookupDrafter
from runahead.decoding.speculative.generated_drafts import ModelDrafter
from runahead.decoding.speculative.payoff import Payoff
from runahead.decoding.speculative.policy_drafts import PolicyDrafter
from runahead.decoding.speculative.proposals import PayingDrafts
from runahead.decoding.speculative.retrieving_drafts import RetrievingDrafter
from runahead.features.facts import Setup
from runahead.features.refused import check
from runahead.model.model import Model
from runahead.thinning.rank_policies import RankPolicies


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The drafter, where drafts are not looked up.

    Attributes:
        by: a smaller model, or policies that choose what the model drafts from.
        first: drafts for `by`: a still smaller model, or look-up; None lets `by` generate a token per forward.
    """

    by: Model | RankPolicies
    first: Model | Literal["lookup"] | None = None


class Speculator:
    """The drafts of an engine's batches, and what they need.

    Args:
        model: verifies.
        draft: drafts; None where drafts are looked up.
        on_layer: called after each layer of a drafting model.
    """

    def __init__(self, model: Model, draft: Model | RankPolicies | Draft | None, on_layer: Callable[[], None]) -> None:
        self._model, self._on_layer = model, on_layer
        draft = draft if isinstance(draft, Draft) or draft is None else Draft(by=draft)
        self._draft = None if draft is None else draft.by
        self._first = None if draft is None else draft.first

    def check(self, options: Sequence[GenerationOptions], lengths: Sequence[int], setup: Setup) -> None:
        """Check that drafts can be made as the options ask.

        Args:
            options: of every row.
            lengths: tokens of every prompt.
            setup: what else is known of the run.

        Raises:
            ValueError: they cannot; in one line.
        """
        drafted = [each for each in options if each.speculate is not Speculate.none]
        if not drafted:
            return
        kind, draft = drafted[0].speculate, self._draft
        by_policy = draft if kind is Speculate.policy else None
        kinds = [each.speculate for each in drafted]
        check(replace(setup, generation=drafted[0], drafts=kinds, drafting=by_policy))
        num_new = max(each.max_new_tokens for each in options)
        if kind is Speculate.model:
            if not isinstance(draft, Model):
                raise ValueError("generation.speculate=model needs a smaller model that drafts: Engine(draft=...)")
            ModelDrafter.check(self._model, draft, lengths=lengths, num_new=num_new)
        if isinstance(self._first, Model) and kind is not Speculate.lookup:
            ModelDrafter.check(self._model, self._first, lengths=lengths, num_new=num_new)
        if kind is Speculate.policy:
            if not isinstance(draft, RankPolicies):
                raise ValueError("generation.speculate=policy needs policies of what drafts see: Engine(draft=...)")
            draft.check(self._model)

    def drafts(self, rows: Sequence[Row], lanes: Lanes, *, token_s: float = 0.0) -> PayingDrafts:
        """The drafts for a batch of rows.

        Args:
            lanes: hold the batch.
            token_s: as of `PayingDrafts`.
        """
        kind = next(row.options.speculate for row in rows if row.asks_for_drafts)
        return PayingDrafts(self._drafter(kind, lanes), Payoff(warm_up=lanes.warm_up), name=kind.name, token_s=token_s)

    def _drafter(self, kind: Speculate, lanes: Lanes) -> Drafter:
        if isinstance(self._draft, Model) and kind is Speculate.model:
            return ModelDrafter(self._draft, self._first_drafter(), verifying=self._model, on_layer=self._on_layer)
        if isinstance(self._draft, RankPolicies) and kind is Speculate.policy:
            if self._draft.retriever is not None:
                return RetrievingDrafter(self._model, self._draft.retriever, lanes, self._first_drafter())
            return PolicyDrafter(self._model, self._draft.last, lanes, self._first_drafter())
        return LookupDrafter()

    def _first_drafter(self) -> Drafter | None:
        if isinstance(self._first, Model):
            return ModelDrafter(self._first, verifying=self._model, on_layer=self._on_layer)
        return None if self._first is None else LookupDrafter()
