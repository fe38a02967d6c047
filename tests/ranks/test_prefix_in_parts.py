"""With sharded decoding each stage stores its part of a text, and later prompts have the numbers of one rank alone."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from runahead import GenerationOptions, PrefillOptions
from runahead.config import DecodeName, DecodeOptions, Speculate
from runahead.report import GenerationBatch
from runahead.reuse.stored_prefix import StoredPrefix
from tests.conftest import RankPools
from tests.families import WINDOW, prompt
from tests.ranks import prefix_tasks
from tests.ranks.prefix_tasks import Parts, Split
from tests.ranks.tasks import tiny_model
from tests.ranks.test_stored_prefix import WAYS, chains
from tests.reuse.test_prefixes import longest, require_same

OPTIONS = GenerationOptions(max_new_tokens=6, ignore_eos=True, logprobs=5)
SHARDED, AUTO = DecodeOptions(name=DecodeName.sharded), DecodeOptions(name=DecodeName.auto)
DOCUMENT, OTHER = prompt(2 * WINDOW + 11), prompt(30, seed=50)
BATCHES = [
    [DOCUMENT],
    [DOCUMENT + prompt(33, seed=1)],
    [DOCUMENT[:20] + prompt(21, seed=2), OTHER, DOCUMENT + prompt(9, seed=3)],
    [DOCUMENT + prompt(33, seed=1) + prompt(25, seed=4), OTHER + prompt(26, seed=5), DOCUMENT[:20]],
    [DOCUMENT + prompt(33, seed=1)],
]
"""Whole prompts, rests of one text and of several in a batch, prefixes that end inside a chunk, and a known prompt."""


def run(
    pools: RankPools,
    size: int,
    batches: list[list[list[int]]] = BATCHES,
    *,
    family: str = "llama",
    split: Split | None = None,
    prefill: PrefillOptions = WAYS[0],
    limits: list[float] | None = None,
    decode: DecodeOptions = SHARDED,
    salts: list[list[str]] | None = None,
) -> list[Parts]:
    """Results of the batches on each rank, which are those of one rank without a tree."""
    limits = limits or [inf] * size
    task, split = prefix_tasks.generate_in_parts, split or Split()
    by_rank = pools.run(size, task, family, batches, OPTIONS, split, prefill, limits, decode, salts)
    [theirs] = pools.run(1, prefix_tasks.generate_alone, family, batches, OPTIONS)
    for rank in by_rank:
        for ours, alone in zip(rank.results, theirs, strict=True):
            require_same(ours, alone)
        assert rank.num_held == 0
    return by_rank


def cached(rank: Parts) -> list[list[int]]:
    return [batch.cached_tokens for batch in rank.results]


def expected(batches: list[list[list[int]]], results: list[GenerationBatch], size: int) -> list[list[int]]:
    """Tokens of each prompt that earlier texts begin with, but for the last one of each stage."""
    known, found = list[list[int]](), list[list[int]]()
    for prompts, result in zip(batches, results, strict=True):
        found.append([longest(ids[: len(ids) - size + 1], known) for ids in prompts])
        known += [ids + each.new_token_ids[:-1] for ids, each in zip(prompts, result.generations, strict=True)]
    return found


@chains()
@pytest.mark.sampled(3)
def test_a_prefix_is_found_in_the_parts_of_all_stages(
    rank_pools: RankPools, size: int, prefill: PrefillOptions
) -> None:
    first, *others = run(rank_pools, size, prefill=prefill)
    assert cached(first) == expected(BATCHES, first.results, size)
    assert all(cached(other) == cached(first) for other in others)
    assert all(result.decode == "sharded" for result in first.results)


def test_no_stage_stores_what_another_one_has(rank_pools: RankPools) -> None:
    """Together they have each token of all texts once, and about as much each."""
    ranks = run(rank_pools, 3, BATCHES[:2])
    text = BATCHES[1][0] + ranks[0].results[1].generations[0].new_token_ids[:-1]
    answer = ranks[0].results[0].generations[0].new_token_ids[:-1]
    assert sum(rank.num_stored for rank in ranks) == len(text) + len(answer)
    assert max(rank.num_stored for rank in ranks) <= len(text) / 3 + 15


@pytest.mark.parametrize("family", ["mistral", "gemma2", pytest.param("bloom", marks=pytest.mark.slow)])
def test_models_with_windows_and_biases_too(rank_pools: RankPools, family: str) -> None:
    ranks = run(rank_pools, 3, BATCHES[:3], family=family, split=Split(ratios=(0.5, 0.2, 0.3)))
    assert cached(ranks[0]) == expected(BATCHES[:3], ranks[0].results, 3)


def test_a_text_that_two_salts_have_stored_in_other_parts_is_read_once_by_each(rank_pools: RankPools) -> None:
    """As the second text is longer, its first tokens lie on other stages."""
    rests = [DOCUMENT + prompt(9, seed=3), DOCUMENT + prompt(9, seed=4)]
    batches, salts = [[DOCUMENT], [DOCUMENT + OTHER], rests, rests[::-1]], [["a"], ["b"], ["a", "b"], ["a", "b"]]
    ranks = run(rank_pools, 2, batches, salts=salts)
    assert cached(ranks[0]) == [[0], [0], [len(DOCUMENT)] * 2, [len(DOCUMENT)] * 2]


@pytest.mark.parametrize("salts", [["a", "b"], ["b", "a"], ["", "a"]])
@pytest.mark.parametrize("ends", [(50, 40), (40, 50)])
def test_rows_share_what_lies_on_a_stage_with_rows_of_their_salt_alone(salts: list[str], ends: tuple[int, int]) -> None:
    begin = prompt(80)
    owners = [([0] * end + [1] * 80)[: 2 * end] for end in ends]
    stored = StoredPrefix.from_prompts([[*begin, *DOCUMENT]] * 2, owners, salts)
    for row, of_row in enumerate(owners):
        runs = [run for run in stored.runs if row in run.rows]
        given = sorted((at, run.stage) for run in runs for at in run.positions)
        assert given == list(enumerate(of_row))
    same = StoredPrefix.from_prompts([[*begin, *DOCUMENT]] * 2, [owners[0]] * 2, ["a", "a"])
    assert [run.rows for run in same.runs] == [(0, 1)] * 2


def test_turns_reuse_answers_whose_tokens_lie_on_all_stages(rank_pools: RankPools) -> None:
    """The answers are those of one rank, so the batches can be written down before."""
    turns, text = list[list[list[int]]](), DOCUMENT
    for turn in range(4):
        [alone] = rank_pools.run(1, prefix_tasks.generate_alone, "llama", [[text]], OPTIONS)
        turns.append([text])
        text = text + alone[0].generations[0].new_token_ids + prompt(9, seed=turn)
    ranks = run(rank_pools, 2, turns)
    assert cached(ranks[0]) == expected(turns, ranks[0].results, 2)
    assert [num for [num] in cached(ranks[0])] == [0, *(len(ids) + 5 for [ids] in turns[:-1])]


def test_a_short_rest_leaves_each_stage_that_has_a_part_a_token(rank_pools: RankPools) -> None:
    """By itself the last stage would compute it alone."""
    batches = [[DOCUMENT], [[*DOCUMENT, 5, 6, 7]]]
    ranks = run(rank_pools, 3, batches, split=Split(short=4))
    assert [report.chunk_tokens for report in ranks[0].results[1].ranks] == [1, 1, 1]
    assert cached(ranks[0]) == [[0], [len(DOCUMENT)]]


@pytest.mark.parametrize("small", [0, 1, 2])
def test_what_one_stage_has_dropped_is_computed_and_stored_again(rank_pools: RankPools, small: int) -> None:
    """The stage has room for its part of one text; the prefix ends where its part begins, and is whole again later."""
    token_bytes = sum(shape.bytes_per_token() for shape in tiny_model("llama").kv_shapes)
    others = [[prompt(40, seed=seed)] for seed in (70, 71)]
    batches = [[DOCUMENT], *others, [DOCUMENT + prompt(9, seed=1)], [DOCUMENT + prompt(9, seed=1) + prompt(8, seed=2)]]
    limits = [inf] * 3
    limits[small] = 30 * token_bytes
    ranks = run(rank_pools, 3, batches, limits=limits)
    *_, [dropped], [again] = cached(ranks[0])
    assert 0 <= dropped < len(DOCUMENT) and again >= len(DOCUMENT) + 9


def test_small_trees_change_no_number(rank_pools: RankPools) -> None:
    """Texts drawn at random, of which all stages drop some, each other ones."""
    draw, token_bytes = random.Random(7), sum(shape.bytes_per_token() for shape in tiny_model("llama").kv_shapes)
    texts, batches = [prompt(40, seed=seed) for seed in range(3)], list[list[list[int]]]()
    for number in range(12):
        rows = []
        for row in range(draw.randint(1, 2)):
            text = draw.choice(texts)
            rows.append(text[: draw.randint(5, len(text))] + prompt(draw.randint(2, 12), seed=100 * number + row))
        texts += [ids for ids in rows if len(ids) < 90]
        batches.append(rows)
    ranks = run(rank_pools, 2, batches, limits=[60 * token_bytes, 45 * token_bytes])
    assert sum(map(sum, cached(ranks[0]))) > 50


def test_auto_decodes_after_a_prefix_where_it_lies(rank_pools: RankPools) -> None:
    """Once stages have stored parts, whichever engine did."""
    by_rank = rank_pools.run(2, prefix_tasks.sharded_then, "llama", [[DOCUMENT], [DOCUMENT + OTHER]], OPTIONS, AUTO)
    [theirs] = rank_pools.run(1, prefix_tasks.generate_alone, "llama", [[DOCUMENT], [DOCUMENT + OTHER]], OPTIONS)
    for results in by_rank:
        for ours, alone in zip(results, theirs, strict=True):
            require_same(ours, alone)
        assert [each.decode for each in results] == ["sharded", "sharded"]
        assert results[1].cached_tokens == [len(DOCUMENT)]


def test_the_last_stage_gets_what_it_lacks_where_it_decodes_alone(rank_pools: RankPools) -> None:
    """The same holds for drafts, which do not go with parts of prefixes."""
    drafting = replace(OPTIONS, speculate=Speculate.lookup)
    batches = [[DOCUMENT], [DOCUMENT + OTHER, DOCUMENT[:30] + OTHER], [DOCUMENT + OTHER + OTHER]]
    by_rank = rank_pools.run(3, prefix_tasks.sharded_then, "llama", batches, OPTIONS, AUTO, drafting)
    [theirs] = rank_pools.run(1, prefix_tasks.generate_alone, "llama", batches, OPTIONS)
    for results in by_rank:
        for ours, alone in zip(results, theirs, strict=True):
            require_same(ours, alone)
        assert [each.decode for each in results] == ["sharded", "last", "last"]
        assert [each.cached_tokens for each in results] == [[0], [len(DOCUMENT), 30], [len(DOCUMENT + OTHER)]]


def test_an_engine_that_keeps_all_on_the_last_stage_reuses_what_that_has_alone(rank_pools: RankPools) -> None:
    last = DecodeOptions(name=DecodeName.last)
    batches = [[DOCUMENT], [DOCUMENT + OTHER], [DOCUMENT + OTHER + OTHER]]
    by_rank = rank_pools.run(2, prefix_tasks.sharded_then, "llama", batches, OPTIONS, last)
    [theirs] = rank_pools.run(1, prefix_tasks.generate_alone, "llama", batches, OPTIONS)
    for results in by_rank:
        for ours, alone in zip(results, theirs, strict=True):
            require_same(ours, alone)
        assert [each.decode for each in results] == ["sharded", "last", "last"]
        assert [each.cached_tokens for each in results] == [[0], [0], [len(DOCUMENT + OTHER)]]


def test_parts_come_back_from_disk_after_a_restart(rank_pools: RankPools, tmp_path: Path) -> None:
    batches = [[DOCUMENT], [DOCUMENT + OTHER], [DOCUMENT[:20] + OTHER]]
    by_rank = rank_pools.run(3, prefix_tasks.restarted_in_parts, tmp_path, "llama", batches, OPTIONS)
    [theirs] = rank_pools.run(1, prefix_tasks.generate_alone, "llama", batches, OPTIONS)
    for results in by_rank:
        for ours, alone in zip(results, theirs, strict=True):
            require_same(ours, alone)
        assert [each.cached_tokens for each in results] == [[0], [len(DOCUMENT)], [20]]
