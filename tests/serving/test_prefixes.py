"""A server that reuses prefixes: the same answers, who computes what, what rank 0 knows, what is held."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from launch.server import serving as server
from policies.exact_topk import ExactTopK
from policies.infinigen import InfiniGen
from policies.layer_view import Phase
from policies.retriever import Retriever
from policies.reuse import GivenPrompt
from runahead import Engine, GenerationOptions, PrefillOptions, Ranks
from runahead.attention import op
from runahead.attention.partial import attend
from runahead.cache.attention import CausalAttention
from runahead.cache.rows import RowsAttention
from runahead.config import CacheOptions, Carrier, DecodeName, Device, RanksOptions, Speculate, Transfer
from runahead.context import ContextPartition
from runahead.features.slower import Way
from runahead.model.memory import token_bytes
from runahead.reuse.prefix_tree import Dropped, PrefixTree, Stored, salted
from runahead.reuse.rows import apart_from_shared
from runahead.reuse.tiers.entry import Tier
from runahead.serving.arrangement import with_slower_last
from runahead.serving.batch import Batch
from runahead.serving.estimate import PrefillTimes, TimeEstimate
from runahead.serving.executor import Executor
from runahead.serving.items import Generate, Inbox, Part, PrefillItem, Report, Stop, Stopping, Tokens
from runahead.serving.lessons import learn_prefill
from runahead.serving.limits import QueueLimits
from runahead.serving.queue import RequestQueue
from runahead.serving.request import Request
from runahead.serving.room import Room
from runahead.serving.scheduler import Scheduler
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import WINDOW, largest_difference, prompt, throughout
from tests.prompt_cache.serving import random_prompt, random_segments
from tests.ranks.tasks import generate, tiny_model
from tests.reuse.prefix_tasks import damage
from tests.serving import rank_tasks
from tests.serving.fakes import FakeEngine
from tests.serving.rank_tasks import Kept, Load
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
        to_prefetch: what is told to come with the next prefill.
        stopping: prefills that it says to stop.
    """

    options = GREEDY

    def __init__(
        self,
        family: str,
        limit_bytes: float = ROOMY,
        policies: RankPolicies | None = None,
        room: Room | None = None,
    ) -> None:
        self.model, self.tree = tiny_model(family), PrefixTree(limit_bytes)
        ranks = Ranks.start(RanksOptions(device=Device.cpu))
        self.engine = Engine(self.model, ranks, tree=self.tree, policies=policies)
        self.plain = Engine(self.model, ranks, policies=policies)
        self.executor = Executor(self.engine, Inbox(), self._hear, QueueLimits(itl_s=1e3), room=room)
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.cached: dict[int, list[int]] = {}
        self.known = PrefixTree(inf)
        self.prompts: list[list[list[int]]] = []
        self.to_prefetch: list[tuple[list[int], str]] = []
        self.salts: dict[int, Sequence[str]] = {}
        self.parts: list[Part] = []
        self.stopping: list[int] = []

    def _hear(self, report: Report) -> None:
        if isinstance(report, Tokens):
            for row, token in report.tokens.items():
                self.tokens.setdefault(row, []).append(token)
            for (number, _), num_cached in report.cached.items():
                self.cached.setdefault(number, []).append(num_cached)
        elif isinstance(report, Stored | Dropped):
            self.known.apply(report)
        elif isinstance(report, Part):
            self.parts.append(report)
        elif isinstance(report, Stopping):
            self.stopping.append(report.number)

    def prefill(
        self, *prompts: Any, num_new: int = 7, salts: Sequence[str] = (), scores: int | None = None
    ) -> PrefillItem:
        options = [replace(self.options, max_new_tokens=num_new)] * len(prompts)
        boundaries = (0, max(map(len, prompts)))
        self.prompts.append(list(prompts))
        number, self.salts[len(self.prompts)] = len(self.prompts), salts
        item = PrefillItem(
            number=number,
            prompts=list(prompts),
            options=options,
            boundaries=boundaries,
            to_prefetch=self.to_prefetch,
            salts=salts,
            scores=scores,
        )
        self.executor.carry_out(item)
        return item

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
        assert all(node.holds == 0 for node in self.tree.nodes())
        key = self.engine.prefixes.key if self.engine.prefixes else ""
        for number, prompts in enumerate(self.prompts, start=1):
            for ids, salt in zip(prompts, self.salts[number] or [""] * len(prompts), strict=True):
                of_salt = salted(key, salt)
                assert self.known.num_stored(ids, of_salt) == self.tree.num_stored(ids, of_salt)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_prompts_of_different_salts_reuse_nothing_of_each_other(family: str) -> None:
    """Also where one prompt is in a batch twice: computed once it would be found by one and not by the other."""
    serving = Serving(family)
    with throughout(serving.model.dtype):
        serving.prefill(DOCUMENT, DOCUMENT, DOCUMENT, salts=["a", "b", "a"])
        assert serving.cached == {1: [0, 0, 0]}
        serving.executor.decode_all()
        longer = [*DOCUMENT, 3, 4]
        for salt, found in (("a", len(DOCUMENT)), ("b", len(DOCUMENT)), ("c", 0), ("", 0)):
            serving.prefill(longer, salts=[salt])
            serving.executor.decode_all()
            assert serving.cached[len(serving.prompts)] == [found], salt
        serving.prefill(longer)
        assert serving.cached[len(serving.prompts)] == [len(longer) - 1 if family == "llama" else 0]
        serving.require_answers()


def test_rank_0_counts_on_prefixes_of_the_same_salt_alone() -> None:
    queue, ids = queue_with_prefixes(), prompt(100)
    queue.stored.apply(Stored(key=salted("a", "mine"), ids=tuple(ids)))
    mine, other, none = (replace_salt(request([*ids, 7]), salt) for salt in ("mine", "other", ""))
    assert [queue.stored.found(each, "a") for each in (mine, other, none)] == [[100], [0], [0]]
    first = replace_salt(request([*ids, 8, 8, 8]), "other")
    assert [queue.stored.found_after(each, [first], "a") for each in (other, none)] == [[100], [0]]
    for each in (mine, other):
        queue.add(each)
    assert queue.to_prefetch() == [(ids, "mine")]


def replace_salt(request: Request, salt: str) -> Request:
    request.salt = salt
    return request


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
    assert serving.executor.drafts.report.verifications == 0


@pytest.mark.slow
def test_rows_that_reuse_prefixes_get_several_tokens_in_a_step() -> None:
    """Accepted drafts of an answer are stored, no others, and rows share a prefix while they draft."""
    serving = Serving("llama")
    serving.options = replace(GREEDY, speculate=Speculate.lookup, speculate_match=1, speculate_always=True)
    with throughout(serving.model.dtype):
        serving.prefill(DOCUMENT, num_new=20)
        serving.step(1)
        serving.prefill(DOCUMENT + prompt(5, seed=1), DOCUMENT, prompt(9, seed=2), num_new=30)
        serving.executor.decode_all()
        answer = serving.tokens[1, 0]
        serving.prefill(DOCUMENT + answer + prompt(3, seed=4), num_new=30)
        assert serving.cached[3][0] >= len(DOCUMENT) + 19
        serving.require_answers()
    report = serving.executor.drafts.report
    assert 0 < report.accepted < report.drafted


def test_rows_in_few_bits_reuse_prompts_and_no_answers() -> None:
    """They were computed from few bits, so they are not what a prompt of the same tokens gives."""
    serving = Serving("mistral", policies=RankPolicies(storage=CacheOptions(bits=4, residual=8)))
    with throughout(serving.model.dtype):
        serving.prefill(DOCUMENT)
        serving.step(2)
        serving.prefill(DOCUMENT + prompt(5, seed=1), num_new=12)
        serving.step(5)
        answer = serving.tokens[1, 0]
        assert len(answer) == 7
        serving.prefill(DOCUMENT + answer + prompt(40, seed=4))
        assert serving.cached == {1: [0], 2: [len(DOCUMENT)], 3: [len(DOCUMENT)]}
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
        live = list(serving.executor.live._lanes._lanes.values())
        ids_B1 = torch.tensor([[row.ids[-1]] for row in serving.executor.live._rows.values()])
        caches, logits = [each.cache for each in live], []
        for own, shared in ((caches, None), apart_from_shared(caches)):  # which store the same in the same places
            calls.clear()
            rows = [
                CausalAttention(cache, start=each.num_tokens, pads=[0], phase=Phase.decode)
                for each, cache in zip(live, own, strict=True)
            ]
            attention = RowsAttention(rows, shared=shared)
            with mock.patch.object(op, "attend_range", counting):
                logits.append(model.forward(ids_B1, attention, start=attention.start, pads=attention.pads))
        assert largest_difference(*logits) < EXACT
        if family == "llama":  # without windows
            own = [(1, each.num_tokens + 1) for each in live]
            assert calls == [*own, (3, 30), (2, len(DOCUMENT) - 30)] * model.num_layers


def test_a_conversation_of_six_turns_computes_each_token_once() -> None:
    """Given tokens and answers together; the last token of an answer is computed with the next prompt."""
    serving, computed = Serving("llama"), list[int]()
    forward = serving.model.forward

    def counting(ids_BC: Tensor, *rest: Any, **more: Any) -> Tensor:
        computed.append(ids_BC.numel())
        return forward(ids_BC, *rest, **more)

    text: list[int] = []
    with throughout(serving.model.dtype), mock.patch.object(serving.model, "forward", counting):
        for turn in range(1, 7):
            known = max(0, len(text) - 1)
            text += prompt(5 + 3 * turn, seed=turn)
            serving.prefill(text, num_new=turn + 1)
            serving.executor.decode_all()
            assert serving.cached[turn] == [known]
            text = text + serving.tokens[turn, 0]
            assert sum(computed) == len(text) - 1
    with throughout(serving.model.dtype):
        serving.require_answers()


def test_a_row_that_is_cancelled_stores_what_it_has() -> None:
    serving = Serving("llama")
    with throughout(serving.model.dtype):
        serving.prefill(DOCUMENT, num_new=20)
        serving.step(3)
        assert serving.executor.live.cancel([(1, 0)]) == [(1, 0)]
        assert len(serving.tokens[1, 0]) == 4
        serving.prefill(DOCUMENT + serving.tokens[1, 0] + [5])
        assert serving.cached[2] == [len(DOCUMENT) + 3]
        serving.require_answers()


@pytest.mark.parametrize("when", ["after a layer", "after the last one"])
def test_of_a_prefill_that_was_stopped_nothing_is_stored_or_decoded(when: str) -> None:
    """Other stages may have stopped before their last layer, and sent zeros, once this one has said that it knows."""
    serving = Serving("llama")
    inbox, prefill = serving.executor._inbox, serving.engine.prefill
    item = PrefillItem(number=9, prompts=[DOCUMENT], options=[GREEDY], boundaries=(0, len(DOCUMENT)))

    def stopping(*rest: Any, **more: Any) -> Any:
        prefilled = prefill(*rest, **more)
        assert not serving.stopping
        inbox.put(Stop(9))
        return prefilled

    inbox.put(item)
    with throughout(serving.model.dtype):
        if when == "after a layer":
            inbox.put(Stop(9))
            serving.executor.carry_out(inbox.take())
        else:
            with mock.patch.object(serving.engine, "prefill", stopping):
                serving.executor.carry_out(inbox.take())
        assert serving.stopping == [9] and not serving.executor.live and not list(serving.tree.nodes())
        assert [part.is_cancelled for part in serving.parts] == [True] and not serving.tokens
        serving.prefill(DOCUMENT)
        serving.require_answers()


def test_a_stop_is_told_to_other_stages_once_the_last_one_will_not_store() -> None:
    told: list[tuple[Any, list[int]]] = []
    scheduler: Any = object.__new__(Scheduler)
    scheduler._engine = SimpleNamespace(may_shard=False, prefixes=object())
    scheduler._ranks, scheduler._leader, scheduler._inbox = SimpleNamespace(size=3), 2, Inbox()
    scheduler._mail = SimpleNamespace(post=lambda item, to: told.append((item, list(to))))
    scheduler._unread = {4: object()}
    scheduler._tell(Stop(4))
    assert told == [(Stop(4), [2])]
    scheduler._hear(Stopping(5))  # all ranks have ended it
    scheduler._hear(Stopping(4))
    assert told[1:] == [(Stop(4), [1])]


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


def test_prefixes_have_half_of_what_rows_leave_and_make_way_for_them() -> None:
    """By hand, in tokens: of memory for six rows of the document one leaves five, and a row of five leaves one."""
    row, token_bytes = len(DOCUMENT) + 7, sum(shape.bytes_per_token() for shape in tiny_model("llama").kv_shapes)
    room = Room(max_tokens=6 * row, shared_bytes=6 * row * token_bytes, token_bytes=token_bytes)
    serving = Serving("llama", room.left_for_prefixes(0, 0), room=room)
    tree = serving.tree

    def left(rows: float) -> bool:
        return tree.limit_bytes == rows * row * token_bytes

    assert left(3)
    with throughout(serving.model.dtype):
        serving.prefill(DOCUMENT)
        assert left(2.5)
        serving.prefill(prompt(len(DOCUMENT), seed=1), prompt(len(DOCUMENT), seed=2))
        assert left(1.5)
        serving.executor.live.cancel([(2, 0)])
        assert left(1.5)  # the memory of a batch stays until its last row has ended
        serving.executor.decode_all()
        assert left(3) and tree.num_bytes == (row - 1) * token_bytes  # the last text, apart from the batch's memory
        serving.prefill(prompt(5 * row - 7, seed=3))
        assert left(0.5) and tree.num_bytes <= tree.limit_bytes
        serving.executor.decode_all()
        serving.prefill(DOCUMENT)  # of which not all is left
        assert serving.cached[4] < [len(DOCUMENT) - 1] and left(2.5)
        serving.executor.decode_all()
        assert tree.num_bytes > 0.5 * row * token_bytes
        serving.prefill(prompt(5 * row - 7, seed=4), scores=0)  # which looks for none
        assert left(0.5) and tree.num_bytes <= tree.limit_bytes
        serving.require_answers()
    assert left(3) and tree.num_bytes <= tree.limit_bytes


def test_rank_0_and_the_stage_that_decodes_count_the_same_memory() -> None:
    """By hand, in tokens: of memory for 2,000, with states of 40 for each row."""
    token_bytes = sum(shape.bytes_per_token() for shape in tiny_model("llama").kv_shapes)
    room = Room(max_tokens=2000, shared_bytes=2000 * token_bytes, token_bytes=token_bytes, row_bytes=40 * token_bytes)
    serving = Serving("llama", room=room)
    queue, length = RequestQueue(serving.engine, QueueLimits(), TimeEstimate(), room=room), len(DOCUMENT)

    def begun(item: PrefillItem) -> Batch:
        owner = Request(prompts=item.prompts, options=item.options, listener=Kept(len(item.prompts)))
        owners = [(owner, row) for row in range(len(item.prompts))]
        batch = Batch(
            item=item,
            owners=owners,
            predicted_s=1.0,
            is_short=False,
            is_alone=True,
            shares_prompts=serving.engine.takes(Way.shared_prompt),
        )
        queue.batches[item.number] = batch
        return batch

    def left(num_tokens: int) -> bool:
        half = (2000 - num_tokens) * token_bytes // 2
        return (serving.tree.limit_bytes, queue.most_stored_bytes) == (half, half)

    with throughout(serving.model.dtype):
        batch = begun(serving.prefill(DOCUMENT, DOCUMENT, DOCUMENT, salts=["a", "b", "a"]))
        assert batch.lengths == [length] * 3 and batch.computed == [0, 1]
        prompts = 2 * length + (2 + 2) * 7  # two prompts; two of the rows share one, and have a place each
        assert left(prompts + 3 * 40)
        serving.executor.live.cancel([(1, 1)])
        batch.left.discard(1)
        assert left(prompts + 2 * 40)
        item = serving.prefill(DOCUMENT, scores=0)
        begun(item)
        assert left(prompts + length + 7 + 3 * 40)
        serving.executor.decode_all()
        queue.batches.clear()
        assert left(0)


def test_a_server_lends_what_rows_leave_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens for rows are those of a server without a tree, which has nothing left beside all of them."""
    model, free = tiny_model("llama"), 10**9
    monkeypatch.setattr(server, "free_bytes", lambda *_: free)
    stages = {"device": model.device, "local_size": 1, "stage": 1, "num_stages": 2}
    less = lambda value, _: [value, (value[0] / 2, 2 * value[1], 9, False) if isinstance(value, tuple) else 2 * value]  # noqa: E731
    ranks: Any = SimpleNamespace(**stages, gather=less)
    given = {"keeps_parts": False, "tree": PrefixTree(9)}
    plain, lending, chosen = (
        server.room_in_memory(model, ranks, None, 0, **given, **more)
        for more in ({}, {"shares_memory": True}, {"shares_memory": True, "max_tokens": 100})
    )
    assert plain.shared_bytes is None and chosen.max_tokens == 100
    assert lending.max_tokens == plain.max_tokens == int(0.8 * free / token_bytes(model))
    assert lending.left_for_prefixes(0, 0) == 4 * 10**8  # of the rank that stores them, which is the first here
    assert lending.left_for_prefixes(lending.max_tokens, 7) < token_bytes(model)
    assert chosen.left_for_prefixes(100, 7) == 4 * 10**8 - 50 * token_bytes(model)


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
    items = {len(ids): item for item in served.items if isinstance(item, PrefillItem) for ids in item.prompts}
    assert [items[len(ids)].is_short for ids in load.prompts] == [False, True, False, True]
    # On several ranks a long rest is computed by all, who have nothing of the prefix.
    long = len(DOCUMENT) if size == 1 else 0
    assert served.cached == [0, len(DOCUMENT), long, len(DOCUMENT)]
    without = rank_pools.run(size, rank_tasks.serve, replace(load, tree_bytes=0))[0]
    assert without.tokens == alone and without.cached == [0] * 4


@pytest.mark.parametrize("size", [1, 2, *slowly(3)])
def test_a_prompt_with_segments_that_begins_like_a_stored_one_is_computed_as_without(
    rank_pools: RankPools, size: int
) -> None:
    draw = random.Random(4)
    segments = random_segments(draw)
    asked = [random_prompt(draw, segments) for _ in range(3)]
    load = Load(
        prompts=[[*asked[0].ids, 5], [*asked[0].ids, 7, 8], *asked],
        options=[GREEDY] * 5,
        limits=QueueLimits(itl_s=1e-6),
        after={1: 0, 2: 0, 3: 0, 4: 2},
        chain_token_s=1e-4,
        tree_bytes=ROOMY,
    )
    served, without = (
        rank_pools.run(size, rank_tasks.serve, replace(load, tree_bytes=num_bytes))[0] for num_bytes in (ROOMY, 0)
    )
    assert served.tokens == without.tokens
    assert served.cached[1] >= len(asked[0].ids) and served.cached[2:] == without.cached[2:]


@pytest.mark.parametrize(
    ("size", "policy"),
    [(1, ExactTopK(fetch=20, min_tokens=0)), (2, InfiniGen(fetch=20, first_layer=1, min_tokens=0, observed=8))],
    ids=lambda each: type(each).__name__,
)
def test_requests_under_a_policy_that_retrieves_reuse_prefixes(
    rank_pools: RankPools, size: int, policy: Retriever
) -> None:
    """A rest that the last stage computes, one that all do, and several answers to one prompt."""
    load = Load(
        prompts=[DOCUMENT, *FOLLOWING],
        options=OPTIONS,
        limits=QueueLimits(itl_s=1e-3),
        after={1: 0, 2: 0, 3: 2},
        short=12,
        chain_token_s=1e-4,
        policies=RankPolicies.everywhere([policy]),
        tree_bytes=ROOMY,
        num_answers=2,
    )
    by_rank = rank_pools.run(size, rank_tasks.serve, load)
    without = rank_pools.run(size, rank_tasks.serve, replace(load, tree_bytes=0))
    assert by_rank[0].tokens == without[0].tokens and without[0].cached == [0] * 4
    least_new = max(1, load.policies.num_observed)  # type: ignore[union-attr]
    assert by_rank[0].cached == [0, *(min(len(DOCUMENT), len(ids) - least_new) for ids in FOLLOWING)]
    assert [each.left_bytes for each in by_rank] == [0] * size


@pytest.mark.parametrize("size", [2, *slowly(3)])
def test_stages_that_decode_together_reuse_the_parts_of_all(rank_pools: RankPools, size: int) -> None:
    load = Load(
        prompts=[DOCUMENT, *FOLLOWING],
        options=OPTIONS,
        limits=QueueLimits(),
        after={1: 0, 2: 0, 3: 2},
        decode=DecodeName.sharded,
        tree_bytes=ROOMY,
    )
    twice = rank_pools.run(size, rank_tasks.serve, replace(load, num_answers=2))[0]
    served = rank_pools.run(size, rank_tasks.serve, load)[0]
    assert twice.tokens == [tokens for tokens in served.tokens for _ in range(2)]
    assert max(twice.cached) == len(DOCUMENT)
    assert served.tokens == [
        rank_pools.run(1, generate, load.family, [ids], options)[0][0].generations[0].new_token_ids
        for ids, options in zip(load.prompts, load.options, strict=True)
    ]
    assert served.cached == [0, *[len(DOCUMENT)] * 3]


WAYS = [PrefillOptions(), PrefillOptions(carrier=Carrier.copy, transfer=Transfer.direct)]


@pytest.mark.parametrize(("size", "decode_ranks"), [(2, 0), (3, 0), (2, 1)])
def test_a_long_rest_is_computed_by_all_after_the_prefix(rank_pools: RankPools, size: int, decode_ranks: int) -> None:
    load = Load(
        prompts=[DOCUMENT, *FOLLOWING],
        options=OPTIONS,
        limits=QueueLimits(itl_s=0.5, decode_ranks=decode_ranks),
        after={1: 0, 2: 0, 3: 2},
        short=12,
        chain_token_s=0.01,
        tree_bytes=ROOMY,
    )
    by_rank = rank_pools.run(size, rank_tasks.serve, load)
    served = by_rank[0]
    assert served.tokens == [
        rank_pools.run(1, generate, load.family, [ids], options)[0][0].generations[0].new_token_ids
        for ids, options in zip(load.prompts, load.options, strict=True)
    ]
    items = {len(ids): item for item in served.items if isinstance(item, PrefillItem) for ids in item.prompts}
    first, short, long, last = (items[len(ids)] for ids in load.prompts)
    assert short.is_short == last.is_short == (not decode_ranks) and not first.is_short and not long.is_short
    assert (list(first.stored), list(long.stored), long.boundaries[-1]) == ([], [len(DOCUMENT)], 30)
    assert served.cached == [0, *[len(DOCUMENT)] * 3]
    assert [each.left_bytes for each in by_rank] == [0] * size


@pytest.mark.parametrize("prefill", WAYS, ids=["relay", "direct copies"])
def test_rests_of_many_lengths_follow_each_other_through_the_chain(
    rank_pools: RankPools, prefill: PrefillOptions
) -> None:
    texts = [DOCUMENT, *(DOCUMENT + prompt(length, seed=length) for length in (20, 40, 80, 160, 30, 60))]
    load = Load(
        prompts=texts,
        options=[GREEDY] * len(texts),
        limits=QueueLimits(itl_s=1e-3),
        after=dict.fromkeys(range(1, len(texts)), 0),
        short=1,
        chain_token_s=1e-4,
        prefill=prefill,
        tree_bytes=ROOMY,
    )
    served = rank_pools.run(3, rank_tasks.serve, load)[0]
    assert served.tokens == [
        rank_pools.run(1, generate, load.family, [ids], GREEDY)[0][0].generations[0].new_token_ids for ids in texts
    ]
    assert sum(any(item.stored) for item in served.items if isinstance(item, PrefillItem)) >= 4
    assert all(cached >= len(DOCUMENT) for cached in served.cached[1:])


TEXTS = [DOCUMENT, *FOLLOWING, DOCUMENT[:30] + prompt(20, seed=9)]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("prefill", WAYS, ids=["relay", "direct copies"])
def test_what_was_dropped_since_rank_0_heard_of_it_is_computed_anew(
    rank_pools: RankPools, prefill: PrefillOptions, family: str
) -> None:
    """Also where it is more than the tree may have, and with states at its end."""
    expected = [rank_pools.run(1, generate, family, [ids], GREEDY)[0][0].generations[0].new_token_ids for ids in TEXTS]
    dropped = rank_pools.run(3, rank_tasks.prefill_after_drops, prefill, TEXTS, GREEDY, family)[-1]
    assert dropped.tokens == expected
    assert dropped.cached == [0, 43, 0, 20, 0] and dropped.num_held == 0


@pytest.mark.parametrize("knows", [[0], [2], [0, 1, 2], *slowly([1], [0, 2])], ids=str)
@pytest.mark.parametrize("prefill", WAYS, ids=["relay", "direct copies"])
def test_no_rank_waits_for_a_prefix_of_one_that_stopped(
    rank_pools: RankPools, prefill: PrefillOptions, knows: list[int]
) -> None:
    few = replace(prefill, layers_in_flight=2)
    token, expected = rank_pools.run(3, rank_tasks.stop_after_prefix, few, TEXTS[:3], knows)[-1]
    assert token == expected


def queue_with_prefixes(num_stages: int = 1, **limits: Any) -> RequestQueue:
    """A queue whose prefills take a second per computed token on one stage, and half of that on all.

    A byte of what is stored takes 1 ms on its way to all stages, which is 10 ms per token.
    """
    engine: Any = FakeEngine()
    engine.prefixes, engine.ranks = (
        SimpleNamespace(key="a", token_bytes=10, state_bytes=0, step=None, tree=PrefixTree(inf)),
        SimpleNamespace(num_stages=num_stages),
    )
    estimate = TimeEstimate()
    estimate.alone.learn([100], 100.0)
    estimate.chain.learn([100], 50.0)
    estimate.s_per_byte = 1e-3
    return RequestQueue(engine, QueueLimits(**limits), estimate)


def request(ids: GivenPrompt) -> Request:
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


@pytest.mark.parametrize("num_stages", [1, 2])
def test_segments_are_computed_beside_what_is_stored(num_stages: int) -> None:
    """A server keeps prefixes and reuses segments, unless it is told otherwise."""
    queue, draw = queue_with_prefixes(num_stages), random.Random(2)
    segments = random_segments(draw)
    asked, known = random_prompt(draw, segments), prompt(30)
    queue.stored.apply(Stored(key="a", ids=tuple(known)))
    new = len(asked) + sum(len(use.segment.ids) for use in asked.uses)
    assert len(asked.uses) > 1
    per_token_s = 1.0 if num_stages == 1 else 0.5
    assert queue.prefill_s([request(asked)]) == pytest.approx(new * per_token_s)
    assert queue.prefill_s([request([*known, 5]), request(asked)]) == pytest.approx((1 + new) * per_token_s)
    queue.stored.apply(Stored(key="a", ids=tuple(asked.ids)))  # which does not come before segments
    assert queue.prefill_s([request(asked)]) == pytest.approx(new * per_token_s)
    queue.note_encoded([asked])
    assert queue.prefill_s([request(asked)]) == pytest.approx(len(asked) * per_token_s)


def test_a_batch_reuses_segments_or_prefixes() -> None:
    queue, draw = queue_with_prefixes(itl_s=1e-6), random.Random(2)
    asked = random_prompt(draw, random_segments(draw))
    queue.note_encoded([asked])
    requests = [request(each) for each in (asked, asked, prompt(len(asked), seed=8), prompt(len(asked), seed=9))]
    queue.waiting = list(requests)
    assert queue.choose() in (requests[:2], requests[2:])


def test_the_last_stage_is_told_what_it_will_soon_be_asked_for() -> None:
    queue, ids = queue_with_prefixes(), prompt(100)
    queue.stored.apply(Stored(key="a", ids=tuple(ids)))
    assert queue.to_prefetch() == []
    for each in (request(prompt(30, seed=5)), request([*ids[:40], 3]), request(ids)):
        queue.add(each)
    assert queue.to_prefetch() == [
        (ids[:40], ""),
        (ids[:-1], ""),
    ]  # of the first nothing is stored


def test_what_is_told_to_come_stays_and_answers_are_the_same_from_the_host() -> None:
    serving = Serving("llama")
    token_bytes = sum(shape.bytes_per_token() for shape in serving.model.kv_shapes)
    tree = PrefixTree(70 * token_bytes, host_bytes=110 * token_bytes)
    serving.tree = serving.engine.prefixes.tree = tree  # type: ignore[union-attr]
    tree.open(serving.engine.prefixes.key, serving.model.kv_shapes, serving.model.device)  # type: ignore[union-attr]
    tree.listen(serving._hear)
    first = prompt(50, seed=1)
    with throughout(serving.model.dtype):
        for seed in (1, 2):
            serving.prefill(prompt(50, seed=seed), num_new=2)
            serving.executor.decode_all()
        serving.to_prefetch = [(first, "")]
        for seed in (3, 4):
            serving.prefill(prompt(50, seed=seed), num_new=2)
            serving.executor.decode_all()
        serving.prefill([*first, 9])
        assert serving.cached[5] == [50] and tree.found_tokens == {Tier.host: 50}
        serving.require_answers()
    [part] = [each for each in serving.parts if each.number == 5]
    assert part.prefix_found_tokens == {"host": 50} and part.prefix_bytes.keys() == {"device", "host"}


def test_a_prefix_found_damaged_in_a_prefill_is_computed_anew_while_others_are_decoded(tmp_path: Path) -> None:
    serving = Serving("llama")

    def restart() -> None:
        tree = PrefixTree(ROOMY, folder=tmp_path)
        serving.tree = serving.engine.prefixes.tree = tree  # type: ignore[union-attr]
        tree.open(serving.engine.prefixes.key, serving.model.kv_shapes, serving.model.device)  # type: ignore[union-attr]
        tree.listen(serving._hear)

    with throughout(serving.model.dtype):
        restart()
        serving.prefill(DOCUMENT)
        serving.executor.decode_all()
        serving.tree.save()
        damage(tmp_path, 1)
        restart()
        serving.executor._limits = QueueLimits(itl_s=1e-9)  # a step inside every layer
        serving.prefill(prompt(20, seed=5), num_new=12)
        with pytest.warns(UserWarning, match="is damaged, and was removed"):
            serving.prefill(DOCUMENT + prompt(9, seed=6))
        assert len(serving.tokens[2, 0]) > 4
        serving.prefill(DOCUMENT + prompt(3, seed=7))
        assert serving.cached == {1: [0], 2: [0], 3: [0], 4: [len(DOCUMENT)]}
        serving.require_answers()


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


def test_the_soonest_of_three_ways_is_chosen() -> None:
    queue, ids = queue_with_prefixes(2, itl_s=5.0), prompt(100)
    estimate, asked = queue._estimate, [request(ids)]
    assert not queue.is_short(asked) and queue.stored_in_chain(asked) == ()
    assert queue.prefill_s(asked) == pytest.approx(50.0)
    queue.stored.apply(Stored(key="a", ids=tuple(ids[:60])))
    assert not queue.is_short(asked) and list(queue.stored_in_chain(asked)) == [60]  # 40 s alone, 20 s by all
    assert queue.prefill_s(asked) == pytest.approx(20.0)
    estimate.s_per_byte = 0.03  # 18 s for 60 tokens, beside 20 s of compute
    assert queue.prefill_s(asked) == pytest.approx(20.0)
    estimate.s_per_byte = 0.05
    assert queue.prefill_s(asked) == pytest.approx(30.0) and list(queue.stored_in_chain(asked)) == [60]
    estimate.s_per_byte = 0.07
    assert queue.is_short(asked) and queue.stored_in_chain(asked) == ()  # 40 s alone, 42 s until all has arrived
    estimate.alone = PrefillTimes()
    estimate.alone.learn([100], 1e4)
    estimate.s_per_byte = 0.1
    assert not queue.is_short(asked) and queue.stored_in_chain(asked) == ()  # 60 s, and 50 s for the whole prompt
    assert queue.prefill_s(asked) == pytest.approx(50.0)
    queue.stored.apply(Stored(key="a", ids=tuple(ids[:99])))
    estimate.s_per_byte = 1e-3
    assert list(queue.stored_in_chain(asked)) == [99] and queue.prefill_s(asked) == pytest.approx(0.99)


def test_the_rate_of_what_is_stored_is_learned_where_a_stage_waits_for_it() -> None:
    estimate = TimeEstimate()
    assert estimate.after_prefixes_s([100], [50], 10**9) == pytest.approx(1.0)  # what is assumed
    for _ in range(30):
        estimate.learn_transfer(10**6, seconds=0.01, wait_s=0.005)
    assert estimate.after_prefixes_s([100], [50], 10**6) == pytest.approx(0.01, rel=1e-3)
    estimate.learn_transfer(10**6, seconds=0.5, wait_s=0.001)  # computed for longer than it took to arrive
    assert estimate.after_prefixes_s([100], [50], 10**6) == pytest.approx(0.01, rel=1e-3)
    estimate.learn_transfer(10**6, seconds=0.002, wait_s=0.0)
    assert estimate.after_prefixes_s([100], [50], 10**6) == pytest.approx(0.002, rel=1e-3)
    estimate.chain.learn([100], 1.0)
    assert estimate.after_prefixes_s([100], [50], 10**6) == pytest.approx(0.5)  # it arrives meanwhile


def test_chunks_after_a_prefix_divide_the_work_of_attention_to_it_too() -> None:
    whole = ContextPartition(boundaries=(0, 600, 1000))
    after = with_slower_last(whole, 1.0, 0.0, 1.0, num_stored=10**6)  # each token costs the same
    assert after.boundaries == (0, 360, 1000)
    assert with_slower_last(whole, 1.0, 1.0, 0.0, num_stored=500) == whole
    assert with_slower_last(whole, 0.0, 0.0, 1.0, num_stored=500).boundaries == (0, 999, 1000)


def test_texts_are_looked_up_once_per_change_and_requests_are_compared_once() -> None:
    queue, walks = queue_with_prefixes(2, itl_s=3.0), list[int]()
    num_stored = PrefixTree.num_stored

    def counting(self: PrefixTree, ids: Sequence[int], key: str) -> int:
        walks.append(len(ids))
        return num_stored(self, ids, key)

    def look() -> int:
        """Number of walks through trees while all that a report leads to is done three times."""
        walks.clear()
        for _ in range(3):
            queue.choose()
            queue.by_deadline()
            queue.predicted_ttft_s(waiting[0])
        return len(walks)

    waiting = [request(DOCUMENT + prompt(5 + seed, seed=seed)) for seed in range(6)]
    begin(queue, [request(DOCUMENT)]).parts[0] = mock.Mock()  # rank 0 has computed its part
    with mock.patch.object(PrefixTree, "num_stored", counting):
        for each in waiting:
            queue.add(each)
        assert look() == 6  # each is compared with the one that is computed
        assert look() == 0
        queue.stored.apply(Stored(key="a", ids=tuple(DOCUMENT[:20])))
        assert look() == 6 and look() == 0
        queue.stored.apply(Dropped(key="a", ids=tuple(DOCUMENT[:20]), num_left=10))
        assert queue.stored.found(waiting[0], "a") == [10]
        assert look() == 5 and look() == 0  # the first one was looked up above
    assert queue.stored.num_tokens == 10


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


@pytest.mark.parametrize(
    ("limit_bytes", "scores", "num_stored", "waits"),
    [
        (10 * len(DOCUMENT), None, 0, True),
        (10 * len(DOCUMENT) - 1, None, 0, False),
        (10 * len(DOCUMENT) - 1, None, 20, True),  # which need not be stored again
        (0, None, 0, False),
        (inf, 0, 0, False),
    ],
)
def test_a_long_prompt_waits_for_no_prefix_that_will_not_be_stored(
    limit_bytes: float, scores: int | None, num_stored: int, waits: bool
) -> None:
    queue, first = queue_with_prefixes(2, itl_s=8.0), request(DOCUMENT)
    queue._engine.prefixes.tree.limit_bytes = limit_bytes  # type: ignore[union-attr]
    queue.stored.apply(Stored(key="a", ids=tuple(DOCUMENT[:num_stored])))
    first.scores = scores
    begin(queue, [first]).parts[0] = mock.Mock()  # rank 0 has computed its part, so that the next chain may begin
    queue.add(following := request(DOCUMENT + prompt(4)))
    assert queue.choose() == ([] if waits else [following])


def test_equal_prompts_are_computed_at_once_where_none_of_them_will_be_stored() -> None:
    queue, same = queue_with_prefixes(), [request(DOCUMENT + prompt(5, seed=seed)) for seed in range(3)]
    queue._engine.prefixes.tree.limit_bytes = 10 * len(DOCUMENT)  # type: ignore[union-attr]
    for each in same:
        queue.add(each)
    assert queue.choose() == same
    queue._engine.prefixes.tree.limit_bytes = 10 * len(DOCUMENT) + 50  # type: ignore[union-attr]
    assert queue.choose() == same[:1]


@pytest.mark.parametrize(("boundaries", "learns"), [((0, 0, 1), False), ((0, 1, 2), True)])
def test_the_rest_of_a_prompt_that_the_last_stage_alone_had_tells_nothing_of_all(
    boundaries: tuple[int, ...], learns: bool
) -> None:
    """Where one stage only decodes, also a rest of one token counts as computed by all."""
    ids, estimate = prompt(100), TimeEstimate()
    stored = [len(ids) - boundaries[-1]]
    item = PrefillItem(number=0, prompts=[ids], options=[GREEDY], boundaries=boundaries, stored=stored)
    batch = Batch(item=item, owners=[(request(ids), 0)], predicted_s=1.0, is_short=False, is_alone=True)
    batch.cached = list(stored)
    for rank, seconds in enumerate((1e-6 if boundaries[1] == 0 else 3.0, 3.0)):
        batch.parts[rank] = Part(number=0, rank=rank, prefill_s=seconds, wait_s=0.0, is_alone=True)
    assert learn_prefill(batch, estimate, estimate.chain) is None
    assert (estimate.chain.seconds([100]) > 0) == learns


def test_sharded_decoding_tells_what_is_kept() -> None:
    serving = Serving("llama")
    with throughout(serving.model.dtype):
        item = Generate(number=0, prompts=[DOCUMENT], options=[GREEDY], salts=["a"])
        serving.executor.carry_out(item)
    [part] = serving.parts
    assert serving.engine.prefixes is not None
    assert part.stored_bytes == serving.tree.num_bytes == (len(DOCUMENT) + 6) * serving.engine.prefixes.token_bytes
    assert part.prefix_bytes == serving.tree.bytes_by_tier == {"device": part.stored_bytes}
    engine: Any = FakeEngine()
    for may_shard, told in ((True, part), (False, None)):
        engine.may_shard = may_shard
        scheduler = Scheduler(engine, QueueLimits())
        scheduler._leader, scheduler._parts = 1, {0: part}
        assert scheduler.last_part is told
