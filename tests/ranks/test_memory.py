"""K,V in memory and on the network are what the method promises, and nothing grows with the prompt's square."""

from __future__ import annotations

from typing import Any

import pytest

from runahead import GenerationOptions, PrefillOptions
from runahead.config import PrefillName, Transfer
from tests.conftest import RankPools
from tests.families import WINDOW, prompt
from tests.ranks import tasks
from tests.ranks.tasks import PrefillOutcome

DEEP_LAYERS = 12  # of the families whose name ends in _deep
LAYER_BYTES = 2 * 2 * 8 * 8  # per token and layer of the families below: K and V, 2 kv heads, head dim 8, float64
NUM_TOKENS = 70

SPLITS = [(0, 41, 70), (0, 30, 55, 70), (0, 25, 45, 60, 70), (0, 1, 40, 70), (0, 30, 30, 69, 70)]


def position_in_chain(bounds: tuple[int, ...], rank: int) -> int:
    """How many ranks before this one have a chunk."""
    return sum(bounds[i] < bounds[i + 1] for i in range(rank))


def layers_bound(options: PrefillOptions, position: int) -> int:
    """Layers of K,V that a rank may hold at a time; `direct` adds what the first rank is ahead of this one."""
    return options.layers_in_flight + (position if options.transfer is Transfer.direct else 0)


@pytest.mark.parametrize("layers_in_flight", [2, 3, 5])
@pytest.mark.parametrize("transfer", list(Transfer))
@pytest.mark.parametrize("bounds", SPLITS)
@pytest.mark.sampled(8)
def test_earlier_ranks_hold_a_few_layers_and_the_last_one_all(
    rank_pools: RankPools, bounds: tuple[int, ...], transfer: Transfer, layers_in_flight: int
) -> None:
    """Looked at from outside: the K,V that are alive in a rank's memory whenever it comes to a layer."""
    num_new, size = 5, len(bounds) - 1
    last = max(rank for rank in range(size) if bounds[rank] < bounds[rank + 1])
    options = PrefillOptions(transfer=transfer, layers_in_flight=layers_in_flight)
    generation = GenerationOptions(max_new_tokens=num_new, ignore_eos=True)
    results = rank_pools.run(
        size, tasks.kv_bytes_in_layers, "llama_deep", [prompt(NUM_TOKENS)], generation, bounds, options
    )
    for rank, (alive_in_layers, alive_afterwards, report) in enumerate(results):
        assert max(alive_in_layers, default=0) == report.kv_peak_bytes
        assert alive_afterwards == 0
        if bounds[rank] == bounds[rank + 1]:
            assert report.kv_peak_bytes == 0
        elif rank == last:
            assert report.kv_peak_bytes == DEEP_LAYERS * (NUM_TOKENS + num_new - 1) * LAYER_BYTES
        else:
            bound = layers_bound(options, position_in_chain(bounds, rank))
            assert 0 < report.kv_peak_bytes <= bound * bounds[rank + 1] * LAYER_BYTES


def prefill(rank_pools: RankPools, family: str, bounds: tuple[int, ...], transfer: Transfer) -> list[PrefillOutcome]:
    options = PrefillOptions(transfer=transfer)
    return rank_pools.run(len(bounds) - 1, tasks.prefill, family, [prompt(NUM_TOKENS)], bounds, options)


@pytest.mark.parametrize("transfer", list(Transfer))
@pytest.mark.parametrize("bounds", SPLITS)
def test_cache_stays_on_the_last_rank_with_tokens_only(
    rank_pools: RankPools, bounds: tuple[int, ...], transfer: Transfer
) -> None:
    for rank, outcome in enumerate(prefill(rank_pools, "llama", bounds, transfer)):
        is_last = bounds[rank] < bounds[rank + 1] == NUM_TOKENS
        assert outcome.holds_cache == is_last
        assert (outcome.logits is not None) == is_last
        assert outcome.chunk_tokens == bounds[rank + 1] - bounds[rank]


@pytest.mark.parametrize("transfer", list(Transfer))
@pytest.mark.parametrize("bounds", SPLITS)
def test_bytes_moved_are_the_inner_boundaries_times_the_bytes_of_a_token(
    rank_pools: RankPools, bounds: tuple[int, ...], transfer: Transfer
) -> None:
    """Boundaries of chunks that are not empty. Both transfers move as much: the relay sends what it received."""
    token_bytes = DEEP_LAYERS * LAYER_BYTES
    ends = sorted(set(bounds))
    outcomes = [outcome for outcome in prefill(rank_pools, "llama_deep", bounds, transfer) if outcome.chunk_tokens]
    assert sum(outcome.kv_sent_bytes for outcome in outcomes) == sum(ends[1:-1]) * token_bytes
    for position, outcome in enumerate(outcomes):
        start, end, later = ends[position], ends[position + 1], len(outcomes) - 1 - position
        sent = (end if later else 0) if transfer is Transfer.relay else later * (end - start)
        assert outcome.kv_received_bytes == start * token_bytes
        assert outcome.kv_sent_bytes == sent * token_bytes


@pytest.mark.parametrize("transfer", list(Transfer))
def test_layers_with_a_window_move_the_window_only(rank_pools: RankPools, transfer: Transfer) -> None:
    """The first query of a chunk sees WINDOW - 1 tokens before its own; a relay passes on what the next rank needs."""
    sliding = prefill(rank_pools, "mistral", (0, 30, 35, 70), transfer)
    moved = 2 * (WINDOW - 1) * 3 * LAYER_BYTES
    assert sum(outcome.kv_sent_bytes for outcome in sliding) == moved
    assert sum(outcome.kv_received_bytes for outcome in sliding) == moved
    mixed = prefill(rank_pools, "gemma3_text", (0, 30, 35, 70), transfer)  # two layers with a window, one without
    assert sum(outcome.kv_sent_bytes for outcome in mixed) == (2 * 2 * (WINDOW - 1) + 30 + 35) * LAYER_BYTES


def test_layers_with_a_window_keep_no_more_than_that_on_earlier_ranks(rank_pools: RankPools) -> None:
    options = PrefillOptions(layers_in_flight=2)
    outcomes = rank_pools.run(3, tasks.prefill, "mistral", [prompt(NUM_TOKENS)], (0, 30, 40, NUM_TOKENS), options)
    assert [outcome.kv_peak_bytes for outcome in outcomes[:2]] == [
        2 * 30 * LAYER_BYTES,
        2 * (WINDOW - 1 + 10) * LAYER_BYTES,
    ]


def test_single_prefill_moves_nothing_and_keeps_nothing_elsewhere(rank_pools: RankPools) -> None:
    options = PrefillOptions(name=PrefillName.single)
    *idle, last = rank_pools.run(3, tasks.prefill, "llama", [prompt(NUM_TOKENS)], (0, 0, 0, NUM_TOKENS), options)
    assert all(outcome.kv_peak_bytes == outcome.kv_sent_bytes == 0 for outcome in idle)
    assert last.kv_received_bytes == 0


SQUARE_TOKENS = 3000

PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "window": ("mistral", {"sliding_window": 1024}),
    "narrow window": ("mistral", {}),
    "chunks": ("llama4_text", {"attention_chunk_size": 1024}),
    "soft cap": ("gemma2", {"sliding_window": 1024}),
    "sinks": ("gpt_oss", {"sliding_window": 1024}),
    "alibi of bloom": ("bloom", {}),
    "alibi of mpt": ("mpt", {"max_seq_len": 4096}),
    "alibi of falcon": ("falcon_alibi", {}),
    "latent": ("deepseek_v3", {}),
    "learned positions": ("gpt2", {}),
    "one kv head": ("gpt_bigcode", {}),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lengths", [[SQUARE_TOKENS], [SQUARE_TOKENS, SQUARE_TOKENS - 900]], ids=["alone", "padded"])
@pytest.mark.sampled(8)
def test_no_tensor_of_prompt_times_prompt_in_prefill_or_decoding(
    rank_pools: RankPools, path: str, lengths: list[int]
) -> None:
    """A quarter of S x S is far above all that is linear in S here, and far below one head's mask or weights."""
    family, config = PATHS[path]
    prompts = [prompt(length, seed=length) for length in lengths]
    options = GenerationOptions(max_new_tokens=3, ignore_eos=True)
    config = {"max_position_embeddings": 4096, **config}
    for elements, operation in rank_pools.run(1, tasks.largest_tensor, family, prompts, options, config):
        assert elements >= SQUARE_TOKENS * 32  # it did look: the hidden states are at least this large
        assert elements < SQUARE_TOKENS**2 / 4, operation


@pytest.mark.parametrize("path", ["plain", "window", "soft cap", "alibi of bloom"])
def test_no_tensor_of_chunk_times_prefix_on_several_ranks(rank_pools: RankPools, path: str) -> None:
    family, config = PATHS[path]
    options = GenerationOptions(max_new_tokens=2, ignore_eos=True)
    config = {"max_position_embeddings": 4096, **config}
    for elements, operation in rank_pools.run(
        2, tasks.largest_tensor, family, [prompt(SQUARE_TOKENS)], options, config
    ):
        assert elements < SQUARE_TOKENS**2 / 4, operation
