"""A server that reuses prefixes: the same answers, who computes what, what rank 0 knows, what is held."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from policies.base import Phase
from runahead import Engine, GenerationOptions, Ranks
from runahead.attention.partial import attend
from runahead.cache.attention import CausalAttention
from runahead.cache.rows import RowsCache
from runahead.config import Device, RanksOptions
from runahead.reuse import rows as reuse_rows
from runahead.reuse.prefix_tree import Dropped, PrefixTree, Stored
from runahead.reuse.rows import SharingRows, rows_cache
from runahead.serving.estimate import PrefillTimes, TimeEstimate
from runahead.serving.executor import Executor
from runahead.serving.items import Inbox, Prefill, Report, Tokens
from runahead.serving.limits import QueueLimits
from runahead.serving.queue import RequestQueue
from runahead.serving.request import Request
from tests.conftest import RankPools
from tests.families import WINDOW, largest_difference, prompt, throughout
from tests.ranks.tasks import generate, tiny_model
from tests.serving import rank_tasks
from tests.serving.fakes import FakeEngine
from tests.serving.rank_tasks import Load
from tests.serving.test_queue import begin

GREEDY = GenerationOptions(max_new_tokens=7, ignore_eos=True)
DOCUMENT = prompt(2 * WINDOW + 11)
ROOMY = 1 << 40
EXACT = 1e-9


def slowly(*values: Any) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


class Serving:
    """One rank's executor, and what it has reported.

    Attributes:
        tokens: new tokens of each prompt, by number and row.
        cached: tokens that each prompt reuses, by number.
        known: the tree as rank 0 knows it.
    """

    def __init__(self, family: str, limit_bytes: float = ROOMY) -> None:
        self.model, self.tree = tiny_model(family), PrefixTree(limit_bytes)
        ranks = Ranks.start(RanksOptions(device=Device.cpu))
        self.engine, self.plain = Engine(self.model, ranks, tree=self.tree), Engine(self.model, ranks)
        self.executor = Executor(self.engine, Inbox(), self._hear, QueueLimits(itl_s=1e3))
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.cached: dict[int, list[int]] = {}
        self.known = PrefixTree(inf)
        self.prompts: list[list[list[int]]] = []

    def _hear(self, report: Report) -> None:
        if isinstance(report, Tokens):
            for row, token in report.tokens.items():
                self.tokens.setdefault(row, []).append(token)
            for (number, _), num_cached in report.cached.items():
                self.cached.setdefault(number, []).append(num_cached)
        elif isinstance(report, Stored | Dropped):
            self.known.apply(report)

    def prefill(self, *prompts: list[int], num_new: int = 7) -> None:
        options = [replace(GREEDY, max_new_tokens=num_new)] * len(prompts)
        boundaries = (0, max(map(len, prompts)))
        self.prompts.append(list(prompts))
        item = Prefill(number=len(self.prompts), prompts=list(prompts), options=options, boundaries=boundaries)
        self.executor.carry_out(item)

    def step(self, times: int) -> None:
        for _ in range(times):
            self.executor._step()

    def require_answers(self) -> None:
        """All rows have ended, each with the tokens that it has alone, and hold nothing."""
        self.executor.decode_all()
        for number, prompts in enumerate(self.prompts, start=1):
            for row, ids in enumerate(prompts):
                ours = self.tokens[number, row]
                options = replace(GREEDY, max_new_tokens=len(ours))
                assert ours == self.plain.generate([ids], options).generations[0].new_token_ids
        assert self.executor.live.num_bytes == 0 and not self.executor._prefixes
        assert all(node.num_hits == 0 for node in self.tree.nodes())
        key = self.engine.prefixes.key if self.engine.prefixes else ""
        for ids in (ids for prompts in self.prompts for ids in prompts):
            assert self.known.num_stored(ids, key) == self.tree.num_stored(ids, key)


@pytest.mark.parametrize("family", ["llama", "mistral", *slowly("gemma2", "gpt_oss", "bloom")])
def test_rows_that_reuse_prefixes_are_decoded_among_others(family: str) -> None:
    serving = Serving(family)
    with throughout(serving.model.dtype):
        serving.prefill(DOCUMENT)
        serving.step(2)
        # While the first is decoded, its prompt is there already.
        serving.prefill(DOCUMENT + prompt(5, seed=1), prompt(9, seed=2), DOCUMENT[:20], num_new=12)
        assert serving.cached == {1: [0], 2: [len(DOCUMENT), 0, 19]}
        serving.step(2)
        serving.prefill(DOCUMENT + prompt(2, seed=3), num_new=4)
        serving.step(4)
        answer = serving.tokens[1, 0]
        assert len(answer) == 7
        serving.prefill(DOCUMENT + answer + prompt(3, seed=4))
        assert serving.cached[4] == [len(DOCUMENT) + 6]
        serving.require_answers()


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma2", *slowly("gpt_oss", "bloom", "llama4_text", "deepseek_v3")]
)
def test_rows_that_share_parts_attend_as_each_would_alone_and_read_them_once(family: str) -> None:
    serving, calls = Serving(family), list[tuple[int, int]]()
    model = serving.model

    def counting(q: Tensor, k: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        calls.append((q.shape[2], k.shape[2]))
        return attend(q, k, *rest, **more)

    with throughout(model.dtype):
        serving.prefill(DOCUMENT)
        serving.prefill(DOCUMENT + prompt(5, seed=1), DOCUMENT[:30] + prompt(3, seed=2), prompt(9, seed=3))
        serving.prefill(DOCUMENT + prompt(2, seed=4))
        live = list(serving.executor.live._live.values())
        start = max(each.num_tokens for each in live)
        pads, rows = [start - each.num_tokens for each in live], [each.cache for each in live]
        ids_B1 = torch.tensor([[each.row.new_ids[-1]] for each in live])
        sharing = rows_cache(rows, pads)
        assert isinstance(sharing, SharingRows)
        logits = []
        for cache in (RowsCache(rows, pads), sharing):  # which store the same in the same places
            attention = CausalAttention(cache, start=start, pads=pads, phase=Phase.decode)
            with mock.patch.object(reuse_rows, "attend", counting):
                logits.append(model.forward(ids_B1, attention, start=start, pads=pads))
        assert largest_difference(*logits) < EXACT
        if family == "llama":  # without windows
            own = [(1, each.num_tokens + 1) for each in live]
            assert calls == [*own, (3, 30), (2, len(DOCUMENT) - 30)] * model.num_layers


def test_a_row_that_is_cancelled_stores_what_it_has() -> None:
    serving = Serving("llama")
    with throughout(serving.model.dtype):
        serving.prefill(DOCUMENT, num_new=20)
        serving.step(3)
        assert serving.executor.live.drop([(1, 0)]) == [(1, 0)]
        assert len(serving.tokens[1, 0]) == 4
        serving.prefill(DOCUMENT + serving.tokens[1, 0] + [5])
        assert serving.cached[2] == [len(DOCUMENT) + 3]
        serving.require_answers()


def test_a_small_tree_forgets_and_rank_0_knows() -> None:
    serving = Serving("llama")
    serving.tree.limit_bytes = 70 * sum(shape.bytes_per_token() for shape in serving.model.kv_shapes)
    with throughout(serving.model.dtype):
        for seed in range(4):
            serving.prefill(prompt(40, seed=seed), [*prompt(25, seed=9)[:24], seed + 3])
            serving.step(seed)
        serving.require_answers()
    assert serving.tree.num_bytes <= serving.tree.limit_bytes
    assert sum(len(node.ids) for node in serving.known.nodes()) == sum(len(node.ids) for node in serving.tree.nodes())


FOLLOWING = [[*DOCUMENT, 3 + length, *prompt(length, seed=length)] for length in (3, 29, 8)]
OPTIONS = [GREEDY, GREEDY, replace(GREEDY, max_new_tokens=3), GREEDY]


@pytest.mark.parametrize("size", [1, 2, *slowly(3)])
def test_a_short_rest_is_computed_where_the_prefix_lies(rank_pools: RankPools, size: int) -> None:
    load = Load(
        prompts=[DOCUMENT, *FOLLOWING],
        options=OPTIONS,
        limits=QueueLimits(itl_s=1e-6),
        after={1: 0, 2: 0, 3: 2},
        short=12,
        tree_bytes=ROOMY,
    )
    served = rank_pools.run(size, rank_tasks.serve, load)[0]
    alone = [
        rank_pools.run(1, generate, load.family, [ids], options)[0][0].generations[0].new_token_ids
        for ids, options in zip(load.prompts, load.options, strict=True)
    ]
    assert served.tokens == alone
    items = {len(ids): item for item in served.items if isinstance(item, Prefill) for ids in item.prompts}
    assert [items[len(ids)].is_short for ids in load.prompts] == [False, True, False, True]
    # On several ranks a long rest is computed by all, who have nothing of the prefix.
    long = len(DOCUMENT) if size == 1 else 0
    assert served.cached == [0, len(DOCUMENT), long, len(DOCUMENT)]
    without = rank_pools.run(size, rank_tasks.serve, replace(load, tree_bytes=0))[0]
    assert without.tokens == alone and without.cached == [0] * 4


def queue_with_prefixes(num_stages: int = 1, **limits: Any) -> RequestQueue:
    """A queue whose prefills take a second per computed token on one stage, and half of that on all."""
    engine: Any = FakeEngine()
    engine.prefixes, engine.ranks = SimpleNamespace(key="a"), SimpleNamespace(num_stages=num_stages)
    estimate = TimeEstimate()
    estimate.alone.learn([100], 100.0)
    estimate.chain.learn([100], 50.0)
    return RequestQueue(engine, QueueLimits(**limits), estimate)


def request(ids: list[int]) -> Request:
    return Request(prompts=[ids], options=[GREEDY], listener=rank_tasks.Kept(1))


def test_what_is_stored_counts_as_computed() -> None:
    queue, ids = queue_with_prefixes(itl_s=15.0), prompt(100)
    assert queue.prefill_s([request(ids)]) == pytest.approx(100.0)
    queue.stored.apply(Stored(key="a", ids=tuple(ids[:90])))
    assert queue.prefill_s([request(ids)]) == pytest.approx(10.0) and queue.is_short([request(ids)])
    assert queue.prefill_s([request(ids[:90])]) == pytest.approx(1.0)  # the last token is always computed
    assert not queue.is_short([request(ids[20:])])
    queue.stored.apply(Dropped(key="a", ids=tuple(ids[:90]), num_left=50))
    assert queue.prefill_s([request(ids)]) == pytest.approx(50.0)
    queue.stored.apply(Stored(key="b", ids=tuple(ids)))
    assert queue.prefill_s([request(ids)]) == pytest.approx(50.0)


def test_times_of_prompts_are_those_of_what_was_computed() -> None:
    times = PrefillTimes()
    for length, reused in ((100, 0), (300, 0), (400, 300), (90, 30)):
        times.learn([length], 0.01 * (length - reused) + 1e-4 * (length**2 - reused**2), [reused])
    assert times.constants == pytest.approx((0.01, 1e-4))
    assert times.seconds([200, 50], [150, 0]) == pytest.approx(0.01 * 100 + 1e-4 * (200**2 - 150**2 + 50**2))


def test_requests_that_begin_alike_are_computed_one_after_another() -> None:
    queue = queue_with_prefixes()
    same = [request(DOCUMENT + prompt(5, seed=seed)) for seed in range(3)]
    other = request(prompt(len(DOCUMENT) + 5, seed=7))
    for each in (*same, other):
        queue.add(each)
    assert queue.choose() == [same[0], other]
    queue.stored.apply(Stored(key="a", ids=tuple(DOCUMENT)))
    assert queue.choose() == [same[0], same[1], same[2]]  # of which each has a short rest


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_long_prompt_waits_for_the_prefix_that_is_being_computed(num_stages: int) -> None:
    queue = queue_with_prefixes(num_stages, itl_s=8.0)
    queue.add(first := request(DOCUMENT))
    assert queue.choose() == [first]
    batch = begin(queue, [first])
    if num_stages == 2:
        batch.parts[0] = mock.Mock()  # rank 0 has computed its part, so that the next chain may begin
    queue.add(following := request(DOCUMENT + prompt(4)))
    queue.add(other := request(prompt(60, seed=8)))
    assert queue.choose() == ([other] if num_stages == 2 else [])
    batch.is_decoded = True
    queue.stored.apply(Stored(key="a", ids=tuple(DOCUMENT)))
    assert queue.is_short([following]) and queue.choose()[0] is following
