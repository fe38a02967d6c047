"""Ranks that share one GPU, over Gloo or by copies between processes: they say what one rank says."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.first_day.parts import Case
from benchmarks.first_day.visit import Visit, small_model
from benchmarks.harness.random_prompts import random_ids
from runahead.config import (
    Carrier,
    DecodeName,
    DecodeOptions,
    GenerationOptions,
    PrefillOptions,
    Transfer,
)
from runahead.context import from_ratios
from runahead.engine import Engine
from runahead.model.model import Model
from runahead.model.shares import load_model
from runahead.ranks.ranks import Ranks

LAYERS = 6

PROMPTS = [(90,), (3000,), (3000, 1700), (7000,), (500,)]
"""Tokens of the prompts of each batch: slabs grow, hold several rows, and are used again for less."""

SMALL_PROMPTS = [(20,), (90,), (90, 50), (200,), (40,)]
"""Likewise for a rehearsal on a CPU."""

SHARES = {2: [0.6, 0.4], 3: [0.5, 0.3, 0.2]}
"""Shares of a prompt by number of ranks: uneven, so that every rank has another chunk."""


def run_case(visit: Visit, case: Case) -> None:
    """A chain of ranks with the whole model each, against one rank alone."""
    engine = Engine(
        load_model(small_model(layers=LAYERS), visit.ranks),
        visit.ranks,
        prefill=PrefillOptions(transfer=Transfer[case.transfer], carrier=Carrier[case.carrier]),
        decode=DecodeOptions(name=DecodeName[case.decode]),
        partition=from_ratios(SHARES[case.num_ranks]),
    )
    compare(visit, engine)


def share_model(visit: Visit) -> None:
    """A stage of two ranks that share the model, against one rank alone."""
    compare(visit, Engine(load_model(small_model(layers=LAYERS), visit.ranks), visit.ranks))


def compare(visit: Visit, engine: Engine) -> None:
    """Check on every rank that the engine says what one rank alone says, batch after batch."""
    visit.say("one rank alone")
    alone = Ranks(0, 1, device=visit.device, backend="gloo", timeout_s=visit.ranks.timeout_s)
    expected = answers(visit, Engine(Model.load(small_model(layers=LAYERS), visit.device), alone))
    found = answers(visit, engine)
    same = visit.ranks.gather([a == b for a, b in zip(found, expected, strict=True)], "the comparison")
    for n, lengths in enumerate(_prompts(visit)):
        wrong = [rank for rank, each in enumerate(same) if not each[n]]
        visit.figures.check(
            f"prompts of {' and '.join(f'{length:,}' for length in lengths)} tokens",
            not wrong,
            otherwise=f"rank {', '.join(map(str, wrong))} has other tokens than one rank alone",
        )


def answers(visit: Visit, engine: Engine) -> list[list[list[int]]]:
    """New tokens by batch and prompt."""
    found = []
    for lengths in _prompts(visit):
        visit.say(f"prompts of {lengths} tokens on {engine.ranks.size} ranks")
        prompts = [random_ids(length, engine.model.vocab_size) for length in lengths]
        batch = engine.generate(prompts, GenerationOptions(max_new_tokens=12, ignore_eos=True))
        found.append([generation.new_token_ids for generation in batch.generations])
    return found


def _prompts(visit: Visit) -> Sequence[tuple[int, ...]]:
    return SMALL_PROMPTS if visit.is_small else PROMPTS
