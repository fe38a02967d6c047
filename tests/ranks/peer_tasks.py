"""Tasks of ranks in test_peers.py: top-level functions, since they run in other processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from runahead import Engine, GenerationOptions, PrefillOptions, Ranks
from runahead.cache.attention import LayerCall
from runahead.config import Profile
from runahead.features.refused import check
from runahead.features.setup import Setup
from runahead.prefill.exchanging import ExchangeRun
from runahead.report import GenerationBatch
from runahead.timeline.ranges import ranges_for
from tests.families import throughout
from tests.ranks.silence import Silence
from tests.ranks.tasks import PrefillOutcome, prefilled, tiny_model


def prefill_each(
    ranks: Ranks,
    family: str,
    prompts: list[list[int]],
    variants: list[PrefillOptions],
    num_new: int = 1,
    dtype: torch.dtype = torch.float64,
) -> list[PrefillOutcome]:
    """Prefill the prompts in several ways, each with the strategy's own split."""
    model, outcomes = tiny_model(family, dtype), []
    for options in variants:
        check(Setup(prefill=options, model=model, num_stages=ranks.size))
        outcomes.append(prefilled(ranks, model, prompts, options, num_new))
    return outcomes


def generate_with_timeline(
    ranks: Ranks, family: str, prompts: list[list[int]], prefill: PrefillOptions, num_new: int, profile: Profile
) -> GenerationBatch:
    model = tiny_model(family)
    model.name_ranges(ranges_for(profile))
    engine = Engine(model, ranks, prefill=prefill)
    with throughout(model.dtype):
        options = GenerationOptions(max_new_tokens=num_new, ignore_eos=True)
        return engine.generate(prompts, options, record_timeline=True)


def fail_in_layer(
    ranks: Ranks, prefill: PrefillOptions, failing: int, layer: int, silence: Silence | None, folder: str
) -> None:
    """The failing rank is killed in a layer, or stands still; the others write what they ended with to the folder."""
    model = tiny_model("llama_deep")
    before_save = ExchangeRun.before_save

    def fail_before(self: ExchangeRun, call: LayerCall) -> None:
        if call.layer == layer and silence is None:
            os.kill(os.getpid(), signal.SIGKILL)
        elif call.layer == layer:
            silence.keep()
        before_save(self, call)

    if ranks.rank == failing:
        ExchangeRun.before_save = fail_before  # type: ignore[method-assign]
    ended = "ok"
    try:
        Engine(model, ranks, prefill=prefill).generate([list(range(3, 60))])
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
    Path(folder, str(ranks.rank)).write_text(ended)
    if silence is not None:
        silence.end(ranks.rank)
