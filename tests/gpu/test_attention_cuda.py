"""Attention on a GPU: fused kernels give what the plain fallback gives, and replayed steps what eager ones give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import sliding_window_causal_mask_function

from runahead.attention.masks import MaskRule
from runahead.attention.partial import AttentionTerms, attend, attend_sequences, blockwise_attention, merge
from runahead.cache.attention import CausalAttention
from runahead.cache.fixed import in_fixed_shape
from runahead.decoding.forward import forward_over
from tests.gpu.models import CUDA, model

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Against the plain fallback in the same dtype, for inputs of spread 1: a few units in the last place."""


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("num_queries", "num_prefix"), [(1, 300), (200, 0), (200, 131)])
def test_fused_kernels_equal_the_fallback(dtype: torch.dtype, num_queries: int, num_prefix: int) -> None:
    end, terms = num_prefix + num_queries, AttentionTerms(scaling=0.125)
    torch.manual_seed(1)
    q = torch.randn(2, num_queries, 8, 64, device="cuda", dtype=dtype).transpose(1, 2)
    slab = torch.randn(end, 2, 2, 128, device="cuda", dtype=dtype).permute(1, 2, 0, 3)
    k, v = slab[..., :64], slab[..., 64:]
    expected, expected_lse = blockwise_attention(q, k, v, terms, q_start=num_prefix, k_start=0)
    own = attend(q, k[:, :, num_prefix:], v[:, :, num_prefix:], terms, q_start=num_prefix, k_start=num_prefix)
    prefix = attend(q, k[:, :, :num_prefix], v[:, :, :num_prefix], terms, q_start=num_prefix, k_start=0)
    out, lse = merge(*own, *prefix)
    assert torch.allclose(out.float(), expected.float(), atol=TOLERANCE[dtype], rtol=0)
    assert torch.allclose(lse.float(), expected_lse.float(), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [1, 2, 40, 131, 200, 201, 240, 241, 260, 350, 5000])
@pytest.mark.parametrize("keys", [range(300, 500), range(150, 300), range(110, 260)], ids=["own", "before", "a gap"])
def test_windows_are_one_call_of_the_kernel(
    dtype: torch.dtype, window: int, keys: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Own keys, and earlier ones, of which only some queries or none see any: the softmax in float64, by hand."""
    torch.manual_seed(1)
    terms = AttentionTerms(scaling=0.125, rule=MaskRule(sliding_window_causal_mask_function(window)))
    q = torch.randn(2, 200, 8, 64, device="cuda", dtype=dtype).transpose(1, 2)
    slab = torch.randn(len(keys), 2, 2, 128, device="cuda", dtype=dtype).permute(1, 2, 0, 3)
    monkeypatch.setattr("runahead.attention.partial.blockwise_attention", lambda *given, **how: pytest.fail("blocks"))
    out, lse = attend(q, slab[..., :64], slab[..., 64:], terms, q_start=300, k_start=keys.start)
    k, v = slab.cpu().double().repeat_interleave(4, dim=1).split(64, dim=-1)
    distances = torch.arange(300, 500)[:, None] - torch.tensor(keys)
    seen = (distances >= 0) & (distances < window)
    scores = (0.125 * (q.cpu().double() @ k.transpose(-1, -2))).masked_fill(~seen, -torch.inf)
    expected, sees = scores.softmax(dim=-1).nan_to_num(0.0) @ v, seen.any(dim=1)
    assert (out.cpu() - expected).abs().max() < TOLERANCE[dtype]
    apart = (lse.cpu() - scores.logsumexp(dim=-1))[:, :, sees].abs()
    assert not apart.numel() or apart.max() < TOLERANCE[dtype]
    assert bool((lse.cpu()[:, :, ~sees] == -torch.inf).all())


@pytest.mark.parametrize("kv_heads", [2, 8], ids=["grouped", "ungrouped"])
def test_sequences_anywhere_in_a_memory_equal_the_softmax(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, by hand. The kernel splits keys among blocks only where query heads share them."""
    torch.manual_seed(1)
    starts, used, heads = [190, 0, 77], [101, 60, 1], list[tuple[int, int]]()
    q_SNH = torch.randn(3, 8, 64, device="cuda", dtype=torch.bfloat16)
    slab = torch.randn(300, kv_heads, 128, device="cuda", dtype=torch.bfloat16).transpose(0, 1)[None]
    flash = torch.ops.aten._flash_attention_forward

    class Noted:
        default = flash.default

        def __call__(self, q: Tensor, k: Tensor, *rest: object, **how: object) -> object:
            heads.append((q.shape[1], k.shape[1]))
            return flash(q, k, *rest, **how)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", Noted())
    out_SNV, lse_SN = attend_sequences(
        q_SNH,
        slab[..., :64],
        slab[..., 64:],
        starts=torch.tensor([*starts, 300], dtype=torch.int32).to("cuda"),
        used_S=torch.tensor(used, dtype=torch.int32).to("cuda"),
        longest=128,
        scaling=0.125,
    )
    for row, (start, num) in enumerate(zip(starts, used, strict=True)):
        k, v = slab[0, :, start : start + num].cpu().double().repeat_interleave(8 // kv_heads, dim=0).split(64, dim=-1)
        scores = 0.125 * (k @ q_SNH[row].cpu().double()[..., None])[..., 0]
        expected = (scores.softmax(dim=-1)[:, None] @ v)[:, 0]
        assert (out_SNV[row].cpu() - expected).abs().max() < TOLERANCE[torch.bfloat16]
        assert (lse_SN[row].cpu() - scores.logsumexp(dim=-1)).abs().max() < TOLERANCE[torch.bfloat16]
    assert heads == [(max(8, 2 * kv_heads), kv_heads)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [(300,), (300, 300, 300), (300, 40, 131)], ids=["one row", "rows", "padded rows"])
@pytest.mark.parametrize("kv_heads", [2, 4], ids=["grouped", "ungrouped"])
def test_replayed_steps_equal_eager_ones(dtype: torch.dtype, lengths: tuple[int, ...], kv_heads: int) -> None:
    """Logits of tokens that are given, so that a near tie changes nothing; steps before and after the capture."""
    device, end = CUDA, max(lengths)
    loaded, pads = model(device, dtype, num_key_value_heads=kv_heads), [end - length for length in lengths]
    assert loaded.repeats_steps
    ids_BS = torch.randint(211, (len(lengths), end + 8), generator=torch.Generator().manual_seed(4)).to(device)
    rows = []
    for fixed in (False, True):
        cache = loaded.empty_cache(end + 8, batch=len(lengths))
        loaded.forward(ids_BS[:, :end], CausalAttention(cache, start=0, pads=pads), start=0, pads=pads)
        over = in_fixed_shape(cache, pads=pads, num_tokens=end) if fixed else cache
        assert over is not None
        forward = forward_over(loaded, over, [], pads=pads, prompt_tokens=end)
        steps = range(end, end + 8)
        rows.append(torch.stack([forward(ids_BS[:, step : step + 1], step).clone() for step in steps]))
    assert (rows[0] - rows[1]).abs().max() < TOLERANCE[dtype] * rows[0].std() * 3
