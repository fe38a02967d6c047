"""`Speculator`: which drafter an engine's batches have, and whether their drafts can be made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from runahead.config import GenerationOptions, Speculate
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import Row
from runahead.decoding.speculative.drafts import Drafter, DraftsByKind, LookupDrafter
from runahead.decoding.speculative.lead import Lead, lead_among
from runahead.decoding.speculative.payoff import Payoff
from runahead.decoding.speculative.proposals import PayingDrafts
from runahead.features.refused import check
from runahead.features.setup import Setup
from runahead.kv_transfer.gathering import Gathering
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
            lengths: tokens of every prompt; none if they are not known.
            setup: what else is known of the run.

        Raises:
            ValueError: they cannot; in one line.
        """
        for kind in dict.fromkeys(each.speculate for each in options if each.asks_for_drafts):
            of_kind = [each for each in options if each.speculate is kind]
            rows = zip(options, lengths, strict=bool(lengths))
            self._check_kind(of_kind, [length for each, length in rows if each.speculate is kind], setup)

    def _check_kind(self, options: Sequence[GenerationOptions], lengths: Sequence[int], setup: Setup) -> None:
        """`check` of the rows with one kind of drafts."""
        kind, draft, num_new = options[0].speculate, self._draft, max(each.max_new_tokens for each in options)
        check(replace(setup, generation=options[0], drafting=draft if kind is Speculate.policy else None))
        if kind is Speculate.model:
            if not isinstance(draft, Model):
                raise ValueError("generation.speculate=model needs a smaller model that drafts: Engine(draft=...)")
            self._check_model(draft, lengths, num_new)
        if isinstance(self._first, Model) and kind is not Speculate.lookup:
            self._check_model(self._first, lengths, num_new)
        if kind is Speculate.policy:
            if not isinstance(draft, RankPolicies):
                raise ValueError("generation.speculate=policy needs policies of what drafts see: Engine(draft=...)")
            draft.check(self._model)

    def _check_model(self, model: Model, lengths: Sequence[int], num_new: int) -> None:
        from runahead.decoding.speculative.generated_drafts import ModelDrafter

        ModelDrafter.check(self._model, model, lengths=lengths, num_new=num_new)

    def drafts(
        self, rows: Sequence[Row], lanes: Lanes, *, token_s: float = 0.0, gather: Gathering | None = None
    ) -> PayingDrafts:
        """The drafts for a batch of rows.

        Args:
            lanes: hold the batch.
            token_s: as of `PayingDrafts`.
            gather: between the ranks that decode together, if there are several.
        """
        lead, payoff = lead_among(self._model, gather), Payoff(warm_up=lanes.warm_up)
        kinds = dict.fromkeys(row.options.speculate for row in rows if row.options.asks_for_drafts)
        drafters = {kind: self._drafter(kind, lanes, lead) for kind in kinds}
        drafter = DraftsByKind(drafters) if len(drafters) > 1 else next(iter(drafters.values()))
        name = " and ".join(kind.name for kind in kinds)
        return PayingDrafts(drafter, payoff, name=name, token_s=token_s, lead=lead)

    def _drafter(self, kind: Speculate, lanes: Lanes, lead: Lead) -> Drafter:
        if isinstance(self._draft, Model) and kind is Speculate.model:
            return self._model_drafter(self._draft, lead, self._first_drafter(lead))
        if isinstance(self._draft, RankPolicies) and kind is Speculate.policy:
            if self._draft.retriever is not None:
                from runahead.decoding.speculative.retrieving_drafts import RetrievingDrafter

                return RetrievingDrafter(self._model, self._draft.retriever, lanes, self._first_drafter(lead), lead)
            from runahead.decoding.speculative.policy_drafts import PolicyDrafter

            return PolicyDrafter(self._model, self._draft.last, lanes, self._first_drafter(lead), lead)
        return LookupDrafter()

    def _model_drafter(self, model: Model, lead: Lead, first: Drafter | None = None) -> Drafter:
        from runahead.decoding.speculative.generated_drafts import ModelDrafter

        return ModelDrafter(model, first, verifying=self._model, on_layer=self._on_layer, lead=lead)

    def _first_drafter(self, lead: Lead) -> Drafter | None:
        if isinstance(self._first, Model):
            return self._model_drafter(self._first, lead)
        return None if self._first is None else LookupDrafter()
