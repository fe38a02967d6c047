"""The table of slower ways says what is done: each way is observed where a row holds, and where none does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest

from policies.exact_topk import ExactTopK
from policies.snapkv import SnapKV
from runahead import Engine, GenerationOptions, Ranks
from runahead.config import CacheOptions, Device, RanksOptions
from runahead.features.slower import Way, takes
from runahead.reuse.prefix_tree import PrefixTree
from runahead.serving.estimate import TimeEstimate
from runahead.serving.limits import QueueLimits
from runahead.serving.queue import RequestQueue
from runahead.serving.request import Request
from runahead.serving.scheduler import Scheduler
from runahead.thinning.rank_policies import RankPolicies
from tests.cache.test_fixed_cache import Gpu
from tests.families import prompt, throughout
from tests.ranks.tasks import tiny_model
from tests.serving.rank_tasks import Kept
from tests.serving.test_answers_of_one_prompt import Answers

NEW = GenerationOptions(max_new_tokens=5, ignore_eos=True)
POLICIES: dict[str, Callable[[], RankPolicies | None]] = {
    "full": lambda: None,
    "snapkv": lambda: RankPolicies.everywhere([SnapKV(budget=16, window=4)]),
    "retrieving": lambda: RankPolicies.everywhere([ExactTopK(fetch=20)]),
    "bits": lambda: RankPolicies(storage=CacheOptions(bits=4)),
}
FAMILIES = ("llama", "mistral", "gpt_oss", "opt", "falcon", "llama_dynamic_ntk", "llama_dms", "gemma3n_text")
"""Families of which most have something that is in the way of a faster way."""

RUNS = [*(("llama", how) for how in POLICIES), *((family, "full") for family in FAMILIES[1:])]

every_run = pytest.mark.parametrize(("family", "how"), RUNS)


def engine_of(family: str, how: str, tree: PrefixTree | None = None) -> Engine:
    ranks = Ranks.start(RanksOptions(device=Device.cpu))
    return Engine(tiny_model(family), ranks, policies=POLICIES[how](), tree=tree)


@every_run
def test_prompts_of_several_requests_are_computed_at_once_or_one_by_one(family: str, how: str) -> None:
    engine = engine_of(family, how)
    limits, lengths = QueueLimits(), (20, 20)
    requests = [Request(prompts=[prompt(length)], options=[NEW], listener=Kept(1)) for length in lengths]
    queue = RequestQueue(engine, limits, TimeEstimate())
    queue.waiting += requests
    at_once = engine.takes(Way.prompts_together)
    assert len(queue.choose()) == (2 if at_once else 1)
    items = Scheduler(engine, limits)._of_items([(request, 0) for request in requests])
    assert len(items) == (1 if at_once else 2)


@every_run
def test_rows_are_decoded_in_one_forward_or_in_several(family: str, how: str) -> None:
    served = Answers(family, policies=POLICIES[how]())
    with throughout(served.model.dtype):
        for length in (20, 31):
            served.prefill([prompt(length)], [NEW])
        with patch.object(served.model, "forward", wraps=served.model.forward) as forwards:
            served.executor._step()
        assert (forwards.call_count == 1) == served.engine.takes(Way.rows_together)
        served.require_answers()


@every_run
def test_answers_to_a_prompt_share_its_keys_and_values_or_copy_them(family: str, how: str) -> None:
    served = Answers(family, policies=POLICIES[how]())
    with throughout(served.model.dtype):
        served.prefill([prompt(20)] * 2, [NEW] * 2)
        lanes = [served.executor.live._lanes.lane((0, row)) for row in (0, 1)]
        assert all(lane.num_shared > 0 for lane in lanes) == served.engine.takes(Way.shared_prompt)
        served.require_answers()


@pytest.mark.parametrize("how", ["full", "retrieving", "bits"])
def test_answers_are_stored_for_later_prompts_or_prompts_alone(how: str) -> None:
    tree, ids = PrefixTree(1 << 40), prompt(20)
    engine = engine_of("llama", how, tree)
    assert engine.prefixes is not None
    with throughout(engine.model.dtype):
        batch = engine.generate([ids], NEW)
    text = ids + batch.generations[0].new_token_ids[:-1]
    stored = tree.num_stored(text, engine.prefixes.key)
    assert stored == (len(text) if engine.takes(Way.stored_answers) else len(ids))
    assert bool(batch.slower) != engine.takes(Way.stored_answers)


@pytest.mark.parametrize(
    ("family", "how", "reuses_prefixes"),
    [*((*run, False) for run in RUNS), *(("llama", how, True) for how in ("full", "retrieving", "bits"))],
)
@pytest.mark.parametrize("has_kernel", [True, False])
def test_steps_of_a_gpu_are_replayed_or_not(family: str, how: str, reuses_prefixes: bool, has_kernel: bool) -> None:
    gpu, tree = Gpu(), PrefixTree(1 << 40) if reuses_prefixes else None
    kernel = (lambda *_: True) if has_kernel else (lambda *_: False)
    with (
        patch("runahead.decoding.forward.accelerator_for", lambda device: gpu),
        patch("runahead.cache.fixed.takes_sequences", kernel),
        patch("runahead.model.model.takes_sequences", kernel),
    ):
        engine = engine_of(family, how, tree)
        with throughout(engine.model.dtype):
            for _ in range(2):  # the second one reuses what the first has stored
                gpu.num_replays = 0
                engine.generate([prompt(20)], NEW)
        on_gpu = replace(engine._setup, device="cuda")
        assert (gpu.num_replays > 0) == takes(on_gpu, Way.graph)
