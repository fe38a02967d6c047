"""Hybrid models in a server: every answer is what transformers generates alone, however rows join, leave and pad."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from launch.server import serving
from runahead import GenerationOptions
from runahead.model.memory import activation_bytes
from runahead.reuse.prefix_tree import PrefixTree
from runahead.serving.items import Cancel, PrefillItem
from runahead.serving.limits import QueueLimits
from tests.conftest import RankPools
from tests.families import oracle_tokens, prompt
from tests.ranks.tasks import generate, tiny_model
from tests.serving import rank_tasks
from tests.serving.rank_tasks import Load
from tests.serving.test_prefixes import slowly

GREEDY = GenerationOptions(max_new_tokens=9, ignore_eos=True)
LENGTHS = [40, 9, 31, 1, 3, 36, 22, 2, 18, 70]
PROMPTS = [prompt(LENGTHS[number % 10] + number // 10, seed=number) for number in range(40)]
OPTIONS = [replace(GREEDY, max_new_tokens=2 + number % 8) for number in range(40)]
LATE = {number: number % 7 for number in range(12, 40)}
"""Requests that come while others are decoded: after the second token of which one."""

FORTY = Load(prompts=PROMPTS, options=OPTIONS, limits=QueueLimits(batch=20, itl_s=1e-6), after=LATE, short=20)


def alone(load: Load) -> list[list[int]]:
    """Tokens that transformers generates after each prompt."""
    return [
        oracle_tokens(load.family, tuple(ids), options.max_new_tokens)
        for ids, options in zip(load.prompts, load.options, strict=True)
    ]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "family", ["qwen3_next", "lfm2", "mamba2", *slowly("granitemoehybrid", "falcon_h1", "nemotron_h")]
)
def test_forty_requests_at_once_are_answered_as_alone(rank_pools: RankPools, family: str, size: int) -> None:
    load = replace(FORTY, family=family)
    by_rank = rank_pools.run(size, rank_tasks.serve, load)
    assert by_rank[0].tokens == alone(load)
    assert max(len(item.prompts) for item in by_rank[0].items if isinstance(item, PrefillItem)) > 1, "padded together"
    assert [each.left_bytes for each in by_rank] == [0] * size


SAMPLED = replace(GREEDY, do_sample=True, temperature=2.0)
"""Answers to one prompt that differ from their first token on; seeds count up."""

ANSWERS = Load(
    prompts=PROMPTS[:4],
    options=[SAMPLED] * 4,
    limits=FORTY.limits,
    after={3: 0},
    family="qwen3_next",
    num_answers=3,
)


def sampled_alone(pools: RankPools, load: Load) -> list[list[int]]:
    """Tokens of each answer, generated alone by one rank."""
    return [
        pools.run(1, generate, load.family, [ids], replace(SAMPLED, seed=seed))[0][0].generations[0].new_token_ids
        for ids in load.prompts
        for seed in range(load.num_answers)
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_answers_of_one_prompt_have_states_of_their_own(rank_pools: RankPools, size: int) -> None:
    served = rank_pools.run(size, rank_tasks.serve, ANSWERS)[0]
    assert served.tokens == sampled_alone(rank_pools, ANSWERS)
    assert len({tuple(tokens) for tokens in served.tokens}) == 12, "answers differ"


def test_a_cancelled_row_leaves_the_states_of_the_others(rank_pools: RankPools) -> None:
    options = [replace(GREEDY, max_new_tokens=400), *OPTIONS[1:8]]
    load = replace(FORTY, family="qwen3_next", prompts=PROMPTS[:8], options=options, cancel={0: 6}, after={7: 0})
    load = replace(load, awaits=rank_tasks.two_prefills)
    served = rank_pools.run(2, rank_tasks.serve, load)
    expected = alone(replace(load, options=[OPTIONS[0], *OPTIONS[1:8]]))
    assert served[0].tokens[1:] == expected[1:]
    assert 6 <= len(served[0].tokens[0]) < 400 and served[0].tokens[0][:2] == expected[0]
    assert any(isinstance(item, Cancel) for item in served[0].items)
    assert [each.left_bytes for each in served] == [0, 0]


@pytest.mark.parametrize(("fault", "size"), [("not sent", 2), ("of another row", 1), ("of the first row", 1)])
def test_wrong_states_show_in_the_answers(rank_pools: RankPools, fault: str, size: int) -> None:
    load = replace(FORTY, family="qwen3_next", prompts=PROMPTS[:10], options=OPTIONS[:10], after={}, short=0)
    assert rank_pools.run(size, rank_tasks.serve_with_wrong_states, fault, load)[0].tokens != alone(load)


def test_a_state_that_answers_share_shows(rank_pools: RankPools) -> None:
    served = rank_pools.run(1, rank_tasks.serve_with_wrong_states, "of the first row", ANSWERS)[0]
    assert served.tokens != sampled_alone(rank_pools, ANSWERS)


@pytest.mark.parametrize(("num_stages", "drafts", "copies"), [(1, False, 1), (2, False, 2), (1, True, 2), (2, True, 2)])
def test_the_room_of_a_server_has_states(
    monkeypatch: pytest.MonkeyPatch, num_stages: int, drafts: bool, copies: int
) -> None:
    """By hand: 2 layers attend and 2 hold states, of which a chain has two each until a prompt is computed.

    Afterwards a row with drafts has two each.
    """
    model, free = tiny_model("qwen3_next"), 10**9
    monkeypatch.setattr(serving, "free_bytes", lambda *_: free)
    ranks: Any = SimpleNamespace(
        device=model.device,
        local_size=1,
        stage=num_stages - 1,
        num_stages=num_stages,
        gather=lambda value, _: [value, 2 * value],
    )
    room = serving.room_in_memory(model, ranks, None, 0, keeps_parts=False, drafts=drafts)
    token_bytes = 2 * 2 * 2 * 8 * 8 + activation_bytes(model.config, model.dtype)
    row_bytes = 2 * 8 * (64 * 4 + 4 * 8 * 8)  # a convolution of 64 channels and kernel 4, four heads of 8 x 8
    assert room.max_tokens == int(0.8 * free / token_bytes)
    assert (room.row_tokens - 1) * token_bytes < copies * row_bytes <= room.row_tokens * token_bytes
    assert str(room).endswith(f"answers at a time, of which the states of each answer take {room.row_tokens}")
    inside_copies = num_stages  # a chain of two has those inside a prompt also as they arrived
    for tree_bytes, limit in ((10**6, 0.8 * free - (2 + inside_copies) * 10**6), (10**9, None)):
        tree = PrefixTree(tree_bytes, snapshot_tokens=32)
        kept = 0 if limit is None else tree_bytes
        inside = serving.room_in_memory(model, ranks, None, kept, keeps_parts=False, drafts=drafts, tree=tree)
        every_32 = 0.8 * free / (token_bytes + inside_copies * row_bytes / 32)
        assert inside.max_tokens == int(every_32 if limit is None else limit / token_bytes) < room.max_tokens
        assert (inside.row_tokens - 1) * token_bytes < (copies + 1) * row_bytes <= inside.row_tokens * token_bytes
    given: Any = {"keeps_parts": False, "drafts": drafts, "tree": PrefixTree(10**6), "shares_memory": True}
    ranks.gather = lambda value, _: [value]
    for more in ({}, {"max_tokens": 100}):  # which count tokens alone; beside prefixes there are states all the same
        lending = serving.room_in_memory(model, ranks, None, 0, **given, **more)
        assert lending.row_bytes == (copies + 1) * row_bytes
        half = (int(0.8 * free) - 50 * token_bytes - 2 * (copies + 1) * row_bytes) // 2
        assert lending.left_for_prefixes(50, 2) == half
    monkeypatch.setattr(serving, "free_bytes", lambda *_: 2 * row_bytes)
    for kept, remedy in ((0, "a device with more free memory"), (100, "a smaller serve.prefix_cache_bytes")):
        tree = PrefixTree(kept, snapshot_tokens=32)
        with pytest.raises(ValueError, match=f"states of one answer.* leave no memory.*; use {remedy}, or"):
            serving.room_in_memory(model, ranks, None, kept, keeps_parts=False, tree=tree)
    without = serving.room_in_memory(tiny_model("llama"), ranks, None, 0, keeps_parts=False)
    monkeypatch.setattr(serving, "free_bytes", lambda *_: 0)  # which is no matter of states
    assert serving.room_in_memory(tiny_model("llama"), ranks, None, 0, keeps_parts=False).max_tokens == 0
    assert without.row_tokens == 0 and str(without).endswith("tokens of prompts and answers at a time")
