"""Tasks of ranks in test_mapped_memory.py: top-level functions, since they run in other processes."""

from __future__ import annotations

import os
import threading
import warnings
from unittest import mock

import torch

from runahead import ContextPartition, GenerationOptions, PrefillOptions, Ranks
from runahead.config import Carrier
from runahead.prefill import PREFILLS, PrefillJob, PromptBatch
from runahead.prefill.base import Prefilled
from runahead.ranks.mapped.memory import Unmapped
from tests.families import prompt, throughout
from tests.ranks.tasks import generate, tiny_model


def prefilled(ranks: Ranks, family: str, ids: list[int]) -> Prefilled:
    options, batch = PrefillOptions(carrier=Carrier.copy), PromptBatch.from_prompts([ids], ranks.device)
    model = tiny_model(family)
    job = PrefillJob(
        model=model,
        ranks=ranks,
        batch=batch,
        partition=ContextPartition(boundaries=(0, len(ids) // 2, len(ids))),
        capacity=len(ids),
        options=options,
    )
    with throughout(model.dtype), torch.inference_mode():
        return PREFILLS[options.name]().run(job)


def arenas(ranks: Ranks, family: str, lengths: list[int]) -> tuple[list[int], list[int]]:
    """Arenas that this rank has made so far, its open files and its threads, after each prompt."""
    made, counts = [], []
    for length in lengths:
        prefilled(ranks, family, prompt(length))
        assert ranks.copying is not None
        made.append(ranks.copying.memory._numbers)
        counts.append(len(os.listdir("/proc/self/fd")) + threading.active_count())
    return made, counts


def two_caches(ranks: Ranks, family: str) -> bool:
    """Whether the keys and values of one prompt are the same after another one."""
    first = prefilled(ranks, family, prompt(30))
    before = [] if first.cache is None else [layer.slab.slab_TBKX.clone() for layer in first.cache.layers]  # type: ignore[attr-defined]
    prefilled(ranks, family, prompt(30, seed=9))
    after = [] if first.cache is None else [layer.slab.slab_TBKX for layer in first.cache.layers]  # type: ignore[attr-defined]
    return all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def without_memory(
    ranks: Ranks, family: str, ids: list[int], options: GenerationOptions, refused: str
) -> tuple[list[int], list[str]]:
    """New tokens of two prompts in a row, of which the second's are returned, and the warnings.

    Args:
        refused: what fails: "SharedBytes", or "Ranks._copying_between", where a GPU's memory is tried.
    """
    with (
        mock.patch(f"runahead.ranks.ranks.{refused}", side_effect=Unmapped("no memory today")),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            batch, _ = generate(ranks, family, [ids], options, None, PrefillOptions(carrier=Carrier.auto))
    return batch.generations[0].new_token_ids, [str(each.message) for each in said]
