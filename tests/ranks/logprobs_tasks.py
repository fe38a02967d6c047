"""Tasks of ranks in test_logprobs.py: top-level functions, since they run in other processes."""

from __future__ import annotations

from runahead import DecodeOptions, Engine, GenerationOptions, Ranks
from runahead.config import DecodeName
from runahead.report import GenerationBatch
from tests.families import throughout
from tests.ranks.tasks import tiny_model

Steps = list[list[int | None]]


def generate(
    ranks: Ranks, prompts: list[list[int]], options: list[GenerationOptions], decode: DecodeName
) -> tuple[GenerationBatch, Steps]:
    """Result of `Engine.generate` on this rank for rows with options of their own, and what `on_tokens` was told."""
    model, steps = tiny_model("llama"), Steps()
    engine = Engine(model, ranks, decode=DecodeOptions(name=decode))
    with throughout(model.dtype):
        return engine.generate(prompts, options, on_tokens=steps.append), steps
