"""`PromptDraft`: chooses the tokens of prompts that are computed, by a draft that all stages run as a chain."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from policies.reuse import ReusingPrompt
from runahead.config import PrefillOptions, Speculative
from runahead.context import Partitioner
from runahead.decoding.speculative.generated_drafts import ModelDrafter
from runahead.model.model import Model
from runahead.prefill.base import Prefill, PrefillPlan
from runahead.prefill.prompt_check import PromptLimits
from runahead.prefill.reusing import ReusingPrefill
from runahead.prompt_draft.choice import kept_tokens, num_kept
from runahead.prompt_draft.first_layers import first_layers
from runahead.prompt_draft.looking_ahead import scores
from runahead.ranks.ranks import Ranks
from runahead.report import SpeculativeReport
from runahead.thinning.rank_policies import RankPolicies
from runahead.timeline.trace import TraceSpan

LAYERS_SHARE = 6
"""One in so many of a model's layers drafts, if no number is given."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The tokens of prompts that are computed.

    Attributes:
        prompts: these tokens at their positions, which have gaps.
        report: of the draft.
        span: of the draft in the timeline of this rank, in seconds of `time.perf_counter`.
    """

    prompts: list[ReusingPrompt]
    report: SpeculativeReport
    span: TraceSpan


class PromptDraft:
    """Chooses the tokens of prompts that are computed.

    The draft reads the prompts with the strategy of the prefill that follows: in a chain each stage has a chunk, and
    the last one looks ahead.

    Args:
        model: which computes what is chosen.
        draft: a smaller model with the same tokens; None: the first layers of `model`.
        strategy, options, partition, lends: of the prefill, as of `Engine`.

    Raises:
        ValueError: the draft cannot be made, or has other tokens.
    """

    def __init__(
        self,
        model: Model,
        draft: Model | None,
        ranks: Ranks,
        strategy: Prefill,
        options: PrefillOptions,
        partition: Partitioner,
        *,
        lends: bool = True,
    ) -> None:
        if draft is None:
            default = max(1, model.num_layers // LAYERS_SHARE)
            draft = first_layers(model, options.speculative_layers or default)
        else:
            ModelDrafter.check(model, draft, lengths=[1], num_new=1)
        self.model = draft
        self._verifying, self._ranks, self._options = model, ranks, options
        self._strategy, self._partition, self._lends = strategy, partition, lends
        own = replace(options, speculative=Speculative.none, chunk_tokens=None)
        limits = PromptLimits.of_model(draft, RankPolicies(), own, ranks.num_stages)
        self._prefills = ReusingPrefill(draft, ranks, strategy, own, RankPolicies(), limits)

    def check(self, lengths: Sequence[int]) -> None:
        """Check that the draft can read prompts of these lengths. Raises: ValueError."""
        ModelDrafter.check(self._verifying, self.model, lengths=lengths, num_new=1)

    def chosen(self, prompts: Sequence[list[int]]) -> Chosen:
        """Choose among the tokens of prompts. All ranks call it, and get the same."""
        share, chunk, began_s = self._options.speculative_share, self._options.speculative_chunk, time.perf_counter()
        kept = [list(range(len(prompt))) for prompt in prompts]
        if any(num_kept(len(prompt), share, chunk) < len(prompt) for prompt in prompts):
            kept = self._kept(prompts)
        ended_s = time.perf_counter()
        return Chosen(
            prompts=[
                ReusingPrompt(uses=(), new_ids=tuple(prompt[at] for at in places), new_positions=tuple(places))
                for prompt, places in zip(prompts, kept, strict=True)
            ],
            report=SpeculativeReport(
                draft=self.model.name, kept_tokens=[len(places) for places in kept], draft_s=ended_s - began_s
            ),
            span=TraceSpan(kind="compute", layer=None, start_s=began_s, end_s=ended_s, detail="draft of the prompt"),
        )

    def _kept(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """The positions of the tokens of each prompt that are computed."""
        ranks, options, longest = self._ranks, self._options, max(map(len, prompts))
        num_ahead, most = options.speculative_ahead, self.model.max_positions
        if most is not None:
            num_ahead = max(1, min(num_ahead, most - longest))
        partition = self._strategy.split(longest, ranks.num_stages, self._partition)
        ready = self._prefills.ready(PrefillPlan(prompts=prompts, partition=partition, num_new=num_ahead + 1))
        with ranks.lending(partition.chain if self._lends else []):
            prefilled, own = self._prefills.run(ready), None
        if prefilled.cache is not None:
            assert prefilled.logits_BV is not None
            with ranks.lending([ranks.stage] if self._lends else []):
                found = scores(
                    self.model,
                    prefilled.cache,
                    prefilled.logits_BV,
                    num_tokens=longest,
                    pads=ready.job.batch.pads,
                    num_ahead=num_ahead,
                    on_layer=ranks.progress,
                )
            own = [kept_tokens(each, options.speculative_share, options.speculative_chunk) for each in found]
        by_rank: list[list[list[int]] | None] = ranks.gather(own, "the tokens that are computed")
        return next(kept for kept in by_rank[::-1] if kept is not None)
