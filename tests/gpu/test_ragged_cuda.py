"""KV heads of different lengths on a GPU: one kernel for all of them, as far as the device has it."""

from __future__ import annotations

import pytest
import torch

from policies.layer_view import Phase
from runahead.attention.partial import AttentionTerms
from runahead.cache.kept import KeptLayer
from runahead.cache.new_tokens import NewTokens
from runahead.cache.slabs import KVShape
from runahead.thinning.ragged import RaggedLayer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_new", [1, 5])
@pytest.mark.parametrize("compensates", [False, True])
def test_attention_is_that_of_float64_on_a_cpu(dtype: torch.dtype, num_new: int, compensates: bool) -> None:
    """Half precision decodes by one varlen kernel, float32 head by head; with a slot for what was dropped, too.

    With decode=sharded a single new token may be on another rank, and a head then may have none.
    """
    batch, heads, group, dim, prompt = 2, 4, 2, 64, 300
    generator, terms, tokens = torch.Generator().manual_seed(2), AttentionTerms(scaling=dim**-0.5), NewTokens(0, [0, 0])

    def random(heads: int, num_tokens: int) -> torch.Tensor:
        return torch.randn(batch, heads, num_tokens, dim, generator=generator, dtype=torch.float64).to(dtype)

    kv, new = (random(heads, prompt), random(heads, prompt)), (random(heads, num_new), random(heads, num_new))
    q_BNCH = random(heads * group, num_new)
    kept_BKn = torch.rand(batch, heads, prompt, generator=generator) < torch.rand(batch, heads, 1, generator=generator)
    kept_BKn[1, 0] &= num_new > 1
    slots_BKn = torch.arange(prompt).masked_fill(~kept_BKn, -1).sort(dim=-1).values
    found = list[list[torch.Tensor]]()
    for device, kind in ((torch.device("cpu"), torch.float64), (torch.device("cuda"), dtype)):
        found.append([])
        shape = KVShape(num_kv_heads=heads, key_dim=dim, value_dim=dim, dtype=kind)
        layer = KeptLayer.empty(shape, batch=batch, room=0, device=device)
        layer.append(kv[0].to(device, kind), kv[1].to(device, kind), tokens)
        ragged = RaggedLayer.from_slots(layer, slots_BKn.to(device), room=2, compensates=compensates)
        after = NewTokens(prompt, [0, 0], Phase.decode)
        for is_here in (False, True) if num_new == 1 else (True,):
            if is_here:
                ragged.append(new[0].to(device, kind), new[1].to(device, kind), after)
            out_BNCV, lse_BNC = ragged.seen(q_BNCH.to(device, kind), after).attend(terms)
            found[-1] += out_BNCV.cpu().double(), lse_BNC.cpu().double()
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-4
    for ours, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, expected, atol=tolerance, rtol=0)
