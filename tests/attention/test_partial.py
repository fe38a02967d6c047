"""Partial attention and its merge are exact: against one softmax over all keys at once, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from runahead.attention import partial as attention
from runahead.attention.masks import MaskRule
from runahead.attention.op import finish
from runahead.attention.partial import AttentionTerms, attend, blockwise_attention, merge

# Legend: B batch, N query heads, K kv heads, C queries, S keys, H key dim, V value dim.

TOLERANCE = 1e-12
"""Outputs are averages of standard normal values; summing in another order costs about 1e-15."""

LSE_TOLERANCE = 1e-11
"""The same for log-sum-exps, which reach 100 here."""


@dataclass(frozen=True)
class Case:
    """Queries [q_start, q_start + C) and the keys [0, q_start + C) of a causal sequence."""

    q_BNCH: Tensor
    k_BKSH: Tensor
    v_BKSV: Tensor
    q_start: int

    @property
    def q_end(self) -> int:
        return self.q_start + self.q_BNCH.shape[2]

    def attend(self, terms: AttentionTerms, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Attention to the keys [start, end) alone."""
        k, v = self.k_BKSH[:, :, start:end], self.v_BKSV[:, :, start:end]
        return attend(self.q_BNCH, k, v, terms, q_start=self.q_start, k_start=start)


def make_case(
    q_start: int, num_queries: int, *, heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (8, 8)
) -> Case:
    """Random tensors; scores are wide enough for weights between 1 and 1e-10. Keys and values lie token-major."""
    generator = torch.Generator().manual_seed(1000 * q_start + num_queries)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    num_heads, num_kv_heads = heads
    num_keys, (key_dim, value_dim) = q_start + num_queries, dims
    kv_BKSX = normal(num_keys, 2, num_kv_heads, key_dim + value_dim).permute(1, 2, 0, 3)
    return Case(3 * normal(2, num_heads, num_queries, key_dim), kv_BKSX[..., :key_dim], kv_BKSX[..., key_dim:], q_start)


def reference(case: Case, terms: AttentionTerms, start: int = 0, end: int | None = None) -> tuple[Tensor, Tensor]:
    """One softmax over the keys [start, end), written out; (output, log-sum-exp without sinks)."""
    end = case.q_end if end is None else end
    group = case.q_BNCH.shape[1] // case.k_BKSH.shape[1]
    k_BNSH, v_BNSV = (x[:, :, start:end].repeat_interleave(group, dim=1) for x in (case.k_BKSH, case.v_BKSV))
    scores = case.q_BNCH @ k_BNSH.transpose(-1, -2) * terms.scaling
    if terms.softcap is not None:
        scores = terms.softcap * torch.tanh(scores / terms.softcap)
    queries, keys = torch.arange(case.q_start, case.q_end), torch.arange(start, end)
    if terms.key_bias is not None:
        scores = scores + terms.key_bias(keys)[None, :, None, :]
    causal_CS = keys[None] <= queries[:, None]
    allowed_CS = causal_CS if terms.rule is None else terms.rule.allowed(queries, keys)
    scores = scores.masked_fill(~allowed_CS, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    if terms.sinks_N is not None:
        sinks = terms.sinks_N[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1] @ v_BNSV, lse
    return torch.softmax(scores, dim=-1).nan_to_num(0.0) @ v_BNSV, lse


def assert_same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(ours[0], theirs[0], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(ours[1], theirs[1], atol=LSE_TOLERANCE, rtol=0)


def slopes(keys_S: Tensor) -> Tensor:
    return torch.tensor([0.5, 0.1, 0.02, 0.9], dtype=torch.float64)[:, None] * keys_S


TERMS: dict[str, AttentionTerms] = {
    "plain": AttentionTerms(scaling=0.35),
    "window": AttentionTerms(scaling=0.35, rule=MaskRule(sliding_window_causal_mask_function(5))),
    "chunks": AttentionTerms(scaling=0.35, rule=MaskRule(chunked_causal_mask_function(6, torch.zeros(2, dtype=int)))),
    "soft cap": AttentionTerms(scaling=0.35, softcap=2.0),
    "key bias": AttentionTerms(scaling=0.35, key_bias=slopes),
    "all": AttentionTerms(
        scaling=0.35, softcap=3.0, key_bias=slopes, rule=MaskRule(sliding_window_causal_mask_function(7))
    ),
}

starts = st.integers(0, 20)
lengths = st.integers(1, 12)


class TestMerge:
    """Attention over a union of key sets, from attention over each."""

    @pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
    @given(q_start=starts, num_queries=lengths, data=st.data())
    def test_parts_make_the_whole(
        self, terms: AttentionTerms, q_start: int, num_queries: int, data: st.DataObject
    ) -> None:
        case = make_case(q_start, num_queries)
        cuts = data.draw(st.lists(st.integers(0, q_start), max_size=3).map(sorted))
        edges = [0, *cuts, q_start]
        whole = case.attend(terms, q_start, case.q_end)  # the own chunk; the prefix may come in pieces, empty ones too
        for start, end in pairwise(edges):
            whole = merge(*whole, *case.attend(terms, start, end))
        assert_same(whole, reference(case, terms))

    @given(q_start=st.integers(2, 20), num_queries=lengths)
    def test_order_does_not_matter(self, q_start: int, num_queries: int) -> None:
        case, terms = make_case(q_start, num_queries), TERMS["plain"]
        a, b, c = case.attend(terms, 0, 1), case.attend(terms, 1, q_start), case.attend(terms, q_start, case.q_end)
        assert_same(merge(*a, *b), merge(*b, *a))
        assert_same(merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)))

    @given(q_start=starts, num_queries=lengths)
    def test_no_keys_change_nothing(self, q_start: int, num_queries: int) -> None:
        case, terms = make_case(q_start, num_queries), TERMS["plain"]
        own, nothing = case.attend(terms, q_start, case.q_end), case.attend(terms, 0, 0)
        assert nothing[0].count_nonzero() == 0
        assert (nothing[1] == -math.inf).all()
        for merged in (merge(*own, *nothing), merge(*nothing, *own)):
            assert torch.equal(merged[0], own[0])
            assert torch.equal(merged[1], own[1])

    def test_two_sides_without_keys_stay_without(self) -> None:
        nothing = make_case(3, 2).attend(TERMS["plain"], 0, 0)
        out, lse = merge(*nothing, *nothing)
        assert out.count_nonzero() == 0
        assert (lse == -math.inf).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_large_scores_do_not_overflow(self, dtype: torch.dtype) -> None:
        """exp(1000) is infinite in either dtype."""
        ones, lse = torch.ones(1, 1, 1, 1, dtype=dtype), torch.full((1, 1, 1), 1000.0, dtype=dtype)
        out, merged = merge(ones, lse, 3 * ones, lse)
        assert out.item() == 2.0
        assert merged.item() == pytest.approx(1000.0 + math.log(2.0))
        out, merged = merge(ones, lse, 3 * ones, -lse)
        assert out.item() == 1.0
        assert merged.item() == 1000.0

    def test_half_precision_outputs_are_merged_in_float32(self) -> None:
        out_a, out_b = torch.full((1, 1, 1, 1), 1.0), torch.full((1, 1, 1, 1), 1.5)
        lse = torch.zeros(1, 1, 1)
        out, merged = merge(out_a.bfloat16(), lse, out_b.bfloat16(), lse + 0.1)
        expected, _ = merge(out_a, lse, out_b, lse + 0.1)
        assert out.dtype == merged.dtype == torch.float32
        assert torch.equal(out, expected), "rounded once, when all parts are merged"


class TestAttend:
    """The keys of one call, whichever code computes them."""

    @pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
    @given(q_start=starts, num_queries=lengths)
    def test_own_chunk_is_causal(self, terms: AttentionTerms, q_start: int, num_queries: int) -> None:
        case = make_case(q_start, num_queries)
        assert_same(case.attend(terms, q_start, case.q_end), reference(case, terms, q_start))

    @pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
    @given(q_start=starts, num_queries=lengths, data=st.data())
    def test_prefix_is_seen_as_the_rule_says(
        self, terms: AttentionTerms, q_start: int, num_queries: int, data: st.DataObject
    ) -> None:
        case = make_case(q_start, num_queries)
        start = data.draw(st.integers(0, q_start))
        end = data.draw(st.integers(start, q_start))
        assert_same(case.attend(terms, start, end), reference(case, terms, start, end))

    @pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
    @given(position=st.integers(0, 30))
    def test_one_query_takes_all_keys_up_to_itself_in_one_call(self, terms: AttentionTerms, position: int) -> None:
        case = make_case(position, 1)
        first = 0 if terms.rule is None else terms.rule.first_key(position)
        assert_same(case.attend(terms, first, position + 1), reference(case, terms))

    @pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 3), (1, 1)])
    @pytest.mark.parametrize("dims", [(8, 8), (8, 6), (4, 12), (7, 7)])
    def test_any_number_of_kv_heads_and_any_width(self, heads: tuple[int, int], dims: tuple[int, int]) -> None:
        case, terms = make_case(9, 6, heads=heads, dims=dims), TERMS["plain"]
        parts = case.attend(terms, 9, 15), case.attend(terms, 0, 9)
        assert_same(merge(*parts[0], *parts[1]), reference(case, terms))

    @given(q_start=starts, num_queries=lengths)
    def test_fused_kernel_and_blocks_agree(self, q_start: int, num_queries: int) -> None:
        case, terms = make_case(q_start, num_queries), TERMS["plain"]
        for start, end in ((q_start, case.q_end), (0, q_start)):
            k, v = case.k_BKSH[:, :, start:end], case.v_BKSV[:, :, start:end]
            fused = attend(case.q_BNCH, k, v, terms, q_start=q_start, k_start=start)
            blocks = blockwise_attention(case.q_BNCH, k, v, terms, q_start=q_start, k_start=start)
            assert_same(fused, blocks)

    @pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
    @pytest.mark.parametrize(("query_block", "key_block"), [(1, 1), (2, 3), (3, 2), (5, 64), (64, 5)])
    def test_size_of_blocks_does_not_matter(
        self, monkeypatch: pytest.MonkeyPatch, terms: AttentionTerms, query_block: int, key_block: int
    ) -> None:
        monkeypatch.setattr(attention, "QUERY_BLOCK", query_block)
        monkeypatch.setattr(attention, "KEY_BLOCK", key_block)
        case = make_case(11, 9)
        for start, end in ((11, 20), (0, 11)):
            k, v = case.k_BKSH[:, :, start:end], case.v_BKSV[:, :, start:end]
            ours = blockwise_attention(case.q_BNCH, k, v, terms, q_start=11, k_start=start)
            assert_same(ours, reference(case, terms, start, end))

    @pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
    def test_no_queries_give_nothing(self, terms: AttentionTerms) -> None:
        case = make_case(5, 0)
        out, lse = case.attend(terms, 0, 5)
        assert out.shape == (2, 4, 0, 8)
        assert lse.shape == (2, 4, 0)

    def test_query_that_sees_no_key_has_weight_zero(self) -> None:
        """Its window lies behind the keys of this call."""
        out, lse = make_case(20, 4).attend(TERMS["window"], 0, 16)
        assert (lse == -math.inf).all()
        assert out.count_nonzero() == 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
    def test_log_sum_exp_has_at_least_float32(self, dtype: torch.dtype, terms: AttentionTerms) -> None:
        exact = make_case(6, 5)
        rounded = Case(*(x.to(dtype) for x in (exact.q_BNCH, exact.k_BKSH, exact.v_BKSV)), exact.q_start)
        doubled = Case(*(x.double() for x in (rounded.q_BNCH, rounded.k_BKSH, rounded.v_BKSV)), exact.q_start)
        out, lse = merge(*rounded.attend(terms, 6, 11), *rounded.attend(terms, 0, 6))
        assert out.dtype == lse.dtype == torch.float32
        expected = reference(doubled, terms)
        # Values up to 3 with 8 (bfloat16), 11 (float16) or 24 significant bits, rounded a few times; scores are
        # rounded to the dtype before their softmax, too.
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
        torch.testing.assert_close(out.double(), expected[0], atol=tolerance, rtol=0)
        torch.testing.assert_close(lse.double(), expected[1], atol=tolerance, rtol=0)


class TestTerms:
    """Terms that families add to plain attention."""

    @pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
    @given(q_start=starts, num_queries=lengths)
    def test_sink_is_one_more_logit_in_the_denominator(
        self, terms: AttentionTerms, q_start: int, num_queries: int
    ) -> None:
        case, sinks_N = make_case(q_start, num_queries), torch.tensor([0.0, 5.0, -5.0, 1.0], dtype=torch.float64)
        out, lse = merge(*case.attend(terms, q_start, case.q_end), *case.attend(terms, 0, q_start))
        with_terms = replace(terms, sinks_N=sinks_N)
        ours = finish((out, lse), with_terms, out.dtype)
        torch.testing.assert_close(ours, reference(case, with_terms)[0], atol=TOLERANCE, rtol=0)

    def test_sink_far_below_all_scores_changes_nothing(self) -> None:
        case = make_case(4, 3)
        out, lse = case.attend(TERMS["plain"], 4, 7)
        terms = replace(TERMS["plain"], sinks_N=torch.full((4,), -1e6, dtype=torch.float64))
        assert torch.equal(finish((out, lse), terms, out.dtype), out)

    def test_bias_of_keys_alone_is_the_bias_of_distances(self) -> None:
        """ALiBi is defined on distances; softmax cancels what depends on the query alone."""
        case = make_case(10, 8)
        ours = merge(*case.attend(TERMS["key bias"], 10, 18), *case.attend(TERMS["key bias"], 0, 10))[0]
        scores = case.q_BNCH @ case.k_BKSH.repeat_interleave(2, dim=1).transpose(-1, -2) * 0.35
        queries, keys = torch.arange(10, 18), torch.arange(18)
        distance_CS = queries[:, None] - keys[None]
        slopes_N = slopes(torch.ones(1))[:, 0]
        scores = (scores - slopes_N[:, None, None] * distance_CS).masked_fill(distance_CS < 0, -math.inf)
        theirs = torch.softmax(scores, dim=-1) @ case.v_BKSV.repeat_interleave(2, dim=1)
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)

    def test_scores_are_needed_for_what_kernels_do_not_know(self) -> None:
        assert not TERMS["plain"].needs_scores
        assert TERMS["soft cap"].needs_scores
        assert TERMS["key bias"].needs_scores


def test_calls_that_are_neither_own_chunk_nor_prefix_are_an_error() -> None:
    case = make_case(4, 4)
    for start, end in ((0, 8), (0, 6), (5, 8)):
        with pytest.raises(AssertionError):
            case.attend(TERMS["plain"], start, end)


@pytest.mark.parametrize("take", [lambda x: x, lambda x: x.contiguous()], ids=["strided", "contiguous"])
def test_keys_may_lie_in_any_order(take: Callable[[Tensor], Tensor]) -> None:
    case, terms = make_case(12, 7), TERMS["plain"]
    laid_out = Case(case.q_BNCH, take(case.k_BKSH), take(case.v_BKSV), case.q_start)
    assert_same(laid_out.attend(terms, 0, 12), reference(case, terms, 0, 12))
