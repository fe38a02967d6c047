"""After a draft the states of a hybrid model are those of its right tokens alone, whatever was drafted."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from policies.adakv import AdaKV
from policies.base import Policy
from policies.h2o import H2O
from policies.quest import Quest
from policies.snapkv import SnapKV
from runahead import Conversation, GenerationOptions
from runahead.attention.states import StateLayer, States
from runahead.cache.attention import CausalAttention
from runahead.cache.base import KVStore
from runahead.cache.kept_cache import KeptCache
from runahead.config import CacheOptions, Speculate
from runahead.decoding import lanes
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import Row, RowId
from runahead.decoding.speculative import own_drafts
from runahead.decoding.speculative.own_drafts import OwnDrafter
from runahead.decoding.speculative.payoff import Payoff
from runahead.decoding.speculative.policy_drafts import PolicyDrafter
from runahead.decoding.speculative.speculator import Draft
from runahead.report import SpeculationReport
from runahead.reuse.prefix_tree import PrefixTree
from runahead.thinning.rank_policies import RankPolicies
from tests.decoding import test_live_drafts, test_speculation
from tests.decoding.test_speculation import (
    DRAFTED,
    PLAIN,
    PROMPTS,
    SAMPLED,
    compare,
    drafted,
    engine_of,
    knowing,
    require_same,
)
from tests.families import HYBRIDS, largest_difference, oracle_logits, oracle_tokens, prompt, throughout
from tests.ranks.tasks import tiny_model

FEW = ["qwen3_next", "falcon_h1", "lfm2", "mamba2"]
"""Recurrent states, states beside attention in a layer, convolution states alone, no layer with attention."""

LENGTHS = [replace(PLAIN, max_new_tokens=num, logprobs=2) for num in (20, 5, 14)]
"""With log-probabilities, in which a wrong state shows where the tokens stay the same."""

OTHER_TOKENS = (AssertionError, ValueError)
"""Errors that `compare` raises then: the second if drafts are asked for after tokens that `knowing` does not know."""


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with throughout(torch.float64):
        yield


@pytest.mark.parametrize(
    "family", [family if family in FEW else pytest.param(family, marks=pytest.mark.slow) for family in HYBRIDS]
)
def test_greedy_tokens_of_rows_that_accept_different_lengths(family: str) -> None:
    """They are those of plain decoding, which are transformers' own."""
    report = compare(engine_of(tiny_model(family)), PROMPTS, LENGTHS, 0.6)
    assert 5 < report.accepted < report.drafted and len(report.accepted_lengths) > 2
    batch = engine_of(tiny_model(family)).generate(PROMPTS, LENGTHS)
    for ids, options, row in zip(PROMPTS, LENGTHS, batch.generations, strict=True):
        assert row.new_token_ids == oracle_tokens(family, tuple(ids), options.max_new_tokens)


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_seed_gives_the_tokens_that_it_gives_without_drafts(rows: int, right: float) -> None:
    options = [replace(PLAIN, max_new_tokens=20, do_sample=True, seed=row, **SAMPLED[row]) for row in range(rows)]
    compare(engine_of(tiny_model("qwen3_next")), PROMPTS[:rows], options, right)


def left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: the states keep what rejected tokens have left in them."""
    monkeypatch.setattr(States, "copy_from", lambda self, other: None)


@pytest.mark.parametrize("family", FEW)
def test_a_state_after_a_rejected_draft_shows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left_as_it_is(monkeypatch)
    with pytest.raises(OTHER_TOKENS):
        compare(engine_of(tiny_model(family)), PROMPTS, LENGTHS, 0.6)


def test_right_tokens_that_are_not_computed_again_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other wrong variant: the state goes back, and the right tokens of the draft are lost."""
    monkeypatch.setattr(lanes.Lane, "to_feed", lambda self, ids: [*ids])
    with pytest.raises(OTHER_TOKENS):
        compare(engine_of(tiny_model("qwen3_next")), PROMPTS, LENGTHS, 0.6)


def test_tokens_come_again_a_few_times_and_then_have_a_forward_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts that are always wrong a row would otherwise have ever more tokens to compute again."""
    verify, fed = Lanes.verify, list[int]()

    def counted(self: Lanes, ids: Mapping[Any, Sequence[int]]) -> Any:
        fed.extend(len(self._lanes[row].to_feed(of_row)) for row, of_row in ids.items())
        return verify(self, ids)

    monkeypatch.setattr(Lanes, "verify", counted)
    options = replace(PLAIN, max_new_tokens=40)
    compare(engine_of(tiny_model("qwen3_next")), PROMPTS[:1], [options], 0.0)
    alone = sum(num == lanes.MOST_AGAIN for num in fed)
    assert max(fed) <= lanes.MOST_AGAIN + DRAFTED.speculate_tokens and alone <= 40 / lanes.MOST_AGAIN


def test_a_smaller_model_with_states_drafts() -> None:
    """A copy of the model drafts what it generates itself, also sampled, which shows that its states are right.

    Another one is mostly wrong. A model with states drafts for one without them, too, and the other way round.
    """
    model, other = tiny_model("qwen3_next"), tiny_model("lfm2")
    for verifying, by, least, most in (
        (model, model, 1.0, 1.0),
        (model, Draft(by=model, first="lookup"), 1.0, 1.0),
        (model, Draft(by=model, first=other), 1.0, 1.0),
        (other, model, 0.0, 0.7),
        (tiny_model("llama"), model, 0.0, 0.7),
        (model, tiny_model("llama"), 0.0, 0.7),
    ):
        report = require_same(engine_of(verifying, draft=by), Speculate.model, PROMPTS, num_drafted=4)
        assert least <= report.accepted / report.drafted <= most


def off_after_taking_back(family: str) -> float:
    """How far logits are off after tokens that were taken back as a drafting model does: over several forwards.

    One token at a time and several, twice before others come, and with two rows of which one goes on otherwise.
    """
    model, texts = tiny_model(family), {0: list(PROMPTS[0]), 1: list(PROMPTS[1])}
    longest = max(map(len, texts.values()))
    pads = [longest - len(text) for text in texts.values()]
    off = 0.0

    def feed(ids: dict[RowId, list[int]]) -> None:
        nonlocal off
        for row, logits_CV in holding.verify(ids).items():
            texts[row] += ids[row]
            off = max(off, largest_difference(logits_CV[-1], oracle_logits(family, tuple(texts[row]))))

    def step(ids: dict[RowId, int]) -> None:
        nonlocal off
        for row, logits_V in zip(*holding.plain(ids), strict=True):
            texts[row].append(ids[row])
            off = max(off, largest_difference(logits_V, oracle_logits(family, tuple(texts[row]))))

    def take_back(row: RowId, num: int) -> None:
        holding.take_back(row, num)
        del texts[row][-num:]

    with throughout(model.dtype), torch.inference_mode():
        cache = model.empty_cache(longest + 40, batch=2)
        ids_BS = torch.tensor([[0] * pad + text for pad, text in zip(pads, texts.values(), strict=True)])
        model.forward(ids_BS, CausalAttention(cache, start=0, pads=pads), start=0, pads=pads)
        holding = Lanes.holding(model, [0, 1], cache, pads=pads, num_tokens=longest)
        holding.part()
        for first in (5, 6):
            holding.keep([0, 1])
            step({0: first, 1: 7})
            step({0: 8, 1: 9})
            feed({0: [10, 11, 12], 1: [13]})
            take_back(0, 2)
            take_back(0, 1)
            take_back(1, 2)
            step({0: 14, 1: 15})
            feed({0: [16], 1: [17, 18]})
    return off


@pytest.mark.parametrize("family", FEW)
def test_tokens_of_several_forwards_are_taken_back(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafting model feeds its drafts one by one. If its states are left as they are, it fails."""
    assert off_after_taking_back(family) < 1e-9
    left_as_it_is(monkeypatch)
    assert off_after_taking_back(family) > 1e-6


def alive_bytes() -> int:
    """Bytes of all states that are in memory."""
    gc.collect()
    layers = [each for each in gc.get_objects() if isinstance(each, StateLayer)]
    storages = [state.untyped_storage() for layer in layers for *_, state in layer.tensors()]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def test_states_of_a_batch_are_counted_to_the_byte() -> None:
    """Each row has one, and one more that is kept before a draft: not what they had before they moved or left."""
    model, rows, ids = tiny_model("qwen3_next"), [0, 1, 2], prompt(20)
    of_row, before = sum(shape.num_bytes for shape in model.state_shapes), alive_bytes()
    with throughout(model.dtype), torch.inference_mode():
        cache = model.empty_cache(len(ids) + 20, batch=3)
        model.forward(torch.tensor([ids] * 3), CausalAttention(cache, start=0, pads=[0] * 3), start=0, pads=[0] * 3)
        holding = Lanes.holding(model, rows, cache, pads=[0] * 3, num_tokens=len(ids))
        kv_bytes = holding.num_bytes - 3 * of_row

        def require(num_states: int) -> None:
            assert alive_bytes() - before == num_states * of_row
            assert holding.num_bytes == kv_bytes + num_states * of_row

        require(3)
        holding.keep(rows)
        holding.verify({0: [5, 6], 1: [7, 8], 2: [9]})
        require(6)
        holding.take_back(1, 1)
        holding.leave(0, 6)
        require(5)
        holding.keep([1, 2])
        holding.verify({1: [10], 2: [11, 12]})
        require(4)
        holding.leave(1, 10)
        holding.verify({2: [13]})
        require(2)


def test_tokens_of_before_the_kept_states_cannot_be_taken_back() -> None:
    model, ids = tiny_model("qwen3_next"), prompt(20)
    with throughout(model.dtype), torch.inference_mode():
        cache = model.empty_cache(len(ids) + 20)
        model.forward(torch.tensor([ids]), CausalAttention(cache, start=0, pads=[0]), start=0, pads=[0])
        holding = Lanes.holding(model, [0], cache, pads=[0], num_tokens=len(ids))
        holding.verify({0: [5]})
        holding.keep([0])
        holding.verify({0: [6, 7]})
        with pytest.raises(AssertionError, match="3 tokens cannot be taken back: states were kept 2 tokens ago"):
            holding.take_back(0, 3)


@pytest.mark.parametrize(
    "policy",
    [SnapKV(budget=12, window=4), AdaKV(scorer=SnapKV(budget=12, window=4)), H2O(budget=10, recent=3, evict_every=3)],
    ids=lambda policy: type(policy).__name__,
)
@pytest.mark.parametrize("bits", [None, 4])
def test_drafts_under_policies(policy: Policy, bits: int | None) -> None:
    """Also where they decide on each token, and where keys are quantised as tokens come."""
    policies = RankPolicies.everywhere([policy])
    policies = replace(policies, storage=CacheOptions(bits=bits, residual=8)) if bits else policies
    compare(engine_of(tiny_model("qwen3_next"), policies=policies), PROMPTS, LENGTHS, 0.6)


@pytest.mark.parametrize("always", [True, False])
def test_rows_that_join_early_and_late_have_the_tokens_that_each_has_alone(
    always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [replace(each, speculate_always=always) for each in test_live_drafts.OPTIONS]
    monkeypatch.setattr(test_live_drafts, "OPTIONS", options)
    decoding = test_live_drafts.Decoding("qwen3_next")
    with throughout(decoding.engine.model.dtype):
        expected = decoding.alone()
        texts = [ids + new for ids, new in zip(test_live_drafts.PROMPTS, expected, strict=True)]
        with knowing(texts, right=0.6):
            decoding.join(0)
            decoding.step(2)
            decoding.join(1, 2)
            decoding.step(2)
            decoding.join(3)
            decoding.step(30)
    assert [decoding.tokens[row] for row in range(4)] == expected


@pytest.mark.parametrize("family", FEW)
@pytest.mark.parametrize("pad", [0, 3])
def test_a_conversation_speculates_in_every_turn(family: str, pad: int) -> None:
    """Answers and what follows them are those of one text, and a fork is not changed by what is taken back."""
    model, ids, more = tiny_model(family), PROMPTS[0], prompt(7, seed=5)
    other = tiny_model("falcon_h1" if family == "lfm2" else "lfm2")
    for kind in (Speculate.lookup, Speculate.model):
        talking, options = Conversation(model, draft=other), replace(drafted(PLAIN), speculate=kind)
        talking.feed(torch.tensor([[0] * pad + ids]), pads=[pad])
        forked = talking.fork()
        known = [*ids, *oracle_tokens(family, tuple(ids), PLAIN.max_new_tokens)]
        with knowing([known], right=0.6):
            talking.generate(options)
        assert talking.rows == [known] and talking.num_tokens == pad + len(known) - 1
        assert talking.speculation is not None and talking.speculation.accepted < talking.speculation.drafted
        ours = talking.feed(torch.tensor([more]))
        assert largest_difference(ours[0], oracle_logits(family, (*known, *more))) < 1e-9
        ours = forked.feed(torch.tensor([more]))
        assert largest_difference(ours[0], oracle_logits(family, (*ids, *more))) < 1e-9


def later_prompt(family: str) -> tuple[float, int]:
    """A prompt that begins as a drafted answer ended, of which a tree has the states.

    Returns:
        how far its log-probabilities are off those without a tree, and how many tokens it reused.
    """
    model, ids, asked = tiny_model(family), PROMPTS[0], replace(PLAIN, logprobs=2)
    engine, plain = engine_of(model, tree=PrefixTree(1 << 40)), engine_of(model)
    answer = plain.generate([ids], PLAIN).generations[0].new_token_ids
    with knowing([ids + answer], right=0.6):
        first = engine.generate([ids], DRAFTED).generations[0].new_token_ids
    longer = ids + first + prompt(5, seed=9)
    batch = engine.generate([longer], asked)
    pairs = zip(*(each.generations[0].logprobs or [] for each in (batch, plain.generate([longer], asked))), strict=True)
    reuse = batch.ranks[0].reuse
    return max(
        abs(ours.logprob - theirs.logprob) for ours, theirs in pairs
    ), 0 if reuse is None else reuse.cached_tokens


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_what_is_stored_for_later_prompts_is_what_was_accepted(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    off, reused = later_prompt(family)
    assert off < 1e-9 and reused > len(PROMPTS[0])
    left_as_it_is(monkeypatch)
    try:
        assert later_prompt(family)[0] > 1e-7
    except ValueError as error:  # other tokens, which `knowing` does not know
        assert "to unpack" in str(error), error


def policy_of(name: str, keeps: str) -> RankPolicies:
    """Policies that drafts are made by.

    Args:
        keeps: "all" tokens, so that each draft is what the model itself generates, or "few".
    """
    found: dict[tuple[str, str], Policy] = {
        ("snapkv", "all"): SnapKV(budget=1.0, window=4),
        ("snapkv", "few"): SnapKV(budget=0.2, window=4),
        ("adakv", "all"): AdaKV(scorer=SnapKV(budget=1.0, window=4)),
        ("adakv", "few"): AdaKV(scorer=SnapKV(budget=0.2, window=4)),
        ("quest", "all"): Quest(**test_speculation.MOST, page=2, fetch=200),
        ("quest", "few"): Quest(**test_speculation.MOST, page=2, fetch=0.2),
    }
    return RankPolicies.everywhere([found[name, keeps]])


def by_policy(options: GenerationOptions, num_drafted: int = 4) -> GenerationOptions:
    more = {"speculate": Speculate.policy, "speculate_match": 1, "speculate_always": True}
    return replace(options, speculate_tokens=num_drafted, **more)


def drafts_by_policy(family: str, by: RankPolicies | Draft, options: list[GenerationOptions]) -> SpeculationReport:
    """Generate with drafts by a policy, and require the tokens and log-probabilities of plain decoding, which are those
    of transformers. Returns what was drafted."""
    engine = engine_of(tiny_model(family), draft=by)
    plain = engine.generate(PROMPTS, options).generations
    batch = engine.generate(PROMPTS, [by_policy(each) for each in options])
    for ids, asked, ours, theirs in zip(PROMPTS, options, batch.generations, plain, strict=True):
        num_new = len(theirs.new_token_ids)
        assert ours.new_token_ids == theirs.new_token_ids
        assert asked.do_sample or theirs.new_token_ids == oracle_tokens(family, tuple(ids), num_new)
        for at, expected in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
            assert abs(at.logprob - expected.logprob) < 1e-9
    report = batch.ranks[0].speculation
    assert report is not None
    return report


LONG = [replace(each, max_new_tokens=num) for each, num in zip(LENGTHS, (30, 5, 24), strict=True)]
"""The second row ends before drafts begin."""

WITH_ATTENTION = [family for family in HYBRIDS if family not in ("mamba", "mamba2")]
SOME = ["qwen3_next", "falcon_h1", "lfm2", "jamba"]


@pytest.mark.parametrize("name", ["snapkv", "adakv", "quest"])
@pytest.mark.parametrize(
    "family", [family if family in SOME else pytest.param(family, marks=pytest.mark.slow) for family in WITH_ATTENTION]
)
def test_the_model_drafts_over_what_a_policy_keeps(family: str, name: str) -> None:
    """Drafts over all tokens are right, which shows that drafting moves the right states and leaves no trace in them.

    Over few tokens they are wrong at times. Rows of several lengths, one of a single token.
    """
    right = drafts_by_policy(family, policy_of(name, "all"), LONG)
    assert right.accepted == right.drafted > 10
    few = drafts_by_policy(family, policy_of(name, "few"), LONG)
    assert few.accepted < few.drafted


def test_drafts_from_states_of_another_text_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong variants: drafts begin from the states after the prompt, and those that retrieve go on from rejected ones.

    Over all tokens they are then wrong, and the tokens are still those of plain decoding.
    """
    origins, join = dict[RowId, States](), OwnDrafter.join

    def noted(self: OwnDrafter, id: RowId, row: Row) -> None:
        states = self._whole.lane(id).cache.states
        assert states is not None
        origins[id] = states.fork()
        join(self, id, row)

    with monkeypatch.context() as wrong:
        wrong.setattr(OwnDrafter, "join", noted)
        wrong.setattr(OwnDrafter, "_states_of", lambda self, row: origins[row].fork())
        report = drafts_by_policy("qwen3_next", policy_of("snapkv", "all"), LONG)
        assert report.accepted < report.drafted
    set_stored = Lanes.set_stored
    monkeypatch.setattr(Lanes, "set_stored", lambda self, row, num, states=None: set_stored(self, row, num))
    report = drafts_by_policy("qwen3_next", policy_of("quest", "all"), LONG)
    assert report.accepted < report.drafted


@pytest.mark.parametrize("first", ["lookup", "model"])
@pytest.mark.parametrize("name", ["snapkv", "quest"])
def test_others_draft_for_a_policy(name: str, first: str) -> None:
    """A forward of the drafter verifies several tokens then, some of which are wrong."""
    by = Draft(by=policy_of(name, "all"), first="lookup" if first == "lookup" else tiny_model("lfm2"))
    options = [*LONG[:2], replace(LONG[2], do_sample=True, temperature=0.7, seed=3)]
    report = drafts_by_policy("qwen3_next", by, options)
    assert report.accepted == report.drafted > 10
    assert report.within is not None and 0 < report.within.drafted > report.within.accepted


def test_a_policy_chooses_by_the_tokens_after_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it keeps is what it keeps of the same text in one forward, whose last queries are those of these tokens."""
    made, kept_of = list[tuple[list[int], KVStore]](), PolicyDrafter._kept

    def noted(self: PolicyDrafter, row: RowId, ids: Sequence[int]) -> KVStore:
        made.append((list(ids), kept_of(self, row, ids)))
        return made[-1][1].fork()

    monkeypatch.setattr(PolicyDrafter, "_kept", noted)
    policies = policy_of("snapkv", "few")
    drafts_by_policy("qwen3_next", policies, LONG)
    assert [len(ids) - len(PROMPTS[row]) for ids, row in zip([ids for ids, _ in made], (0, 2), strict=True)] == [8, 8]
    for ids, kept in made:
        talking = Conversation(tiny_model("qwen3_next"), policies)
        talking.feed(torch.tensor([ids]))
        assert talking.cache is not None and isinstance(kept, KeptCache)
        for ours, theirs in zip(kept.layers, talking.cache.layers, strict=True):
            assert torch.equal(ours.positions_BKn(), theirs.positions_BKn())
            assert largest_difference(ours.kv_BKnX(), theirs.kv_BKnX()) < 1e-9
        assert kept.states is not None and talking.cache.states is not None
        for mine, theirs in zip(kept.states.layers, talking.cache.states.layers, strict=True):
            for (*_, state), (*_, expected) in zip(mine.tensors(), theirs.tensors(), strict=True):
                assert largest_difference(state, expected) < 1e-9


def test_states_before_drafts_are_kept_anew_where_these_begin_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else ever more tokens would have to be computed once more. They are counted in the bytes until drafts begin."""
    model, begun = tiny_model("qwen3_next"), list[int]()
    of_row = sum(shape.num_bytes for shape in model.state_shapes)
    monkeypatch.setattr(own_drafts, "OBSERVED_TOKENS", 10)
    observed = OwnDrafter._observed

    def noted(self: OwnDrafter, row: RowId, whole: Any, num_tokens: int, num_last: int) -> Any:
        assert self.num_bytes == of_row
        first, states = observed(self, row, whole, num_tokens, num_last)
        begun.append(num_tokens - first)
        return first, states

    may_begin = Payoff.may_begin
    monkeypatch.setattr(OwnDrafter, "_observed", noted)
    steps = iter(range(100))
    monkeypatch.setattr(Payoff, "may_begin", lambda self, *given: next(steps) >= 5 and may_begin(self, *given))
    options = replace(PLAIN, max_new_tokens=60, logprobs=2)
    engine = engine_of(model, draft=policy_of("snapkv", "all"))
    batch = engine.generate(PROMPTS[:1], by_policy(options))
    assert batch.generations[0].new_token_ids == oracle_tokens("qwen3_next", tuple(PROMPTS[0]), 60)
    report = batch.ranks[0].speculation
    assert report is not None and report.accepted == report.drafted > 10 and report.declined == 5
    assert begun == [10]


def test_rows_of_a_batch_ask_for_different_drafts() -> None:
    """Of a policy, of look-up, and of none."""
    engine = engine_of(tiny_model("qwen3_next"), draft=policy_of("quest", "all"))
    options = [replace(each, max_new_tokens=30) for each in LENGTHS]
    plain = [each.new_token_ids for each in engine.generate(PROMPTS, options).generations]
    asked = [by_policy(options[0]), drafted(options[1]), options[2]]
    with knowing([ids + new for ids, new in zip(PROMPTS, plain, strict=True)], right=0.0):
        batch = engine.generate(PROMPTS, asked)
    assert [each.new_token_ids for each in batch.generations] == plain
    report = batch.ranks[0].speculation
    assert report is not None and 0 < report.accepted < report.drafted


@pytest.mark.parametrize("keeps", ["all", "few"])
@pytest.mark.parametrize("name", ["snapkv", "quest"])
def test_a_conversation_drafts_by_a_policy(name: str, keeps: str) -> None:
    """In every turn anew; a fork is not changed by it."""
    family, ids, more = "qwen3_next", PROMPTS[0], prompt(7, seed=5)
    talking = Conversation(tiny_model(family), draft=policy_of(name, keeps))
    options = by_policy(replace(PLAIN, max_new_tokens=20))
    talking.feed(torch.tensor([ids]))
    text = list(ids)
    for _ in range(2):
        forked = talking.fork()
        talking.generate(options)
        answer = oracle_tokens(family, tuple(text), 20)
        assert talking.rows[0] == [*text, *answer] and talking.speculation is not None
        assert (talking.speculation.accepted == talking.speculation.drafted) == (keeps == "all")
        ours = forked.feed(torch.tensor([more]))
        assert largest_difference(ours[0], oracle_logits(family, (*text, *more))) < 1e-9
        text += [*answer, *more]
        ours = talking.feed(torch.tensor([more]))
        assert largest_difference(ours[0], oracle_logits(family, tuple(text))) < 1e-9


def test_policies_do_not_draft_where_there_are_states_alone() -> None:
    with pytest.raises(ValueError, match="stores no keys and values, of which policy snapkv"):
        engine_of(tiny_model("mamba2"), draft=policy_of("snapkv", "few")).generate(PROMPTS[:1], by_policy(PLAIN))
