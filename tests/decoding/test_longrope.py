"""Answers that grow past the length where LongRoPE changes its tables go on as those of a prompt of that length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from policies.adakv import AdaKV
from policies.base import Policy
from policies.exact_topk import ExactTopK
from policies.experiments.minicache import MiniCache
from policies.h2o import H2O
from policies.kvzip import KVzip
from policies.quest import Quest
from policies.snapkv import SnapKV
from policies.zigzagkv import ZigZagKV
from runahead import Conversation, Engine, GenerationOptions, Ranks
from runahead.config import CacheOptions, Device, PrefillName, PrefillOptions, RanksOptions, Speculate
from runahead.thinning.rank_policies import RankPolicies
from tests.families import ROPE_THRESHOLD, oracle_logits, oracle_tokens, prompt, throughout
from tests.ranks.tasks import tiny_model

FAMILY = "phi3_longrope"
NUM_NEW = 14
OPTIONS = GenerationOptions(max_new_tokens=NUM_NEW, ignore_eos=True)
LENGTHS = [ROPE_THRESHOLD - 9, ROPE_THRESHOLD - 4, ROPE_THRESHOLD, ROPE_THRESHOLD + 1, 5]
"""Lengths of prompts: three cross at different steps, one at its first, one has crossed and one never does."""

POLICIES: dict[str, RankPolicies] = {
    "snapkv": RankPolicies.everywhere([SnapKV(budget=0.5, window=4)]),
    "h2o": RankPolicies.everywhere([H2O(budget=16)]),
    "unequal heads": RankPolicies.everywhere([AdaKV(scorer=SnapKV(budget=16, window=4))]),
    "the whole prompt": RankPolicies.everywhere([KVzip(budget=0.6)]),
    "retrieving": RankPolicies.everywhere([ExactTopK(fetch=20)]),
    "retrieving ahead": RankPolicies.everywhere([Quest(fetch=20)]),
    "merging": RankPolicies.everywhere([MiniCache()]),
    "few bits": RankPolicies(storage=CacheOptions(bits=4, residual=4)),
    "snapkv, few bits": RankPolicies.everywhere(
        [SnapKV(budget=16, window=4)], storage=CacheOptions(bits=8, residual=4)
    ),
}


def engine_of(policies: RankPolicies | None = None, **more: object) -> Engine:
    ranks = Ranks.start(RanksOptions(device=Device.cpu))
    return Engine(tiny_model(FAMILY), ranks, policies=policies, **more)  # type: ignore[arg-type]


def answers(engine: Engine, prompts: Sequence[Sequence[int]], options: GenerationOptions = OPTIONS) -> list[list[int]]:
    with throughout(engine.model.dtype):
        return [each.new_token_ids for each in engine.generate(list(map(list, prompts)), options).generations]


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    return [prompt(length, seed=length) for length in lengths]


def in_two(engine: Engine, ids: list[int], num_new: int = NUM_NEW) -> list[int]:
    """An answer of a prompt, the last part of which is that of a prompt as long as the text when it crosses."""
    before = max(0, ROPE_THRESHOLD + 1 - len(ids))
    if not 0 < before < num_new or len(ids) > ROPE_THRESHOLD:
        return answers(engine, [ids], replace(OPTIONS, max_new_tokens=num_new))[0]
    first = answers(engine, [ids], replace(OPTIONS, max_new_tokens=before))[0]
    return first + answers(engine, [ids + first], replace(OPTIONS, max_new_tokens=num_new - before))[0]


@pytest.mark.parametrize("lengths", [[length] for length in LENGTHS] + [LENGTHS], ids=str)
@pytest.mark.parametrize("prefill", [PrefillName.single, PrefillName.tsp, PrefillName.zigzag])
def test_answers_are_those_of_transformers(lengths: list[int], prefill: PrefillName) -> None:
    engine, prompts = engine_of(prefill=PrefillOptions(name=prefill)), prompts_of(lengths)
    assert answers(engine, prompts) == [oracle_tokens(FAMILY, tuple(ids), NUM_NEW) for ids in prompts]


def test_every_token_is_that_of_the_whole_text_without_a_cache() -> None:
    text = prompt(ROPE_THRESHOLD - 3, seed=1)
    [answer] = answers(engine_of(), [text])
    for token in answer:
        assert token == int(oracle_logits(FAMILY, tuple(text)).argmax())
        text = [*text, token]


@pytest.mark.parametrize("how", POLICIES)
def test_under_a_policy_prompt_and_answer_are_then_one_prompt(how: str) -> None:
    engine = engine_of(POLICIES[how])
    for ids in prompts_of(LENGTHS[:3]):
        assert answers(engine, [ids]) == [in_two(engine, ids)]


@pytest.mark.parametrize("how", ["snapkv", "retrieving", "few bits"])
def test_a_row_of_a_batch_goes_on_as_alone(how: str) -> None:
    """Both have prompts of one length, so that both cross at once."""
    engine, prompts = engine_of(POLICIES[how]), [prompt(ROPE_THRESHOLD - 5, seed=seed) for seed in (1, 2)]
    assert answers(engine, prompts) == [in_two(engine, ids) for ids in prompts]


def test_drafts_end_before_the_tables_change() -> None:
    """Tokens of a period are looked up, so drafts would cross; sampled ones are those without drafts, too."""
    engine, ids = engine_of(), [*range(3, 9)] * 6
    drafted = replace(OPTIONS, speculate=Speculate.lookup, speculate_always=True, speculate_match=1)
    for options in (drafted, replace(drafted, do_sample=True, temperature=0.3, seed=4)):
        plain = replace(options, speculate=Speculate.none)
        prompts = [ids, ids[:30], prompt(ROPE_THRESHOLD - 8)]
        assert answers(engine, prompts, options) == answers(engine, prompts, plain)


def test_a_smaller_model_may_draft() -> None:
    engine = engine_of(draft=tiny_model(FAMILY))
    drafted = replace(OPTIONS, speculate=Speculate.model, speculate_always=True)
    prompts = prompts_of(LENGTHS)
    assert answers(engine, prompts, drafted) == [oracle_tokens(FAMILY, tuple(ids), NUM_NEW) for ids in prompts]


def test_a_run_says_that_it_is_slower_there() -> None:
    engine = engine_of()
    with throughout(engine.model.dtype):
        told = engine.generate([prompt(ROPE_THRESHOLD - 2)], OPTIONS).slower
        none = engine.generate([prompt(5)], OPTIONS).slower
    assert any(f"grows past {ROPE_THRESHOLD} tokens" in each for each in told) and not none


def test_rows_end_and_are_cancelled_around_the_change() -> None:
    engine, prompts = engine_of(), prompts_of(LENGTHS)
    options = [replace(OPTIONS, max_new_tokens=number) for number in (10, 11, 1, 3, 12)]
    steps = 0

    def cancel(tokens: list[int | None]) -> list[int]:
        nonlocal steps
        steps += 1
        return [4] if steps == 7 else []

    with throughout(engine.model.dtype):
        found = engine.generate(prompts, options, on_tokens=cancel, cancellable=True)
    for ids, each, row in zip(prompts, options, found.generations, strict=True):
        expected = oracle_tokens(FAMILY, tuple(ids), each.max_new_tokens)
        assert row.new_token_ids == expected[: len(row.new_token_ids)]
        assert row.finish_reason == ("cancelled" if ids is prompts[4] else "length")


def conversation(*policies: Policy, length: int | None = None) -> Conversation:
    return Conversation(tiny_model(FAMILY), RankPolicies.everywhere(policies), length=length)


def said(by: Conversation, *rows: Sequence[int], pads: list[int] | None = None) -> list[list[int]]:
    """Answers to a turn."""
    with throughout(by.model.dtype):
        by.feed(torch.tensor(rows), pads=pads)
        return [row.new_ids for row in by.generate(OPTIONS).rows]


TURNS = [prompt(20), prompt(3, seed=1), prompt(9, seed=2), prompt(5, seed=3)]


def test_a_conversation_crosses_in_an_answer_and_goes_on() -> None:
    ours, text = conversation(), list[int]()
    for turn in TURNS:
        text += turn
        [answer] = said(ours, turn)
        assert answer == oracle_tokens(FAMILY, tuple(text), NUM_NEW)
        text += answer
    assert ours.rows == [text] and ours.num_tokens == len(text) - 1 > ROPE_THRESHOLD


def test_all_tokens_have_the_tables_of_a_length_that_is_given() -> None:
    ours, text = conversation(length=ROPE_THRESHOLD + 50), list[int]()
    for turn in TURNS[:2]:
        text += turn
        [answer] = said(ours, turn)
        for token in answer:
            whole = conversation(length=ROPE_THRESHOLD + 50)
            with throughout(whole.model.dtype):
                assert token == int(whole.feed(torch.tensor([text])).argmax())
            text.append(token)
        assert len(text) < ROPE_THRESHOLD or turn is TURNS[1]


def test_rows_of_a_conversation_cross_at_different_steps() -> None:
    """And rows that ended apart go on together."""
    ours, texts = conversation(), [prompt(ROPE_THRESHOLD - 6), prompt(ROPE_THRESHOLD - 8, seed=1)]
    ends, pads = oracle_tokens(FAMILY, tuple(texts[0]), NUM_NEW)[9], [0, 2]
    padded = [[0] * pad + ids for pad, ids in zip(pads, texts, strict=True)]
    options = replace(OPTIONS, ignore_eos=False)
    with patch.object(ours.model.module.generation_config, "eos_token_id", [ends]):
        with throughout(ours.model.dtype):
            ours.feed(torch.tensor(padded), pads=pads)
        for turn in ([4, 5], [6]):
            with throughout(ours.model.dtype):
                new = [row.new_ids for row in ours.generate(options).rows]
            for ids, new_ids in zip(texts, new, strict=True):
                assert new_ids == oracle_tokens(FAMILY, tuple(ids), len(new_ids))
            assert [len(ids) == NUM_NEW or ids[-1] == ends for ids in new] == [True] * 2
            texts = [ids + new_ids + turn for ids, new_ids in zip(texts, new, strict=True)]
            with throughout(ours.model.dtype):
                logits_BV = ours.feed(torch.tensor([turn]))
            for ids, logits_V in zip(texts, logits_BV, strict=True):
                torch.testing.assert_close(logits_V, oracle_logits(FAMILY, tuple(ids)), atol=1e-9, rtol=0)
    assert ours.rows == texts and len(texts[1]) > ROPE_THRESHOLD


KEPT: dict[str, list[Policy]] = {
    "full": [],
    "snapkv": [SnapKV(budget=16, window=4)],
    "the whole prompt": [KVzip(budget=0.6)],
    "all layers": [ZigZagKV(budget=0.5, window=4)],
    "retrieving": [ExactTopK(fetch=20)],
}


@pytest.mark.parametrize("policies", KEPT.values(), ids=KEPT)
def test_tokens_that_follow_cross_as_answers_do(policies: list[Policy]) -> None:
    ids = prompt(ROPE_THRESHOLD - 6)
    answering, following = conversation(*policies), conversation(*policies)
    [answer] = said(answering, ids)
    with throughout(following.model.dtype):
        following.feed(torch.tensor([ids]))
        logits_1CV = following.follow(torch.tensor([answer]))
    assert logits_1CV[0, :-1].argmax(dim=-1).tolist() == answer[1:]
    assert answer == in_two(engine_of(RankPolicies.everywhere(policies)), ids)


@pytest.mark.parametrize("policies", [KEPT["the whole prompt"], KEPT["all layers"]], ids=["kvzip", "zigzagkv"])
def test_rows_that_crossed_are_decided_on_as_one_prompt_without_their_last_tokens(policies: list[Policy]) -> None:
    ours, texts = conversation(*policies), [prompt(ROPE_THRESHOLD - 6, seed=seed) for seed in (1, 2)]
    engine, turn = engine_of(RankPolicies.everywhere(policies)), [4, 5]
    new = said(ours, *texts)
    assert new == [in_two(engine, ids) for ids in texts]
    with throughout(ours.model.dtype):
        logits_BV = ours.feed(torch.tensor([turn]))
        for ids, new_ids, logits_V in zip(texts, new, logits_BV, strict=True):
            alone = conversation(*policies)
            alone.feed(torch.tensor([ids + new_ids[:-1]]))
            alone_1V = alone.feed(torch.tensor([new_ids[-1:] + turn]))
            torch.testing.assert_close(logits_V, alone_1V[0], atol=1e-9, rtol=0)


def test_a_policy_decides_anew_where_a_turn_crosses() -> None:
    policy, text = SnapKV(budget=0.5, window=4), prompt(ROPE_THRESHOLD + 20)
    ours, at_once = conversation(policy), conversation(policy)
    with throughout(ours.model.dtype):
        ours.feed(torch.tensor([text[:30]]))
        peeked = ours.peek(torch.tensor([text[30:]]))
        logits = ours.feed(torch.tensor([text[30:]]), all_logits=True)
        expected = at_once.feed(torch.tensor([text]), all_logits=True)
        torch.testing.assert_close(peeked, logits, atol=1e-9, rtol=0)
        torch.testing.assert_close(logits, expected[:, 30:], atol=1e-9, rtol=0)
        answered = [[row.new_ids for row in each.generate(OPTIONS).rows] for each in (ours, at_once)]
    assert answered[0] == answered[1]
