"""A server of a hybrid model with a prefix tree: the same answers, computed from the last snapshots on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from launch.server.options import ServeOptions
from runahead.attention.states import States
from runahead.reuse import prefixes
from runahead.reuse.prefix_tree import PrefixTree, Stored
from runahead.reuse.prefixes import RowPrefix
from runahead.serving.known_texts import KnownTexts
from runahead.serving.queue import RequestQueue
from runahead.serving.request import Request
from tests.conftest import RankPools
from tests.families import prompt, throughout
from tests.serving import rank_tasks
from tests.serving.rank_tasks import Kept
from tests.serving.test_hybrids import ANSWERS, FORTY, alone, sampled_alone
from tests.serving.test_prefixes import Serving, queue_with_prefixes, request, slowly
from tests.serving.test_queue import begin

DOCUMENT = prompt(90, seed=7)
QUESTIONS = [
    *(DOCUMENT + prompt(3 + number, seed=number) for number in range(12)),
    *(DOCUMENT[: 30 + number] + prompt(9, seed=number) for number in range(28)),
]
TREES = {"roomy": 1 << 40, "no room": 1, "a few texts": 600_000}


@pytest.mark.parametrize(
    ("size", "room"),
    [*((1, room) for room in TREES), (2, "roomy"), pytest.param(2, "a few texts", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "family", ["qwen3_next", "mamba2", *slowly("lfm2", "granitemoehybrid", "falcon_h1", "nemotron_h", "jamba")]
)
def test_forty_requests_at_once_are_answered_as_alone_with_a_tree(
    rank_pools: RankPools, family: str, size: int, room: str
) -> None:
    limits = replace(FORTY.limits, max_per_client=64)
    load = replace(FORTY, family=family, prompts=QUESTIONS, limits=limits, tree_bytes=TREES[room], snapshot_tokens=32)
    served = rank_pools.run(size, rank_tasks.serve, load)[0]
    assert served.tokens == alone(load)
    if room == "roomy":
        assert any(served.cached), "requests that come late go on after those before"
    assert served.left_bytes == 0


def test_answers_of_one_prompt_go_on_after_its_snapshot(rank_pools: RankPools) -> None:
    load = replace(ANSWERS, tree_bytes=1 << 40, snapshot_tokens=8)
    assert rank_pools.run(1, rank_tasks.serve, load)[0].tokens == sampled_alone(rank_pools, ANSWERS)


def serving(snapshot_tokens: int) -> Serving:
    found = Serving("qwen3_next")
    found.tree.snapshot_tokens = snapshot_tokens
    return found


@pytest.mark.parametrize("snapshot_tokens", [0, 32])
def test_turns_and_branches_compute_what_follows_the_last_snapshot(snapshot_tokens: int) -> None:
    """Prompts and answers that are stored while others are decoded; rank 0 knows how much is reused."""
    server = serving(snapshot_tokens)
    with throughout(server.model.dtype):
        server.prefill(DOCUMENT, num_new=5)
        server.step(2)
        server.prefill([*DOCUMENT, *prompt(4, seed=1)], prompt(9, seed=2), num_new=12)
        server.executor.decode_all()
        answer = server.tokens[1, 0]
        server.prefill([*DOCUMENT, *answer, *prompt(5, seed=3)])
        server.prefill([*DOCUMENT[:70], *prompt(5, seed=4)])
        server.require_answers()
    assert server.cached == {1: [0], 2: [90, 0], 3: [94], 4: [64 if snapshot_tokens else 0]}
    sizes = [node.num_bytes for node in server.tree.nodes() if node.is_snapshot]
    assert server.engine.prefixes is not None and set(sizes) == {server.engine.prefixes.state_bytes}
    last = server.parts[-1]
    assert sum(sizes[:-1]) < last.stored_bytes == last.prefix_bytes["device"]


def loses_the_last_tokens(patch: pytest.MonkeyPatch) -> None:
    kept = list[Any]()

    def late(states: States) -> Any:
        kept.append(rows_of(states))
        return kept[max(0, len(kept) - 2)]

    rows_of = prefixes.state_rows
    patch.setattr(prefixes, "state_rows", late)


def drops_states(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowPrefix, "states", None)


@pytest.mark.parametrize("wrong", [loses_the_last_tokens, drops_states])
def test_wrong_snapshots_show_in_the_answers(
    wrong: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong(monkeypatch)
    server = serving(0)
    with throughout(server.model.dtype):
        server.prefill(DOCUMENT, prompt(40, seed=5), num_new=9)
        server.executor.decode_all()
        for number, ids in enumerate((DOCUMENT, prompt(40, seed=5))):
            server.prefill([*ids, *server.tokens[1, number], 5], num_new=20)
        with pytest.raises(AssertionError):
            server.require_answers()


def known_texts(step: int | None) -> KnownTexts:
    """Known texts of a queue of two stages."""
    queue: Any = queue_with_prefixes(num_stages=2)
    queue._engine.prefixes.step = step
    return RequestQueue(queue._engine, queue._limits, queue._estimate).stored


def test_requests_wait_for_others_only_where_they_can_go_on_after_them() -> None:
    first, second, whole = request([*DOCUMENT, 1]), request([*DOCUMENT, 2]), request([*DOCUMENT, 1, 5])
    for step, common in ((None, 90), (32, 64), (1, 90), (0, 0)):
        stored = known_texts(step)
        assert stored.found_after(second, [first], "a") == [common]
        assert stored.found_after(whole, [first], "a") == [91]


def test_a_prompt_goes_on_after_a_text_and_not_after_its_length_of_another() -> None:
    """Two prompts of a request: the one that begins as the other request's does is longer than what they share."""
    short = Request(prompts=[[*DOCUMENT, 1], [7] * 40], options=[ANSWERS.options[0]] * 2, listener=Kept(2))
    asked = request([*DOCUMENT[:40], 5, 6])
    assert known_texts(0).found_after(asked, [short], "a") == [0]
    assert known_texts(0).found_after(request([*[7] * 40, 3]), [short], "a") == [40]


@pytest.mark.parametrize(("step", "again"), [(None, 89), (32, 64), (0, 0)])
def test_rank_0_counts_of_the_same_prompt_again_what_the_last_stage_finds(step: int | None, again: int) -> None:
    """Its last token is always computed, and there is no snapshot right before it."""
    server, known, same = Serving("llama") if step is None else serving(step), known_texts(step), request(DOCUMENT)
    with throughout(server.model.dtype):
        server.prefill(DOCUMENT)
        server.tree.listen(known.apply)
        server.prefill(DOCUMENT)
        server.executor.decode_all()
    assert server.engine.prefixes is not None
    assert [known.found(same, server.engine.prefixes.key)] == [server.cached[2]] == [[again]]
    assert known.found_after(same, [request(DOCUMENT)], "a") == [again]


@pytest.mark.parametrize("has_states", [False, True])
def test_prompts_that_are_padded_after_their_states_are_computed_at_once(has_states: bool) -> None:
    """All stages begin rows after their prefixes, whatever the lengths of their rests."""
    queue: Any = queue_with_prefixes(2, decode_ranks=1)  # else the last stage takes what all would compute whole
    queue._engine.prefixes.state_bytes = int(has_states)
    texts = [prompt(90, seed=seed) for seed in range(3)]
    for number, ids in enumerate(texts):
        for states in (False, True) if has_states else (None,):
            queue.stored.apply(Stored(key="a", ids=tuple(ids), states=states))
        queue.add(request(ids + prompt(10 + number % 2, seed=9)))
    first, longer, same = queue.waiting
    assert queue.choose() == [first, same, longer]
    assert list(queue.stored_in_chain([first, same])) == [90, 90]
    assert list(queue.stored_in_chain([first, longer])) == [90, 90]
    assert queue.prefill_s([first, longer]) == pytest.approx(0.5 * 21)


def test_a_prompt_waits_for_states_inside_one_that_all_stages_compute() -> None:
    for step, waits in ((None, True), (32, True), (0, False)):
        queue: Any = queue_with_prefixes(2, itl_s=0.5)
        queue._engine.prefixes.step, queue._engine.prefixes.state_bytes = step, int(step is not None)
        queue = RequestQueue(queue._engine, queue._limits, queue._estimate)
        batch = begin(queue, [request([*DOCUMENT, 1])])
        assert not batch.is_short
        batch.parts[0] = Mock()  # rank 0 has computed its part
        queue.add(following := request([*DOCUMENT, 2]))
        assert queue.choose() == ([] if waits else [following])


def test_rank_0_knows_where_texts_can_go_on() -> None:
    told, mirror = list[Any](), PrefixTree(1 << 40)
    server = serving(32)
    with throughout(server.model.dtype):
        server.prefill(DOCUMENT)
        server.executor.decode_all()
    server.tree.listen(told.append)
    for change in told:
        mirror.apply(change)
    key = server.engine.prefixes.key if server.engine.prefixes else ""
    assert [mirror.num_stored(DOCUMENT[:end], key) for end in (20, 40, 80, 90)] == [0, 32, 64, 90]
    assert all(isinstance(each, Stored) for each in told)


def test_the_option_needs_a_tree_and_a_number_of_tokens() -> None:
    assert ServeOptions(prefix_cache_bytes=1, snapshot_tokens=512).snapshot_tokens == 512
    with pytest.raises(ValueError, match="serve.snapshot_tokens=512 has no effect with serve.prefix_cache_bytes=0"):
        ServeOptions(prefix_cache_bytes=0, snapshot_tokens=512)
    with pytest.raises(ValueError, match="serve.snapshot_tokens=-1 must be a number of tokens"):
        ServeOptions(prefix_cache_bytes=1, snapshot_tokens=-1)
