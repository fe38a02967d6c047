"""Keys and values in 4 bits on a GPU: the numbers of a CPU, and a host that does not wait."""

from __future__ import annotations

import pytest
import torch

from policies.base import Phase
from runahead.attention.partial import AttentionTerms
from runahead.cache.kept import KeptLayer
from runahead.cache.new_tokens import NewTokens
from runahead.cache.quantised.layer import QuantisedLayer
from runahead.cache.slabs import KVShape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


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
        exact.append(*(x.to(device) for x in kv), NewTokens(0, pads))
        given = [(k.to(device), v.to(device)) for k, v in new]
        q, slots = q_BN1H.to(device), slots_BKm.to(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer = QuantisedLayer.of(
                exact, bits=4, residual=128, residual_bits=16, keys_by_token=keys_by_token, room=32
            )
            for number, (k, v) in enumerate(given):
                tokens = NewTokens(prompt + number, pads, Phase.decode)
                layer.append(k, v, tokens)
            if keys_by_token:
                layer.keep(slots, room=32)
            out, lse = layer.seen(q, tokens).attend(terms)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append((out.cpu().double(), lse.cpu().double(), layer.num_bytes))
    assert found[0][2] == found[1][2]
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-3  # a number near the middle of two codes may get the other one
    for ours, expected in zip(found[1][:2], found[0][:2], strict=True):
        torch.testing.assert_close(ours, expected, atol=tolerance, rtol=0)
