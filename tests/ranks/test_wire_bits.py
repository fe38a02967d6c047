"""Keys and values that travel in few bits: a chain computes what one rank does that rounds those of earlier chunks."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import pairwise, product
from math import inf

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from runahead import GenerationOptions, PrefillOptions, even
from runahead.attention.op import Part
from runahead.cache.attention import CausalAttention
from runahead.cache.kv_cache import KVCache
from runahead.config import Carrier, Transfer
from runahead.prefill import PromptBatch
from tests.cache.sent_numbers import sent
from tests.conftest import RankPools
from tests.families import FAMILIES, HYBRIDS, SHARING, WINDOW, largest_difference, prompt, throughout
from tests.partitions import boundaries
from tests.ranks import prefix_tasks, tasks, wire_tasks
from tests.ranks.prefix_tasks import Split
from tests.ranks.tasks import tiny_model
from tests.ranks.test_exactness import PROMPT_TOKENS, TOLERANCE, WAYS

ALL = {**FAMILIES, **SHARING, **HYBRIDS}
BITS = (8, 4)
PADDED = [prompt(70), prompt(33, seed=1), prompt(9, seed=2)]


def rounded_logits(
    family: str,
    prompts: list[list[int]],
    bounds: tuple[int, ...],
    bits: int | None,
    attend: Callable[[int], Callable[..., Part]] | None = None,
    **mistake: bool,
) -> Tensor:
    """Logits of the last tokens, by one rank that computes chunk by chunk and rounds the chunks before.

    Args:
        attend: as of `CausalAttention`.
    """
    model, batch = tiny_model(family), PromptBatch.from_prompts(prompts, torch.device("cpu"))
    with throughout(model.dtype):
        cache = model.empty_cache(batch.num_tokens, batch=len(prompts))
        cache.states = model.empty_states()
        for start, end in pairwise(sorted(set(bounds))):
            attention = CausalAttention(cache, start=start, pads=batch.pads, attend=attend)
            logits_BV = model.forward(
                batch.ids_BS[:, start:end], attention, start=start, pads=batch.pads, length=batch.num_tokens
            )
            if bits is not None:
                round_tokens(cache, start, end, bits, **mistake)
    return logits_BV


def round_tokens(cache: KVCache, start: int, end: int, bits: int, **mistake: bool) -> None:
    """Replace keys and values of tokens by what arrives of them."""
    for slab in cache.slabs.by_layer:
        kv_SBKX = slab.tokens(start, end)
        parts = kv_SBKX.split([slab.key_dim, slab.value_dim], dim=3)
        kv_SBKX.copy_(torch.cat([sent(part, bits, **mistake) for part in parts], dim=3))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", BITS)
def test_a_stored_prefix_is_sent_in_few_bits_too(
    rank_pools: RankPools, way: tuple[Transfer, Carrier], bits: int
) -> None:
    """The last rank reads what it has stored as it is; the first rank reads what arrives of it."""
    text, rest = prompt(43), prompt(33, seed=1)
    options = PrefillOptions(transfer=way[0], carrier=way[1], layers_in_flight=2, wire_bits=bits)
    once = GenerationOptions(max_new_tokens=1, ignore_eos=True)
    turns = rank_pools.run(
        2, prefix_tasks.generate_in_turn, "llama", [[text], [text + rest]], once, Split(), options, inf
    )[-1]
    assert turns.ours[1].ranks[-1].reuse.cached_tokens == len(text)

    model, (_, middle, end) = tiny_model("llama"), even(len(rest), 2).boundaries
    ids_1S = torch.tensor([text + rest])

    def forward(cache: KVCache, start: int, stop: int) -> Tensor:
        attention = CausalAttention(cache, start=start, pads=[0])
        return model.forward(ids_1S[:, start:stop], attention, start=start, pads=[0])

    with throughout(model.dtype):
        last = model.empty_cache(ids_1S.shape[1])
        (_, begin, stored) = even(len(text), 2).boundaries
        forward(last, 0, begin)
        round_tokens(last, 0, begin, bits)
        forward(last, begin, stored)
        first = last.fork()
        round_tokens(first, 0, stored, bits)
        forward(first, stored, stored + middle)
        round_tokens(first, stored, stored + middle, bits)
        for mine, theirs in zip(last.slabs.by_layer, first.slabs.by_layer, strict=True):
            mine.tokens(stored, stored + middle).copy_(theirs.tokens(stored, stored + middle))
        expected, _ = forward(last, stored + middle, stored + end)[0].topk(5)
    ours = [logit for _, logit in turns.ours[1].generations[0].first_token_logits_top5]
    assert largest_difference(ours, expected) < TOLERANCE


def chain_logits(
    rank_pools: RankPools, family: str, prompts: list[list[int]], bounds: tuple[int, ...], options: PrefillOptions
) -> Tensor:
    outcomes = rank_pools.run(len(bounds) - 1, tasks.prefill, family, prompts, bounds, options)
    (logits,) = [outcome.logits for outcome in outcomes if outcome.logits is not None]
    return torch.tensor(logits, dtype=torch.float64)


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.sampled(16)
def test_logits_are_those_of_one_rank_that_rounds_earlier_chunks(rank_pools: RankPools, family: str, size: int) -> None:
    ids = prompt(PROMPT_TOKENS)

    @seed(zlib.crc32(f"{size} {family}".encode()))
    @settings(max_examples=3, phases=[Phase.generate])
    @given(bounds=boundaries(PROMPT_TOKENS, size), way=st.sampled_from(WAYS), bits=st.sampled_from(BITS))
    def check(bounds: tuple[int, ...], way: tuple[Transfer, Carrier], bits: int) -> None:
        options = PrefillOptions(transfer=way[0], carrier=way[1], layers_in_flight=2, wire_bits=bits)
        ours = chain_logits(rank_pools, family, [ids], bounds, options)
        assert largest_difference(ours, rounded_logits(family, [ids], bounds, bits)) < TOLERANCE, (bounds, options)

    check()


@pytest.mark.parametrize(("way", "bits"), list(product(WAYS, BITS)))
def test_padded_rows_on_three_ranks(rank_pools: RankPools, way: tuple[Transfer, Carrier], bits: int) -> None:
    options, bounds = PrefillOptions(transfer=way[0], carrier=way[1], wire_bits=bits), (0, 30, 45, 70)
    for family in ("llama", "gemma3_text"):
        ours = chain_logits(rank_pools, family, PADDED, bounds, options)
        assert largest_difference(ours, rounded_logits(family, PADDED, bounds, bits)) < TOLERANCE
        # What is wrong is seen: the scale of a neighbour, exact keys and values, other bits.
        for other, mistake in ((bits, {"neighbours_scale": True}), (None, {}), (12 - bits, {})):
            wrong = rounded_logits(family, PADDED, bounds, other, **mistake)
            assert largest_difference(ours, wrong) > 1e4 * TOLERANCE, (family, other, mistake)


@pytest.mark.parametrize(("way", "bits"), list(product(WAYS, BITS)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_rank_reads_the_codes_of_the_first(
    rank_pools: RankPools, way: tuple[Transfer, Carrier], bits: int, dtype: torch.dtype
) -> None:
    """They are passed on: no rank encodes what it has received. In the last layer only the last rank reads any."""
    options, bounds = PrefillOptions(transfer=way[0], carrier=way[1], wire_bits=bits), (0, 30, 45, 70)
    first, second, third = rank_pools.run(3, wire_tasks.records, "llama", prompt(70), bounds, options, dtype)
    assert not first.decoded and not third.encoded
    assert second.decoded == {place: digest for place, digest in first.encoded.items() if place[0] < 2}
    assert third.decoded == first.encoded | second.encoded
    assert {(start, end) for _, start, end in third.decoded} == {(0, 30), (30, 45)}


@pytest.mark.parametrize("transfer", list(Transfer))
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bytes_are_those_of_the_records(
    rank_pools: RankPools, transfer: Transfer, bits: int, dtype: torch.dtype
) -> None:
    bounds, record_bytes = (0, 30, 55, 70), 2 * (2 * 8 * bits // 8 + 2 * 2)  # 2 KV heads of 8 dims
    options = PrefillOptions(transfer=transfer, wire_bits=bits)
    outcomes = rank_pools.run(3, tasks.prefill, "llama_deep", [prompt(70)], bounds, options, 1, dtype)
    assert sum(outcome.kv_sent_bytes for outcome in outcomes) == (30 + 55) * 12 * record_bytes
    assert [outcome.kv_received_bytes for outcome in outcomes] == [0, 30 * 12 * record_bytes, 55 * 12 * record_bytes]
    # A ring of records beside the exact one; the last rank has all layers, and records of earlier chunks alone.
    exact_bytes, depth = 2 * 2 * 8 * dtype.itemsize, [3, 3, 3] if transfer is Transfer.relay else [3, 3, 4]
    first, second = ((exact_bytes + record_bytes) * bounds[rank + 1] * depth[rank] for rank in (0, 1))
    third = 12 * 70 * exact_bytes + depth[2] * 55 * record_bytes
    assert [outcome.kv_peak_bytes for outcome in outcomes] == [first, second, third]


@pytest.mark.parametrize("bits", BITS)
def test_layers_with_a_window_send_the_window_only(rank_pools: RankPools, bits: int) -> None:
    options, record_bytes = PrefillOptions(wire_bits=bits), 2 * (2 * 8 * bits // 8 + 2 * 2)
    outcomes = rank_pools.run(3, tasks.prefill, "mistral", [prompt(70)], (0, 30, 35, 70), options)
    assert sum(outcome.kv_sent_bytes for outcome in outcomes) == 2 * (WINDOW - 1) * 3 * record_bytes
