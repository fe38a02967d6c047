"""The first token's logits, and the tokens behind it, are transformers' own: for every family, split and transfer."""

from __future__ import annotations

import zlib
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from runahead import GenerationOptions, Model, PrefillOptions
from runahead.config import Carrier, DecodeName, PrefillName, Transfer
from tests.conftest import RankPools
from tests.families import (
    FAMILIES,
    REFUSED,
    ROPE_THRESHOLD,
    build,
    largest_difference,
    oracle_logits,
    oracle_tokens,
    prompt,
)
from tests.partitions import boundaries
from tests.ranks import tasks

PROMPT_TOKENS = 70
"""More than four windows, and beyond the length at which the RoPE scalings that depend on length change."""

TOLERANCE = 1e-9
"""Logits have a standard deviation of 1 to 3. Summing in another order costs about 1e-14 in float64; the least wrong
key, position or scale costs above 1e-4. (In between lies 1e-6, what rounding to float32 somewhere would cost.)"""

FLOAT32_TOLERANCE = 1e-4
"""Rounding of float32 through three layers with wide weights: up to 2e-5 is seen."""

WAYS = [(transfer, carrier) for transfer in Transfer for carrier in (Carrier.copy, Carrier.backend)]


def first_logits(
    rank_pools: RankPools, family: str, ids: list[int], bounds: tuple[int, ...], options: PrefillOptions
) -> list[float]:
    """Logits after the prompt, from the one rank that has them."""
    outcomes = rank_pools.run(len(bounds) - 1, tasks.prefill, family, [ids], bounds, options)
    (logits,) = [outcome.logits for outcome in outcomes if outcome.logits is not None]
    return logits[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("examples", [4, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.sampled(16)
def test_first_logits_equal_transformers_for_any_partition_and_transfer(
    rank_pools: RankPools, family: str, size: int, examples: int
) -> None:
    ids = prompt(PROMPT_TOKENS)
    expected = oracle_logits(family, tuple(ids))

    # Seeded by the case, so that the families do not all get the same partitions; not shrunk, since ranks that fail
    # take their time.
    @seed(zlib.crc32(f"{size} {family}".encode()))
    @settings(max_examples=1 if size == 1 else examples, phases=[Phase.generate])
    @given(bounds=boundaries(PROMPT_TOKENS, size), layers_in_flight=st.integers(2, 4))
    def check(bounds: tuple[int, ...], layers_in_flight: int) -> None:
        for transfer, carrier in WAYS:
            options = PrefillOptions(transfer=transfer, carrier=carrier, layers_in_flight=layers_in_flight)
            ours = first_logits(rank_pools, family, ids, bounds, options)
            assert largest_difference(ours, expected) < TOLERANCE, (bounds, transfer, carrier)

    check()


@pytest.mark.parametrize(("transfer", "carrier"), WAYS)
@pytest.mark.parametrize(
    "bounds", [(0, 0, 0, 70), (0, 70, 70, 70), (0, 0, 70, 70), (0, 1, 2, 70), (0, 35, 35, 70), (0, 1, 69, 70)]
)
def test_empty_and_one_token_chunks_anywhere(
    rank_pools: RankPools, bounds: tuple[int, ...], transfer: Transfer, carrier: Carrier
) -> None:
    ids = prompt(PROMPT_TOKENS)
    ours = first_logits(rank_pools, "gemma3_text", ids, bounds, PrefillOptions(transfer=transfer, carrier=carrier))
    assert largest_difference(ours, oracle_logits("gemma3_text", tuple(ids))) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "bloom", "mistral"])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5])
def test_prompts_of_fewer_tokens_than_ranks(rank_pools: RankPools, family: str, num_tokens: int) -> None:
    ids = prompt(num_tokens)
    results = rank_pools.run(4, tasks.generate, family, [ids], GenerationOptions(max_new_tokens=4, ignore_eos=True))
    for batch, _ in results:
        assert batch.generations[0].new_token_ids == oracle_tokens(family, tuple(ids), 4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("size", "bounds"), [(1, (0, 70)), (2, (0, 41, 70)), (3, (0, 30, 31, 70))])
@pytest.mark.sampled(8)
def test_greedy_tokens_equal_generate_on_every_rank(
    rank_pools: RankPools, family: str, size: int, bounds: tuple[int, ...]
) -> None:
    ids = prompt(PROMPT_TOKENS)
    expected = oracle_tokens(family, tuple(ids), 8)
    options = GenerationOptions(max_new_tokens=8, ignore_eos=True)
    for batch, _ in rank_pools.run(size, tasks.generate, family, [ids], options, bounds):
        assert batch.generations[0].new_token_ids == expected


def test_reported_top_logits_are_the_largest_raw_ones(rank_pools: RankPools) -> None:
    ids = prompt(PROMPT_TOKENS)
    options = GenerationOptions(max_new_tokens=2, repetition_penalty=5.0)  # which changes the choice, not the logits
    values, tokens = oracle_logits("llama", tuple(ids)).topk(5)
    for batch, _ in rank_pools.run(2, tasks.generate, "llama", [ids], options):
        reported = batch.generations[0].first_token_logits_top5
        assert [token for token, _ in reported] == tokens.tolist()
        assert largest_difference([logit for _, logit in reported], values) < TOLERANCE


@pytest.mark.parametrize("size", [2, 3])
def test_single_prefill_leaves_all_work_to_the_last_rank(rank_pools: RankPools, size: int) -> None:
    ids = prompt(PROMPT_TOKENS)
    options = GenerationOptions(max_new_tokens=8, ignore_eos=True)
    single = PrefillOptions(name=PrefillName.single)
    for batch, _ in rank_pools.run(size, tasks.generate, "mistral", [ids], options, None, single):
        assert batch.generations[0].new_token_ids == oracle_tokens("mistral", tuple(ids), 8)
        assert [rank.chunk_tokens for rank in batch.ranks] == [0] * (size - 1) + [PROMPT_TOKENS]
        assert all(rank.kv_sent_bytes == rank.kv_received_bytes == 0 for rank in batch.ranks)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "llama4_text", "llama", "bloom", "gemma2"])
def test_float32_with_transformers_own_choice_of_kernels(rank_pools: RankPools, family: str) -> None:
    """The other tests are in float64, where the experts take another path than users'."""
    ids = prompt(PROMPT_TOKENS)
    expected = oracle_logits(family, tuple(ids), torch.float32)
    for transfer in Transfer:
        options = PrefillOptions(transfer=transfer)
        outcomes = rank_pools.run(2, tasks.prefill, family, [ids], (0, 41, 70), options, 1, torch.float32)
        assert outcomes[-1].logits is not None
        assert largest_difference(outcomes[-1].logits[0], expected) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("family", ["phi3_longrope", "llama_dynamic_ntk"])
class TestRopeThatDependsOnLength:
    """The whole prompt decides which rotary table a chunk takes, and nothing before it does."""

    LONG, SHORT = PROMPT_TOKENS, ROPE_THRESHOLD - 10

    def test_the_tables_do_differ(self, family: str) -> None:
        """The other tests of this class need tables that differ: the first tokens' logits with the two tables."""
        ids = prompt(self.LONG)
        module = build(family)
        with torch.inference_mode():
            short = module(input_ids=torch.tensor([ids[: self.SHORT]]), use_cache=False).logits[0, -1]
            long = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, self.SHORT - 1]
        assert largest_difference(short, long) > 0.05

    @pytest.mark.parametrize("bounds", [(0, 20, 70), (0, 39, 70), (0, 40, 70), (0, 41, 70), (0, 5, 20, 70)])
    def test_chunks_before_the_threshold_take_the_long_prompts_tables(
        self, rank_pools: RankPools, family: str, bounds: tuple[int, ...]
    ) -> None:
        ids = prompt(self.LONG)
        ours = first_logits(rank_pools, family, ids, bounds, PrefillOptions())
        assert largest_difference(ours, oracle_logits(family, tuple(ids))) < TOLERANCE

    @pytest.mark.parametrize("num_tokens", [ROPE_THRESHOLD - 1, ROPE_THRESHOLD, ROPE_THRESHOLD + 1])
    def test_on_either_side_of_the_threshold(self, rank_pools: RankPools, family: str, num_tokens: int) -> None:
        ids = prompt(num_tokens)
        ours = first_logits(rank_pools, family, ids, (0, 20, num_tokens), PrefillOptions())
        assert largest_difference(ours, oracle_logits(family, tuple(ids))) < TOLERANCE

    def test_long_and_short_prompts_do_not_influence_each_other(self, rank_pools: RankPools, family: str) -> None:
        options = GenerationOptions(max_new_tokens=6, ignore_eos=True)
        for num_tokens in (self.SHORT, self.LONG, self.SHORT, self.LONG, self.LONG, self.SHORT):
            ids = prompt(num_tokens, seed=num_tokens)
            bounds = (0, num_tokens // 2, num_tokens)
            for batch, _ in rank_pools.run(2, tasks.generate, family, [ids], options, bounds):
                assert batch.generations[0].new_token_ids == oracle_tokens(family, tuple(ids), 6)


@pytest.mark.parametrize("decode", [DecodeName.last, DecodeName.sharded])
@pytest.mark.parametrize("size", [2, 3])
def test_answers_over_the_longrope_threshold_are_those_of_transformers(
    rank_pools: RankPools, size: int, decode: DecodeName
) -> None:
    """By the last stage alone, or by the chain whose stages decode together; three rows cross, each at its own step."""
    prompts = [prompt(ROPE_THRESHOLD - before) for before in (8, 3, 0, -1, 30)]
    options = GenerationOptions(max_new_tokens=12, ignore_eos=True)
    task = partial(tasks.generate, decode=decode)
    for batch, _ in rank_pools.run(size, task, "phi3_longrope", prompts, options):
        for ids, row in zip(prompts, batch.generations, strict=True):
            assert row.new_token_ids == oracle_tokens("phi3_longrope", tuple(ids), 12)


@pytest.mark.parametrize("family", REFUSED)
def test_family_that_would_be_computed_wrong_is_refused_in_one_line(family: str) -> None:
    with pytest.raises(ValueError, match="not supported|use another model") as caught:
        Model(build(family, attention="eager"), name=family)
    assert "\n" not in str(caught.value)
    assert family in str(caught.value)
