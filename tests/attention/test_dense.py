"""Dense attention is causal attention that computes the masked half too."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.masking_utils import sliding_window_causal_mask_function

from runahead.attention.dense import DenseAttention
from runahead.attention.masks import MaskRule
from runahead.attention.op import Run, Step, attend, spans_of
from runahead.attention.partial import AttentionTerms
from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import KVShape, Slabs

NUM_TOKENS, BATCH = 14, 3
SHAPE = KVShape(num_kv_heads=2, key_dim=4, value_dim=4, dtype=torch.float64)
TERMS = {
    "causal": AttentionTerms(scaling=0.5),
    "window": AttentionTerms(scaling=0.5, rule=MaskRule(sliding_window_causal_mask_function(4))),
    "bias": AttentionTerms(scaling=0.5, key_bias=lambda keys_S: torch.tensor([[0.1], [0.2], [0.3], [0.4]]) * keys_S),
    "soft cap": AttentionTerms(scaling=0.5, softcap=2.0),
    "sinks": AttentionTerms(scaling=0.5, sinks_N=torch.tensor([0.0, 1.0, 2.0, -3.0], dtype=torch.float64)),
}


def filled_cache() -> KVCache:
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(Slabs.empty([SHAPE], batch=BATCH, spans=[(0, NUM_TOKENS)], num_slabs=1, device=torch.device("cpu")))
    cache.layer(0).slab_TBKX.normal_(generator=generator)
    return cache


def queries(num: int) -> torch.Tensor:
    return torch.randn(BATCH, 4, num, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@given(
    start=st.integers(0, NUM_TOKENS - 1),
    num=st.integers(1, NUM_TOKENS),
    pads=st.lists(st.integers(0, NUM_TOKENS - 1), min_size=BATCH - 1, max_size=BATCH - 1),
)
def test_equals_causal_attention_for_any_chunk_and_padding(
    terms: AttentionTerms, start: int, num: int, pads: list[int]
) -> None:
    num, pads, cache = min(num, NUM_TOKENS - start), [*pads, 0], filled_cache()
    slab, dense = cache.layer(0), DenseAttention(NUM_TOKENS)
    spans = spans_of(range(start + num), start=start, num_new=num, pads=pads)
    expected = attend(queries(num), [Step([Run(slab, spans)])], terms)
    for _ in range(2):  # the second time with the mask at hand
        part = dense.attend(queries(num), [Step([Run(slab, spans)])], terms)
        for actual, wanted in zip(part, expected, strict=True):
            torch.testing.assert_close(actual, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("terms", [TERMS["causal"], TERMS["soft cap"]], ids=["fused", "blocks"])
def test_masked_keys_are_computed(terms: AttentionTerms) -> None:
    """0 times not-a-number is not a number: values of later tokens that are one show who multiplied with them."""
    cache = filled_cache()
    cache.layer(0).slab_TBKX[9:, ..., 4:] = math.nan
    spans = spans_of(range(9), start=3, num_new=6, pads=[0] * BATCH)
    causal, _ = attend(queries(6), [Step([Run(cache.layer(0), spans)])], terms)
    dense, _ = DenseAttention(NUM_TOKENS).attend(queries(6), [Step([Run(cache.layer(0), spans)])], terms)
    assert causal.isfinite().all()
    assert dense.isnan().all()
