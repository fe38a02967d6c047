"""Tasks of ranks in test_pipeline.py: top-level functions, since they run in other processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from launch.inputs.engine import arrange, load
from launch.inputs.options import RunOptions
from launch.inputs.partitions import AutoChoice, partitioner
from partitioner.auto.chunks import PipelineChunks
from partitioner.auto.partition import AutoPartition
from partitioner.simulation.cluster import Cluster
from runahead import ContextPartition, Engine, GenerationOptions, Model, PrefillOptions, Ranks, even
from runahead.config import PrefillName
from runahead.features.refused import check
from runahead.features.setup import Setup
from runahead.model.checks.logits_check import LogitsCheck
from runahead.pipeline import stage
from runahead.pipeline.hidden import Passage
from runahead.report import GenerationBatch
from tests.families import rounded, throughout
from tests.ranks.tasks import PrefillOutcome, Steps, prefilled

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
    model = stage_of(ranks, family, dtype)
    each = [PrefillOptions(name=PrefillName.pipeline, chunk_tokens=tokens) for tokens in chunk_tokens]
    return [prefilled(ranks, model, prompts, options, num_new) for options in each]


def prefill_in(
    ranks: Ranks, family: str, prompts: list[list[int]], boundaries: list[tuple[int, ...]]
) -> list[PrefillOutcome]:
    """Prefill the prompts in chunks with each of these boundaries, as a partitioner chooses them."""
    model, options = stage_of(ranks, family), PrefillOptions(name=PrefillName.pipeline)
    splits = [ContextPartition(boundaries=each) for each in boundaries]
    return [prefilled(ranks, model, prompts, options, 1, lambda *_, split=each: split) for each in splits]


@dataclass(frozen=True, kw_only=True)
class Searched:
    """Results of a run whose chunks are searched, and what rank 0 knew of the machine."""

    boundaries: list[list[int]]
    tokens: list[list[int]]
    told: list[str]
    cluster: Cluster | None


def generate_searched(ranks: Ranks, family: str, prompts: list[list[int]], num_new: int, folder: Path) -> Searched:
    """Generate from prompts, one after the other, in chunks that partition=auto searches."""
    told: list[str] = []
    prefill, model = PrefillOptions(name=PrefillName.pipeline), stage_of(ranks, family)
    with throughout(torch.float64):
        with mock.patch.object(Passage, "__init__", side_effect=AssertionError("timing sends hidden states")):
            partition = AutoPartition.start(model, ranks, prefill=prefill, folder=folder, tell=told.append)
        engine = Engine(model, ranks, prefill=prefill, partition=partition)
        options = GenerationOptions(max_new_tokens=num_new, ignore_eos=True)
        found = [engine.generate([ids], options) for ids in prompts]
    known = partition.balance
    assert known is None or isinstance(known, PipelineChunks)
    return Searched(
        boundaries=[batch.boundaries for batch in found],
        tokens=[batch.generations[0].new_token_ids for batch in found],
        told=told,
        cluster=None if known is None else known.cluster,
    )


def loaded(ranks: Ranks, run: RunOptions) -> tuple[list[int], str]:
    """The chunks of a prompt of 435 tokens after what launch/infer.py does before it, and what splits them."""
    arrange(run, ranks)
    partition = partitioner(run.partition, ranks)
    model = load(run, ranks, partition)
    engine = Engine(model, ranks, prefill=run.prefill, partition=partition)
    batch = engine.generate([list(range(3, 90)) * 5], GenerationOptions(max_new_tokens=1))
    chosen = partition.chosen if isinstance(partition, AutoChoice) else partition
    return batch.boundaries, type(chosen).__name__


def generate(
    ranks: Ranks,
    family: str,
    prompts: list[list[int]],
    options: GenerationOptions,
    chunk_tokens: int | None,
    times: int,
) -> list[tuple[GenerationBatch, Steps]]:
    """Results of a few calls of `Engine.generate`, with the calls of `on_tokens`."""
    prefill = PrefillOptions(name=PrefillName.pipeline, chunk_tokens=chunk_tokens)
    engine, found = Engine(stage_of(ranks, family), ranks, prefill=prefill), []
    with throughout(torch.float64):
        for _ in range(times):
            steps: Steps = []
            found.append((engine.generate(prompts, options, on_tokens=steps.append, record_timeline=True), steps))
    return found


def compared(ranks: Ranks, run: RunOptions, is_poor: bool) -> tuple[str, bool, bool]:
    """Errors of ranks as they load a model, and whether they compare their stage alone and all stages together.

    Args:
        is_poor: each stage alone, but not all together, is far off.
    """
    said, require = "fine", LogitsCheck.require

    def is_off(*_: Any) -> None:
        raise ValueError("off by rounding")

    with (
        mock.patch.object(LogitsCheck, "require", autospec=True, side_effect=is_off if is_poor else require) as alone,
        mock.patch.object(stage, "differ", side_effect=stage.differ) as together,
    ):
        try:
            load(run, ranks, even)
        except Exception as error:
            said = str(error)
    return said, alone.called, together.called


def joined_wrongly(ranks: Ranks, wrong: str) -> str:
    """The refusal by ranks whose stages were made wrongly."""
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
