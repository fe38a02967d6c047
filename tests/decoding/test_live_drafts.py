"""Rows that join and leave between steps and draft by look-up: their tokens are those that each has alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from policies.adakv import AdaKV
from policies.h2o import H2O
from policies.snapkv import SnapKV
from runahead import Engine, GenerationOptions
from runahead.config import Device, RanksOptions, Speculate
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import NewToken
from runahead.decoding.rows import Rows
from runahead.decoding.speculative.drafts import Lookup, LookupDrafter
from runahead.decoding.speculative.payoff import Payoff
from runahead.decoding.speculative.proposals import PayingDrafts
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks
from runahead.thinning.rank_policies import RankPolicies
from tests.decoding.test_live_rows import PROMPTS, joined
from tests.decoding.test_speculation import VOCAB_SIZE, knowing
from tests.families import throughout
from tests.ranks.tasks import tiny_model

GREEDY = GenerationOptions(max_new_tokens=14, ignore_eos=True, speculate=Speculate.lookup, speculate_always=True)
OPTIONS = [
    GREEDY,
    replace(GREEDY, max_new_tokens=9, do_sample=True, temperature=2.0, seed=7),
    replace(GREEDY, max_new_tokens=16, repetition_penalty=3.0),
    replace(GREEDY, max_new_tokens=8, speculate=Speculate.none, do_sample=True, top_k=5, seed=3),
]


class Decoding:
    """Rows that are decoded together. `tokens` are those of each row so far, `left` what left with how many stored."""

    def __init__(self, family: str, policies: RankPolicies | None = None) -> None:
        self.engine = Engine(tiny_model(family), Ranks.start(RanksOptions(device=Device.cpu)), policies=policies)
        self.left: dict[int, int] = {}
        lanes = Lanes(self.engine.model, policies)
        self.drafts = PayingDrafts(LookupDrafter(), Payoff(warm_up=lanes.warm_up), name="lookup")
        self.live = Rows(lanes, drafts=self.drafts, on_leave=self._leave)
        self.tokens: dict[int, list[int | None]] = {}

    def _leave(self, id, row, lane) -> None:
        self.left[id] = lane.num_tokens

    def join(self, *rows: int) -> None:
        self._take(joined(self.engine, self.live, rows, OPTIONS)[0])

    def step(self, times: int) -> None:
        for _ in range(times):
            for place in self.live.step():
                self._take(place)

    def _take(self, new: Sequence[NewToken]) -> None:
        for each in new:
            self.tokens.setdefault(each.row, []).append(each.token)

    def alone(self) -> list[list[int]]:
        plain = [replace(each, speculate=Speculate.none) for each in OPTIONS]
        return [
            self.engine.generate([ids], [options]).generations[0].new_token_ids
            for ids, options in zip(PROMPTS, plain, strict=True)
        ]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("always", [True, False])
@pytest.mark.sampled(3)
def test_rows_that_join_early_and_late_have_the_tokens_that_each_has_alone(family, always, monkeypatch):
    """It fails if a row's number of stored tokens is that of the longest draft, or rows get each other's logits."""
    monkeypatch.setattr(f"{__name__}.OPTIONS", [replace(x, speculate_always=always) for x in OPTIONS])
    decoding = Decoding(family)
    with throughout(decoding.engine.model.dtype):
        expected = decoding.alone()
        texts = [ids + new for ids, new in zip(PROMPTS, expected, strict=True)]
        with knowing(texts, right=0.7, vocab_size=VOCAB_SIZE):
            decoding.join(0)
            decoding.step(2)
            decoding.join(1, 2)
            decoding.step(2)
            decoding.join(3)
            decoding.step(20)
    assert [decoding.tokens[row] for row in range(4)] == expected
    assert decoding.left == {row: len(texts[row]) - 1 for row in range(4)}
    report = decoding.drafts.report
    assert 0 < report.accepted < report.drafted or not always


@pytest.mark.parametrize(
    "policy", [SnapKV(budget=12, window=4), AdaKV(scorer=SnapKV(budget=12, window=4)), H2O(budget=10, recent=3)]
)
def test_rows_under_policies_have_the_tokens_that_each_has_alone(policy):
    decoding = Decoding("llama", RankPolicies.everywhere([policy]))
    with throughout(decoding.engine.model.dtype):
        expected = decoding.alone()
        texts = [ids + new for ids, new in zip(PROMPTS, expected, strict=True)]
        with knowing(texts, right=0.7, vocab_size=VOCAB_SIZE):
            for row in range(4):
                decoding.join(row)
                decoding.step(2)
            decoding.step(20)
    assert [decoding.tokens[row] for row in range(4)] == expected
    assert 0 < decoding.drafts.report.accepted < decoding.drafts.report.drafted


def test_plain_steps_follow_what_rows_have_accepted():
    """One of two rows accepts a draft. If their group keeps its padding, it fails."""
    decoding = Decoding("llama")
    with throughout(decoding.engine.model.dtype):
        expected = decoding.alone()
        text = PROMPTS[0] + expected[0]

        def draft(lookup: Lookup, ids: list[int], most: int) -> list[int]:
            at = len(ids)
            return text[at : at + 2] if at == len(PROMPTS[0]) + 2 and ids == text[:at] else []

        with patch.object(Lookup, "draft", draft):
            decoding.join(0, 1)
            decoding.step(20)
    assert [decoding.tokens[row] for row in range(2)] == expected[:2]
    assert decoding.drafts.report.accepted == decoding.drafts.report.drafted == 2


def test_right_drafts_are_accepted_and_a_row_ends_inside_one(monkeypatch):
    """It fails if rows get the drafts of others, or if tokens of a draft are chosen after its row has ended."""
    decoding = Decoding("llama")
    model, ends = decoding.engine.model, replace(OPTIONS[0], ignore_eos=False)
    with throughout(model.dtype):
        expected = decoding.alone()
        end = next(at for at in range(4, 14) if expected[0][at] not in expected[0][:at])
        monkeypatch.setattr(f"{__name__}.OPTIONS", [ends, *OPTIONS[1:]])
        monkeypatch.setattr(Model, "eos_token_ids", {expected[0][end]})
        with knowing([ids + new for ids, new in zip(PROMPTS, expected, strict=True)], right=1.0):
            decoding.join(1, 2)
            decoding.step(20)
            assert decoding.drafts.report.accepted == decoding.drafts.report.drafted > 4
            decoding.join(0)
            decoding.step(20)
    assert [decoding.tokens[row] for row in range(3)] == [expected[0][: end + 1], *expected[1:3]]


def test_nothing_remains_of_rows_that_left():
    """One row is dropped, one ends in a verification. If rates or texts of either stay, it fails."""
    decoding = Decoding("llama")
    with throughout(decoding.engine.model.dtype):
        texts = [ids + new for ids, new in zip(PROMPTS, decoding.alone(), strict=True)]
        with knowing(texts, right=0.9):
            decoding.join(0, 1)
            decoding.step(2)
            assert len(decoding.drafts.payoff.rates) == 2
            decoding.live.cancel([0])
            decoding.step(20)
    drafts = decoding.drafts
    assert len(decoding.live) == 0 and not drafts._rests and not drafts.drafter._rows and not drafts.payoff.rates


def test_a_row_that_gives_no_numbers_leaves_and_others_go_on(monkeypatch):
    decoding, model = Decoding("llama"), tiny_model("llama")
    forward = model.forward

    def broken(ids_BC, *given, **more):
        logits = forward(ids_BC, *given, **more).clone()
        logits[0] = torch.nan
        return logits

    with throughout(model.dtype):
        expected = decoding.alone()
        decoding.join(0, 1)
        monkeypatch.setattr(model, "forward", broken)
        with knowing([ids + new for ids, new in zip(PROMPTS, expected, strict=True)]):
            decoding.step(1)
            monkeypatch.setattr(model, "forward", forward)
            decoding.step(12)
    assert decoding.tokens[0] == [*expected[0][:1], None] and decoding.tokens[1] == expected[1]


@pytest.mark.parametrize("cancelled", [[], [0]])
def test_tokens_of_a_step_are_told_place_by_place(cancelled):
    """One row accepts a draft of two tokens, the other of one. A row that is cancelled at a place has no later one."""
    decoding, told = Decoding("llama"), list[list[NewToken]]()
    with throughout(decoding.engine.model.dtype):
        expected = decoding.alone()
        texts = [ids + new for ids, new in zip(PROMPTS, expected, strict=True)]

        def draft(lookup: Lookup, ids: list[int], most: int) -> list[int]:
            [row] = [row for row in (0, 1) if ids == texts[row][: len(ids)]]
            return texts[row][len(ids) :][: 2 - row]

        def tell(new: list[NewToken]) -> None:
            told.append(new)
            decoding.live.cancel(cancelled)

        with patch.object(Lookup, "draft", draft):
            decoding.join(0, 1)
            assert decoding.live.step(tell) == told
    places = [{each.row: each.token for each in place} for place in told]
    after = [{row: expected[row][at] for row in rows} for at, rows in ((1, (0, 1)), (2, (0, 1)), (3, (0,)))]
    assert places == ([after[0], {1: expected[1][2]}] if cancelled else after)
    assert decoding.left == ({0: len(PROMPTS[0]) + 1} if cancelled else {})
