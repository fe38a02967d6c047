"""Speculation changes no token: not of a batch, not of sampled answers, whatever is drafted and however rows end."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from launch.inputs.draft import draft_of
from launch.inputs.options import DraftOptions, RunOptions, ineffective_settings
from launch.outputs.summary import summary
from launch.server.options import ServeRun
from policies.adakv import AdaKV
from policies.exact_topk import ExactTopK
from policies.infinigen import InfiniGen
from policies.magicpig import MagicPIG
from policies.quest import Pages, Quest
from policies.retriever import Choice, Index, Slots
from policies.retroinfer import RetroInfer
from policies.snapkv import SnapKV
from policies.sparq import SparQ
from runahead import Engine, GenerationOptions, Model, PrefillOptions, Ranks
from runahead.cache.attention import CausalAttention
from runahead.config import (
    MAX_DRAFT_TOKENS,
    CacheOptions,
    DecodeName,
    DecodeOptions,
    Device,
    PrefillName,
    RanksOptions,
    Speculate,
)
from runahead.conversation import Conversation
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import Row
from runahead.decoding.rows import Choose, choose_alone, decode
from runahead.decoding.sampling import Sampler
from runahead.decoding.speculative import retrieving_drafts, speculator
from runahead.decoding.speculative.drafts import Lookup, LookupDrafter
from runahead.decoding.speculative.payoff import FREE_STEPS, INVESTED, LOSS, Payoff
from runahead.decoding.speculative.proposals import PayingDrafts
from runahead.decoding.speculative.retrieving_drafts import over_whole
from runahead.decoding.speculative.speculator import Draft
from runahead.report import GenerationBatch, SpeculationReport
from runahead.retrieval.cache import RetrievedCache
from runahead.reuse.prefix_tree import PrefixTree
from runahead.thinning.rank_policies import RankPolicies
from tests.cache.test_fixed_cache import Gpu
from tests.families import VOCAB_SIZE, WINDOW, build, prompt, save_tiny_llama
from tests.policies.test_indices import view
from tests.ranks.tasks import tiny_model
from tests.tokenizers_for_tests import byte_level

NUM_NEW = 12
PLAIN = GenerationOptions(max_new_tokens=NUM_NEW, ignore_eos=True)
DRAFTED = replace(PLAIN, speculate=Speculate.lookup, speculate_tokens=5, speculate_always=True)
PROMPTS = [prompt(2 * WINDOW + 9, seed=1), prompt(WINDOW + 3, seed=2), prompt(1, seed=4)]


def engine_of(model: Model, **more: Any) -> Engine:
    return Engine(model, Ranks.start(RanksOptions(device=Device.cpu)), **more)


def drafted(options: GenerationOptions) -> GenerationOptions:
    return replace(options, speculate=Speculate.lookup, speculate_tokens=5, speculate_always=True)


def report_of(batch: GenerationBatch) -> SpeculationReport:
    report = batch.ranks[0].speculation
    assert report is not None
    return report


@contextmanager
def knowing(texts: Sequence[Sequence[int]], *, right: float = 0.8, vocab_size: int = VOCAB_SIZE) -> Iterator[None]:
    """Drafts are what follows in these texts, but for some wrong tokens, and of random lengths."""
    draw = random.Random(0)

    def draft(lookup: Lookup, text: list[int], most: int) -> list[int]:
        [found] = [list(each) for each in texts if list(each[: len(text)]) == text][:1]
        num = draw.randint(0, max(0, most))
        return [
            token if draw.random() < right else draw.randrange(vocab_size)
            for token in found[len(text) : len(text) + num]
        ]

    with patch.object(Lookup, "draft", draft):
        yield


def compare(engine: Engine, prompts: list[list[int]], options: Sequence[GenerationOptions], right: float = 0.8) -> Any:
    """Generate without speculation and with it, and compare tokens, texts and ends. Returns the report."""
    plain = engine.generate(prompts, list(options)).generations
    texts = [ids + each.new_token_ids for ids, each in zip(prompts, plain, strict=True)]
    with knowing(texts, right=right, vocab_size=engine.model.vocab_size):
        batch = engine.generate(prompts, [drafted(each) for each in options])
    for ours, theirs in zip(batch.generations, plain, strict=True):
        assert ours.new_token_ids == theirs.new_token_ids
        assert (ours.finish_reason, ours.text) == (theirs.finish_reason, theirs.text)
        for at, expected in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
            assert abs(at.logprob - expected.logprob) < 1e-9
    return report_of(batch)


FAMILIES = ["llama", "mistral", "gpt2"]
MORE_FAMILIES = ["gemma2", "gpt_oss", "deepseek_v3", "bloom", "llama4_text", "llama4_text_tempered", "mixtral", "opt"]


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(family, marks=pytest.mark.slow) for family in MORE_FAMILIES)]
)
def test_greedy_tokens_of_rows_that_accept_different_lengths(family: str) -> None:
    """Rows end at different places, beyond the window, and one prompt is a single token.

    It fails where a row goes on after a rejected token, or takes a wrong one; where rejected tokens stay in its length;
    and where rows get each other's logits, or no padding.
    """
    model = tiny_model(family)
    prompts = PROMPTS if model.uneven_limit is None else [prompt(2 * WINDOW, seed=seed) for seed in range(3)]
    options = [replace(PLAIN, max_new_tokens=num) for num in (NUM_NEW, 5, 9)]
    report = compare(engine_of(model), prompts, options)
    assert report.accepted > 5 and report.accepted < report.drafted and len(report.accepted_lengths) > 2
    assert sum(number * count for number, count in enumerate(report.accepted_lengths)) == report.accepted


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.7, "top_k": 7},
    {"top_p": 0.8, "min_p": 0.05},
    {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logprobs": 2},
]


@pytest.mark.parametrize("right", [0.8, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_seed_gives_the_tokens_that_it_gives_without_drafts(right: float) -> None:
    options = [replace(PLAIN, do_sample=True, seed=seed, **each) for seed, each in enumerate(SAMPLED)]
    compare(engine_of(tiny_model("llama")), PROMPTS, options, right)


def test_rows_without_speculation_beside_rows_with_it() -> None:
    engine, ids = engine_of(tiny_model("llama")), PROMPTS[:2]
    few = replace(PLAIN, max_new_tokens=6)
    plain = engine.generate(ids, few).generations
    batch = engine.generate(ids, [few, drafted(few)])
    assert [each.new_token_ids for each in batch.generations] == [each.new_token_ids for each in plain]


def test_a_row_ends_inside_a_draft() -> None:
    """It ends at a token that ends texts, at a stop string, at the most new tokens, or as a reader cancels it.

    Where tokens of its draft are still chosen then, it fails.
    """
    model = Model(build("llama", vocab_size=len(byte_level())), byte_level())
    engine, long = engine_of(model), replace(PLAIN, max_new_tokens=14)
    ids = [prompt(12, seed=seed) for seed in range(4)]
    free = [each.new_token_ids for each in engine.generate(ids, long).generations]
    eos = free[0][5]
    stop = model.tokenizer.decode(free[1][6:9])
    with patch.object(Model, "eos_token_ids", {eos}):
        options = [
            replace(long, ignore_eos=False),
            replace(long, stop=[stop]) if stop else long,
            replace(long, max_new_tokens=7),
            long,
        ]
        compare(engine, ids, options, 1.0)
        steps: list[list[int | None]] = []

        def on_tokens(tokens: list[int | None]) -> list[int]:
            steps.append(tokens)
            return [3] if sum(step[3] is not None for step in steps) >= 4 else []

        texts = [start + new for start, new in zip(ids, free, strict=True)]
        with knowing(texts, right=1.0, vocab_size=model.vocab_size):
            batch = engine.generate(ids, [drafted(each) for each in options], on_tokens=on_tokens, cancellable=True)
    told = [[step[row] for step in steps if step[row] is not None] for row in range(4)]
    assert told == [each.new_token_ids for each in batch.generations]
    assert batch.generations[3].finish_reason == "cancelled" and len(told[3]) < 8


def test_plain_steps_follow_what_is_taken_back() -> None:
    """One row takes tokens back, so rows are at another distance. If their forward keeps its padding, it fails."""
    model, longest, pads = tiny_model("llama"), len(PROMPTS[0]), [0, len(PROMPTS[0]) - len(PROMPTS[1])]
    cache = model.empty_cache(longest + 3, batch=2)
    ids_BS = torch.tensor([PROMPTS[0], [0] * pads[1] + PROMPTS[1]])
    model.forward(ids_BS, CausalAttention(cache, start=0, pads=pads), start=0, pads=pads)
    lanes = Lanes.holding(model, [0, 1], cache, pads=pads, num_tokens=longest)
    lanes.part()
    _, first = lanes.plain({0: 5, 1: 6})
    lanes.take_back(0, 1)
    _, second = lanes.plain({0: 5, 1: 7})
    text = [*PROMPTS[1], 6, 7]
    attention = CausalAttention(model.empty_cache(len(text)), start=0, pads=[0])
    expected_1V = model.forward(torch.tensor([text]), attention, start=0, pads=[0])
    assert torch.allclose(second[0], first[0], atol=1e-9) and torch.allclose(second[1], expected_1V[0], atol=1e-9)


def test_what_is_stored_for_later_prompts_is_what_was_accepted() -> None:
    """Later prompts begin as the text with its answer does, whose rejected tokens must not be in the tree.

    It fails where rejected tokens stay in a row's length.
    """
    model = tiny_model("llama")
    tree = PrefixTree(1 << 40)
    engine, plain = engine_of(model, tree=tree), engine_of(model)
    ids = PROMPTS[0]
    expected = plain.generate([ids], PLAIN).generations[0].new_token_ids
    with knowing([ids + expected]):
        first = engine.generate([ids], DRAFTED).generations[0].new_token_ids
    longer = ids + first + prompt(5, seed=9)
    follow = plain.generate([longer], PLAIN).generations[0].new_token_ids
    with knowing([longer + follow]):
        batch = engine.generate([longer], DRAFTED)
    assert (first, batch.generations[0].new_token_ids) == (expected, follow)
    assert batch.ranks[0].reuse is not None and batch.ranks[0].reuse.cached_tokens > len(ids)


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(PROMPTS[:1], id="one"),
        pytest.param(PROMPTS, id="padded", marks=pytest.mark.slow),
        pytest.param([PROMPTS[0], PROMPTS[0][::-1]], id="rows"),
    ],
)
def test_a_gpu_replays_plain_steps_between_verifications(ids: list[list[int]]) -> None:
    gpu = Gpu()
    engine = engine_of(tiny_model("llama"))
    with patch("runahead.decoding.forward.accelerator_for", lambda device: gpu):
        options = [replace(PLAIN, max_new_tokens=26 - 5 * row) for row in range(len(ids))]
        report = compare(engine, ids, options, 0.6)
    assert gpu.num_replays > 1 and report.verifications > 3


NUM_ROWS, NUM_IDS, NUM_DRAWN = 4000, 4, 3
LOGITS = 1.5 * torch.randn(NUM_IDS, NUM_IDS, generator=torch.Generator().manual_seed(2))
"""A language of four tokens, each of which depends on the one before it."""


class Language:
    """The lanes of texts in that language."""

    warm_up = num_bytes = 0

    def outgrown(self, rows: Iterable[int]) -> list[int]:
        return []

    def most_at_once(self, rows: Iterable[int]) -> int | None:
        return None

    def plain(self, last_ids: Mapping[int, int]) -> tuple[list[int], Tensor]:
        return list(last_ids), LOGITS[list(last_ids.values())]

    def verify(self, ids: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        return {row: LOGITS[list(of_row)] for row, of_row in ids.items()}

    def keep(self, rows: Iterable[int]) -> None:
        pass

    def take_back(self, row: int, num: int) -> None:
        pass

    def leave(self, row: int, last_id: int) -> None:
        pass


SPEECH = SimpleNamespace(device=torch.device("cpu"), tokenizer=None, eos_token_ids=set())


def by_the_rule(drafted: dict[Sampler, list[int]]) -> Choose:
    return choose_alone


def as_published(drafted: dict[Sampler, list[int]]) -> Choose:
    """The rule of TriForce's middle level: what takes the place of a rejected token is drawn from the whole law."""

    def choose(samplers: Sequence[Sampler | None], logits_BV: Tensor | None) -> list[int | None]:
        chosen = choose_alone(samplers, logits_BV)
        for at, sampler in enumerate(samplers):
            guess = drafted[sampler].pop(0) if drafted.get(sampler) else chosen[at]
            if chosen[at] != guess:
                [chosen[at]] = choose_alone([sampler], logits_BV[at : at + 1])
        return chosen

    return choose


def chi_square(rule: Callable[[dict[Sampler, list[int]]], Choose]) -> float:
    """Chi-square of drawn texts against their law, in its standard deviations above its mean if they follow it."""
    options = replace(
        DRAFTED, max_new_tokens=NUM_DRAWN, do_sample=True, temperature=0.8, top_k=3, speculate_tokens=NUM_DRAWN
    )
    rows, draw = [Row(SPEECH, [0], options, seed=row) for row in range(NUM_ROWS)], random.Random(0)
    drafted: dict[Sampler, list[int]] = {}

    class Guesses(LookupDrafter):
        def draft(
            self, texts: Mapping[int, Sequence[int]], most: Mapping[int, int], samplers: Mapping[int, Sampler]
        ) -> dict[int, list[int]]:
            found = super().draft(texts, most, samplers)
            drafted.update({samplers[row]: list(draft) for row, draft in found.items()})
            return found

    def draft(lookup: Lookup, text: list[int], most: int) -> list[int]:
        likely = int(LOGITS[text[-1]].argmax())
        return draw.choices([likely, *range(NUM_IDS)], [NUM_IDS, *[1] * NUM_IDS], k=most)

    drafts = PayingDrafts(Guesses(), Payoff(warm_up=0), name="lookup")
    with patch.object(Lookup, "draft", draft):
        decode(rows, LOGITS[:1].expand(NUM_ROWS, -1), lambda: (Language(), drafts), choose=rule(drafted))
    assert min(drafts.report.accepted_lengths[:2]) > NUM_ROWS / 4
    law = torch.stack([Sampler(options, 0, SPEECH.device).scores(row).softmax(dim=0) for row in LOGITS])
    counts, probabilities = torch.zeros((NUM_IDS,) * NUM_DRAWN), torch.zeros((NUM_IDS,) * NUM_DRAWN)
    for row in rows:
        counts[tuple(row.new_ids)] += 1
    for text in product(range(NUM_IDS), repeat=NUM_DRAWN):
        probabilities[text] = law[0, text[0]] * law[text[0], text[1]] * law[text[1], text[2]]
    assert counts[probabilities == 0].sum() == 0
    expected = NUM_ROWS * probabilities[probabilities > 0]
    statistic = ((counts[probabilities > 0] - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    return float((statistic - degrees) / (2 * degrees) ** 0.5)


def test_sampled_texts_follow_their_law_and_those_of_the_published_rule_do_not() -> None:
    """Guesses of uniform law would hide the difference: on average over them both rules have the same law."""
    assert abs(chi_square(by_the_rule)) < 4
    assert chi_square(as_published) > 8


def test_lookup_drafts_what_followed_the_longest_earlier_match() -> None:
    drafter = Lookup(2)
    text = [1, 2, 3, 9, 2, 3, 8, 1, 2, 3]
    assert drafter.draft(text, 3) == [9, 2, 3], "three tokens match there, and only two at the later place"
    assert drafter.draft([*text, 8], 2) == [1, 2], "the last of places that match alike"
    assert drafter.draft([*text, 8, 7, 7], 2) == []
    assert Lookup(2).draft([5, 6, 7, 5, 6], 7) == [7, 5, 6, 7, 5, 6, 7], "a draft goes on with itself"
    assert Lookup(2).draft([5], 7) == [] == Lookup(2).draft([5, 6, 5, 6], 0)


def test_each_row_looks_up_in_its_own_text() -> None:
    """With the table of one row for all it fails, as their last tokens are alike. Rows that left have no drafts."""
    drafter, alike = LookupDrafter(), [*[0] * (MAX_DRAFT_TOKENS + 9), 7]
    for row in range(3):
        drafter.join(row, Row(SPEECH, [0], replace(DRAFTED, speculate_match=1), seed=0))
    texts = {row: [7 if at == row else 10 + at for at in range(5)] + alike for row in range(4)}
    drafter.leave(2)
    assert drafter.draft(texts, dict.fromkeys(texts, 1), {}) == {0: [11], 1: [12], 2: [], 3: []}


def test_lookup_forgets_drafts_that_were_taken_back() -> None:
    """It fails if places are known by the number of tokens alone, so that wrong drafts stay in the table."""
    draw, drafter, text = random.Random(0), Lookup(2), [0, 1, 2]
    for _ in range(200):
        tried = text + [draw.randrange(3) for _ in range(draw.randrange(6))]
        assert drafter.draft(tried, 5) == Lookup(2).draft(tried, 5)
        text = tried[: max(len(text), len(tried) - draw.randrange(6))]


class Times:
    """Speculation at given costs: seconds of everything that a payoff decides, with drafts of a given quality."""

    def __init__(
        self,
        *,
        verify_s: Callable[[int], float],
        right: Callable[[int], float],
        num_new: int = 400,
        draft_s: float = 0.0,
        begin_s: float = 0.0,
    ) -> None:
        payoff, draw, self.begun = Payoff(warm_up=2), random.Random(1), num_new if begin_s else 0
        self.seconds, self.plain_s, made, self.verified = 0.0, float(num_new), 0, list[int]()
        while made < num_new:
            accepted = 0
            while accepted < 8 and draw.random() < right(made):
                accepted += 1
            if self.begun > made and payoff.may_begin(1, begin_s, num_new - made):
                payoff.add_beginning(1, begin_s, num_new - made)
                self.seconds, self.begun = self.seconds + begin_s, made
            is_ready = payoff.is_warm(1) and self.begun <= made
            num = payoff.num_to_verify([(0, 8)], is_drafted=not draft_s) if is_ready else 0
            self.verified.append(num)
            if num == 0:
                payoff.add_plain(1, 1.0)
                if not draft_s:
                    payoff.rates[0].add(int(accepted > 0), was_rejected=accepted == 0)
                self.seconds, made = self.seconds + 1.0, made + 1
                continue
            accepted = min(accepted, num)
            payoff.add_verification(1, num, verify_s(num), num_new=accepted + 1, draft_s=num * draft_s)
            payoff.rates[0].add(accepted, was_rejected=accepted < num)
            self.seconds, made = self.seconds + verify_s(num) + num * draft_s, made + accepted + 1


@pytest.mark.parametrize("right", [0.0, 0.1, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("slope", [0.05, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("draft_s", [0.0, 0.2, 0.7])
def test_speculation_never_loses_more_than_its_share(slope: float, right: float, draft_s: float) -> None:
    """Whatever drafts cost: the share, the free steps, and one verification that was begun within them."""
    times = Times(verify_s=lambda num: 1.0 + slope * num, right=lambda made: right, draft_s=draft_s)
    assert times.seconds <= times.plain_s * (1 + LOSS) + FREE_STEPS + (slope + draft_s) * 8


@pytest.mark.parametrize("right", [0.1, 0.6])
@pytest.mark.parametrize("begin_s", [1.0, 5.0, 30.0])
def test_a_drafter_begins_where_its_time_is_within_what_may_be_lost(begin_s: float, right: float) -> None:
    """It fails where a drafter begins at once, or where the time that it took is not counted as lost."""
    times = Times(verify_s=lambda num: 1 + 0.3 * num, right=lambda made: right, draft_s=0.3, begin_s=begin_s)
    assert times.seconds <= times.plain_s * (1 + LOSS + INVESTED) + 1
    assert (times.begun <= 2) == (begin_s < 6) and (times.begun == 400) == (begin_s > 15)


def test_speculation_gains_where_drafts_are_right_and_cheap() -> None:
    times = Times(verify_s=lambda num: 1.0 + 0.05 * num, right=lambda made: 0.9)
    assert times.plain_s / times.seconds > 2
    assert max(times.verified[10:]) == 8


def test_drafts_that_cost_time_are_made_where_they_are_worth_it() -> None:
    times = Times(verify_s=lambda num: 1.0 + 0.05 * num, right=lambda made: 0.95, draft_s=0.2)
    assert times.seconds < 0.6 * times.plain_s and max(times.verified) > 2


def test_speculation_begins_when_the_text_begins_to_repeat() -> None:
    times = Times(verify_s=lambda num: 1.0 + 0.1 * num, right=lambda made: 0.0 if made < 200 else 0.95, num_new=400)
    assert sum(times.verified[:200]) < 60 and times.seconds < 0.85 * times.plain_s


def test_the_report_says_when_speculation_turned_itself_off() -> None:
    class Refusing(Payoff):
        def num_to_verify(self, drafted: Any, **more: Any) -> int:
            return 0

    engine = engine_of(tiny_model("llama"))
    ids = prompt(6) * 3
    with patch.object(speculator, "Payoff", Refusing):
        batch = engine.generate([ids], replace(DRAFTED, speculate_always=False, speculate_match=1))
    report = report_of(batch)
    assert report.verifications == report.drafted == 0 and report.mean_accepted is None
    assert report.declined > 0 and report.off_after is not None and report.plain_steps == NUM_NEW - 1
    text = summary([batch])
    assert f"lookup: no draft was verified; {report.declined:,} drafts left out" in text
    told = summary([engine.generate([ids], replace(DRAFTED, speculate_match=1))])
    assert "drafted tokens accepted" in told and "s verifying" in told
    assert "speculation" not in summary([engine.generate([ids], PLAIN)])


SAMPLING = replace(PLAIN, max_new_tokens=6, do_sample=True, temperature=0.7, repetition_penalty=1.2)


def require_same(
    engine: Engine, kind: Speculate, prompts: list[list[int]], *, num_drafted: int = 2
) -> SpeculationReport:
    """Tokens are those without speculation, of a greedy row and of sampled ones. Returns the report."""
    options = [replace(SAMPLING, seed=row, do_sample=row != 1) for row in range(len(prompts))]
    expected = [each.new_token_ids for each in engine.generate(prompts, options).generations]
    speculating = [
        replace(each, speculate=kind, speculate_tokens=num_drafted, speculate_match=1, speculate_always=True)
        for each in options
    ]
    batch = engine.generate(prompts, speculating)
    assert [each.new_token_ids for each in batch.generations] == expected
    return report_of(batch)


def test_a_smaller_model_drafts() -> None:
    """A copy of the model drafts what it generates itself, also sampled; another one is mostly wrong.

    It fails with other draws than the sampler's next ones, with these draws taken from the sampler, where its own wrong
    drafts stay in the drafting model's cache, and where the last drafted token is taken to be in it.
    """
    model = tiny_model("llama")
    for draft, least, most in ((model, 1.0, 1.0), (Model(build("qwen2")), 0.0, 0.7)):
        report = require_same(engine_of(model, draft=draft), Speculate.model, PROMPTS)
        assert report.drafts == "model" and least <= report.accepted / report.drafted <= most


def test_the_model_drafts_over_what_a_policy_keeps() -> None:
    """With all tokens kept, every draft is right; a policy that keeps few tokens is wrong at times.

    It fails where a row drafts from what is kept of another.
    """
    engines = [engine_of(tiny_model("llama"), draft=policies(budget)) for budget in (1.0, 0.2)]
    reports = [require_same(each, Speculate.policy, PROMPTS[:2]) for each in engines]
    assert reports[0].accepted == reports[0].drafted and 0 < reports[1].accepted < reports[1].drafted
    windows = engine_of(tiny_model("gemma2"), draft=policies(0.5))
    assert require_same(windows, Speculate.policy, PROMPTS[:1]).drafted > 0


def policies(budget: float) -> RankPolicies:
    return RankPolicies.everywhere([SnapKV(budget=budget, window=4)])


def test_a_drafter_that_begins_late_has_the_text_so_far() -> None:
    """All drafts are right then, too. It fails where it has stored the prompt alone and takes the text for stored."""
    model, steps = tiny_model("llama"), list[int]()

    class Late(PayingDrafts):
        def begin(self, num_rows: int, num_left: int) -> None:
            steps.append(num_left)
            if num_left < NUM_LEFT:
                super().begin(num_rows, num_left)

    for draft, kind in (
        (model, Speculate.model),
        (policies(1.0), Speculate.policy),
        (RankPolicies.everywhere([Quest(**MOST, page=2, fetch=200)]), Speculate.policy),
    ):
        with patch.object(speculator, "PayingDrafts", Late):
            report = require_same(engine_of(model, draft=draft), kind, PROMPTS[:2])
        assert report.accepted == report.drafted > 0 and report.plain_steps >= 2
    assert max(steps) == SAMPLING.max_new_tokens - 1


NUM_LEFT = 4
"""New tokens to come, with fewer of which a late drafter begins."""

MOST: dict[str, Any] = {"min_tokens": 0, "first_layer": 0, "sinks": 1, "recent": 2}
RETRIEVERS = {
    "quest": Quest(**MOST, page=2, fetch=0.4),
    "infinigen": InfiniGen(**MOST, fetch=0.3, skew="none"),
    "sparq": SparQ(**MOST, fetch=0.2),
    "retroinfer": RetroInfer(**MOST, fetch=0.2),
    "magicpig": MagicPIG(**MOST, bits=2, tables=6, dense_every=0),
}


@pytest.mark.parametrize(
    ("name", "first"),
    [("quest", None), ("infinigen", "lookup"), ("sparq", None), ("retroinfer", "lookup"), ("magicpig", None)],
)
def test_the_model_drafts_over_what_it_retrieves(name: str, first: Any) -> None:
    """Rows of different lengths, greedy and sampled. Some drafts are right and some are wrong."""
    draft = Draft(by=RankPolicies.everywhere([RETRIEVERS[name]]), first=first)
    report = require_same(engine_of(tiny_model("llama"), draft=draft), Speculate.policy, PROMPTS[:2])
    assert 0 < report.accepted < report.drafted


class AllSlotsByNumber(Index):
    """Index that chooses all slots, each by its number, where others say that all are wanted."""

    def choose(self, q_BNH: Tensor, slots: Slots) -> Choice:
        return Choice(slots_BKm=torch.arange(slots.num_slots).expand(1, 2, -1))


class AllByNumber(ExactTopK):
    """Retrieves all slots."""

    index_class = AllSlotsByNumber


def test_drafts_over_all_tokens_are_right() -> None:
    """It fails where a drafting forward attends to a token twice, to a rejected one, or not to an own one.

    It fails, too, where a row gets the drafts of another, and where another row's tokens are taken into its index.
    """
    for retriever in (AllByNumber(**MOST), Quest(**MOST, page=2, fetch=200)):
        engine = engine_of(tiny_model("llama"), draft=RankPolicies.everywhere([retriever]))
        report = require_same(engine, Speculate.policy, PROMPTS[:2])
        assert report.accepted == report.drafted > 4


@pytest.mark.parametrize("num_rows", [1, 2])
def test_drafts_over_the_memory_of_a_graph(num_rows: int) -> None:
    """On a GPU plain steps are replayed over the memory in which drafts are retrieved and verified."""
    gpu, draft = Gpu(), Draft(by=RankPolicies.everywhere([RETRIEVERS["quest"]]), first="lookup")
    with patch("runahead.decoding.forward.accelerator_for", lambda device: gpu):
        report = require_same(engine_of(tiny_model("llama"), draft=draft), Speculate.policy, PROMPTS[:num_rows])
    assert 0 < report.accepted < report.drafted


def test_an_index_has_no_rejected_token() -> None:
    """After the last draft the index is that of a run which drafted nothing, over keys and values of such a run.

    It fails if drafted tokens are appended to the index, as those of a retrieving policy that decodes are, if verified
    ones are not, or those of another row.
    """
    model, made = tiny_model("llama"), list[RetrievedCache]()
    draft = RankPolicies.everywhere([Quest(**MOST, page=2, fetch=0.3)])
    options = replace(PLAIN, speculate=Speculate.policy, speculate_tokens=3, speculate_always=True)

    def noted(*given: Any) -> RetrievedCache:
        made.append(over_whole(*given))
        return made[-1]

    with patch.object(retrieving_drafts, "over_whole", noted):
        batch = engine_of(model, draft=draft).generate(PROMPTS[:2], options)
    assert report_of(batch).accepted < report_of(batch).drafted
    for ids, generation, row in zip(PROMPTS[:2], batch.generations, made, strict=True):
        text = ids + generation.new_token_ids
        cache = model.empty_cache(len(text))
        model.forward(torch.tensor([text]), CausalAttention(cache, start=0, pads=[0]), start=0, pads=[0])
        for number, found in enumerate(row.retrieval.layers):
            assert found is not None
            num, index = found.index.num_slots, found.index
            assert len(ids) < num < len(text) and isinstance(index, Pages)
            k_BKnH, v_BKnV = cache.layer(number).read(0, num)
            seen = replace(view(num, [0]), k_BKnH=k_BKnH, v_BKnV=v_BKnV, scaling=index.scaling)
            q_BNH = torch.randn(1, 4, k_BKnH.shape[3], dtype=k_BKnH.dtype)
            assert torch.allclose(index.page_scores(q_BNH), Pages(seen, index.how).page_scores(q_BNH), atol=1e-9)


def test_a_draft_for_the_draft_saves_forwards() -> None:
    """The drafts are the same ones, since the first level changes no token of the second either.

    It fails where guesses of the first level count untested, or stay in the second one's cache when they are rejected.
    """
    model = tiny_model("llama")
    for by, kind in ((policies(0.5), Speculate.policy), (model, Speculate.model)):
        alone = require_same(engine_of(model, draft=by), kind, PROMPTS, num_drafted=3)
        assert alone.within is None
        for first in ("lookup", Model(build("llama"))):
            report = require_same(engine_of(model, draft=Draft(by=by, first=first)), kind, PROMPTS, num_drafted=3)
            assert report.accepted_lengths == alone.accepted_lengths
            assert report.within is not None and report.within.verifications > 0
    batch = engine_of(model, draft=Draft(by=model, first="lookup")).generate(
        PROMPTS[:1], replace(DRAFTED, speculate=Speculate.model, speculate_match=1)
    )
    assert "tokens by lookup" in summary([batch])
    same = require_same(engine_of(model, draft=Draft(by=model, first=model)), Speculate.model, PROMPTS, num_drafted=3)
    assert same.within is not None and same.within.accepted == same.within.drafted > 2


def test_what_cannot_draft_is_refused() -> None:
    model = tiny_model("llama")
    for draft, kind, message in (
        (None, Speculate.model, "needs a smaller model that drafts"),
        (Model(build("llama", vocab_size=50)), Speculate.model, "use one with the same tokenizer"),
        (Model(build("llama", max_position_embeddings=8)), Speculate.model, "exceeds the 8 positions"),
        (None, Speculate.policy, "needs policies of what drafts see"),
        (
            RankPolicies.everywhere([ExactTopK(late=0.5)]),
            Speculate.policy,
            "leave policy.late and policy.pool.bytes out",
        ),
        (RankPolicies.everywhere([SnapKV(), ExactTopK()]), Speculate.policy, "retrieves from what others keep"),
    ):
        with pytest.raises(ValueError, match=message):
            engine_of(model, draft=draft).generate([[5, 6]], replace(PLAIN, speculate=kind))
    for kind, given, message in (
        (Speculate.model, {}, "generation.speculate=model needs draft.model="),
        (Speculate.policy, {}, "generation.speculate=policy needs draft.policy="),
        (Speculate.policy, {"policy": {"name": "quest"}, "speculate": "model"}, "draft.speculate=model needs draft.mo"),
        (Speculate.model, {"model": "x", "speculate": "model"}, "draft.speculate=model drafts for a policy"),
        (Speculate.model, {"model": "x", "speculate": "policy"}, "draft.speculate=policy is not"),
    ):
        with pytest.raises(ValueError, match=message):
            RunOptions(generation=replace(PLAIN, speculate=kind), policy={"name": "full"}, draft=DraftOptions(**given))


def test_the_config_of_a_drafting_model_has_overrides(tmp_path: Path) -> None:
    def drafting(overrides: dict[str, Any]) -> Any:
        options = replace(PLAIN, speculate=Speculate.model)
        draft = DraftOptions(model=save_tiny_llama(tmp_path, byte_level()), overrides=overrides)
        made = draft_of(
            RunOptions(generation=options, policy={"name": "full"}, draft=draft),
            Ranks.start(RanksOptions(device=Device.cpu)),
        )
        assert made is not None and isinstance(made.by, Model)
        return made.by.config

    assert drafting({"rms_norm_eps": 0.5}).rms_norm_eps == 0.5 != drafting({}).rms_norm_eps
    with pytest.raises(ValueError, match=r"draft\.overrides\.rms_eps is no key .*did you mean rms_norm_eps"):
        drafting({"rms_eps": 0.5})
    unused = RunOptions(policy={"name": "full"}, draft=DraftOptions(overrides={"rms_norm_eps": 0.5}))
    told = "draft.overrides has no effect without generation.speculate=model or prefill.speculative=model"
    assert told in ineffective_settings(unused)


def test_rows_of_a_batch_ask_for_different_drafts() -> None:
    """Drafts of look-up, of a copy of the model that is always right, and none."""
    model = tiny_model("llama")
    engine, few = engine_of(model, draft=model), replace(PLAIN, max_new_tokens=8)
    expected = [each.new_token_ids for each in engine.generate(PROMPTS, few).generations]
    kinds = [replace(drafted(few), speculate=kind) for kind in (Speculate.lookup, Speculate.model, Speculate.none)]
    with knowing([ids + new for ids, new in zip(PROMPTS, expected, strict=True)], right=0.0):
        batch = engine.generate(PROMPTS, kinds)
    report = report_of(batch)
    assert [each.new_token_ids for each in batch.generations] == expected
    assert report.drafts == "lookup and model" and 4 < report.accepted < report.drafted


def test_a_drafting_model_needs_positions_for_its_own_rows_alone() -> None:
    """Not for a longer prompt whose drafts are looked up, nor for as many new tokens as that asks for."""
    model, short = tiny_model("llama"), Model(build("llama", max_position_embeddings=32))
    engine, by_model = engine_of(model, draft=short), replace(PLAIN, speculate=Speculate.model)
    prompts, looked_up = [prompt(40), prompt(10)], replace(DRAFTED, max_new_tokens=60)
    engine.check(prompts, [looked_up, by_model])
    with pytest.raises(ValueError, match="exceeds the 32 positions"):
        engine.check(prompts, [by_model, looked_up])


def test_what_is_kept_in_unequal_heads_drafts() -> None:
    """With all tokens kept, every draft is right."""
    for budget in (1.0, 0.3):
        by = RankPolicies.everywhere([AdaKV(scorer=SnapKV(budget=budget, window=4))])
        report = require_same(engine_of(tiny_model("llama"), draft=by), Speculate.policy, PROMPTS[:2], num_drafted=3)
        assert (report.accepted == report.drafted) == (budget == 1.0) and report.accepted > 0


def test_a_model_whose_rotation_depends_on_the_length_is_refused() -> None:
    with pytest.raises(ValueError, match="whose rotary angles depend on the length"):
        engine_of(tiny_model("llama_dynamic_ntk")).generate([[5, 6]], DRAFTED)


@pytest.mark.parametrize(
    "more",
    [
        {"cache": CacheOptions(bits=4)},
        {"policy": {"name": "streaming_llm"}},
        {"ranks": RanksOptions(tensor=2)},
        {"prefill": PrefillOptions(name=PrefillName.tensor)},
        {"decode": DecodeOptions(name=DecodeName.sharded)},
    ],
)
def test_a_run_that_drafts(more: dict[str, Any]) -> None:
    RunOptions(generation=DRAFTED, **{"policy": {"name": "full"}, **more})
    with pytest.raises(ValueError, match="generation.speculate=lookup does not go with policy quest"):
        RunOptions(generation=DRAFTED, **{**more, "policy": {"name": "quest"}})


def test_a_conversation_speculates_in_every_turn() -> None:
    """Answers and later turns are those without speculation, sampled and greedy, with look-up and a smaller model."""
    model = tiny_model("mistral")
    turns = [torch.tensor([PROMPTS[0]]), torch.tensor([prompt(7, seed=5)]), torch.tensor([prompt(2, seed=6)])]
    known, logits_BV = list[list[int]](), torch.empty(0)
    for kind in (Speculate.none, Speculate.lookup, Speculate.model):
        conversation = Conversation(model, draft=model)
        options = [replace(PLAIN, speculate=kind, speculate_always=True), replace(SAMPLING, seed=3, speculate=kind)]
        with knowing(known) if kind is Speculate.lookup else nullcontext():
            for number, ids_1C in enumerate(turns):
                conversation.feed(ids_1C)
                if number < 2:
                    conversation.generate(options[number])
        if kind is Speculate.none:
            known, logits_BV = [conversation.rows[0]], conversation.logits_BV
            continue
        assert conversation.rows == known and torch.allclose(conversation.logits_BV, logits_BV, atol=1e-9)
        assert conversation.speculation is not None and conversation.num_tokens == len(known[0])


@pytest.mark.parametrize(("budget", "fetch"), [(1.0, 200), (0.3, 0.4)])
def test_a_conversation_drafts_by_a_policy(budget: float, fetch: float) -> None:
    """In every turn the policy chooses anew among all tokens. With all kept, every draft is right."""
    model, known = tiny_model("llama"), list[int]()
    for by in (None, SnapKV(budget=budget, window=4), Quest(**MOST, page=2, fetch=fetch)):
        talking = Conversation(model, draft=None if by is None else RankPolicies.everywhere([by]))
        asked = PLAIN if by is None else replace(DRAFTED, speculate=Speculate.policy)
        for ids in (PROMPTS[0], prompt(7, seed=5)):
            talking.feed(torch.tensor([ids]))
            talking.generate(asked)
            if talking.speculation is not None:
                assert (talking.speculation.accepted == talking.speculation.drafted) == (budget == 1.0)
        known = known or talking.rows[0]
        assert talking.rows[0] == known


@pytest.mark.parametrize("kind", [Speculate.lookup, Speculate.model, Speculate.policy])
def test_a_padded_row_drafts_with_all_but_a_policy(kind: Speculate) -> None:
    """Reads a row's memory as if its first slot had its first token."""
    model = tiny_model("llama")
    draft = RankPolicies.everywhere([SnapKV(budget=16, window=4)]) if kind is Speculate.policy else model
    expected, talking = Conversation(model), Conversation(model, draft=draft)
    expected.feed(torch.tensor([PROMPTS[0]]))
    talking.feed(torch.tensor([[0, 0, 0, *PROMPTS[0]]]), pads=[3])
    known = expected.generate(PLAIN).rows[0].ids
    if kind is Speculate.policy:
        with pytest.raises(ValueError, match=r"text without padding, and pads=\[3\] were fed; feed the row without"):
            talking.generate(replace(DRAFTED, speculate=kind))
    with knowing([known]):
        talking.generate(replace(DRAFTED, speculate=Speculate.lookup if kind is Speculate.policy else kind))
    assert talking.rows[0] == known


def test_a_fork_is_not_changed_by_what_is_taken_back() -> None:
    """It fails if a fork has the cache of its origin."""
    conversation = Conversation(tiny_model("llama"))
    conversation.feed(torch.tensor([PROMPTS[0]]))
    forks = [conversation.fork() for _ in range(2)]
    expected = forks[0].generate(PLAIN).rows[0].new_ids
    with knowing([PROMPTS[0] + expected], right=0.5):
        found = [each.generate(DRAFTED).rows[0].new_ids for each in (forks[1], conversation)]
    assert found == [expected] * 2


def test_what_a_conversation_and_a_server_refuse() -> None:
    full: dict[str, Any] = {"name": "full"}
    two = Conversation(tiny_model("llama"))
    two.feed(torch.tensor([[5, 6], [7, 8]]))
    with pytest.raises(ValueError, match="does not go with a conversation of 2 rows"):
        two.generate(DRAFTED)
    for given, kind, message in (
        (None, Speculate.policy, "needs policies of what drafts see"),
        (RankPolicies.everywhere([Quest()]), Speculate.lookup, "does not go with policy quest"),
        (RankPolicies(storage=CacheOptions(bits=4)), Speculate.policy, "does not go with cache.bits=4"),
        (None, Speculate.model, "needs a smaller model that drafts"),
    ):
        conversation = Conversation(tiny_model("llama"), given)
        conversation.feed(torch.tensor([[5, 6]]))
        with pytest.raises(ValueError, match=message):
            conversation.generate(replace(PLAIN, speculate=kind))
    with pytest.raises(ValueError, match=r"generation.speculate=model is for launch/infer.py"):
        ServeRun(generation=replace(PLAIN, speculate=Speculate.model), policy=full)
    ServeRun(generation=DRAFTED, policy=full, ranks=RanksOptions(tensor=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculate": "guess"}, "generation.speculate=guess is not one of none, lookup, policy, model"),
        ({"speculate_tokens": 0}, "generation.speculate_tokens=0 must be from 1 to 64"),
        ({"speculate_match": 0}, "generation.speculate_match=0 must be at least 1"),
    ],
)
def test_options_that_cannot_be_right(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationOptions(**options)
