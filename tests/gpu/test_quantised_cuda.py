"""Keys and values in 4 bits on a GPU: the numbers of a CPU, and a host that does not wait."""

from __future__ import annotations

import pytest
import torch

from policies.layer_view import Phase
from runahead.attention.partial import AttentionTerms
from runahead.cache.host.copy_stream import copies_for
from runahead.cache.kept import KeptLayer
from runahead.cache.new_tokens import NewTokens
from runahead.cache.quantised.few_bits import FewBits
from runahead.cache.quantised.pool import PooledCodes, pooled, to_host
from runahead.cache.slabs import KVShape, SlotsToCopy
from runahead.thinning.ragged import RaggedLayer
from tests.gpu.models import CPU, CUDA


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys_by_token", [False, True])
def test_a_gpu_stores_and_attends_as_a_cpu_without_a_wait(dtype: torch.dtype, keys_by_token: bool) -> None:
    batch, heads, group, dim, prompt = 2, 4, 2, 64, 1200
    generator, terms, pads = torch.Generator().manual_seed(2), AttentionTerms(scaling=dim**-0.5), [0, 70]

    def random(heads: int, num_tokens: int) -> torch.Tensor:
        return torch.randn(batch, heads, num_tokens, dim, generator=generator, dtype=torch.float64).to(dtype)

    kv, new = (random(heads, prompt), random(heads, prompt)), [(random(heads, 1), random(heads, 1)) for _ in range(40)]
    q_BN1H = random(heads * group, 1)
    slots_BKm = torch.arange(1, prompt + 40).expand(batch, heads, -1)
    found = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        shape = KVShape(num_kv_heads=heads, key_dim=dim, value_dim=dim, dtype=dtype)
        exact = KeptLayer.empty(shape, batch=batch, room=0, device=device)
        exact.append(kv[0].to(device), kv[1].to(device), NewTokens(0, pads))
        given = [(k.to(device), v.to(device)) for k, v in new]
        q, slots = q_BN1H.to(device), slots_BKm.to(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer = exact.in_bits(FewBits(bits=4, residual=128, residual_bits=16, keys_by_token=keys_by_token), room=32)
            for number, (k, v) in enumerate(given):
                tokens = NewTokens(prompt + number, pads, Phase.decode)
                layer.append(k, v, tokens)
            if keys_by_token:
                layer.keep(slots, room=32, tokens_B=[prompt + 39, prompt + 40 - pads[1]])
            out, lse = layer.seen(q, tokens).attend(terms)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append((out.cpu().double(), lse.cpu().double(), layer.num_bytes))
    assert found[0][2] == found[1][2]
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-3  # a number near the middle of two codes may get the other one
    for ours, expected in zip(found[1][:2], found[0][:2], strict=True):
        torch.testing.assert_close(ours, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys_by_token", [False, True])
def test_heads_of_different_lengths_are_those_of_a_cpu_without_a_wait(dtype: torch.dtype, keys_by_token: bool) -> None:
    """A generated token and a turn of several; one head has no groups."""
    batch, heads, group, dim, prompt = 2, 4, 2, 64, 900
    generator, terms, pads = torch.Generator().manual_seed(4), AttentionTerms(scaling=dim**-0.5), [0, 70]

    def random(heads: int, num_tokens: int) -> torch.Tensor:
        return torch.randn(batch, heads, num_tokens, dim, generator=generator, dtype=torch.float64).to(dtype)

    kv, new = (
        (random(heads, prompt), random(heads, prompt)),
        [(random(heads, n), random(heads, n)) for n in [1] * 40 + [5]],
    )
    queries = [random(heads * group, k.shape[2]) for k, _ in new]
    shares_BK1 = torch.linspace(0.05, 1.0, batch * heads).view(batch, heads, 1)
    kept_BKn = torch.rand(batch, heads, prompt, generator=generator) < shares_BK1
    kept_BKn[1, :, :70] = False
    slots_BKn = torch.arange(prompt).masked_fill(~kept_BKn, -1).sort(dim=-1).values
    found = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        shape = KVShape(num_kv_heads=heads, key_dim=dim, value_dim=dim, dtype=dtype)
        exact = KeptLayer.empty(shape, batch=batch, room=0, device=device)
        exact.append(kv[0].to(device), kv[1].to(device), NewTokens(0, pads))
        given = [tuple(x.to(device) for x in (q, k, v)) for q, (k, v) in zip(queries, new, strict=True)]
        ragged = RaggedLayer.from_slots(exact, slots_BKn.to(device), room=0)
        outputs, at = list[torch.Tensor](), prompt
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer = ragged.in_bits(FewBits(bits=4, residual=64, residual_bits=16, keys_by_token=keys_by_token), room=32)
            for q, k, v in given:
                tokens = NewTokens(at, pads, Phase.decode)
                layer.append(k, v, tokens)
                outputs += layer.seen(q, tokens).attend(terms)
                at += k.shape[2]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append(([x.cpu().double() for x in outputs], layer.num_bytes))
    assert found[0][1] == found[1][1]
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-3  # a number near the middle of two codes may get the other one
    for ours, expected in zip(found[1][0], found[0][0], strict=True):
        torch.testing.assert_close(ours, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("skips_keys", [False, True])
def test_a_gpu_fetches_from_the_host_what_a_cpu_has_without_a_wait(dtype: torch.dtype, skips_keys: bool) -> None:
    batch, heads, dim, prompt, num_new = 2, 4, 64, 1200, 40
    generator, pads = torch.Generator().manual_seed(3), [0, 70]

    def random(num_tokens: int) -> torch.Tensor:
        return torch.randn(batch, heads, num_tokens, dim, generator=generator, dtype=torch.float64).to(dtype)

    kv, new = (random(prompt), random(prompt)), [(random(1), random(1)) for _ in range(num_new)]
    slots_mBK = torch.randint(70, prompt + num_new, (300, batch, heads), generator=generator)
    rows_x = (slots_mBK * batch * heads + torch.arange(batch * heads).view(batch, heads)).flatten()
    found = []
    for device in (CPU, CUDA):
        shape = KVShape(num_kv_heads=heads, key_dim=dim, value_dim=dim, dtype=dtype)
        exact = KeptLayer.empty(shape, batch=batch, room=0, device=device)
        exact.append(kv[0].to(device), kv[1].to(device), NewTokens(0, pads))
        few = FewBits(bits=4, residual=128, residual_bits=16, keys_by_token=False)
        layer, copies = pooled(exact.in_bits(few, room=64), room=0), copies_for(device)
        if copies is not None:
            layer = to_host(layer, copies, room=64, spare=64)
            assert isinstance(layer.codes, PooledCodes) and layer.codes.words.slab_TBKX.is_pinned()
        given, rows = [(k.to(device), v.to(device)) for k, v in new], rows_x.to(device)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for number, (k, v) in enumerate(given):
                layer.append(k, v, NewTokens(prompt + number, pads, Phase.decode))
            bring = layer.gather(SlotsToCopy(rows_X=rows, skips_keys=skips_keys))
            assert bring is not None
            slab_mBKX = bring()[:-1, ..., dim if skips_keys else 0 :]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append(slab_mBKX.cpu().double())
    # A number near the middle of two codes may get the other one.
    assert ((found[0] - found[1]).abs() > 1e-3).double().mean() < 1e-3
