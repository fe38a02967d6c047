"""The formulas of what has to be sent."""

from __future__ import annotations

import pytest
import torch

from benchmarks.ttft.traffic import formula_bytes, kv_bytes_per_token, narrowed_tokens, wanted_zigzag_tokens
from benchmarks.ttft.variants import Traffic
from policies.pyramidinfer import PyramidInfer
from runahead.context import ContextPartition, even
from runahead.model.model import Model
from tests.ranks.tasks import tiny_model

LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 8  # of the tests' tiny Llama
PER_TOKEN = 2 * KV_HEADS * HEAD_DIM * torch.float64.itemsize * LAYERS


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model("llama")


def test_bytes_of_a_token(model: Model) -> None:
    assert kv_bytes_per_token(model.kv_shapes) == PER_TOKEN


@pytest.mark.parametrize("p", [2, 3, 4])
def test_even_chunks_along_a_chain_are_half_of_gathering(p: int, model: Model) -> None:
    C = 120
    chain = formula_bytes(Traffic.chain, even(C, p), model)
    gathered = formula_bytes(Traffic.gathered, even(C, p), model)
    assert gathered == (p - 1) * C * PER_TOKEN
    assert chain is not None and 2 * chain == gathered


def test_an_uneven_chain_sends_its_inner_boundaries(model: Model) -> None:
    partition = ContextPartition(boundaries=(0, 50, 80, 100))
    assert formula_bytes(Traffic.chain, partition, model) == (50 + 80) * PER_TOKEN


@pytest.mark.parametrize("bits", [8, 4])
def test_a_chain_in_few_bits_sends_codes_and_scales(bits: int, model: Model) -> None:
    partition = ContextPartition(boundaries=(0, 50, 80, 100))
    per_token = LAYERS * KV_HEADS * 2 * (HEAD_DIM * bits // 8 + 2)
    assert formula_bytes(Traffic.chain, partition, model, wire_bits=bits) == (50 + 80) * per_token


def test_ranks_without_a_chunk_are_sent_nothing(model: Model) -> None:
    assert formula_bytes(Traffic.chain, ContextPartition(boundaries=(0, 0, 100)), model) == 0


def test_one_rank_sends_nothing_and_tensor_parallelism_hidden_states(model: Model) -> None:
    assert formula_bytes(Traffic.nothing, even(100, 2), model) == 0
    # Two all-reduces per layer of 100 tokens' hidden states of 32 dims; each of two ranks sends as much as one has.
    hidden = 100 * 32 * torch.float64.itemsize
    assert formula_bytes(Traffic.activations, even(100, 2), model) == LAYERS * 2 * 2 * hidden


@pytest.mark.parametrize("p", [2, 3, 4])
def test_zigzag_without_what_nobody_attends_to_sends_three_quarters(p: int) -> None:
    C = 24 * p
    assert wanted_zigzag_tokens(C, p, in_last_layer=False) == 3 * (p - 1) * C // 4
    assert wanted_zigzag_tokens(C, p, in_last_layer=True) == C - C // p


def test_what_pyramidinfer_leaves_of_a_chunk_travels() -> None:
    policy = PyramidInfer(mean_keep=0.5, min_tokens=1)
    lengths = policy.lengths(100, LAYERS)
    assert narrowed_tokens([policy], ContextPartition(boundaries=(0, 100, 180)), LAYERS) == lengths
    three = narrowed_tokens([policy], ContextPartition(boundaries=(0, 100, 200, 230)), LAYERS)
    assert three == [3 * each for each in lengths]  # the first chunk twice
    assert narrowed_tokens([policy], ContextPartition(boundaries=(0, 100, 100)), LAYERS) == [0] * LAYERS
