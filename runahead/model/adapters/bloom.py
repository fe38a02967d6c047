"""BLOOM: multi-head attention with ALiBi positions."""

# Legend: B batch, N heads, C new tokens, H head dim, S keys.

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.bloom.modeling_bloom import BloomAttention

from runahead.attention.masks import MaskRule
from runahead.attention.partial import AttentionTerms
from runahead.model.adapters.alibi import alibi_slopes
from runahead.model.seam import SeamCache


def forward(
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
    terms = AttentionTerms(scaling=self.inv_norm_factor, rule=attention_mask, key_bias=key_bias)
    out_BNCH = layer_past.attention.attend(self.layer_idx, q_BNCH, k_BNCH, v_BNCH, terms)
    return residual + self.dense(out_BNCH.transpose(1, 2).flatten(2)), None
