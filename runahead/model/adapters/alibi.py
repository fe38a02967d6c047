"""BLOOM and MPT: multi-head attention with ALiBi positions (Press et al., 2022).

Positions beyond MPT's max_seq_len, for which transformers' bias table has no entries, are refused by the engine's check
of the prompt's length.
"""

# Legend: B batch, N heads, C new tokens, H head dim, S keys.

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.mpt.modeling_mpt import MptAttention

from runahead.attention.masks import MaskRule, rule_of
from runahead.attention.partial import AttentionTerms
from runahead.model.seam import SeamCache


def bloom_forward(
    self: BloomAttention,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: MaskRule | None,
    layer_past: SeamCache | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    assert layer_past is not None

    def key_bias(keys_S: Tensor) -> Tensor:
        return (alibi_slopes(self.num_heads, keys_S.device)[:, None] * keys_S).to(alibi.dtype)

    fused_BCN3H = self.query_key_value(hidden_states).unflatten(-1, (self.num_heads, 3, self.head_dim))
    q_BNCH, k_BNCH, v_BNCH = (fused_BCN3H[..., i, :].transpose(1, 2) for i in range(3))
    terms = AttentionTerms(scaling=self.inv_norm_factor, rule=rule_of(attention_mask), key_bias=key_bias)
    out_BNCH = layer_past.attend(self.layer_idx, q_BNCH, k_BNCH, v_BNCH, terms)
    return residual + self.dense(out_BNCH.transpose(1, 2).flatten(2)), None


def mpt_forward(
    self: MptAttention,
    hidden_states: Tensor,
    position_bias: Tensor,
    past_key_values: SeamCache | None = None,
    attention_mask: MaskRule | None = None,
    cache: SeamCache | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if past_key_values is None:
        past_key_values = cache  # as transformers names it from 5.24 on
    assert past_key_values is not None

    def key_bias(keys_S: Tensor) -> Tensor:
        # Relative to the last position of the model, as in transformers: float32 and never positive.
        return mpt_slopes(self.n_heads, keys_S.device)[:, None] * (keys_S - (self.max_seq_length - 1))

    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    q_BNCH, k_BNCH, v_BNCH = (
        part.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2) for part in mixed.chunk(3, dim=-1)
    )
    terms = AttentionTerms(scaling=self.softmax_scale, rule=rule_of(attention_mask), key_bias=key_bias)
    out_BNCH = past_key_values.attend(self.layer_idx, q_BNCH, k_BNCH, v_BNCH, terms)
    return self.out_proj(out_BNCH.transpose(1, 2).flatten(2)), None


@lru_cache
def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """Slopes (num_heads) in float32 of BLOOM and Falcon: head n of N = 2^k heads has slope 2^(-8 n / N), n = 1 .. N.

    With a number of heads that is not a power of two, the slopes are those of the next lower power, followed by every
    other slope of the next higher one. They are made once for a device, since the host waits for their copy.
    """
    lower = 2 ** math.floor(math.log2(num_heads))
    exponents = [8.0 * n / lower for n in range(1, lower + 1)]
    exponents += [4.0 * n / lower for n in range(1, 2 * (num_heads - lower), 2)]
    return torch.tensor([2.0**-exponent for exponent in exponents], dtype=torch.float32, device=device)


def mpt_slopes(num_heads: int, device: torch.device) -> Tensor:
    """Slopes (num_heads) of MPT for a maximal bias of 8.

    With a number of heads that is not a power of two, they are slopes of the next higher power: every other one,
    beginning with the second, then the rest.
    """
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = 2.0 ** (-8.0 / power * torch.arange(1, power + 1, dtype=torch.float32, device=device))
    return slopes if power == num_heads else torch.cat([slopes[1::2], slopes[::2]])[:num_heads]
