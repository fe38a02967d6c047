"""What the ranks of a `RankPool` run for the tests: top-level functions, since they run in other processes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from runahead import ContextPartition, Engine, GenerationOptions, Model, PrefillOptions, Ranks
from runahead.context import Partitioner
from runahead.prefill import PREFILLS, PrefillJob, PromptBatch
from runahead.report import GenerationBatch
from tests.families import build, throughout


@cache
def tiny_model(family: str, dtype: torch.dtype = torch.float64) -> Model:
    """A family's model, made once per process: later tests run on a model that has seen the earlier ones' prompts."""
    with throughout(dtype):
        return Model(build(family, dtype=dtype), name=family)


@dataclass(kw_only=True)
class PrefillOutcome:
    """What one rank has after a prefill. Logits (B, V) as lists, on the last rank of the chain only."""

    logits: list[list[float]] | None
    holds_cache: bool
    chunk_tokens: int
    kv_sent_bytes: int
    kv_received_bytes: int
    kv_peak_bytes: int


def prefill(
    ranks: Ranks,
    family: str,
    prompts: list[list[int]],
    boundaries: tuple[int, ...],
    options: PrefillOptions,
    num_new: int = 1,
    dtype: torch.dtype = torch.float64,
) -> PrefillOutcome:
    """Prefill prompts, split as the boundaries say, with room for new tokens."""
    batch = PromptBatch.of(prompts, ranks.device)
    job = PrefillJob(
        model=tiny_model(family, dtype),
        ranks=ranks,
        batch=batch,
        partition=ContextPartition(boundaries=boundaries).check(batch.num_tokens, ranks.size),
        capacity=batch.num_tokens + num_new - 1,
        options=options,
    )
    with throughout(dtype):
        done = PREFILLS[options.name](job)
    return PrefillOutcome(
        logits=None if done.logits_BV is None else done.logits_BV.tolist(),
        holds_cache=done.cache is not None,
        chunk_tokens=done.chunk_tokens,
        kv_sent_bytes=done.kv_sent_bytes,
        kv_received_bytes=done.kv_received_bytes,
        kv_peak_bytes=done.kv_peak_bytes,
    )


Steps = list[list[int | None]]


def generate(
    ranks: Ranks,
    family: str,
    prompts: list[list[int]],
    options: GenerationOptions,
    shares: list[float] | None = None,
    prefill: PrefillOptions | None = None,
    first_index: int = 0,
    eos: list[int] | None = None,
) -> tuple[GenerationBatch, Steps]:
    """What `Engine.generate` returns on this rank, and what it told `on_tokens` there. `eos` replaces the model's."""
    model = tiny_model(family)
    engine = Engine(model, ranks, prefill=prefill, partition=_of_shares(shares))
    seen: Steps = []
    with throughout(model.dtype), _eos(model, eos):
        return engine.generate(prompts, options, on_tokens=seen.append, first_index=first_index), seen
