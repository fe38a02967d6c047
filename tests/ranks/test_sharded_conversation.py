"""A conversation over several ranks: tokens of one rank, and each rank stores its part of the text."""

from __future__ import annotations

import pytest
import torch

from runahead import Conversation, GenerationOptions
from tests.conftest import RankPools
from tests.families import ROPE_THRESHOLD, largest_difference, oracle_logits, oracle_tokens, prompt, throughout
from tests.ranks import sharded_conversation_tasks
from tests.ranks.sharded_conversation_tasks import Talk
from tests.ranks.tasks import tiny_model

TOLERANCE = 1e-9  # float64
NUM_NEW = 6
GREEDY = GenerationOptions(max_new_tokens=NUM_NEW, ignore_eos=True)
IDS = prompt(80, seed=9)
TURNS = {
    "of any length": [IDS[:31], IDS[31:50], IDS[50:51], IDS[51:80]],
    "one token first": [IDS[:1], IDS[1:40], IDS[40:42]],
}


def check(talks: list[Talk], family: str, turns: list[list[int]]) -> None:
    """Compare answers and logits of one row with transformers'."""
    text = list[int]()
    for turn, ids in enumerate(turns):
        text += ids
        expected = oracle_tokens(family, tuple(text), NUM_NEW)
        for talk in talks:
            assert talk.answers[turn] == [expected]
            assert largest_difference(talk.logits[turn][0], oracle_logits(family, tuple(text))) < TOLERANCE
        text += expected


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "bloom", "deepseek_v3", "gpt2"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.sampled(3)
def test_answers_of_several_turns_are_those_of_transformers(rank_pools: RankPools, family: str, size: int) -> None:
    """Windows, soft caps, sinks, ALiBi, keys and values of two widths, learned positions."""
    turns = TURNS["of any length"]
    talks = rank_pools.run(size, sharded_conversation_tasks.talk, family, [[ids] for ids in turns], None, GREEDY)
    check(talks, family, turns)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS)
@pytest.mark.sampled(2)
def test_long_turns_go_in_pieces_and_look_ahead_and_forks_change_nothing(
    rank_pools: RankPools, family: str, turns: list[list[int]]
) -> None:
    rows = [[ids] for ids in turns]
    talks = rank_pools.run(3, sharded_conversation_tasks.piecewise, family, rows, GREEDY)
    check(talks, family, turns)
    for talk in talks:
        for peeked, logits in zip(talk.peeked, talk.logits[1:], strict=True):
            assert largest_difference(peeked[0], torch.tensor(logits[0], dtype=torch.float64)) < TOLERANCE


@pytest.mark.parametrize("size", [1, 2])
def test_a_text_crosses_longropes_threshold_in_an_answer_or_with_a_turn(rank_pools: RankPools, size: int) -> None:
    for first in (ROPE_THRESHOLD - 3, ROPE_THRESHOLD - 9, ROPE_THRESHOLD + 1):
        turns = [IDS[:first], IDS[60:64], IDS[64:70]]
        talks = rank_pools.run(
            size, sharded_conversation_tasks.talk, "phi3_longrope", [[ids] for ids in turns], None, GREEDY
        )
        check(talks, "phi3_longrope", turns)


def test_each_rank_stores_its_share_of_the_text(rank_pools: RankPools) -> None:
    turns = TURNS["of any length"]
    talks = rank_pools.run(3, sharded_conversation_tasks.talk, "llama_deep", [[ids] for ids in turns], None, GREEDY)
    model = tiny_model("llama_deep")
    per_token = sum(shape.bytes_per_token() + 4 for shape in model.kv_shapes)  # and a position
    total = 0
    for turn, ids in enumerate(turns):
        total += len(ids) + (turn > 0)  # the answer's last token comes with the next turn
        stored = [talk.stored[turn] for talk in talks]
        assert all(len(set(layers)) == 1 for layers in stored)
        shares = [layers[0] for layers in stored]
        assert sum(shares) == total and max(shares) - min(shares) <= 1
        if len(ids) > 1:  # a single token may use room that an answer has left
            assert [talk.kv_bytes[turn] for talk in talks] == [share * per_token for share in shares]
        total += NUM_NEW - 1


@pytest.mark.parametrize("pads", [[0, 0], [0, 9], [29, 0]])
def test_rows_of_a_batch_are_those_of_a_conversation_in_one_process(rank_pools: RankPools, pads: list[int]) -> None:
    options = GenerationOptions(
        max_new_tokens=NUM_NEW, do_sample=True, seed=7, top_k=20, repetition_penalty=1.3, ignore_eos=True
    )
    first = [[0] * pad + prompt(30 - pad, seed=row) for row, pad in enumerate(pads)]
    turns = [first, [IDS[:8], IDS[8:16]], [IDS[16:36]]]  # the last turn is the same for both rows
    alone, model = Talk(), tiny_model("llama")
    with throughout(torch.float64):
        ours = Conversation(model)
        for turn, rows in enumerate(turns):
            alone.logits.append(ours.feed(torch.tensor(rows), pads=None if turn else pads).tolist())
            alone.answers.append([row.new_ids for row in ours.generate(options).rows])
    for talk in rank_pools.run(2, sharded_conversation_tasks.talk, "llama", turns, pads, options):
        assert talk.answers == alone.answers
        for theirs, logits in zip(talk.logits, alone.logits, strict=True):
            assert largest_difference(theirs, torch.tensor(logits, dtype=torch.float64)) < TOLERANCE


def test_one_rank_is_a_conversation_as_well(rank_pools: RankPools) -> None:
    turns = TURNS["of any length"]
    check(
        rank_pools.run(1, sharded_conversation_tasks.talk, "llama", [[ids] for ids in turns], None, GREEDY),
        "llama",
        turns,
    )


def test_turns_that_differ_between_ranks_are_told(rank_pools: RankPools) -> None:
    for said in rank_pools.run(2, sharded_conversation_tasks.refused_conversation):
        assert len(said) == 2
        assert "the turn" in said[0] and said[0].endswith("every rank must feed the same tokens")
        assert said[1].startswith("decode=sharded needs prefill=kv_runahead: prefill=zigzag collects")
