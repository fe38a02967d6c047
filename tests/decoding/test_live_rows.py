"""Rows that join and leave between decoding steps: their tokens are those that each has alone."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from policies.adakv import AdaKV
from policies.exact_topk import ExactTopK
from policies.h2o import H2O
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from runahead import ContextPartition, Engine, GenerationOptions
from runahead.config import CacheOptions, Device, RanksOptions
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import NewToken, Row
from runahead.decoding.rows import Rows
from runahead.decoding.sampling import NOT_NUMBERS
from runahead.prefill import Prefilled, PrefillPlan
from runahead.ranks.ranks import Ranks
from runahead.thinning.rank_policies import RankPolicies
from tests.families import WINDOW, prompt, throughout
from tests.ranks.tasks import tiny_model

GREEDY = GenerationOptions(max_new_tokens=9, ignore_eos=True)
OPTIONS = [
    GREEDY,
    replace(GREEDY, max_new_tokens=4, do_sample=True, temperature=2.0, seed=7),
    replace(GREEDY, max_new_tokens=12, repetition_penalty=3.0),
    replace(GREEDY, max_new_tokens=6, do_sample=True, top_k=5, seed=3),
]
PROMPTS = [prompt(2 * WINDOW + 9, seed=1), prompt(WINDOW + 3, seed=2), prompt(WINDOW + 3, seed=3), prompt(1, seed=4)]


def engine_of(family: str, policies: RankPolicies | None = None) -> Engine:
    return Engine(tiny_model(family), Ranks.start(RanksOptions(device=Device.cpu)), policies=policies)


def joined(
    engine: Engine, live: Rows, rows: Sequence[int], options: Sequence[GenerationOptions]
) -> tuple[list[NewToken], Prefilled]:
    """Prefill some of `PROMPTS` as one batch, and let its rows join. Returns their first tokens, too."""
    prompts = [PROMPTS[row] for row in rows]
    whole = ContextPartition(boundaries=(0, max(map(len, prompts))))
    num_new = max(options[row].max_new_tokens for row in rows)
    prefilled = engine.prefill(PrefillPlan(prompts=prompts, partition=whole, num_new=num_new))
    made = [Row(engine.model, PROMPTS[row], options[row], seed=options[row].seed) for row in rows]
    assert prefilled.cache is not None and prefilled.logits_BV is not None
    return live.join(rows, made, prefilled.logits_BV, prefilled.cache, list(map(len, prompts))), prefilled


class Decoding:
    """Rows of an engine that are decoded together; `tokens` are those of each row so far, `ended` how rows ended."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.live = engine, Rows(Lanes(engine.model, engine.policies))
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}

    def join(self, *rows: int) -> Prefilled:
        tokens, prefilled = joined(self.engine, self.live, rows, OPTIONS)
        self._take(tokens)
        return prefilled

    def step(self, times: int) -> None:
        for _ in range(times):
            for place in self.live.step():
                self._take(place)

    def _take(self, new) -> None:
        for each in new:
            self.tokens.setdefault(each.row, []).append(each.token)
            if each.ended is not None:
                self.ended[each.row] = each.ended


def alone(engine: Engine) -> list[list[int]]:
    return [
        engine.generate([ids], [options]).generations[0].new_token_ids
        for ids, options in zip(PROMPTS, OPTIONS, strict=True)
    ]


FAMILIES = [
    "llama",
    "llama_dynamic_ntk",
    "phi3_longrope",
    "mistral",
    "gemma2",
    "gpt_oss",
    "deepseek_v3",
    "gpt2",
    "bart",
    "gptj",
    "bloom",
    "falcon_alibi",
    "llama4_text_tempered",
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(3)
def test_rows_that_join_early_and_late_have_the_tokens_that_each_has_alone(family):
    """It fails where groups stay as they are when rows join or leave, and where rows get each other's draws or tokens.

    As well where rows have no padding, and where a model that counts positions computes rows of any length at once.
    """
    engine = engine_of(family)
    with throughout(engine.model.dtype):
        expected, decoding = alone(engine), Decoding(engine)
        decoding.join(0)
        decoding.step(3)
        decoding.join(1, 2)  # of equal length, and one of them ends soon
        decoding.step(2)
        decoding.join(3)
        decoding.step(12)
    assert [decoding.tokens[row] for row in range(4)] == expected
    assert len(decoding.live) == 0


def test_prompts_that_are_padded_to_be_computed_at_once_decode_as_alone():
    """If the cache is split without regard to padding, it fails."""
    engine = engine_of("mistral")
    with throughout(engine.model.dtype):
        expected, decoding = alone(engine), Decoding(engine)
        decoding.join(0, 1, 2, 3)
        decoding.step(12)
    assert [decoding.tokens[row] for row in range(4)] == expected


TOGETHER = {
    "streaming_llm": RankPolicies.everywhere([StreamingLLM(budget=16, sinks=2)]),
    "h2o": RankPolicies.everywhere([H2O(budget=16)]),
    "adakv": RankPolicies.everywhere([AdaKV(scorer=SnapKV(budget=16, window=4))]),
    "exact_topk": RankPolicies.everywhere([ExactTopK(fetch=20)]),
    "4 bits": RankPolicies(storage=CacheOptions(bits=4, residual=4)),
    "h2o, 4 bits": RankPolicies.everywhere([H2O(budget=16)], storage=CacheOptions(bits=4, residual=4)),
}


@pytest.mark.parametrize("how", TOGETHER)
def test_rows_under_policies_and_in_few_bits_are_decoded_together_as_alone(how, monkeypatch):
    """It fails if they are decoded one by one, all over the first row's cache, or with the budgets of another row."""
    engine = engine_of("llama", TOGETHER[how])
    forward, batches = engine.model.forward, []
    with throughout(engine.model.dtype):
        expected, decoding = alone(engine), Decoding(engine)
        for row in range(4):
            decoding.join(row)
            decoding.step(1)
        monkeypatch.setattr(
            engine.model,
            "forward",
            lambda ids_BC, *args, **more: batches.append(len(ids_BC)) or forward(ids_BC, *args, **more),
        )
        decoding.step(12)
    assert [decoding.tokens[row] for row in range(4)] == expected
    assert batches[0] == 3  # one had ended


def test_memory_returns_when_rows_leave():
    """It fails if a row keeps the cache of its batch, or stays when it is dropped."""
    engine = engine_of("llama")
    with throughout(engine.model.dtype):
        decoding = Decoding(engine)
        caches = [weakref.ref(decoding.join(*rows).cache) for rows in ((0, 1), (2,), (3,))]
        assert [cache() for cache in caches] == [None] * 3, "rows keep no more than their slabs"
        held = decoding.live.num_bytes
        decoding.step(1)
        assert decoding.live.num_bytes == held > 0
        assert decoding.live.cancel([2, 2, 77]) == [2]
        assert 0 < decoding.live.num_bytes < held
        decoding.step(12)
    assert decoding.live.num_bytes == 0 and len(decoding.live) == 0
    assert decoding.tokens[2] == alone_of(engine, 2)[:2]


def alone_of(engine: Engine, row: int) -> list[int]:
    with throughout(engine.model.dtype):
        return engine.generate([PROMPTS[row]], [OPTIONS[row]]).generations[0].new_token_ids


@pytest.mark.parametrize("at_once", [True, False])
def test_a_row_whose_logits_are_no_numbers_ends_alone(at_once, monkeypatch):
    """It fails if the row goes on, with some token or none, or if all rows leave with it."""
    engine = engine_of("llama")
    forward, calls = engine.model.forward, []

    def broken(*args, **more):
        logits_BV = forward(*args, **more)
        calls.append(len(logits_BV))
        if len(calls) == (1 if at_once else 3):
            logits_BV = logits_BV.index_fill(0, torch.tensor([1]), torch.nan)
        return logits_BV

    with throughout(engine.model.dtype), torch.inference_mode():
        expected, decoding = alone(engine), Decoding(engine)
        monkeypatch.setattr(engine.model, "forward", broken)
        decoding.join(0, 1, 2)
        assert len(decoding.live) == (2 if at_once else 3)
        decoding.step(12)
    assert decoding.tokens[0] == expected[0] and decoding.tokens[2] == expected[2]
    assert decoding.tokens[1] == [*expected[1][: 0 if at_once else 2], None]
    assert decoding.ended[1] == NOT_NUMBERS and len(decoding.live) == 0 and decoding.live.num_bytes == 0


def test_rows_of_a_batch_that_ended_stay_in_its_forward(monkeypatch):
    """With fewer rows kernels would round differently. They go on with their last token."""
    engine = engine_of("llama")
    forward, given = engine.model.forward, list[list[int]]()

    def counting(ids_BC, *args, **more):
        given.append(ids_BC[:, -1].tolist())
        return forward(ids_BC, *args, **more)

    with throughout(engine.model.dtype):
        monkeypatch.setattr(engine.model, "forward", counting)
        options = [replace(GREEDY, max_new_tokens=number) for number in (2, 5, 1)]
        rows = [each.new_token_ids for each in engine.generate(PROMPTS[:3], options).generations]
    assert given[1:] == [[ids[min(step, len(ids) - 1)] for ids in rows] for step in range(4)]
