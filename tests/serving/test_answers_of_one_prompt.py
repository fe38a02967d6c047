"""Several answers to one prompt: it is computed once, read once in every step, and each answer is as alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from policies.adakv import AdaKV
from policies.exact_topk import ExactTopK
from policies.h2o import H2O
from policies.kvzip import KVzip
from policies.layer_view import Phase
from policies.reuse import GivenPrompt
from policies.snapkv import SnapKV
from runahead import Engine, GenerationOptions, Ranks
from runahead.attention import op
from runahead.attention.partial import attend
from runahead.cache.attention import CausalAttention
from runahead.config import Device, RanksOptions
from runahead.features.slower import Way
from runahead.reuse.forks import each_once
from runahead.reuse.prefix_tree import PrefixTree
from runahead.serving.estimate import TimeEstimate
from runahead.serving.executor import Executor
from runahead.serving.items import Inbox, PrefillItem, Report, Tokens
from runahead.serving.limits import QueueLimits
from runahead.serving.queue import RequestQueue
from runahead.serving.request import Request
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import WINDOW, prompt, throughout
from tests.prompt_cache.serving import random_prompt, random_segments
from tests.ranks.tasks import generate, tiny_model
from tests.serving import rank_tasks
from tests.serving.fakes import FakeEngine
from tests.serving.rank_tasks import Load
from tests.serving.test_prefixes import slowly

DOCUMENT, OTHER = prompt(2 * WINDOW + 11), prompt(9, seed=2)
SAMPLED = GenerationOptions(max_new_tokens=7, ignore_eos=True, do_sample=True, temperature=2.0)
ANSWERS = [replace(SAMPLED, seed=seed, max_new_tokens=length) for seed, length in ((4, 7), (5, 3), (6, 1))]
ROOMY = 1 << 40


class Answers:
    """One rank's executor.

    Attributes:
        tokens: of each row.
        cached: tokens that each row's prompt reuses.
        num_computed: given tokens that were computed, padding included.
    """

    def __init__(self, family: str, tree: PrefixTree | None = None, policies: RankPolicies | None = None) -> None:
        self.model, ranks = tiny_model(family), Ranks.start(RanksOptions(device=Device.cpu))
        self.engine = Engine(self.model, ranks, tree=tree, policies=policies)
        self.plain = Engine(self.model, ranks, policies=policies)
        self.executor = Executor(self.engine, Inbox(), self._hear, QueueLimits(itl_s=1e3))
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.cached: dict[tuple[int, int], int] = {}
        self.items: list[PrefillItem] = []
        self.num_computed = 0
        forward = self.model.forward

        def counting(ids_BC: Tensor, attention: Any, **more: Any) -> Tensor:
            if isinstance(attention, CausalAttention) and attention.tokens.phase is Phase.prefill:
                self.num_computed += ids_BC.numel()
            return forward(ids_BC, attention, **more)

        self.model.forward = counting  # type: ignore[method-assign]

    def _hear(self, report: Report) -> None:
        if isinstance(report, Tokens):
            for row, token in report.tokens.items():
                self.tokens.setdefault(row, []).append(token)
            self.cached |= report.cached

    def prefill(self, prompts: Sequence[GivenPrompt], options: list[GenerationOptions]) -> None:
        boundaries = (0, max(map(len, prompts)))
        item = PrefillItem(number=len(self.items), prompts=prompts, options=options, boundaries=boundaries)
        self.items.append(item)
        self.executor.carry_out(item)

    def require_answers(self) -> None:
        """All rows have ended, each with the tokens that it has alone, and hold nothing."""
        self.executor.decode_all()
        for item in self.items:
            for row, (ids, options) in enumerate(zip(item.prompts, item.options, strict=True)):
                [alone] = self.plain.generate([ids], [options]).generations
                assert self.tokens[item.number, row] == alone.new_token_ids
        assert self.executor.live.num_bytes == 0 and not self.executor._prefixes


@pytest.mark.parametrize("has_tree", [True, *slowly(False)])
@pytest.mark.parametrize("family", ["llama", "mistral", *slowly("gemma2", "gpt_oss", "deepseek_v3", "gpt2", "falcon")])
def test_a_prompt_is_computed_once_for_its_answers(family: str, has_tree: bool) -> None:
    tree = PrefixTree(ROOMY) if has_tree else None
    served = Answers(family, tree)
    with throughout(served.model.dtype):
        served.prefill([DOCUMENT] * 3, ANSWERS)
        assert served.num_computed == len(DOCUMENT)
        served.executor._step()
        # Beside another prompt in the same batch, which pads: the second is as long as the first.
        served.prefill([OTHER, DOCUMENT, OTHER, DOCUMENT], [SAMPLED, *ANSWERS])
        reused = len(DOCUMENT) - 1 if has_tree else 0
        assert served.num_computed == len(DOCUMENT) + 2 * (9 if has_tree else len(DOCUMENT))
        assert [served.cached.get((1, row), 0) for row in range(4)] == [0, reused, 0, reused]
        served.require_answers()
        if tree is not None and served.engine.prefixes is not None:
            assert all(node.holds == 0 for node in tree.nodes())
            for item in served.items:
                for row, ids in enumerate(item.prompts):
                    text = [*ids, *served.tokens[item.number, row]]
                    assert tree.num_stored(text, served.engine.prefixes.key) >= len(text) - 1


def test_answers_attend_to_their_prompt_in_one_product() -> None:
    served, calls = Answers("llama"), list[tuple[int, int]]()
    token_bytes = sum(shape.bytes_per_token() for shape in served.model.kv_shapes)

    def counting(q: Tensor, k: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        calls.append((q.shape[2], k.shape[2]))
        return attend(q, k, *rest, **more)

    with throughout(served.model.dtype):
        served.prefill([DOCUMENT] * 3, [SAMPLED] * 3)
        assert served.executor.live.num_bytes == (len(DOCUMENT) + 3 * 6) * token_bytes
        row = served.executor.live._lanes.lane((0, 0)).cache
        assert row.fork().shared_TKX is row.shared_TKX  # so that it is counted once
        with mock.patch.object(op, "attend_range", counting):
            served.executor._step()
        assert calls == [(1, 1), (1, 1), (1, 1), (3, len(DOCUMENT))] * served.model.num_layers
        served.require_answers()


@pytest.mark.parametrize("family", ["llama_dynamic_ntk", *slowly("phi3_longrope", "bart", "llama4_text_tempered")])
def test_models_that_count_positions_on_their_own_copy_the_prompt(family: str) -> None:
    served = Answers(family)
    assert not served.engine.takes(Way.shared_prompt)
    with throughout(served.model.dtype):
        served.prefill([DOCUMENT] * 3, ANSWERS)
        assert served.num_computed == len(DOCUMENT)
        served.require_answers()


@pytest.mark.parametrize(
    "policy",
    [
        H2O(budget=16),
        ExactTopK(fetch=20),
        AdaKV(scorer=SnapKV(budget=16, window=8)),
        KVzip(budget=0.4, chunk_tokens=32),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_under_a_policy_a_prompt_is_computed_once_too(policy: Any) -> None:
    served = Answers("llama", policies=RankPolicies.everywhere([policy]))
    with throughout(served.model.dtype):
        served.prefill([DOCUMENT] * 3, ANSWERS)
        repeats = policy.replay is not None
        assert served.num_computed == (1 + repeats) * len(DOCUMENT)
        served.require_answers()


@pytest.mark.parametrize("how", ["full", "policy", *slowly("windows")])
@pytest.mark.sampled(2)
def test_answers_on_two_ranks_are_those_of_single_requests(rank_pools: RankPools, how: str) -> None:
    policies = RankPolicies.everywhere([H2O(budget=16)]) if how == "policy" else None
    load = Load(
        prompts=[DOCUMENT],
        options=[SAMPLED],
        limits=QueueLimits(itl_s=1e-6),
        num_answers=3,
        policies=policies,
        family="mistral" if how == "windows" else "llama",
    )
    served = rank_pools.run(2, rank_tasks.serve, load)[0]
    if how == "policy":
        single = replace(load, num_answers=1)
        loads = [replace(single, options=[replace(SAMPLED, seed=seed)]) for seed in range(3)]
        assert served.tokens == [rank_pools.run(2, rank_tasks.serve, each)[0].tokens[0] for each in loads]
    else:
        alone = rank_pools.run(1, generate, load.family, [DOCUMENT] * 3, SAMPLED)[0][0]  # seeds count up
        assert served.tokens == [each.new_token_ids for each in alone.generations]
    assert len([item for item in served.items if isinstance(item, PrefillItem)]) == 1
    assert served.state is not None
    chunks = [part.report.chunk_tokens for part in served.state.parts.values() if part.report is not None]
    assert sum(chunks) == len(DOCUMENT) and len(chunks) == 2


def test_answers_after_a_stored_prefix_share_what_all_stages_compute(rank_pools: RankPools) -> None:
    texts = [DOCUMENT, [*DOCUMENT, 3, *prompt(40, seed=1)]]
    load = Load(
        prompts=texts,
        options=[SAMPLED] * 2,
        limits=QueueLimits(itl_s=0.5),
        after={1: 0},
        short=12,
        chain_token_s=0.01,
        tree_bytes=ROOMY,
        num_answers=3,
    )
    served = rank_pools.run(2, rank_tasks.serve, load)[0]
    alone = [rank_pools.run(1, generate, load.family, [ids] * 3, SAMPLED)[0][0].generations for ids in texts]
    assert served.tokens == [each.new_token_ids for of_prompt in alone for each in of_prompt]
    first, second = (item for item in served.items if isinstance(item, PrefillItem))
    assert list(first.stored) == [] and list(second.stored) == [len(DOCUMENT)] * 3 and second.boundaries[-1] == 41
    assert served.cached == [0, len(DOCUMENT)] and served.left_bytes == 0


def test_a_prompt_that_reuses_segments_is_computed_once_too() -> None:
    asked = random_prompt(random.Random(9), random_segments(random.Random(9)))
    served = Answers("llama")
    with throughout(served.model.dtype):
        served.plain.generate([asked], [SAMPLED])  # encodes the segments
        served.engine.prefills.store, before = served.plain.store, served.num_computed
        served.prefill([asked, OTHER, asked], [ANSWERS[0], SAMPLED, ANSWERS[1]])
        assert served.num_computed - before == 2 * max(len(asked), len(OTHER))
        served.require_answers()


def test_prompts_that_are_equal_are_numbered_once() -> None:
    assert each_once([[5, 6], [7], [5, 6], [8], [7]]) == ([[5, 6], [7], [8]], [0, 1, 0, 2, 1])


def test_the_memory_of_a_prompt_counts_once_for_its_answers() -> None:
    def queue_of(shares_prompts: bool) -> RequestQueue:
        engine: Any = FakeEngine()
        engine.slow = set() if shares_prompts else {Way.shared_prompt}
        estimate = TimeEstimate()
        estimate.alone.learn([100], 100.0)
        return RequestQueue(engine, QueueLimits(max_tokens=200), estimate)

    options = [GenerationOptions(max_new_tokens=10)] * 4
    prompts = [[5] * 100] * 4
    shared, own = queue_of(True), queue_of(False)
    with pytest.raises(ValueError, match="4 x 110 tokens of prompt and answer are more than this server has memory"):
        own.check(prompts, options)
    shared.check(prompts, options)  # the prompt and its room, and four answers: 150
    assert shared.fitting(prompts, 1000, is_chosen=False) == 20
    assert own.fitting(prompts[:1], 1000, is_chosen=False) == 100
    with pytest.raises(ValueError, match="255 tokens of prompt and answer are more"):
        shared.check(prompts, [replace(options[0], max_new_tokens=31)] * 4)
    request = Request(prompts=prompts, options=options, listener=rank_tasks.Kept(4))
    assert shared.prefill_s([request]) == pytest.approx(100.0)
    assert shared.prefill_s([Request(prompts=[*prompts, [6] * 50], options=options, listener=rank_tasks.Kept(5))]) > 120
