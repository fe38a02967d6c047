"""All stages compute the rest of a prompt whose beginning the last stage has stored, with the numbers of the whole."""

from __future__ import annotations

from itertools import product
from math import inf
from pathlib import Path

import pytest

from policies.exact_topk import ExactTopK
from policies.infinigen import InfiniGen
from policies.offload import Offload
from policies.quest import Quest
from policies.retriever import Retriever
from runahead import GenerationOptions, PrefillOptions
from runahead.config import CacheOptions, Carrier, Transfer
from runahead.report import GenerationBatch
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import WINDOW, prompt
from tests.ranks import prefix_tasks
from tests.ranks.prefix_tasks import Split, Turns
from tests.ranks.tasks import tiny_model
from tests.reuse.test_prefixes import longest, require_same

OPTIONS = GenerationOptions(max_new_tokens=4, ignore_eos=True, logprobs=5)
DOCUMENT = prompt(2 * WINDOW + 11)
OTHER = prompt(30, seed=50)
BATCHES = [
    [DOCUMENT],
    [DOCUMENT + prompt(33, seed=1)],
    [DOCUMENT[:20] + prompt(21, seed=2), OTHER, DOCUMENT + prompt(9, seed=3)],
    [DOCUMENT + prompt(33, seed=1) + prompt(25, seed=4), OTHER + prompt(26, seed=5), DOCUMENT[:20]],
]
"""Whole prompts, rests of the same text in one batch, of texts in several nodes, and rows that are all padding."""
WAYS = [
    PrefillOptions(transfer=transfer, carrier=carrier, layers_in_flight=2)
    for transfer, carrier in product(Transfer, (Carrier.copy, Carrier.backend))
]


def chains(*alone: tuple[int, PrefillOptions]) -> pytest.MarkDecorator:
    """Runs a test with chains of two and three ranks, in each way of messages, and with the ranks that are given."""
    return pytest.mark.parametrize(
        ("size", "prefill"),
        [*alone, *product((2, 3), WAYS)],
        ids=lambda each: each if isinstance(each, int) else f"{each.transfer.name}, {each.carrier.name}",
    )


LONG = [
    [DOCUMENT, OTHER[:20]],
    [DOCUMENT + prompt(53, seed=1), OTHER[:20] + prompt(44, seed=2)],
    [DOCUMENT + prompt(53, seed=1) + prompt(61, seed=4), OTHER[:20] + prompt(44, seed=2) + prompt(44, seed=5)],
]
"""Rests that are longer than the first prompts."""
SLOW_FAMILIES = [pytest.param(family, marks=pytest.mark.slow) for family in ("mistral", "bloom", "gpt_oss")]


def run(
    pools: RankPools,
    size: int,
    family: str,
    split: Split,
    prefill: PrefillOptions,
    limit_bytes: float = inf,
    batches: list[list[list[int]]] = BATCHES,
    policies: RankPolicies | None = None,
) -> Turns:
    """Results of the batches, which are the same on all ranks, but for what each holds."""
    by_rank = pools.run(
        size, prefix_tasks.generate_in_turn, family, batches, OPTIONS, split, prefill, limit_bytes, policies
    )
    assert [each.num_held for each in by_rank] == [0] * size
    return by_rank[-1]


def counts(batch: GenerationBatch) -> tuple[int, int]:
    """Tokens that were computed of the longest row, on all ranks together, and tokens of all rows that were not."""
    return sum(report.chunk_tokens for report in batch.ranks), batch.ranks[-1].reuse.cached_tokens


@chains((1, WAYS[0]))
@pytest.mark.sampled(2)
def test_logits_are_those_of_the_whole_prompt(rank_pools: RankPools, size: int, prefill: PrefillOptions) -> None:
    turns, known = run(rank_pools, size, "llama", Split(), prefill), list[list[int]]()
    for prompts, ours, theirs in zip(BATCHES, turns.ours, turns.theirs, strict=True):
        require_same(ours, theirs)
        reused = [longest(ids, known) for ids in prompts]
        assert counts(ours) == (max(len(ids) - num for ids, num in zip(prompts, reused, strict=True)), sum(reused))
        assert all(report.chunk_tokens > 0 for report in ours.ranks)
        known += [ids + each.new_token_ids[:-1] for ids, each in zip(prompts, ours.generations, strict=True)]


@pytest.mark.parametrize("family", ["gemma2", *SLOW_FAMILIES])
def test_models_with_windows_and_biases_too(rank_pools: RankPools, family: str) -> None:
    """The first prompt is computed by the last stage alone, which otherwise lacks what lies before windows."""
    turns = run(rank_pools, 3, family, Split(short=len(DOCUMENT), ratios=(0.5, 0.2, 0.3)), WAYS[0], batches=LONG)
    for ours, theirs in zip(turns.ours, turns.theirs, strict=True):
        require_same(ours, theirs)
    assert [counts(batch)[1] for batch in turns.ours] == [0, 63, 160]


@pytest.mark.parametrize("prefill", WAYS, ids=lambda each: f"{each.transfer.name}, {each.carrier.name}")
@pytest.mark.sampled(2)
def test_many_layers_go_through_the_memory_of_a_few(rank_pools: RankPools, prefill: PrefillOptions) -> None:
    turns = run(rank_pools, 2, "deep", Split(), prefill)
    for ours, theirs in zip(turns.ours, turns.theirs, strict=True):
        require_same(ours, theirs)
    assert counts(turns.ours[1]) == (33, len(DOCUMENT))


@pytest.mark.parametrize("prefill", WAYS[:2], ids=["copies", "messages"])
def test_each_stage_receives_once_what_it_lacks(rank_pools: RankPools, prefill: PrefillOptions) -> None:
    """The last stage gets nothing of the prefix. The others get what two rows share once, but for the last layer."""
    rest = prompt(33, seed=1)
    batches = [[DOCUMENT], [DOCUMENT + rest], [DOCUMENT + prompt(33, seed=2), DOCUMENT + prompt(33, seed=3)]]
    turns = run(rank_pools, 3, "llama", Split(), prefill, batches=batches)
    shapes = tiny_model("llama").kv_shapes
    layer_bytes, num_layers = shapes[0].bytes_per_token(), len(shapes)
    for rows, ours in enumerate(turns.ours[1:], start=1):
        prefix = -(-len(DOCUMENT) // rows) * rows * (num_layers - 1)
        in_bytes = [report.kv_received_bytes for report in ours.ranks]
        new = [rows * 11 * num_layers, rows * 22 * num_layers]
        assert in_bytes == [layer_bytes * tokens for tokens in (prefix, prefix + new[0], new[1])]


RETRIEVING = [
    (2, WAYS[0], InfiniGen(fetch=20, first_layer=1, min_tokens=0, observed=8)),
    (3, WAYS[3], ExactTopK(fetch=20, min_tokens=0)),
    *(
        pytest.param(3, WAYS[1], policy, marks=pytest.mark.slow)
        for policy in (Quest(fetch=20, page=4, min_tokens=0), Offload())
    ),
]


@pytest.mark.parametrize(("size", "prefill", "policy"), RETRIEVING, ids=lambda each: type(each).__name__)
def test_policies_that_retrieve_have_the_stored_prefix_too(
    rank_pools: RankPools, size: int, prefill: PrefillOptions, policy: Retriever
) -> None:
    policies = RankPolicies.everywhere([policy])
    turns, known = run(rank_pools, size, "llama", Split(), prefill, policies=policies), list[list[int]]()
    for prompts, ours, theirs in zip(BATCHES, turns.ours, turns.theirs, strict=True):
        require_same(ours, theirs)
        least_new = max(1, policies.num_observed)
        reused = [longest(ids[: max(1, len(ids) - least_new + 1)], known) for ids in prompts]
        assert counts(ours) == (max(len(ids) - num for ids, num in zip(prompts, reused, strict=True)), sum(reused))
        known += prompts  # no answers, whose tokens have attended to what was retrieved


def test_in_few_bits_the_last_stage_stores_what_all_compute_and_receives_it_whole(rank_pools: RankPools) -> None:
    """The first prompt, too, in a model with windows: groups begin at its first token."""
    policies = RankPolicies(storage=CacheOptions(bits=4, residual=8))
    turns = run(rank_pools, 2, "mistral", Split(), WAYS[0], batches=LONG, policies=policies)
    for ours, theirs in zip(turns.ours, turns.theirs, strict=True):
        require_same(ours, theirs)
        assert ours.ranks[-1].kv_kept_bytes == theirs.ranks[-1].kv_kept_bytes
    assert [counts(batch)[1] for batch in turns.ours] == [0, 63, 160]


def test_a_short_rest_is_computed_by_the_last_stage_alone(rank_pools: RankPools) -> None:
    batches = [[DOCUMENT], [[*DOCUMENT, 5]], [[*DOCUMENT, 5, *prompt(9, seed=1)]]]
    turns = run(rank_pools, 2, "llama", Split(short=4), WAYS[0], batches=batches)
    for ours, theirs in zip(turns.ours, turns.theirs, strict=True):
        require_same(ours, theirs)
    assert [[report.chunk_tokens for report in ours.ranks] for ours in turns.ours] == [[21, 22], [0, 1], [4, 5]]
    assert [counts(ours)[1] for ours in turns.ours] == [0, 43, 44]


def test_what_another_stage_decodes_is_computed_whole_and_not_stored(rank_pools: RankPools) -> None:
    batches = [[DOCUMENT], [DOCUMENT + prompt(9, seed=1)], [DOCUMENT + prompt(9, seed=1)]]
    turns = run(rank_pools, 2, "llama", Split(short=-1, ratios=(1.0, 0.0)), WAYS[0], batches=batches)
    for (ids,), ours, theirs in zip(batches, turns.ours, turns.theirs, strict=True):
        require_same(ours, theirs)
        assert [report.chunk_tokens for report in ours.ranks] == [len(ids), 0]
        assert all(report.reuse is None for report in ours.ranks)


def test_a_rest_of_which_the_last_stage_would_have_no_token_leaves_it_one(rank_pools: RankPools) -> None:
    text = DOCUMENT + prompt(29, seed=1)
    batches = [[DOCUMENT], [text], [text + prompt(44, seed=2)]]
    split = Split(short=len(DOCUMENT) - 1, ratios=(0.4, 0.6), short_ratios=(1.0, 0.0))
    turns = run(rank_pools, 2, "llama", split, WAYS[0], batches=batches)
    for ours, theirs in zip(turns.ours, turns.theirs, strict=True):
        require_same(ours, theirs)
    assert [[report.chunk_tokens for report in ours.ranks] for ours in turns.ours] == [[17, 26], [28, 1], [18, 26]]
    assert [counts(ours)[1] for ours in turns.ours] == [0, len(DOCUMENT), len(text)]


@pytest.mark.parametrize(("size", "num_rest"), [(2, 1), (3, 1), (3, 2)])
def test_a_rest_of_fewer_tokens_than_stages_is_computed_by_the_last(
    rank_pools: RankPools, size: int, num_rest: int
) -> None:
    """The partition gives all of it to the first stage, as a split that was learned may."""
    batches = [[DOCUMENT], [DOCUMENT + prompt(num_rest, seed=3)]]
    split = Split(
        short=num_rest, ratios=(0.4, *[0.6 / (size - 1)] * (size - 1)), short_ratios=(1.0,) + (0.0,) * (size - 1)
    )
    turns = run(rank_pools, size, "llama", split, WAYS[0], batches=batches)
    for ours, theirs in zip(turns.ours, turns.theirs, strict=True):
        require_same(ours, theirs)
    assert [report.chunk_tokens for report in turns.ours[1].ranks] == [num_rest - 1, *[0] * (size - 2), 1]
    assert counts(turns.ours[1])[1] == len(DOCUMENT)


def test_a_small_tree_changes_no_number(rank_pools: RankPools) -> None:
    token_bytes = sum(shape.bytes_per_token() for shape in tiny_model("llama").kv_shapes)
    turns = run(rank_pools, 2, "llama", Split(), WAYS[1], limit_bytes=60 * token_bytes)
    for ours, theirs in zip(turns.ours, turns.theirs, strict=True):
        require_same(ours, theirs)
    assert [counts(batch)[1] for batch in turns.ours] == [0, 43, 63, 62]  # of 125 in the last one


@pytest.mark.parametrize(("size", "prefill", "layer"), [(2, WAYS[0], 0), (3, WAYS[0], -1), (3, WAYS[3], 1)], ids=str)
def test_a_prefix_found_damaged_on_its_way_is_computed_by_its_stage_while_others_wait(
    rank_pools: RankPools, tmp_path: Path, size: int, prefill: PrefillOptions, layer: int
) -> None:
    """It may be found in the last layer, which only the last stage reads."""
    texts = [DOCUMENT, DOCUMENT + prompt(33, seed=1), DOCUMENT + prompt(20, seed=2)]
    found = rank_pools.run(size, prefix_tasks.generate_from_damaged_files, tmp_path, texts, OPTIONS, prefill, layer)
    turns, told = found[-1]
    for ours, theirs in zip(turns.ours, turns.theirs, strict=True):
        require_same(ours, theirs)
    assert [counts(ours) for ours in turns.ours] == [(33, 0), (20, len(DOCUMENT))]
    assert [len(each) for _, each in found] == [0] * (size - 1) + [1] and "is damaged, and was removed" in told[0]
    assert [each.num_held for each, _ in found] == [0] * size


def test_ranks_that_differ_in_whether_they_have_a_tree_say_so(rank_pools: RankPools) -> None:
    errors = rank_pools.run(2, prefix_tasks.tree_on_rank_0_alone, DOCUMENT)
    assert "whether there is a prefix tree" in errors[0] and "\n" not in errors[0]
