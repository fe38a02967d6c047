"""decode=sharded: each rank attends to the keys and values of its chunk, and the tokens are those of one rank."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from policies.clusterkv import ClusterKV
from policies.events import By, Events
from policies.infllm import InfLLM
from policies.kvzip import KVzip
from policies.quest import Quest
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from runahead import Engine, GenerationOptions, PrefillOptions, Ranks, RanksOptions
from runahead.cache.shard import shard_bytes, shards
from runahead.config import (
    Attention,
    CacheOptions,
    Carrier,
    DecodeName,
    Device,
    Positions,
    PrefillName,
    Speculative,
    Transfer,
)
from runahead.context import ContextPartition, even
from runahead.decoding.placement import NOTED, ROUNDS, STEPS, Placement, Timing
from runahead.features.slower import SLOWER, Way
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import (
    FAMILIES,
    ROPE_THRESHOLD,
    largest_difference,
    oracle_logits,
    oracle_tokens,
    prompt,
    throughout,
)
from tests.prompt_cache.serving import random_prompt, random_segments
from tests.prompt_cache.test_blend import blended_prompt
from tests.ranks import sharded_tasks, tasks
from tests.ranks.tasks import tiny_model
from tests.ranks.test_exactness import PROMPT_TOKENS, TOLERANCE
from tests.ranks.test_memory import DEEP_LAYERS, LAYER_BYTES
from tests.reuse.test_prefixes import require_same

NUM_NEW = 8
GREEDY = GenerationOptions(max_new_tokens=NUM_NEW, ignore_eos=True)
SPLITS = {
    2: [(0, 41, 70), (0, 1, 70), (0, 69, 70)],
    3: [(0, 30, 31, 70), (0, 30, 30, 70), (0, 0, 35, 70), (0, 40, 70, 70)],
}
SEVERAL = ["llama", "mistral", "gemma3_text", "gemma2", "gpt_oss", "bloom", "mpt", "deepseek_v3", "gpt_bigcode"]
"""Plain attention, windows, both, soft caps, sinks, ALiBi, latent attention, one KV head."""

BATCH = [prompt(70, seed=1), prompt(ROPE_THRESHOLD - NUM_NEW + 1, seed=2), prompt(1, seed=3), prompt(52, seed=4)]
"""Rows; a rank has no token at all of some."""


def check(rank_pools: RankPools, size: int, family: str, cases: list[sharded_tasks.Case]) -> None:
    """Run cases on ranks and compare tokens with transformers', and the logits of the last token."""
    by_rank = rank_pools.run(size, sharded_tasks.sharded, family, cases)
    for at, (prompts, bounds, options, _) in enumerate(cases):
        expected = [oracle_tokens(family, tuple(ids), options.max_new_tokens) for ids in prompts]
        for rows, _, decode in (of_rank[at] for of_rank in by_rank):
            assert rows == expected, bounds
            assert decode == ("sharded" if len(set(bounds)) > 2 else "last")
        (logits,) = [of_rank[at][1] for of_rank in by_rank if of_rank[at][1]] or [None]
        assert (logits is not None) == (len(set(bounds)) > 2)
        if family == "llama_dynamic_ntk":
            continue  # keys stay rotated for the length that the text had when they were computed
        for ids, row, ours in zip(prompts, expected, logits or [], strict=False):
            theirs = oracle_logits(family, (*ids, *row[:-1]))
            assert largest_difference(ours, theirs) < TOLERANCE, bounds


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(3)
def test_tokens_and_logits_equal_transformers_for_every_family(rank_pools: RankPools, family: str) -> None:
    check(rank_pools, 2, family, [([prompt(PROMPT_TOKENS)], (0, 41, 70), GREEDY, PrefillOptions())])


@pytest.mark.parametrize("family", SEVERAL)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.sampled(4)
def test_chunks_of_any_length_and_no_chunk(rank_pools: RankPools, family: str, size: int) -> None:
    ids = prompt(PROMPT_TOKENS)
    cases = [([ids], bounds, GREEDY, PrefillOptions()) for bounds in SPLITS[size]]
    check(rank_pools, size, family, [*cases, ([ids], (0, *[70] * size), GREEDY, PrefillOptions())])


@pytest.mark.parametrize("family", SEVERAL)
@pytest.mark.sampled(3)
def test_rows_of_different_lengths(rank_pools: RankPools, family: str) -> None:
    check(rank_pools, 3, family, [(BATCH, bounds, GREEDY, PrefillOptions()) for bounds in SPLITS[3]])


def test_every_way_of_keys_and_values_along_the_chain(rank_pools: RankPools) -> None:
    options = [PrefillOptions(transfer=transfer, carrier=carrier) for transfer in Transfer for carrier in Carrier]
    check(rank_pools, 3, "llama", [(BATCH, (0, 25, 50, 70), GREEDY, each) for each in options])


def test_over_the_backend_where_no_memory_can_be_mapped(rank_pools: RankPools) -> None:
    ids, bounds = prompt(PROMPT_TOKENS), (0, 20, 41, 70)
    for batch, gathering in rank_pools.run(3, sharded_tasks.over_the_backend, "llama", [ids], GREEDY, bounds):
        assert batch.generations[0].new_token_ids == oracle_tokens("llama", tuple(ids), NUM_NEW)
        assert (batch.decode, gathering) == ("sharded", "BackendGathering")


@pytest.mark.parametrize("bounds", [(0, 41, 70), (0, 70, 70)])
def test_sampled_tokens_are_those_of_one_rank(rank_pools: RankPools, bounds: tuple[int, ...]) -> None:
    options = GenerationOptions(
        max_new_tokens=12, do_sample=True, seed=5, top_k=20, top_p=0.9, repetition_penalty=1.3, ignore_eos=True
    )
    alone = rank_pools.run(1, tasks.generate, "llama", BATCH, options)[0][0]
    results = rank_pools.run(
        len(bounds) - 1, tasks.generate, "llama", BATCH, options, bounds, None, 0, None, DecodeName.sharded
    )
    for batch, _ in results:
        assert [row.new_token_ids for row in batch.generations] == [row.new_token_ids for row in alone.generations]


@pytest.mark.parametrize(("size", "bounds"), [(2, (0, 41, 70)), (3, (0, 0, 41, 70))])
def test_rows_end_by_themselves_and_rank_0_is_told_step_by_step(
    rank_pools: RankPools, size: int, bounds: tuple[int, ...]
) -> None:
    """In the second case rank 0 has no chunk and does not decode."""
    rows = [oracle_tokens("llama", tuple(ids), 10) for ids in BATCH]
    letters, eos = tasks.Letters(), [rows[0][4]]
    for options in (
        GenerationOptions(max_new_tokens=10),
        GenerationOptions(max_new_tokens=10, stop=[letters.decode(rows[1][3:5])], ignore_eos=True),
    ):
        arguments = ("llama", BATCH, options, None, None, 0, eos)
        alone, steps_alone = rank_pools.run(1, tasks.generate, *arguments)[0]
        arguments = ("llama", BATCH, options, bounds, None, 0, eos)
        (first, steps), *others = rank_pools.run(size, tasks.generate, *arguments, DecodeName.sharded)
        assert {"eos", "stop"} & {row.finish_reason for row in alone.generations}
        assert steps == steps_alone
        for batch, told in [(first, steps), *others]:
            assert batch.decode == "sharded"
            for row, same in zip(batch.generations, alone.generations, strict=True):
                assert (row.new_token_ids, row.text, row.finish_reason) == (
                    same.new_token_ids,
                    same.text,
                    same.finish_reason,
                )
            assert told is steps or told == []


@pytest.mark.parametrize("bounds", [(0, 35, 70), (0, 44, 70), (0, 20, 45, 70), (0, 30, 30, 70)])
@pytest.mark.parametrize("num_new", [1, 5, 40])
@pytest.mark.sampled(3)
def test_bytes_of_each_rank_are_its_chunk_its_new_tokens_and_a_ring_of_the_prefix(
    rank_pools: RankPools, bounds: tuple[int, ...], num_new: int
) -> None:
    size, options = len(bounds) - 1, GenerationOptions(max_new_tokens=num_new, ignore_eos=True)
    results = rank_pools.run(size, sharded_tasks.kv_bytes, "llama_deep", [prompt(PROMPT_TOKENS)], options, bounds)
    lengths = [end - start for start, end in pairwise(bounds)]
    owned = [0] * size
    for _ in range(num_new - 1):  # to whoever stores fewest
        stored = [length + own if length else 10**6 for length, own in zip(lengths, owned, strict=True)]
        owned[stored.index(min(stored))] += 1
    for rank, (alive, alive_afterwards, report) in enumerate(results):
        kept = DEEP_LAYERS * (lengths[rank] + owned[rank] + (num_new > 1)) * LAYER_BYTES if lengths[rank] else 0
        ring = PrefillOptions().layers_in_flight * bounds[rank] * LAYER_BYTES if lengths[rank] else 0
        assert (report.kv_kept_bytes, report.kv_peak_bytes) == (kept, kept + ring)
        assert (alive, alive_afterwards) == (report.kv_peak_bytes, 0)


def test_padded_rows_take_no_more_where_no_graph_is_replayed(rank_pools: RankPools) -> None:
    """Only for a graph are they moved, each into a sequence of its own; see tests/cache/test_fixed_cache.py."""
    bounds = (0, 60, 70)
    results = rank_pools.run(2, sharded_tasks.kv_bytes, "llama_deep", [prompt(70), prompt(30)], GREEDY, bounds)
    slots = [60 + 1, 10 + NUM_NEW - 1 + 1]  # all new tokens are stored where there are fewer
    for rank, (_, _, report) in enumerate(results):
        ring = PrefillOptions().layers_in_flight * 2 * bounds[rank] * LAYER_BYTES
        assert report.kv_peak_bytes == DEEP_LAYERS * 2 * slots[rank] * LAYER_BYTES + ring


def test_each_new_token_is_stored_once_where_there_are_fewest() -> None:
    partition = ContextPartition(boundaries=(0, 5, 5, 12, 15))
    made = shards(partition, 20)
    assert list(made) == [0, 2, 3]
    assert [sum(owners) for owners in zip(*(shard.is_own for shard in made.values()), strict=True)] == [1] * 20
    stored = [len(shard.chunk) + sum(shard.is_own) for shard in made.values()]
    assert max(stored) - min(stored) <= 1 and sum(stored) == 15 + 20
    for shard in made.values():
        assert shard.indices() == sorted(shard.indices())


@pytest.mark.parametrize(
    ("free", "gains_s", "lengths", "chosen", "timed"),
    [
        # Longer than a length at which sharding is faster, and shorter than one at which it is not: known.
        ([1 << 40] * 2, {50: 0.1, 20: -0.1}, [50, 60, 20, 10, 55], "sslls", [50, 20]),
        # At most 60 tokens are timed; the gain at 100 is 2.5 - 2.0 on the line through (15, -2.0) and (60, -0.1).
        ([1 << 40] * 2, {60: -0.1, 15: -2.0}, [100, 61], "sl", [60, 15]),
        # No rank but the first could store everything, and each its share.
        ([1 << 40, 60_000], {}, [100], "s", []),
        # Neither way has room, nor has a measurement at more than a token per rank.
        ([1 << 40, 100], {2: -1.0}, [100], "l", [2]),
    ],
)
def test_auto_chooses_by_what_was_timed_and_by_memory(
    rank_pools: RankPools,
    free: list[int],
    gains_s: dict[int, float],
    lengths: list[int],
    chosen: str,
    timed: list[int],
) -> None:
    for decodes, lengths_timed in rank_pools.run(2, sharded_tasks.auto, "llama", lengths, gains_s, free):
        assert "".join(decode[0] for decode in decodes) == chosen
        assert list(dict.fromkeys(lengths_timed)) == timed


@pytest.mark.parametrize(
    ("timed_s", "answers_s", "chosen"),
    [
        ((1.6, 1.4), [(1.6, 1.4)] * 3, "sss"),
        ((1.6, 1.4), [(1.6, 1.6)] * 3, "sss"),  # not by a fifth
        ((1.6, 1.4), [(1.6, 2.0)] * 4, "slll"),
        ((1.6, 1.4), [(2.5, 2.0)] * 4, "slss"),  # the machine is slower both ways: so the other one is tried
        ((1.6, 1.4), [(1.6, 2.0), (1.6, 1.0), (1.6, 1.0)], "sll"),
        ((1.4, 1.6), [(1.4, 1.6), (3.0, 1.6), (3.0, 1.6)], "lls"),
    ],
)
def test_steps_that_are_slower_than_timed_by_a_fifth_count_in_place_of_these(
    rank_pools: RankPools, timed_s: tuple[float, float], answers_s: list[tuple[float, float]], chosen: str
) -> None:
    for decodes in rank_pools.run(2, sharded_tasks.decided_again, "llama", 60, timed_s, answers_s):
        assert "".join(decode[0] for decode in decodes) == chosen


def test_the_time_of_a_step_is_that_of_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the mean, since the first steps of an answer prepare the others."""
    clock = SimpleNamespace(now=100.0)
    gaps = iter([50.0, 20.0, 1.0, 1.0, 1.5, 1.0, 1.0, 0.0])

    def on_tokens(tokens: list[int | None]) -> list[int]:
        clock.now += next(gaps)
        return []

    monkeypatch.setattr("runahead.decoding.rows.time", SimpleNamespace(perf_counter=lambda: clock.now))
    model = tiny_model("llama")
    with Ranks.start(RanksOptions(device=Device.cpu, threads=1)) as ranks, throughout(model.dtype):
        options = GenerationOptions(max_new_tokens=8, ignore_eos=True)
        batch = Engine(model, ranks).generate([prompt(20)], options, on_tokens=on_tokens)
    assert batch.step_s == 1.0
    assert batch.tpot_s == pytest.approx(75.5 / 7)


@pytest.mark.parametrize(
    "more",
    [
        {"do_sample": True, "seed": 1},
        {"logprobs": 3},
        {"repetition_penalty": 1.1},
        {"logit_bias": {7: 1.0}},
    ],
)
def test_steps_that_do_more_than_timed_ones_are_not_compared_with_them(more: dict[str, Any]) -> None:
    """Timed steps take the largest logits: grammars and log-probabilities take their time either way."""
    model = tiny_model("llama")
    with Ranks.start(RanksOptions(device=Device.cpu, threads=1)) as ranks, throughout(model.dtype):
        engine = Engine(model, ranks)
        plain, other = (engine.generate([prompt(20)], each) for each in (GREEDY, replace(GREEDY, **more)))
    assert plain.step_s is not None and other.step_s is None


def test_steps_are_timed_anew_some_answers_after_a_correction_and_others_are_not_compared() -> None:
    timing = Timing(batch=1, num_tokens=1000, last_s=1.6, sharded_s=1.4)
    placement = Placement.__new__(Placement)
    placement.timings = [timing]
    for others in ({"batch": 2}, {"num_tokens": 1251}, {"num_tokens": 799}):
        placement.note(**({"batch": 1, "num_tokens": 1000} | others), is_sharded=True, step_s=9.0)
        assert placement.timings == [timing]
    for number in range(1, NOTED + 1):
        placement.note(batch=1, num_tokens=1200, is_sharded=number == 1, step_s=2.0 + number)
        [found] = placement.timings
        assert (found.num_noted, found.sharded_s, found.last_s) == (number, 3.0, 1.6 if number == 1 else 2.0 + number)
    placement.note(batch=1, num_tokens=1200, is_sharded=False, step_s=2.0)
    assert placement.timings == []


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_both_ways_are_timed_and_the_faster_one_is_taken(rank_pools: RankPools, family: str) -> None:
    ids = prompt(PROMPT_TOKENS)
    results = rank_pools.run(3, sharded_tasks.timed_for_real, family, ids)
    assert results.count(results[0]) == 3
    tokens, decode, seconds, timed_bytes = results[0]
    assert tokens == oracle_tokens(family, tuple(ids), 4)
    assert all(last_s > 0 and sharded_s > 0 for last_s, sharded_s in seconds)
    assert decode == ("sharded" if seconds[0][1] < seconds[0][0] else "last")
    shapes, num_steps = tiny_model(family).kv_shapes, ROUNDS * STEPS
    expected = [shard_bytes(shapes, shard, 1) for shard in shards(even(PROMPT_TOKENS, 3), num_steps).values()]
    expected[-1] += (PROMPT_TOKENS + num_steps) * sum(shape.bytes_per_token() for shape in shapes)
    assert timed_bytes == expected


def test_the_free_memory_is_asked_for_once_and_for_what_takes_much_of_it(rank_pools: RankPools) -> None:
    token_bytes = sum(shape.bytes_per_token() for shape in tiny_model("llama").kv_shapes)
    for asked in rank_pools.run(2, sharded_tasks.memory_questions, "llama", [20, 30, 90, 20], 250 * token_bytes):
        assert asked == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("size", "family", "bounds"),
    [(2, "llama", (0, 6, 14)), (2, "bloom", (0, 1, 14)), (3, "mistral", (0, 5, 5, 14)), (3, "gpt2", (0, 3, 9, 14))],
)
def test_reused_segments_stay_on_the_last_rank(
    rank_pools: RankPools, size: int, family: str, bounds: tuple[int, ...]
) -> None:
    """Tokens and their logarithms are those of decode=last. New tokens lie between reused ones, and rows are padded."""
    draw = random.Random(6)
    segments = random_segments(draw)
    prompts = [random_prompt(draw, segments) for _ in range(3)]
    shares = tuple(bound / bounds[-1] for bound in bounds)
    for sharded, last in rank_pools.run(size, sharded_tasks.segments_both_ways, family, prompts, shares):
        assert (sharded.decode, last.decode) == ("sharded", "last")
        require_same(sharded, last)
        assert sharded.ranks[-1].reuse.cached_tokens == sum(each.num_cached for each in prompts)


def test_what_does_not_go_with_sharded_decoding_is_refused(rank_pools: RankPools) -> None:
    for said in rank_pools.run(2, sharded_tasks.refused):
        assert said == [
            "decode=sharded needs prefill=kv_runahead: prefill=zigzag collects all keys and values on the last rank; "
            "use decode=last",
            "decode=sharded keeps tokens of a text on several ranks, and policy.positions=reencoded counts all that "
            "are kept; use policy.positions=original or decode=last",
        ]


SHORT = GenerationOptions(max_new_tokens=3, ignore_eos=True)
CHAIN = PrefillOptions()
DRAFTED = PrefillOptions(speculative=Speculative.layers, speculative_chunk=8, speculative_layers=1)
REENCODED = RankPolicies.everywhere([StreamingLLM(budget=16)], positions=Positions.reencoded)
CLUSTERS = RankPolicies.everywhere([ClusterKV(min_tokens=0, cluster=4, sinks=1, recent=4, fetch=8)])
EVENTS = RankPolicies.everywhere([Quest(min_tokens=0, fetch=20, events=Events(by=By.surprise))])
SNAPKV = RankPolicies.everywhere([SnapKV(budget=16, window=4)])
SPARSE = PrefillOptions(attention=Attention.xattention)
PLAIN = random_prompt(random.Random(2), random_segments(random.Random(2)))
ASKED: dict[str, sharded_tasks.Asked] = {
    "nothing": ("llama", CHAIN, None, prompt(40), SHORT),
    "prefill=tsp or zigzag": ("llama", PrefillOptions(name=PrefillName.zigzag), None, prompt(40), SHORT),
    "policy.positions=reencoded": ("llama", CHAIN, REENCODED, prompt(40), SHORT),
    "a policy that needs the whole prompt": ("llama", CHAIN, RankPolicies(last=[KVzip()]), prompt(40), SHORT),
    "policy.clamped=true": ("llama", CHAIN, RankPolicies.everywhere([InfLLM(recent=16)]), prompt(40), SHORT),
    "cache policies or cache.bits + policy=prompt_cache": ("llama", CHAIN, CLUSTERS, PLAIN, SHORT),
    "cache policies or cache.bits + prefill.speculative": ("llama", DRAFTED, CLUSTERS, prompt(40), SHORT),
    "policy.recompute": ("llama", CHAIN, None, blended_prompt(1, 0.5), SHORT),
    "marks": ("llama_dms", CHAIN, None, prompt(40), SHORT),
    "states": ("qwen3_next", CHAIN, None, prompt(40), SHORT),
    "cache.bits": ("llama", CHAIN, RankPolicies(storage=CacheOptions(bits=4)), prompt(40), SHORT),
    "policy.events.by=surprise": ("llama", CHAIN, EVENTS, prompt(40), SHORT),
    "a policy that drops tokens + prefill.attention=xattention": ("llama", SPARSE, SNAPKV, prompt(40), SHORT),
    "cache policies": ("llama", CHAIN, SNAPKV, prompt(40), SHORT),
}
"""For each fact with which decode=auto keeps all on the last stage, a batch of which it holds."""


def test_decode_auto_tells_what_keeps_all_keys_and_values_on_the_last_stage(rank_pools: RankPools) -> None:
    of_auto = [set(row.facts) - {"decode=auto on several stages"} for row in SLOWER if row.way is Way.sharded]
    rows = {" + ".join(sorted(facts)) for facts in of_auto}
    # Drafts of a policy need one that drafts, a conversation is no batch, a prefix tree keeps what came before, and a
    # DynamicCache is asked for by `to_cache`.
    elsewhere = ("generation.speculate", "reuse of prefixes", "a DynamicCache")
    assert {row for row in rows if not any(each in row for each in elsewhere)} == ASKED.keys() - {"nothing"}
    for found in rank_pools.run(2, sharded_tasks.placed, list(ASKED.values())):
        for asked, (decode, told) in zip(ASKED, found, strict=True):
            assert decode == ("sharded" if asked == "nothing" else "last"), asked
            is_told = [sentence.startswith(Way.sharded.value) for sentence in told]
            assert is_told == ([] if asked == "nothing" else [True]), (asked, told)
