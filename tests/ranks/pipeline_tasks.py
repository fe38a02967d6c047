"""Tasks of ranks in test_pipeline.py: top-level functions, since they run in other processes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from runahead import Engine, GenerationOptions, Model, PrefillOptions, Ranks, even
from runahead.config import PrefillName
from runahead.features.facts import Setup
from runahead.features.refused import check
from runahead.pipeline import stage
from runahead.pipeline.hidden import Passage
from runahead.pipeline.prefill import Pipeline
from runahead.prefill import PrefillJob, PromptBatch
from runahead.report import GenerationBatch
from tests.families import rounded, throughout
from tests.ranks.tasks import PrefillOutcome, Steps

_STAGES: dict[tuple[str, torch.dtype, int, int], Model] = {}


def stage_of(ranks: Ranks, family: str, dtype: torch.dtype = torch.float64, **config: Any) -> Model:
    """This rank's stage of a family's model, made once per process. Every rank calls it."""
    key = family, dtype, ranks.rank, ranks.size
    if key not in _STAGES:
        module = rounded(family, dtype=dtype, **config)
        check(Setup(prefill=PrefillOptions(name=PrefillName.pipeline), config=module.config))
        part = stage.Stage(ranks)
        with throughout(dtype):
            ranks.on_all_ranks("the layers", lambda: part.keep(module))
            model = ranks.on_all_ranks("the model", lambda: Model(module, name=family))
            part.join(model)
        check(Setup(prefill=PrefillOptions(name=PrefillName.pipeline), model=model, num_stages=ranks.size))
        _STAGES[key] = model
    return _STAGES[key]


def prefill_each(
    ranks: Ranks,
    family: str,
    prompts: list[list[int]],
    chunk_tokens: list[int | None],
    num_new: int = 1,
    dtype: torch.dtype = torch.float64,
) -> list[PrefillOutcome]:
    """Prefill the prompts in chunks of each of these lengths."""
    model, batch, outcomes = stage_of(ranks, family, dtype), PromptBatch.from_prompts(prompts, ranks.device), []
    for tokens in chunk_tokens:
        options = PrefillOptions(name=PrefillName.pipeline, chunk_tokens=tokens)
        strategy = Pipeline.of(options)
        job = PrefillJob(
            model=model,
            ranks=ranks,
            batch=batch,
            partition=strategy.split(batch.num_tokens, ranks.size, even),
            capacity=batch.num_tokens + num_new - 1,
            options=options,
        )
        with throughout(dtype):
            outcomes.append(PrefillOutcome.after(strategy.run(job)))
    return outcomes


def generate(
    ranks: Ranks,
    family: str,
    prompts: list[list[int]],
    options: GenerationOptions,
    chunk_tokens: int | None,
    times: int,
) -> list[tuple[GenerationBatch, Steps]]:
    """What `Engine.generate` returns a few times, and the calls of `on_tokens`."""
    prefill = PrefillOptions(name=PrefillName.pipeline, chunk_tokens=chunk_tokens)
    engine, found = Engine(stage_of(ranks, family), ranks, prefill=prefill), []
    with throughout(torch.float64):
        for _ in range(times):
            steps: Steps = []
            found.append((engine.generate(prompts, options, on_tokens=steps.append, record_timeline=True), steps))
    return found


def joined_wrongly(ranks: Ranks, wrong: str) -> str:
    """What ranks say whose stages were made wrongly."""
    module, part, keep_layers = rounded("llama_deep"), stage.Stage(ranks), stage.keep_layers

    def other_layers(module: Any, layers: range) -> None:
        shift = int(ranks.rank > 0)
        keep_layers(module, range(layers.start - shift, layers.stop - shift))

    def own(self: Passage, own_BCD: torch.Tensor) -> torch.Tensor:
        receive(self, own_BCD)
        return own_BCD

    receive = Passage.receive
    replaced: dict[str, Any] = {
        "layers": mock.patch.object(stage, "keep_layers", other_layers),
        "hidden states": mock.patch.object(Passage, "receive", own),
    }
    with replaced[wrong], throughout(torch.float64):
        part.keep(module)
        model = Model(module, name="llama")
        try:
            part.join(model)
        except ValueError as error:
            return str(error)
    return "fine"
