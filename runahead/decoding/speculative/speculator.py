"""`Speculator`: which drafter an engine's batches have, and whether their drafts can be made."""

# Legend: B batch, V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from runahead.config import GenerationOptions, Speculate
from runahead.decoding.decode import Decoded, Row
from runahead.decoding.speculative.drafts import Drafter, LookupDrafter
from runahead.decoding.speculative.generated_drafts import GeneratedDrafter, ModelDrafter
from runahead.decoding.speculative.policy_drafts import PolicyDrafter
from runahead.decoding.speculative.retrieving_drafts import RetrievingDrafter
from runahead.decoding.speculative.speculation import Speculation
from runahead.decoding.speculative.verification import RowForwards
from runahead.model.model import Model
from runahead.prefill.base import Prefilled, PromptBatch
from runahead.report import SpeculationReport
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
    """Speculative decoding of batches.

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

    def check(self, options: Sequence[GenerationOptions], lengths: Sequence[int], *, reuses: bool) -> None:
        """Check that drafts can be made as the options ask.

        Args:
            options: of every row.
            lengths: tokens of every prompt.
            reuses: prompts reuse prefixes or segments.

        Raises:
            ValueError: they cannot; in one line.
        """
        kinds = [each.speculate for each in options if each.speculate is not Speculate.none]
        if not kinds:
            return
        kind = kinds[0]
        if other := next((each for each in kinds if each is not kind), None):
            raise ValueError(
                f"generation.speculate={kind.name} and {other.name} are asked for in one batch; use one of them for "
                "all of its prompts"
            )
        self._model.require_unmarked(f"generation.speculate={kind.name}", "use generation.speculate=none")
        if self._model.rotates_by_length:
            raise ValueError(
                f"generation.speculate={kind.name} does not go with model {self._model.name}, whose rotary angles "
                "depend on the length of the text, which is another one for each token of a draft; use "
                "generation.speculate=none"
            )
        if kind is Speculate.model:
            if not isinstance(self._draft, Model):
                raise ValueError("generation.speculate=model needs a smaller model that drafts: Engine(draft=...)")
            num_new = max(each.max_new_tokens for each in options)
            ModelDrafter.check(self._model, self._draft, lengths=lengths, num_new=num_new)
        if isinstance(self._first, Model) and kind is not Speculate.lookup:
            num_new = max(each.max_new_tokens for each in options)
            ModelDrafter.check(self._model, self._first, lengths=lengths, num_new=num_new)
        if kind is Speculate.policy:
            if not isinstance(self._draft, RankPolicies):
                raise ValueError("generation.speculate=policy needs policies of what drafts see: Engine(draft=...)")
            if reuses:
                raise ValueError(
                    "generation.speculate=policy does not go with reused prefixes and segments, since policies choose "
                    "among the computed tokens; use generation.speculate=lookup"
                )
            self._model.require_own_kv("generation.speculate=policy", "use generation.speculate=lookup")
            self._draft.check(self._model)
            PolicyDrafter.check(self._draft)

    def decode(
        self,
        rows: Sequence[Row],
        prefilled: Prefilled,
        batch: PromptBatch,
        on_step: Callable[[list[int | None]], Iterable[int]],
    ) -> Decoded:
        """Generate all tokens, on the one rank that has a KV cache. `prefilled` gets the cache's new form and reports.

        Args:
            rows: one per prompt, without new tokens.
            on_step: as of `Speculation`.
        """
        assert prefilled.cache is not None and prefilled.logits_BV is not None
        forwards = RowForwards(self._model, prefilled.cache, pads=batch.pads, num_tokens=batch.num_tokens)
        prefilled.cache = forwards.cache
        told = prefilled.report
        token_s = told.prefill_s / max(1, told.chunk_tokens * len(rows))
        decoded, report, drafter_bytes = self.decode_over(forwards, rows, prefilled.logits_BV, on_step, token_s=token_s)
        prefilled.report.speculation = report
        forwards.cache.describe_decoding(prefilled.report)
        prefilled.report.kv_peak_bytes += drafter_bytes
        return decoded

    def decode_over(
        self,
        forwards: RowForwards,
        rows: Sequence[Row],
        logits_BV: Tensor,
        on_step: Callable[[list[int | None]], Iterable[int]] = lambda tokens: (),
        *,
        token_s: float = 0.0,
    ) -> tuple[Decoded, SpeculationReport, int]:
        """Generate all tokens; `token_s` as of `Speculation`. Returns also the statistics, and the drafter's bytes."""
        drafter = self._drafter(rows, forwards)
        speculation = Speculation(rows, forwards, drafter, on_step, token_s=token_s)
        decoded = speculation.decode(logits_BV)
        speculation.report.within = drafter.within if isinstance(drafter, GeneratedDrafter) else None
        return decoded, speculation.report, drafter.num_bytes

    def _drafter(self, rows: Sequence[Row], forwards: RowForwards) -> Drafter:
        kinds, match = {row.options.speculate for row in rows}, dict[int, int]()
        for number, row in enumerate(rows):
            if row.options.speculate is not Speculate.none:
                match[number] = row.options.speculate_match
        first = self._first_drafter(rows, match)
        if isinstance(self._draft, Model) and Speculate.model in kinds:
            return ModelDrafter(self._draft, rows, first, verifying=self._model, on_layer=self._on_layer)
        if isinstance(self._draft, RankPolicies) and Speculate.policy in kinds:
            if self._draft.retriever is not None:
                return RetrievingDrafter(self._model, self._draft.retriever, rows, forwards, first)
            return PolicyDrafter(self._model, self._draft.last, rows, forwards, first)
        return LookupDrafter(match)

    def _first_drafter(self, rows: Sequence[Row], match: Mapping[int, int]) -> Drafter | None:
        if isinstance(self._first, Model):
            return ModelDrafter(self._first, rows, verifying=self._model, on_layer=self._on_layer)
        return None if self._first is None else LookupDrafter(match)
