"""Tasks of ranks in test_speculative_prefill.py: top-level functions, since they run in other processes."""

from __future__ import annotations

from typing import Any

import torch

from runahead import ContextPartition, DecodeOptions, Engine, GenerationOptions, PrefillOptions, Ranks
from runahead.config import DecodeName
from runahead.model.model import Model
from runahead.report import GenerationBatch
from runahead.thinning.rank_policies import RankPolicies
from tests.families import throughout
from tests.ranks.tasks import tiny_model


def generate(
    ranks: Ranks,
    family: str,
    prompts: list[list[int]],
    options: GenerationOptions,
    prefill: PrefillOptions,
    ratios: tuple[float, ...] = (1.0,),
    *,
    decode: DecodeName = DecodeName.last,
    policies: RankPolicies | None = None,
    draft: str | None = None,
    records: bool = False,
) -> tuple[GenerationBatch, list[list[int]]]:
    """Result of `Engine.generate`, and the positions that were computed; chunks are in these ratios, draft's, too."""

    def partition(num_tokens: int, num_ranks: int) -> ContextPartition:
        ends = [round(num_tokens * sum(ratios[: rank + 1])) for rank in range(num_ranks)]
        return ContextPartition(boundaries=(0, *ends))

    more: dict[str, Any] = {"draft": None if draft is None else tiny_model(draft)}
    model: Model = tiny_model(family)
    with throughout(torch.float64):
        engine = Engine(
            model,
            ranks,
            prefill=prefill,
            partition=partition,
            decode=DecodeOptions(name=decode),
            policies=policies,
            **more,
        )
        kept = list[list[int]]()
        if engine._prompt_draft is not None:
            found = engine._prompt_draft.chosen
            engine._prompt_draft.chosen = lambda prompts: _noted(found(prompts), kept)  # type: ignore[method-assign]
        return engine.generate(prompts, options, record_timeline=records), kept


def _noted(chosen: Any, kept: list[list[int]]) -> Any:
    kept += [list(each.new_positions) for each in chosen.prompts]
    return chosen
