"""Attention to spans of stored tokens is one causal softmax per row, whatever the chunks, the padding and the place."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.masking_utils import sliding_window_causal_mask_function

from runahead.attention import op
from runahead.attention.masks import MaskRule
from runahead.attention.op import EVERY_ROW, Run, Span, Step, attend, spans_of
from runahead.attention.partial import AttentionTerms, merge
from runahead.cache.attention import CausalAttention
from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import KVShape, Slabs
from tests.partitions import boundaries

# Legend: B batch, N query heads, K kv heads, S tokens of the padded batch, H head dim.

NUM_TOKENS = 14
BATCH = 3
SHAPE = KVShape(num_kv_heads=2, key_dim=4, value_dim=4, dtype=torch.float64)
TOLERANCE = 1e-12  # averages of standard normal values in float64

SCATTERED = {
    "causal": AttentionTerms(scaling=0.5),
    "window": AttentionTerms(scaling=0.5, rule=MaskRule(sliding_window_causal_mask_function(4))),
    "bias": AttentionTerms(scaling=0.5, key_bias=lambda keys_S: torch.tensor([[0.1], [0.2], [0.3], [0.4]]) * keys_S),
    "soft cap": AttentionTerms(scaling=0.5, softcap=2.0),
}

RULES = {"causal": None, "window": MaskRule(sliding_window_causal_mask_function(4))}


def slabs(room: int) -> Slabs:
    """Empty slabs of one layer."""
    return Slabs.empty([SHAPE], batch=BATCH, spans=[(0, room)], num_slabs=1, device=torch.device("cpu"))


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(  # type: ignore[return-value]
        torch.randn(BATCH, heads, NUM_TOKENS, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )


def _reference(pads: list[int], rule: MaskRule | None) -> Tensor:
    """Output (B, N, S, H), row by row over the row's own tokens; 0 on padding."""
    q_BNSH, k_BKSH, v_BKSH = _inputs()
    out = torch.zeros_like(q_BNSH)
    for row, pad in enumerate(pads):
        q, k, v = (x[row, :, pad:] for x in (q_BNSH, k_BKSH, v_BKSH))
        k, v = k.repeat_interleave(2, dim=0), v.repeat_interleave(2, dim=0)
        positions = torch.arange(NUM_TOKENS - pad)
        allowed = positions[None] <= positions[:, None] if rule is None else rule.allowed(positions, positions)
        scores = (0.5 * q @ k.transpose(-1, -2)).masked_fill(~allowed, -math.inf)
        out[row, :, pad:] = torch.softmax(scores, dim=-1) @ v
    return out


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@given(
    bounds=boundaries(NUM_TOKENS, 4),
    pads=st.lists(st.integers(0, NUM_TOKENS - 1), min_size=BATCH - 1, max_size=BATCH - 1),
)
def test_chunks_and_padding_do_not_matter(rule: MaskRule | None, bounds: tuple[int, ...], pads: list[int]) -> None:
    pads = [*pads, 0]  # the longest row sets the length
    terms = AttentionTerms(scaling=0.5, rule=rule)
    q_BNSH, k_BKSH, v_BKSH = _inputs()
    cache = KVCache(slabs(NUM_TOKENS))
    outs = []
    for start, end in pairwise(bounds):
        if start == end:
            continue
        q, k, v = (x[:, :, start:end] for x in (q_BNSH, k_BKSH, v_BKSH))
        outs.append(CausalAttention(cache, start=start, pads=pads).attend(0, q, k, v, terms))
    out = torch.cat(outs, dim=2)
    expected = _reference(pads, rule)
    for row, pad in enumerate(pads):
        torch.testing.assert_close(out[row, :, pad:], expected[row, :, pad:], atol=TOLERANCE, rtol=0)
    assert out.isfinite().all()  # on padding it may be anything that does not spread


@given(start=st.integers(1, NUM_TOKENS - 2))
def test_prefix_is_not_read_before_it_arrived(start: int) -> None:
    """Earlier K,V are written by `await_prefix` only; they were not a number until then."""
    q_BNSH, k_BKSH, v_BKSH = _inputs()
    cache = KVCache(slabs(NUM_TOKENS))
    slab = cache.layer(0)
    slab.slab_TBKX.fill_(math.nan)
    slab.write(start, k_BKSH[:, :, start:], v_BKSH[:, :, start:])
    spans = spans_of(range(NUM_TOKENS), start=start, num_new=NUM_TOKENS - start, pads=[0] * BATCH)
    out, _ = attend(
        q_BNSH[:, :, start:],
        [Step([Run(slab, spans)])],
        AttentionTerms(scaling=0.5),
        await_prefix=lambda: slab.write(0, k_BKSH[:, :, :start], v_BKSH[:, :, :start]),
    )
    torch.testing.assert_close(out, _reference([0] * BATCH, None)[:, :, start:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("terms", SCATTERED.values(), ids=SCATTERED)
@given(
    here=st.sets(st.integers(0, NUM_TOKENS - 1)),
    num_new=st.sampled_from([1, 1, 3]),
    pads=st.lists(st.integers(0, NUM_TOKENS - 1), min_size=BATCH - 1, max_size=BATCH - 1),
)
def test_tokens_of_two_places_make_the_whole(
    terms: AttentionTerms, here: set[int], num_new: int, pads: list[int]
) -> None:
    """Each place stores some of the tokens, in order, and may have none that a query sees."""
    pads, (q_BNSH, k_BKSH, v_BKSH), parts = [*pads, 0], _inputs(), []
    q_BNCH, start = q_BNSH[:, :, -num_new:], NUM_TOKENS - num_new
    for indices in (sorted(here), sorted(set(range(NUM_TOKENS)) - here)):
        room = len(indices) + 1
        slab = slabs(room).by_layer[0]
        slab.slab_TBKX.fill_(math.nan)
        slab.write(0, k_BKSH[:, :, indices], v_BKSH[:, :, indices])
        spans = spans_of(
            range(len(indices)),
            start=start,
            num_new=num_new,
            pads=pads,
            at=indices,
            at_T=torch.tensor(indices, dtype=torch.long),
            has_new=False,
        )
        parts.append(attend(q_BNCH, [Step([Run(slab, spans)])], terms))
    out, lse_BNC = merge(*parts[0], *parts[1])
    cache = KVCache(slabs(NUM_TOKENS))
    cache.layer(0).write(0, k_BKSH, v_BKSH)
    spans = spans_of(range(NUM_TOKENS), start=start, num_new=num_new, pads=pads)
    expected, expected_lse = attend(q_BNCH, [Step([Run(cache.layer(0), spans)])], terms)
    torch.testing.assert_close(out, expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(lse_BNC, expected_lse, atol=TOLERANCE, rtol=0)


def test_sinks_are_added_once_however_many_parts_there_are() -> None:
    q_BNSH, k_BKSH, v_BKSH = _inputs()
    sinks_N = torch.tensor([0.0, 1.0, 2.0, -3.0], dtype=torch.float64)
    terms = AttentionTerms(scaling=0.5, sinks_N=sinks_N)
    outs = []
    for cuts in ([0, NUM_TOKENS], [0, 1, 6, NUM_TOKENS]):
        cache = KVCache(slabs(NUM_TOKENS))
        for start, end in pairwise(cuts):
            q, k, v = (x[:, :, start:end] for x in (q_BNSH, k_BKSH, v_BKSH))
            out = CausalAttention(cache, start=start, pads=[0] * BATCH).attend(0, q, k, v, terms)
        outs.append(out[:, :, -1])
    torch.testing.assert_close(*outs, atol=TOLERANCE, rtol=0)
    scores = 0.5 * q_BNSH[:, :, -1:] @ k_BKSH.repeat_interleave(2, dim=1).transpose(-1, -2)
    with_sink = torch.cat([scores, sinks_N[None, :, None, None].expand(BATCH, 4, 1, 1)], dim=-1).softmax(dim=-1)
    expected = with_sink[..., :-1] @ v_BKSH.repeat_interleave(2, dim=1)
    torch.testing.assert_close(outs[0], expected[:, :, 0], atol=TOLERANCE, rtol=0)


def test_a_part_that_some_queries_see_is_merged_into_these_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged into all, each of many parts would take an output of all queries."""
    q_BNSH, k_BKSH, v_BKSH = _inputs()
    cache = KVCache(slabs(NUM_TOKENS))
    slab = cache.layer(0)
    slab.write(0, k_BKSH, v_BKSH)
    num_new, merged = 6, list[int]()
    merge_parts = op.merge

    def noting(out_a: Tensor, lse_a: Tensor, *others: Tensor, **more: bool) -> tuple[Tensor, Tensor]:
        merged.append(lse_a.shape[2])
        return merge_parts(out_a, lse_a, *others, **more)

    def seen_by(first_slot: int, end_slot: int, first_query: int) -> Step:
        slots = range(first_slot, end_slot)
        queries, positions = range(first_query, num_new), range(8 + first_query, 8 + num_new)
        span = Span(
            rows=EVERY_ROW,
            stored=EVERY_ROW,
            pad=0,
            slots=slots,
            at=slots,
            queries=queries,
            positions=positions,
            has_new=False,
        )
        return Step([Run(slab, [span])])

    own = spans_of(range(8, NUM_TOKENS), start=8, num_new=num_new, pads=[0] * BATCH)
    steps = [Step([Run(slab, own)]), seen_by(0, 4, 0), seen_by(4, 8, 4)]
    monkeypatch.setattr(op, "merge", noting)
    out, _ = attend(q_BNSH[:, :, 8:], steps, AttentionTerms(scaling=0.5))
    assert merged == [6, 2]
    expected = _reference([0] * BATCH, None)[:, :, 12:]  # the last two see all
    torch.testing.assert_close(out[:, :, 4:], expected, atol=TOLERANCE, rtol=0)
