"""Tasks of ranks in test_drafts.py: top-level functions, since they run in other processes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from runahead import ContextPartition, DecodeOptions, Engine, GenerationOptions, PrefillOptions, Ranks
from runahead.config import DecodeName, PrefillName
from runahead.decoding.placement import Placement
from runahead.decoding.speculative.payoff import Payoff
from runahead.decoding.speculative.speculator import Draft
from runahead.report import GenerationBatch
from runahead.thinning.rank_policies import RankPolicies
from tests.cache.test_fixed_cache import Gpu
from tests.decoding.test_speculation import knowing
from tests.families import throughout
from tests.ranks.tasks import tiny_model
from tests.ranks.tensor_tasks import arranged, shared_model


@contextmanager
def clocks_apart(rank: int) -> Iterator[None]:
    """Each rank finds other numbers of tokens worth verifying, and another time worth beginning a drafter."""
    draw, is_warm = random.Random(rank), Payoff.is_warm

    def num_to_verify(payoff: Payoff, drafted: Sequence[tuple[Any, int]], **more: Any) -> int:
        most = max(num for _, num in drafted)
        return draw.choice([0, most, most, draw.randint(0, most)])

    with (
        patch.object(Payoff, "num_to_verify", num_to_verify),
        patch.object(Payoff, "is_warm", lambda payoff, num: is_warm(payoff, num) and draw.random() < 0.9),
        patch.object(Payoff, "may_begin", lambda payoff, num, *_: is_warm(payoff, num) and draw.random() < 0.6),
    ):
        yield


def drafted(
    ranks: Ranks,
    family: str,
    prompts: list[list[int]],
    options: Sequence[GenerationOptions],
    boundaries: tuple[int, ...] = (),
    *,
    known: Sequence[Sequence[int]] = (),
    num_shares: int = 1,
    prefill: PrefillName = PrefillName.kv_runahead,
    decode: DecodeName = DecodeName.last,
    policies: RankPolicies | None = None,
    by: RankPolicies | None = None,
    first: str | None = None,
    on_gpu: bool = False,
) -> tuple[GenerationBatch, list[list[int | None]], int]:
    """Result of `Engine.generate` on ranks whose clocks differ, the calls of `on_tokens`, and replays of a graph.

    With decode=auto the last stage has no memory for all keys and values.

    Args:
        known: texts from which drafts are looked up, some tokens of which are wrong; by default that of each row.
        by: policies that draft; by default the model itself, where a model is asked for.
        on_gpu: there seems to be a GPU that captures graphs.
    """
    steps, gpu = list[list[int | None]](), Gpu()
    accelerator = patch("runahead.decoding.forward.accelerator_for", lambda device: gpu if on_gpu else None)
    must_shard = patch.object(Placement, "_must_shard", lambda *_: True)
    alone = tiny_model(family) if num_shares == 1 else None  # later tests have it, too, as it is made otherwise
    with arranged(ranks, num_shares), throughout(torch.float64), clocks_apart(ranks.rank), accelerator, must_shard:
        model = alone or shared_model(ranks, family, torch.float64, num_shares)
        engine = Engine(
            model,
            ranks,
            prefill=PrefillOptions(name=prefill),
            decode=DecodeOptions(name=decode),
            policies=policies,
            draft=model if by is None else Draft(by=by, first=first),
            **({"partition": lambda *_: ContextPartition(boundaries=boundaries)} if boundaries else {}),
        )
        with knowing(known, right=0.7, vocab_size=model.vocab_size) if known else nullcontext():
            batch = engine.generate(prompts, options, on_tokens=steps.append)
    return batch, steps, gpu.num_replays
