"""Our own kernels for CPUs: attention as a softmax in float64 has it, the same bits for the same keys; their build."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from launch import kernels as program
from runahead import Engine, GenerationOptions, Model, Ranks, RanksOptions
from runahead.attention import op, partial
from runahead.attention.dense import DenseAttention
from runahead.attention.masks import MaskRule
from runahead.attention.op import Run, Step, spans_of
from runahead.attention.partial import AttentionTerms
from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import KVShape, Slabs
from runahead.config import Device, ModelName, ModelOptions, PrefillName, PrefillOptions, Weights
from runahead.features.slower import Way
from runahead.files import cache_folder
from runahead.kernels import operators
from runahead.kernels.operators import KERNELS
from runahead.model import shares
from runahead.model.layers import cpu_linear
from runahead.model.loading import kernels as loading
from tests.needs import TEST_KERNELS, missing

# Legend: B batch, N query heads, K kv heads, C queries, S keys, H head dim (key), V head dim (value).

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Outputs are averages of standard normal numbers, which reach 4; the last bit of bfloat16 is 2^-7 of them."""

LSE_TOLERANCE = 2e-5
"""Log-sum-exps reach 30, whose last bit is 2e-6; products are of the very numbers of either dtype."""

Part = tuple[Tensor, Tensor]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Built once for all runs of the tests. They are in use where a test says so alone."""
    if loading.unsupported() or loading.compiler() is None:
        missing("a processor with AVX2 and a C++ compiler")
    operators.load(loading.build(cache_folder() / TEST_KERNELS))


@pytest.fixture
def in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS, "in_use", True)


def tensors(
    num_queries: int,
    num_keys: int,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (32, 32),
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as the cache has them: token-major, a token's keys beside its values."""
    generator = torch.Generator().manual_seed(1000 * num_queries + num_keys)
    slab = torch.randn(num_keys, batch, heads[1], sum(dims), generator=generator).to(dtype).permute(1, 2, 0, 3)
    q_BCNH = 2 * torch.randn(batch, num_queries, heads[0], dims[0], generator=generator)
    return q_BCNH.to(dtype).transpose(1, 2), slab[..., : dims[0]], slab[..., dims[0] :]


def dense(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scaling: float, *, offset: int = 0, leave_out: int = 0
) -> Part:
    """One softmax over all keys, in float64.

    Args:
        causal: the last query sees all keys, each one before it a key less.
        offset: keys after its own that a query sees, which is wrong unless 0.
        leave_out: last keys that are left out, which is wrong unless 0.
    """
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * scaling
    num_queries, num_keys = scores.shape[2:]
    hidden = (
        torch.ones(num_queries, num_keys, dtype=torch.bool).triu(1 + offset + num_keys - num_queries)
        if causal
        else torch.zeros(1, num_keys)
    )
    hidden = hidden.bool() | (torch.arange(num_keys) >= num_keys - leave_out)
    scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)


def assert_same(found: Part, known: Part) -> None:
    dtype = found[0].dtype
    torch.testing.assert_close(found[0].double(), known[0], atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(found[1].double(), known[1], atol=LSE_TOLERANCE, rtol=1e-6)
    assert found[1].dtype == torch.float32


NAN_BITS = [0x7FC00000, 0x7FC00001, -1]
"""A NaN, and two whose low bits are set; -1 are all bits."""

lengths = st.integers(1, 80) | st.sampled_from([127, 128, 129, 191, 255, 256, 257, 300, 513])
sizes = st.sampled_from([16, 32, 48, 64, 80, 128])
groups = st.sampled_from([(1, 1), (3, 1), (4, 2), (5, 5), (8, 1), (9, 3), (34, 2)])
dtypes = st.sampled_from(list(TOLERANCE))


class TestAttention:
    @given(lengths, groups, sizes, sizes, st.integers(1, 2), dtypes)
    def test_of_a_chunk_to_itself(
        self, length: int, heads: tuple[int, int], key_dim: int, value_dim: int, batch: int, dtype: torch.dtype
    ) -> None:
        given = tensors(length, length, heads=heads, dims=(key_dim, value_dim), batch=batch, dtype=dtype)
        scaling = key_dim**-0.5
        assert_same(operators.attend(*given, True, scaling), dense(*given, True, scaling))

    @given(lengths, lengths, groups, sizes, dtypes)
    def test_of_a_chunk_to_what_lies_before_it_and_itself(
        self, length: int, before: int, heads: tuple[int, int], dim: int, dtype: torch.dtype
    ) -> None:
        given = tensors(length, before + length, heads=heads, dims=(dim, dim), dtype=dtype)
        found = operators.attend(*given, True, 0.125)
        assert_same(found, dense(*given, True, 0.125))
        if length > 1:
            with pytest.raises(AssertionError):
                assert_same(found, dense(*given, True, 0.125, offset=-before))

    @given(
        st.integers(1, 300), st.integers(0, 300), st.booleans(), st.integers(0, 99), groups, st.integers(1, 2), dtypes
    )
    def test_of_queries_to_chosen_blocks(
        self, length: int, before: int, sees_own: bool, pad: int, heads: tuple[int, int], batch: int, dtype: torch.dtype
    ) -> None:
        """Of the first queries and keys some may be missing in their blocks; some queries see no key."""
        block, keys = 32, before + length if sees_own else max(1, before)
        q, k, v = tensors(length, keys, heads=heads, dims=(32, 48), batch=batch, dtype=dtype)
        q_at, k_at = torch.arange(length) + pad + before, torch.arange(keys) + pad
        first, of_q, of_k = (pad + before) // block, q_at // block, k_at // block
        shape = batch, heads[1], int(of_q[-1]) + 1 - first, int(of_k[-1]) + 1 - pad // block
        chosen = torch.rand(shape, generator=torch.Generator().manual_seed(length)) < 0.4
        places = block, (pad + before) % block, pad % block
        found = operators.attend(q, k, v, sees_own, 0.125, None, 0, chosen, *places)
        sees = chosen[:, :, (of_q - first)[:, None], of_k - pad // block]
        if sees_own:
            sees = sees & (k_at <= q_at[:, None])
        sees = sees.repeat_interleave(heads[0] // heads[1], dim=1)
        k, v = (x.double().repeat_interleave(heads[0] // heads[1], dim=1) for x in (k, v))
        scores = (q.double() @ k.mT * 0.125).masked_fill(~sees, -math.inf)
        assert_same(found, (scores.softmax(dim=-1).nan_to_num(0.0) @ v, scores.logsumexp(dim=-1)))

    @pytest.mark.parametrize("heads", [(9, 3), (8, 1)])
    def test_of_all_blocks_has_the_bits_of_all_keys(self, heads: tuple[int, int]) -> None:
        given = tensors(700, 1100, heads=heads)
        chosen = torch.ones(1, heads[1], 7, 9, dtype=torch.bool)
        known, found = (
            operators.attend(*given, True, 0.125, None, 0, *of) for of in ((None,), (chosen, 128, 400 % 128, 0))
        )
        assert all(torch.equal(*each) for each in zip(known, found, strict=True))
        chosen[..., 3] = False
        assert not torch.equal(known[0], operators.attend(*given, True, 0.125, None, 0, chosen, 128, 16, 0)[0])

    @given(lengths | st.integers(1, 4), lengths, groups, sizes, sizes, st.integers(1, 2), dtypes)
    def test_of_queries_to_all_keys(
        self,
        num_queries: int,
        num_keys: int,
        heads: tuple[int, int],
        key_dim: int,
        value_dim: int,
        batch: int,
        dtype: torch.dtype,
    ) -> None:
        dims = key_dim, value_dim
        given = tensors(num_queries, num_keys, heads=heads, dims=dims, batch=batch, dtype=dtype)
        assert_same(operators.attend(*given, False, key_dim**-0.5), dense(*given, False, key_dim**-0.5))

    @pytest.mark.parametrize("bits", NAN_BITS)
    @pytest.mark.parametrize("num_tokens", [1, 40])
    def test_of_a_nan_is_nan(self, num_tokens: int, bits: int) -> None:
        """In the rows of its query alone, whatever its bits are: few rows, and a tile."""
        q, k, v = tensors(num_tokens, num_tokens)
        q = q.contiguous()
        q[:, :, -1] = torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.float32)
        for found in operators.attend(q, k, v, True, 0.125):
            assert found[:, :, -1].isnan().all() and not found[:, :, :-1].isnan().any()

    @pytest.mark.parametrize("wrong", [{"offset": 1}, {"offset": -1}, {"leave_out": 1}, {"scaling": 0.126}])
    @pytest.mark.parametrize("num_keys", [3, 64, 257])
    def test_is_told_from_what_is_nearly_right(self, wrong: dict[str, float], num_keys: int) -> None:
        for causal in (True, False):
            if not causal and "offset" in wrong:
                continue
            given = tensors(num_keys if causal else 1, num_keys)
            found = operators.attend(*given, causal, 0.125)
            with pytest.raises(AssertionError):
                assert_same(found, dense(*given, causal, **{"scaling": 0.125, **wrong}))

    @pytest.mark.parametrize(
        ("num_queries", "num_keys", "causal"), [(700, 700, True), (90, 700, False), (1, 900, False)]
    )
    def test_is_within_1e_5_of_pytorchs(self, num_queries: int, num_keys: int, causal: bool) -> None:
        given = tensors(num_queries, num_keys, heads=(9, 3), dims=(64, 64))
        for found, known in zip(
            operators.attend(*given, causal, 0.125), partial.cpu_flash(*given, causal, 0.125), strict=True
        ):
            assert (found - known).abs().max() < 1e-5

    def test_of_scores_far_apart_has_no_overflow(self) -> None:
        for num_queries in (1, 70):
            q, k, v = tensors(num_queries, 300)
            given = q * 1000, k, v
            out, lse = operators.attend(*given, False, 1.0)
            known = dense(*given, False, 1.0)
            # The largest score takes all; the last bit of scores near 2^15 is 2^-8, some of which add up.
            assert torch.isfinite(out).all() and (lse - known[1]).abs().max() < 0.05

    @pytest.mark.parametrize("growing", [1.0, -1.0])
    @pytest.mark.parametrize("step", [0.02, 0.3, 7.9, 8.1, 60.0])
    def test_of_scores_that_grow_or_fall(self, step: float, growing: float) -> None:
        """By `step` powers of 2 from key to key, and in every other row by half of it: scores are counted anew."""
        q, k, v = tensors(90, 400)
        q, k = torch.zeros_like(q), torch.zeros_like(k)
        q[..., 0] = torch.where(torch.arange(90) % 2 == 0, 1.0, 0.5)
        k[..., 0] = growing * step * math.log(2) * torch.arange(400)
        for length, causal in ((90, False), (80, True), (2, False)):  # the last are few rows
            tried = q[:, :, :length], *(x[:, :, : length if causal else 400] for x in (k, v))
            out, lse = operators.attend(*tried, causal, 1.0)
            known_out, known_lse = dense(*tried, causal, 1.0)
            # Scores reach 400 steps, and are rounded to 2^-24 of that; so are weights, relative to their own.
            assert (out - known_out).abs().max() < 1e-5 + 400 * step * 2**-23
            assert (lse - known_lse).abs().max() < 1e-5 + 400 * step * 2**-23

    @pytest.mark.parametrize("num_queries", [1, 70])
    def test_hides_no_number_that_is_none(self, num_queries: int) -> None:
        """NaN where PyTorch has it, and in no other head."""
        q, k, v = tensors(num_queries, 70)
        k = k.clone()
        k[0, 1, 5] = math.nan
        out, lse = operators.attend(q, k, v, False, 0.125)
        assert out[:, 2:].isnan().all() and lse[:, 2:].isnan().all() and torch.isfinite(out[:, :2]).all()


WINDOWS = {
    "window of 1": sliding_window_causal_mask_function(1),
    "window of 5": sliding_window_causal_mask_function(5),
    "window of 90": sliding_window_causal_mask_function(90),
    "window of 200": sliding_window_causal_mask_function(200),
    "chunks of 60": chunked_causal_mask_function(60, torch.zeros(2, dtype=int)),
}


@pytest.mark.usefixtures("in_use")
class TestWindows:
    """Queries that do not see all keys before them, each a run of keys that ends with its own."""

    @staticmethod
    def known(given: tuple[Tensor, Tensor, Tensor], rule: MaskRule, q_start: int, k_start: int) -> Part:
        """One softmax over the keys that the rule allows, in float64."""
        q, k, v = given[0].double(), *(x.double().repeat_interleave(2, dim=1) for x in given[1:])
        queries, keys = torch.arange(q_start, q_start + q.shape[2]), torch.arange(k_start, k_start + k.shape[2])
        scores = (q @ k.mT * 0.125).masked_fill(~rule.allowed(queries, keys), -math.inf)
        return scores.softmax(dim=-1).nan_to_num(0.0) @ v, scores.logsumexp(dim=-1)

    @pytest.mark.parametrize("name", WINDOWS)
    @given(st.sampled_from([0, 1, 50, 128, 200]), lengths, st.integers(0, 300), dtypes)
    def test_are_seen(self, name: str, q_start: int, num_queries: int, num_before: int, dtype: torch.dtype) -> None:
        rule, none_computed = MaskRule(WINDOWS[name]), lambda *_, **__: pytest.fail("attention block by block")
        num_before = min(num_before, q_start)
        cases = [(q_start, num_queries)] + [(q_start - num_before, num_before)] * (num_before > 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(partial, "blockwise_attention", none_computed)
            for k_start, num_keys in cases:
                given = tensors(num_queries, num_keys, dtype=dtype)
                terms = AttentionTerms(scaling=0.125, rule=rule)
                found = partial.attend(*given, terms, q_start=q_start, k_start=k_start)
                assert_same(found, self.known(given, rule, q_start, k_start))

    def test_are_told_from_others(self) -> None:
        given, rule = tensors(150, 150), MaskRule(sliding_window_causal_mask_function(40))
        found = partial.attend(*given, AttentionTerms(scaling=0.125, rule=rule), q_start=0, k_start=0)
        for wrong in (39, 41):
            other = MaskRule(sliding_window_causal_mask_function(wrong))
            with pytest.raises(AssertionError):
                assert_same(found, self.known(given, other, 0, 0))

    def test_first_keys_are_those_of_the_mask(self) -> None:
        for function in WINDOWS.values():
            rule = MaskRule(function)
            allowed_CS = rule.allowed(torch.arange(100, 700), torch.arange(700))
            firsts_C = rule.first_keys(100, 700)
            assert firsts_C is not None and firsts_C.tolist() == allowed_CS.int().argmax(dim=1).tolist()

    @pytest.mark.parametrize(
        "function",
        [
            lambda batch, head, query, key: (key <= query) & (key != 7),
            lambda batch, head, query, key: (key < query) | (query == 0),
            lambda batch, head, query, key: key <= query + 1,
            lambda batch, head, query, key: (key <= query) & ((key < 4) | (key > query - 20)),
            lambda batch, head, query, key: (key <= query) & (key > query - torch.where(query % 7 == 0, 5, 40)),
            lambda batch, head, query, key: (key <= query) & (key > query - torch.where(query < 32, 5, 40)),
        ],
        ids=["a gap", "not its own", "a later one", "sinks and a window", "firsts that decrease", "at a block"],
    )
    def test_what_is_no_run_of_keys_is_pytorchs(
        self, function: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("runahead.attention.masks.BLOCK", 32)
        for start in (0, 29, 31):  # the first query of the last sees a window, where a later one sees all keys
            assert MaskRule(function).first_keys(start, 60) is None
        given, rule = tensors(60, 60), MaskRule(function)
        found = partial.attend(*given, AttentionTerms(scaling=0.125, rule=rule), q_start=0, k_start=0)
        assert_same((found[0], found[1]), self.known(given, rule, 0, 0))

    def test_bits_are_those_of_a_shorter_chunk(self) -> None:
        q, k, v = tensors(300, 300)
        terms = AttentionTerms(scaling=0.125, rule=MaskRule(sliding_window_causal_mask_function(90)))
        whole = partial.attend(q, k, v, terms, q_start=0, k_start=0)
        for length in (2, 63, 257):
            part = partial.attend(*(x[:, :, :length] for x in (q, k, v)), terms, q_start=0, k_start=0)
            assert all(torch.equal(a[:, :, :length], b) for a, b in zip(whole, part, strict=True)), length


class TestBits:
    """The bits of a row depend on its query and the keys that it sees."""

    @pytest.mark.parametrize(
        ("num_queries", "num_keys", "causal"), [(300, 300, True), (70, 600, False), (1, 900, False)]
    )
    def test_are_the_same_for_any_number_of_threads(self, num_queries: int, num_keys: int, causal: bool) -> None:
        given, before = tensors(num_queries, num_keys, heads=(9, 3), dims=(64, 64)), torch.get_num_threads()
        found = []
        try:
            for threads in (1, 2, 3, 2):
                torch.set_num_threads(threads)
                found.append(operators.attend(*given, causal, 0.125))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(a, b) for each in found for a, b in zip(each, found[0], strict=True))

    @pytest.mark.parametrize(
        ("num_queries", "num_keys", "causal"), [(150, 150, True), (20, 300, False), (1, 300, False)]
    )
    def test_are_those_of_a_row_of_a_batch_alone(self, num_queries: int, num_keys: int, causal: bool) -> None:
        given = tensors(num_queries, num_keys, batch=3)
        together = operators.attend(*given, causal, 0.125)
        for row in range(3):
            alone = operators.attend(*(x[row : row + 1] for x in given), causal, 0.125)
            assert all(torch.equal(a[row : row + 1], b) for a, b in zip(together, alone, strict=True))

    def test_are_those_of_a_shorter_chunk(self) -> None:
        q, k, v = tensors(300, 300)
        whole = operators.attend(q, k, v, True, 0.125)
        for length in (1, 63, 128, 257):
            part = operators.attend(q[:, :, :length], k[:, :, :length], v[:, :, :length], True, 0.125)
            assert all(torch.equal(a[:, :, :length], b) for a, b in zip(whole, part, strict=True)), length

    def test_are_those_of_keys_in_one_piece(self) -> None:
        for tried in (tensors(40, 40), tensors(2, 400)):
            causal = tried[0].shape[2] == 40
            pieces = operators.attend(*(x.contiguous() for x in tried), causal, 0.125)
            transposed = operators.attend(*(x.mT.contiguous().mT for x in tried), causal, 0.125)
            for found in (pieces, transposed):
                assert all(map(torch.equal, found, operators.attend(*tried, causal, 0.125)))


class TestOperator:
    def test_is_an_operator_of_torch(self) -> None:
        """Its shapes are known without computing it, and it changes none of its arguments."""
        for dtype in TOLERANCE:
            given = (*tensors(5, 9, dtype=dtype), False, 0.125)
            torch.library.opcheck(
                torch.ops.runahead.attend.default, given, test_utils=["test_schema", "test_faketensor"]
            )

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            (lambda q, k, v: (q, k[:, :, 1:], v), "do not belong together"),
            (lambda q, k, v: (q[:, :3], k, v), "do not belong together"),
            (lambda q, k, v: (q[:, :, :0], k, v), "do not belong together"),
            (lambda q, k, v: (q[..., :9], k[..., :9], v), "no multiples of"),
            (lambda q, k, v: (q, k.double(), v), "dtypes differ"),
            (lambda q, k, v: (q.double(), k.double(), v.double()), "is not to be had"),
        ],
    )
    def test_refuses_what_it_cannot_compute(self, changed: Callable[..., tuple[Tensor, ...]], message: str) -> None:
        with pytest.raises(RuntimeError, match=message):
            operators.attend(*changed(*tensors(5, 9)), False, 0.125)  # type: ignore[call-arg]

    @pytest.mark.parametrize(
        ("dtype", "dims", "terms", "takes"),
        [
            (torch.float32, (32, 32), {}, True),
            (torch.bfloat16, (32, 32), {}, True),
            (torch.float32, (48, 32), {}, True),
            (torch.float64, (32, 32), {}, False),
            (torch.float16, (32, 32), {}, False),
            (torch.float32, (8, 8), {}, False),
            (torch.float32, (24, 16), {}, False),
            (torch.float32, (32, 32), {"softcap": 2.0}, False),
        ],
    )
    @pytest.mark.usefixtures("in_use")
    def test_is_taken_where_it_can_be(
        self,
        dtype: torch.dtype,
        dims: tuple[int, int],
        terms: dict[str, float],
        takes: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        calls, attend = [], operators.attend
        monkeypatch.setattr(operators, "attend", lambda *given: calls.append(0) or attend(*given))
        given = tensors(5, 5, dims=dims, dtype=dtype)
        partial.attend(*given, AttentionTerms(scaling=0.125, **terms), q_start=0, k_start=0)  # type: ignore[arg-type]
        assert bool(calls) == takes

    @pytest.mark.usefixtures("in_use")
    @pytest.mark.parametrize(("awaits", "num_calls"), [(False, 1), (True, 2)])
    @pytest.mark.parametrize("window", [None, 12, 90])
    def test_a_chunk_and_what_is_stored_before_it_are_one_call_unless_it_arrives(
        self, awaits: bool, num_calls: int, window: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls, kernel = list[int](), operators.attend
        monkeypatch.setattr(operators, "attend", lambda *given: calls.append(0) or kernel(*given))
        shape = KVShape(num_kv_heads=2, key_dim=32, value_dim=32, dtype=torch.float32)
        slabs = Slabs.empty([shape], batch=1, spans=[(0, 90)], num_slabs=1, device=torch.device("cpu"))
        slab = KVCache(slabs).layer(0)
        q, k, v = tensors(30, 90, dims=(32, 32))
        slab.slab_TBKX.copy_(torch.cat([k, v], dim=-1).permute(2, 0, 1, 3))
        rule = MaskRule(sliding_window_causal_mask_function(window or 90))
        terms = AttentionTerms(scaling=0.125, rule=None if window is None else rule)
        steps = [Step([Run(slab, spans_of(range(90), start=60, num_new=30, pads=[0]))])]
        found = op.attend(q, steps, terms, **({"await_prefix": lambda: None} if awaits else {}))
        assert_same(found, TestWindows.known((q, k, v), rule, 60, 0))
        assert len(calls) == num_calls

    @pytest.mark.usefixtures("in_use")
    def test_dense_attention_has_a_mask_for_which_it_is_not_taken(self) -> None:
        """Also where keys and values of different width leave PyTorch no kernel."""
        for dims in ((32, 32), (48, 32)):
            shape = KVShape(num_kv_heads=2, key_dim=dims[0], value_dim=dims[1], dtype=torch.float32)
            slabs = Slabs.empty([shape], batch=1, spans=[(0, 40)], num_slabs=1, device=torch.device("cpu"))
            slab = KVCache(slabs).layer(0)
            q, k, v = tensors(30, 40, dims=dims)
            slab.slab_TBKX.copy_(torch.cat([k, v], dim=-1).permute(2, 0, 1, 3))
            spans = spans_of(range(40), start=10, num_new=30, pads=[0])
            out, lse = DenseAttention(40).attend(q, [Step([Run(slab, spans)])], AttentionTerms(scaling=0.125))
            whole = torch.cat([torch.zeros(1, 4, 10, dims[0]), q], dim=2)
            known = dense(whole, k, v, True, 0.125)
            assert_same((out, lse), (known[0][:, :, 10:], known[1][:, :, 10:]))


@pytest.mark.usefixtures("in_use")
class TestSequences:
    """One query for each of several sequences of different lengths in one memory."""

    @staticmethod
    def sequences_of(
        lengths: list[int], heads: tuple[int, int] = (6, 2), dims: tuple[int, int] = (32, 32), **of: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values, first tokens and lengths, with tokens between the sequences that no query sees."""
        starts = torch.tensor([0, *itertools.accumulate(length + 3 for length in lengths)], dtype=torch.int32)
        _, k, v = tensors(1, int(starts[-1]), heads=heads, dims=dims, **of)
        q, _, _ = tensors(len(lengths), 1, heads=heads, dims=dims, **of)
        return q[0].transpose(0, 1), k, v, starts, torch.tensor(lengths, dtype=torch.int32)

    @staticmethod
    def attended(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, used: Tensor) -> Part:
        longest = int(used.max())
        return partial.attend_sequences(q, k, v, starts=starts, used_S=used, longest=longest, scaling=0.125)

    @staticmethod
    def known(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, used: Tensor, late: int = 0) -> Part:
        """One softmax for each sequence in float64; `late` tokens further on, which is wrong unless 0."""
        parts = []
        for query, first, length in zip(q, starts.tolist(), used.tolist(), strict=False):
            seen = slice(first + late, first + late + length)
            parts.append(dense(query[None, :, None], k[:, :, seen], v[:, :, seen], False, 0.125))
        return torch.cat([out[:, :, 0] for out, _ in parts]), torch.cat([lse[:, :, 0] for _, lse in parts])

    @given(st.lists(lengths | st.just(0), min_size=1, max_size=4), groups, sizes, sizes, dtypes)
    def test_are_seen(
        self, lengths: list[int], heads: tuple[int, int], key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> None:
        given = self.sequences_of(lengths, heads, (key_dim, value_dim), dtype=dtype)
        assert_same(self.attended(*given), self.known(*given))

    @pytest.mark.parametrize("wrong", [{"late": 1}, {"more": 1}, {"more": -1}])
    def test_are_told_from_others(self, wrong: dict[str, int]) -> None:
        *given, used = self.sequences_of([30, 258])
        with pytest.raises(AssertionError):
            assert_same(
                self.attended(*given, used), self.known(*given, used + wrong.get("more", 0), wrong.get("late", 0))
            )

    def test_have_the_bits_of_each_alone_with_any_threads(self) -> None:
        q, k, v, starts, used = self.sequences_of([700, 20, 300], (9, 3), (64, 64))
        before, found = torch.get_num_threads(), []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(self.attended(q, k, v, starts, used))
        finally:
            torch.set_num_threads(before)
        for i in range(3):
            alone = self.attended(q[i : i + 1], k, v, starts[i : i + 2], used[i : i + 1])
            assert all(torch.equal(a[i], b[0]) for each in found for a, b in zip(each, alone, strict=True))

    def test_is_an_operator_of_torch(self) -> None:
        given = (*self.sequences_of([4, 9]), 0.125)
        operator = torch.ops.runahead.attend_sequences.default
        torch.library.opcheck(operator, given, test_utils=["test_schema", "test_faketensor"])

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            (lambda q, k, v, starts, used: (q, k[..., :9], v, starts, used), "do not belong together"),
            (lambda q, k, v, starts, used: (q, k, v, starts[1:], used), "has a start and a length"),
            (lambda q, k, v, starts, used: (q, k, v, starts, used.long()), "are int32"),
            (lambda q, k, v, starts, used: (q, k.double(), v, starts, used), "dtypes differ"),
        ],
    )
    def test_are_refused_where_they_do_not_fit(self, changed: Callable[..., tuple[Tensor, ...]], message: str) -> None:
        with pytest.raises(RuntimeError, match=message):
            operators.attend_sequences(*changed(*self.sequences_of([4, 9])), 0.125)  # type: ignore[call-arg]


def tiny_llama() -> LlamaForCausalLM:
    """Of head dim 32, which the kernels take."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def tiny_deepseek() -> DeepseekV3ForCausalLM:
    """A model with keys of 32 and values of 16 numbers, which no kernel of PyTorch takes."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=2,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    return DeepseekV3ForCausalLM(config).eval().requires_grad_(False)


@pytest.mark.usefixtures("in_use")
@pytest.mark.parametrize("made", [tiny_llama, tiny_deepseek])
@pytest.mark.parametrize("chunk_tokens", [None, 70])
def test_tokens_are_those_of_transformers(
    chunk_tokens: int | None, made: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, attend = [], operators.attend
    monkeypatch.setattr(operators, "attend", lambda *given: calls.append(given[3]) or attend(*given))
    module = made()
    prompts = [[(7 * i + 3 * row) % 200 for i in range(length)] for row, length in enumerate((200, 90))]
    known = [
        module.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)[0, len(ids) :]
        for ids in prompts
    ]
    ranks = Ranks.start(RanksOptions(device=Device.cpu, threads=1))
    prefill = PrefillOptions(name=PrefillName.single, chunk_tokens=chunk_tokens)
    batch = Engine(Model(module), ranks, prefill=prefill).generate(
        prompts, GenerationOptions(max_new_tokens=12, ignore_eos=True)
    )
    assert [each.new_token_ids for each in batch.generations] == [ids.tolist() for ids in known]
    assert {True, False} == set(calls)


class GatheringRanks:
    """A rank, and what others say; in place of what this one does not name they name nothing, either."""

    device = torch.device("cpu")

    def __init__(self, *others: str, rank: int = 0, folder: str | None = None, products: str | None = None) -> None:
        self._others, self.rank, self._folder, self._products = others, rank, folder, products

    def gather(self, value: Any, label: str) -> list[Any]:
        if isinstance(value, str):
            return [value, *self._others]
        pairs = zip(value, (self._folder, self._products), strict=True)
        theirs = tuple(other if own and other else own for own, other in pairs)
        return [value, *[theirs] * len(self._others)]


def told_of_unlike(dtype: torch.dtype, ranks: GatheringRanks, weights: Weights = Weights.full) -> bool:
    model: Any = SimpleNamespace(dtype=dtype, weights=weights)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        shares.tell_unlike(model, ranks)  # type: ignore[arg-type]
    return ["of unlike processors" in str(each.message) for each in found] == [True]


class TestUse:
    @pytest.fixture(autouse=True)
    def not_in_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(KERNELS, "in_use", False)
        monkeypatch.setattr(KERNELS, "lacking", None)

    @pytest.mark.parametrize(
        ("own", "others", "why"),
        [("", [""], ""), ("", ["not built"], "not built"), ("not built", ["", ""], "not built")],
    )
    def test_is_of_all_ranks_or_of_none(
        self, own: str, others: list[str], why: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shares, "load_if_built", lambda: own)
        assert shares.use_kernels(GatheringRanks(*others)) == why  # type: ignore[arg-type]
        assert KERNELS.in_use == (not why)

    @pytest.mark.parametrize(
        ("rank", "folder", "products", "dtype", "lacks", "is_told"),
        [
            (0, "another", None, torch.float32, "", True),
            (0, "another", None, torch.bfloat16, "", True),
            (1, "another", None, torch.float32, "", False),
            (0, None, None, torch.float32, "", False),
            (0, "another", None, torch.float32, "not built", False),
            (0, "another", None, torch.float64, "", False),
            (0, None, "another", torch.float32, "not built", True),
            (1, None, "another", torch.float32, "", False),
        ],
    )
    def test_of_unlike_hosts_is_told_once(
        self,
        rank: int,
        folder: str | None,
        products: str | None,
        dtype: torch.dtype,
        lacks: str,
        is_told: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(KERNELS, "in_use", not lacks)
        assert told_of_unlike(dtype, GatheringRanks("", rank=rank, folder=folder, products=products)) is is_told

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("weights", Weights)
    def test_of_unlike_makers_is_told_where_products_differ(
        self, dtype: torch.dtype, weights: Weights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Beside a host on which PyTorch chooses, one whose float32 products are oneDNN's."""
        monkeypatch.setattr(cpu_linear, "takes_onednn", lambda: True)
        is_told = told_of_unlike(dtype, GatheringRanks("", products="torch"), weights)
        assert is_told is (dtype is torch.float32 and weights is Weights.full)

    def test_is_decided_once_for_all_models_of_a_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A build that ends, and a file that goes, between a model and its draft."""
        for first, later in (("not built", ""), ("", "not built")):
            monkeypatch.setattr(KERNELS, "lacking", None)
            for own in (first, later):
                monkeypatch.setattr(shares, "load_if_built", lambda own=own: own)
                assert shares.use_kernels(GatheringRanks("")) == first  # type: ignore[arg-type]
                assert KERNELS.in_use == (not first)

    def test_is_of_all_programs(self) -> None:
        """They load models by `load_model`, which decides; `Model.load` takes what has been decided."""
        root = Path(program.__file__).resolve().parent.parent
        paths = [path for folder in ("launch", "benchmarks/evaluation") for path in (root / folder).rglob("*.py")]
        texts = {path.relative_to(root).as_posix(): path.read_text() for path in paths}
        assert sum("load_model(" in text for text in texts.values()) >= 8
        assert not [name for name, text in texts.items() if "Model.load(" in text]

    @pytest.mark.parametrize("is_built", [True, False])
    def test_is_told_where_it_could_be(self, is_built: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RUNAHEAD_CACHE", str(cache_folder() / TEST_KERNELS if is_built else tmp_path))
        tiny_llama().config.save_pretrained(tmp_path)
        ranks = Ranks.start(RanksOptions(device=Device.cpu, threads=1))
        options = ModelOptions(name=ModelName.random, config=str(tmp_path))
        model = shares.load_model(options, ranks)
        sentences = Engine(model, ranks).slower([GenerationOptions()], reuses=False)
        told = [each for each in sentences if each.startswith(Way.kernels.value)]
        assert (told == []) == is_built == KERNELS.in_use
        if told:
            assert "not built; python -m launch.kernels" in told[0]


def with_attention(text: str, folder: Path) -> tuple[Path, ...]:
    """The sources in a folder, with another text of attention.cpp, the first of them."""
    assert operators.SOURCES[0].name == "attention.cpp"
    copies = [Path(shutil.copy(source, folder)) for source in operators.SOURCES]
    copies[0].write_text(text)
    return tuple(copies)


class TestBuild:
    def test_is_for_source_torch_and_processor(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found = {loading.library_folder(tmp_path)}
        changed_sources = with_attention(operators.SOURCES[0].read_text() + "\n", tmp_path)
        for name, value in {
            "runahead.kernels.operators.SOURCES": changed_sources,
            "torch.__version__": "2.0",
            "runahead.model.loading.kernels._lines": lambda _: ["model name\t: another", "flags\t\t: sse2"],
        }.items():
            with monkeypatch.context() as changed:
                changed.setattr(name, value)
                found.add(loading.library_folder(tmp_path))
        assert len(found) == 4 and loading.library_folder(tmp_path) in found

    @pytest.mark.parametrize(
        ("compiler", "message"),
        [
            ("/nowhere/c++", "there is no C\\+\\+ compiler /nowhere/c\\+\\+; install g\\+\\+"),
            ("exit 1", "failed with status 1"),
            ("for last; do :; done; echo half > ${@: -4:1}; kill -9 $$", "failed with status -9"),
        ],
    )
    def test_that_fails_leaves_nothing(
        self, compiler: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script = tmp_path / "compiler"
        script.write_text(f"#!/bin/bash\n{compiler}\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", compiler if compiler.startswith("/") else str(script))
        cache = tmp_path / "cache"
        with pytest.raises(ValueError, match=message):
            loading.build(cache)
        assert not [path for path in cache.rglob("*") if path.suffix != ".lock" and path.name != "kernels"]
        assert "not built" in loading.load_if_built(cache)

    def test_that_computes_something_else_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A library that really does, in a process that has loaded the right one. Only windows are wrong."""
        text, right = operators.SOURCES[0].read_text(), "std::max<int64_t>(0, firsts[c] - k_start)"
        assert text.count(right) == 1
        wrong = text.replace(right, right.replace("(0,", "(0, 1 +"))
        monkeypatch.setattr(operators, "SOURCES", with_attention(wrong, tmp_path))
        monkeypatch.setattr(loading, "FLAGS", tuple("-O1" if flag == "-O3" else flag for flag in loading.FLAGS))
        with pytest.raises(ValueError, match="times what rounding allows .* so it is not used"):
            loading.build(tmp_path / "cache")
        assert "not built" in loading.load_if_built(tmp_path / "cache")

    @pytest.fixture
    def copying(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A compiler that gives the library of the tests, which takes less time than making one."""
        library = loading.library_folder(cache_folder() / TEST_KERNELS) / loading.LIBRARY
        script = tmp_path / "compiler"
        script.write_text(f"#!/bin/bash\ncp {library} ${{@: -4:1}}\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return script

    def test_is_taken_without_its_compiler(
        self, copying: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        library = loading.build(tmp_path / "cache")
        assert (library.parent / loading.COMPILER).read_text() == f"{copying}\n"
        for other in ("/nowhere/c++", "c++"):
            monkeypatch.setenv("CXX", other)
            assert loading.load_if_built(tmp_path / "cache") == ""

    @pytest.mark.usefixtures("copying")
    def test_is_made_again_after_the_file_was_deleted(self, tmp_path: Path) -> None:
        library = loading.build(tmp_path / "cache")
        library.unlink()
        assert "not built" in loading.load_if_built(tmp_path / "cache")
        assert loading.build(tmp_path / "cache") == library and library.is_file()
        assert loading.load_if_built(tmp_path / "cache") == ""

    def test_that_takes_too_long_ends_with_all_that_the_compiler_started(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that is left has the pipe of messages open, and a build waits for it, so that it has written the file."""
        script = tmp_path / "compiler"
        script.write_text(f"#!/bin/bash\n(sleep 4; touch {tmp_path}/left) &\nwait\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        monkeypatch.setattr(loading, "BUILD_S", 1.0)
        with pytest.raises(ValueError, match="has not ended after 1 s"):
            loading.build(tmp_path / "cache")
        assert not (tmp_path / "left").exists()

    def test_needs_a_folder_that_can_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "cache").write_text("a file")
        with pytest.raises(OSError, match="set RUNAHEAD_CACHE"):
            loading.build(tmp_path / "cache")

    def test_that_cannot_be_loaded_is_told(self, tmp_path: Path) -> None:
        """In a process that has loaded no other."""
        folder = loading.library_folder(tmp_path)
        folder.mkdir(parents=True)
        (folder / loading.LIBRARY).write_bytes(b"half a library")
        script = "from runahead.model.loading.kernels import load_if_built; print(load_if_built())"
        environment = {**os.environ, "RUNAHEAD_CACHE": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert "kernels of our own cannot be loaded" in done.stdout, done.stderr

    def test_program(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RUNAHEAD_CACHE", str(cache_folder() / TEST_KERNELS))
        assert program.main([]) == 0 and Path(capsys.readouterr().out.strip()).is_file()
        monkeypatch.setenv("CXX", "/nowhere/c++")
        monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path))
        assert program.main([]) == 2 and "not built: there is no C++ compiler" in capsys.readouterr().out
        assert program.main(["--help"]) == 0 and program.main(["x=1"]) == 2
