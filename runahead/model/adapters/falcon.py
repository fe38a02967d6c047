"""Falcon: multi-query and grouped (new decoder) attention, rotary or ALiBi positions."""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, S keys.

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb

from runahead.attention.masks import MaskRule, rule_of
from runahead.attention.partial import AttentionTerms
from runahead.model.adapters.alibi import alibi_slopes
from runahead.model.seam import SeamCache


def forward(
    self: FalconAttention,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: MaskRule | None,
    position_ids: Tensor | None = None,
    layer_past: SeamCache | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    assert layer_past is not None
    q_BNCH, k_BKCH, v_BKCH = _project(self, hidden_states)
    if alibi is None:
        assert position_embeddings is not None
        q_BNCH, k_BKCH = apply_rotary_pos_emb(q_BNCH, k_BKCH, *position_embeddings)
    dtype, scaling = hidden_states.dtype, self.inv_norm_factor

    def key_bias(keys_S: Tensor) -> Tensor:
        # As Falcon computes it: rounded to bfloat16, and scaled together with the scores.
        slopes_N = alibi_slopes(self.num_heads, keys_S.device).bfloat16()
        return (slopes_N[:, None] * keys_S).to(dtype) * scaling

    terms = AttentionTerms(scaling=scaling, rule=rule_of(attention_mask), key_bias=None if alibi is None else key_bias)
    out_BNCH = layer_past.attend(self.layer_idx, q_BNCH, k_BKCH, v_BKCH, terms)
    return self.dense(out_BNCH.transpose(1, 2).flatten(2)), None


def _project(self: FalconAttention, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Project to q (B, N, C, H) and k, v (B, K, C, H), with K KV heads as in the weights.

    transformers repeats the KV heads of the new decoder architecture before it caches them. They are not repeated here,
    so that the KV cache and its messages stay small. The fused projection holds, per KV head, its group of query heads,
    then the key, then the value; the oldest layout interleaves q, k, v per head, which is a group of 1.
    """
    fused = self.query_key_value(hidden_states)
    if self.multi_query and not self.new_decoder_architecture:
        num_kv_heads = 1
    else:
        num_kv_heads = self.num_kv_heads
    fused_BCKGH = fused.unflatten(-1, (num_kv_heads, -1, self.head_dim))
    q_BNCH = fused_BCKGH[..., :-2, :].flatten(2, 3).transpose(1, 2)
    k_BKCH, v_BKCH = fused_BCKGH[..., -2, :].transpose(1, 2), fused_BCKGH[..., -1, :].transpose(1, 2)
    return q_BNCH, k_BKCH, v_BKCH
