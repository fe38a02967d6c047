"""Turns on one cache are what one long prompt would be, as far as the policies let them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from policies.base import Policy
from policies.h2o import H2O
from policies.pyramidinfer import PyramidInfer
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from runahead import Conversation, GenerationOptions
from runahead.thinning.rank_policies import RankPolicies
from tests.families import ROPE_THRESHOLD, VOCAB_SIZE, oracle_logits, oracle_tokens, prompt, throughout
from tests.ranks.tasks import tiny_model

IDS = prompt(48)
POLICIES = {
    "streaming_llm": StreamingLLM(budget=12, sinks=2),
    "h2o": H2O(budget=12),
    "snapkv": SnapKV(budget=0.5, window=4, kernel=3),
    "pyramidinfer": PyramidInfer(min_tokens=4, mean_keep=0.5),
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
NEW = GenerationOptions(max_new_tokens=6, ignore_eos=True)


def conversation(*policies: Policy, family: str = "llama", length: int | None = None) -> Conversation:
    return Conversation(tiny_model(family), RankPolicies.everywhere(policies), length=length)


def feed(to: Conversation, *rows: Sequence[int], **options: object) -> Tensor:
    with throughout(to.model.dtype):
        return to.feed(torch.tensor(rows), **options)  # type: ignore[arg-type]


def peek(at: Conversation, ids: Sequence[int]) -> Tensor:
    with throughout(at.model.dtype):
        return at.peek(torch.tensor([ids]))


def generate(by: Conversation) -> list[list[int]]:
    with throughout(by.model.dtype):
        return [row.new_ids for row in by.generate(NEW).rows]


def equal(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)  # float64


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_bigcode", "bloom"])
@pytest.mark.parametrize("turns", [[48], [20, 28], [1, 30, 1, 16]], ids=str)
def test_with_all_kept_every_token_has_the_logits_of_one_pass(family: str, turns: list[int]) -> None:
    ours, start = conversation(family=family), 0
    for turn in turns:
        logits_1CV = feed(ours, IDS[start : start + turn], all_logits=True)
        assert logits_1CV.shape == (1, turn, VOCAB_SIZE)
        for at in {0, turn - 1}:
            equal(logits_1CV[0, at], oracle_logits(family, tuple(IDS[: start + at + 1])))
        start += turn
    assert (ours.num_tokens, ours.rows) == (48, [IDS])


def test_an_answer_is_part_of_the_next_turn() -> None:
    """Its last token was never fed, so the next turn brings it along."""
    ours = conversation()
    feed(ours, IDS[:30])
    [answer] = generate(ours)
    assert answer == oracle_tokens("llama", tuple(IDS[:30]), 6)
    logits_1CV = feed(ours, IDS[30:], all_logits=True)
    text = IDS[:30] + answer + IDS[30:]
    assert logits_1CV.shape[1] == 18 and ours.rows == [text] and ours.num_tokens == len(text)
    equal(logits_1CV[0, 0], oracle_logits("llama", tuple(text[:37])))
    equal(logits_1CV[0, -1], oracle_logits("llama", tuple(text)))
    assert generate(ours) == [oracle_tokens("llama", tuple(text), 6)]


@every_policy
@pytest.mark.sampled(2)
def test_padded_rows_go_on_as_they_do_alone(policy: Policy) -> None:
    """Shares of a prompt are of the padded one, so rows alone are padded as well."""
    short = IDS[:33]
    together = conversation(policy)
    found = [feed(together, IDS[:40], [0] * 7 + short, pads=[0, 7]), feed(together, IDS[40:])]
    answers = generate(together)
    for row, (ids, pad) in enumerate([(IDS[:40], 0), ([0] * 7 + short, 7)]):
        alone = conversation(policy)
        for ours, theirs in zip(found, [feed(alone, ids, pads=[pad]), feed(alone, IDS[40:])], strict=True):
            equal(ours[row], theirs[0])
        assert generate(alone) == [answers[row]]


def test_padded_rows_end_where_positions_of_the_padded_text_count() -> None:
    """Llama 4 scales the queries of its layers without RoPE from token number floor_scale (8) of the padded text on."""
    ours = conversation(family="llama4_text_tempered")
    logits_BV = feed(ours, IDS[:7], [0] * 4 + IDS[:3], pads=[0, 4])
    equal(logits_BV[0], oracle_logits("llama4_text_tempered", tuple(IDS[:7])))
    equal(logits_BV[1], oracle_logits("llama4_text_tempered", tuple(IDS[:3])))
    with pytest.raises(ValueError, match="counts positions from the start of the longest row"):
        feed(ours, IDS[7:8], IDS[3:4])


@every_policy
def test_a_look_ahead_changes_nothing(policy: Policy) -> None:
    looking, other = conversation(policy), conversation(policy)
    for start in (0, 16, 32):
        ids = IDS[start : start + 16]
        before = looking.kv_bytes
        seen = peek(looking, ids)
        assert (looking.kv_bytes, looking.num_tokens) == (before, start)
        last = feed(looking, ids)
        logits_1CV = feed(other, ids, all_logits=True)
        equal(last, logits_1CV[:, -1])
        equal(seen[:, :-1], logits_1CV[:, :-1])
    assert looking.kept_tokens == other.kept_tokens and looking.kv_bytes == other.kv_bytes


@every_policy
def test_tokens_see_only_what_is_kept_of_earlier_turns(policy: Policy) -> None:
    ours = conversation(policy)
    feed(ours, IDS[:32])
    assert max(ours.kept_tokens) <= 32 and min(ours.kept_tokens) < 32
    thinned = peek(ours, IDS[32:])
    kept_all = conversation()
    feed(kept_all, IDS[:32])
    assert (thinned - peek(kept_all, IDS[32:])).abs().max() > 1e-3


@every_policy
def test_branches_do_not_meet(policy: Policy) -> None:
    trunk = conversation(policy)
    feed(trunk, IDS[:30])
    generate(trunk)  # leaves room behind what is stored
    branch = trunk.fork()
    answers = []
    for ours, ids in ((branch, IDS[30:40]), (trunk, IDS[35:48])):
        feed(ours, ids)
        answers.append(generate(ours))
    for ids, answer in zip((IDS[30:40], IDS[35:48]), answers, strict=True):
        fresh = conversation(policy)
        feed(fresh, IDS[:30])
        generate(fresh)
        feed(fresh, ids)
        assert generate(fresh) == answer


def test_bytes_are_those_of_what_is_kept() -> None:
    ours = conversation(StreamingLLM(budget=12, sinks=2))
    per_token = sum(shape.bytes_per_token() for shape in ours.model.kv_shapes)
    positions = 4 * len(ours.model.kv_shapes)  # an int32 per slot and layer
    for end in (8, 20, 48):
        feed(ours, IDS[ours.num_tokens : end])
        kept = min(12, end)
        assert ours.kept_tokens == [kept] * len(ours.model.kv_shapes)
        assert ours.kv_bytes == kept * (per_token + positions)
        assert ours.full_kv_bytes == end * per_token


def test_chunks_may_be_kept_whole_until_the_last_one() -> None:
    """A policy then sees the whole prompt, as if it came at once."""
    policy = SnapKV(budget=12, window=4, kernel=3)
    whole, pieces = conversation(policy), conversation(policy)
    feed(whole, IDS)
    for start in (0, 20):
        feed(pieces, IDS[start : start + 20], cut_back=False)
    assert min(pieces.kept_tokens) == 40
    equal(feed(pieces, IDS[40:]), whole.logits_BV)  # type: ignore[arg-type]
    assert pieces.kept_tokens == whole.kept_tokens
    assert generate(pieces) == generate(whole)


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        ([[]], "no tokens were given; a turn has at least one"),
        ([[VOCAB_SIZE]], f"token ids must be in 0..{VOCAB_SIZE - 1}"),
        ([prompt(513)], "would have 513 tokens, which exceeds the 512 positions"),
        ([prompt(500), prompt(13)], "would have 513 tokens, which exceeds the 512 positions"),
    ],
)
def test_what_cannot_be_fed_is_told(turns: list[list[int]], says: str) -> None:
    ours = conversation(StreamingLLM(budget=12, sinks=2))
    for turn in turns[:-1]:
        feed(ours, turn)
    before = ours.num_tokens
    with pytest.raises(ValueError, match=says) as caught, throughout(torch.float64):
        ours.feed(torch.tensor([turns[-1]], dtype=torch.long))
    assert "\n" not in str(caught.value) and ours.num_tokens == before


def test_nothing_to_answer_and_padding_later_on_are_told() -> None:
    ours = conversation()
    with pytest.raises(ValueError, match="there is nothing to answer; feed tokens first"):
        ours.generate()
    feed(ours, IDS[:8])
    with pytest.raises(ValueError, match=r"pads=\[40\] must give the padding of 1 rows"):
        feed(ours, IDS[8:], pads=[40])
    with pytest.raises(ValueError, match="2 rows were given but the conversation has 1"):
        feed(ours, IDS[8:], IDS[8:])
    with pytest.raises(ValueError, match="exceeds the 512 positions"):
        ours.generate(GenerationOptions(max_new_tokens=600))


def ended_apart(*policies: Policy, family: str = "llama") -> tuple[Conversation, list[list[int]]]:
    """A conversation of two rows after an answer that the first one ended earlier, and the ids of the rows."""
    rows = [IDS[:20], IDS[20:40]]
    alone = [conversation(*policies, family=family) for _ in rows]
    for each, ids in zip(alone, rows, strict=True):
        feed(each, ids)
    first, second = (generate(each)[0] for each in alone)
    # An end of text that only one of the rows comes to.
    ends = next(token for token in first[:4] if token not in second)
    ours = conversation(*policies, family=family)
    feed(ours, *rows)
    with throughout(torch.float64), pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(ours.model), "eos_token_ids", {ends})
        ours.generate(GenerationOptions(max_new_tokens=6))
    assert len(ours.rows[0]) < len(ours.rows[1]) == 26
    return ours, ours.rows


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
def test_rows_that_ended_apart_go_on_together(family: str) -> None:
    """Each as if it was alone, also after another answer and a fork."""
    ours, rows = ended_apart(family=family)
    fork = ours.fork()
    for row, logits_V in zip(rows, feed(ours, [5, 7, 9]), strict=True):
        equal(logits_V, oracle_logits(family, (*row[:-3], 5, 7, 9)))
    answers = generate(ours)
    for row, answer in zip(ours.rows, answers, strict=True):
        assert answer == oracle_tokens(family, tuple(row[: -len(answer)]), len(answer))
    for row, logits_V in zip(fork.rows, feed(fork, [8]), strict=True):
        equal(logits_V, oracle_logits(family, tuple(row)))


def test_rows_that_could_not_be_moved_behind_padding_are_not_fed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some layers may have moved them, and others not."""
    failed = list[Conversation]()

    def fail(talking: Conversation, nums: Sequence[int]) -> None:
        failed.append(talking)
        raise MemoryError

    monkeypatch.setattr(Conversation, "_forget_last", fail)
    with pytest.raises(MemoryError):
        ended_apart()
    with pytest.raises(ValueError, match="failed half-way"):
        feed(failed[0], [5])


def test_under_a_policy_rows_that_ended_apart_go_on_as_each_does_alone() -> None:
    policy = SnapKV(budget=12, window=4, kernel=3)
    ours, rows = ended_apart(policy)
    lengths = [len(ids) - 20 for ids in rows]
    together = feed(ours, [5, 7])
    for row, (ids, num_new) in enumerate(zip(rows, lengths, strict=True)):
        alone = conversation(policy)
        feed(alone, ids[:20])
        if num_new > 1:  # all but the last token of an answer are stored
            with throughout(torch.float64):
                alone.follow(torch.tensor([ids[20 : 20 + num_new - 1]]))
        equal(together[row], feed(alone, [ids[20 + num_new - 1], 5, 7])[0])


def test_under_a_policy_that_cuts_back_answers_rows_that_ended_apart_cannot_go_on_together() -> None:
    ours, _ = ended_apart(H2O(budget=12))
    with pytest.raises(ValueError, match="after different numbers of tokens"):
        feed(ours, [5])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_bigcode", "bloom"])
def test_later_turns_may_be_padded(family: str) -> None:
    """By more than a row has stored, too."""
    ours = conversation(family=family)
    rows = [IDS[:9], IDS[9:11]]
    feed(ours, rows[0], [0] * 7 + rows[1], pads=[0, 7])
    for turn, pads in (([12, 3], [0, 9]), ([2, 6], [4, 0]), ([1, 1], [0, 0])):
        new = [prompt(num, seed=num) for num in turn]
        rows = [ids + more for ids, more in zip(rows, new, strict=True)]
        logits_BCV = feed(
            ours, *([0] * pad + ids for pad, ids in zip(pads, new, strict=True)), pads=pads, all_logits=True
        )
        for ids, logits_CV in zip(rows, logits_BCV, strict=True):
            equal(logits_CV[-1], oracle_logits(family, tuple(ids)))
    assert ours.rows == rows


@pytest.mark.parametrize("lengths", [(20,), (20, 11), (20, 4)], ids=["a row", "padded rows", "one row after the other"])
def test_a_text_that_crosses_a_change_of_rope_is_computed_anew(lengths: tuple[int, ...]) -> None:
    """It does as transformers: all keys are those of the whole text."""
    family, more = "phi3_longrope", prompt(ROPE_THRESHOLD, seed=3)
    ours, rows = conversation(family=family), [prompt(length, seed=length) for length in lengths]
    feed(ours, *([0] * (20 - len(ids)) + ids for ids in rows), pads=[20 - len(ids) for ids in rows])
    for turn in (more[:-12], more[-12:]):
        rows = [ids + turn for ids in rows]
        for ids, logits_V in zip(rows, feed(ours, turn), strict=True):
            equal(logits_V, oracle_logits(family, tuple(ids)))
    assert max(map(len, rows)) > ROPE_THRESHOLD and ours.rows == rows


def test_a_change_of_rope_is_known_ahead() -> None:
    family, ids = "phi3_longrope", prompt(ROPE_THRESHOLD + 10)
    known = conversation(family=family, length=len(ids))
    feed(known, ids[:20])
    equal(feed(known, ids[20:])[0], oracle_logits(family, tuple(ids)))


def test_a_policy_that_cannot_work_on_a_model_is_refused() -> None:
    with pytest.raises(ValueError, match="windows"):
        conversation(PyramidInfer(), family="gemma2")
