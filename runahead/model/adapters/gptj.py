"""GPT-J and CodeGen: attention after rotary positions in a method of its own."""

# Legend: B batch, N heads, C new tokens, H head dim.

from __future__ import annotations

from typing import Any

from torch import Tensor

from runahead.attention.masks import MaskRule, rule_of
from runahead.attention.partial import AttentionTerms


def attend(
    self: Any, q_BNCH: Tensor, k_BNCH: Tensor, v_BNCH: Tensor, attention_mask: MaskRule | Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Replaces the method that both classes call once the cache has taken the keys, which then carry our attention."""
    attention = getattr(k_BNCH, "runahead", None)
    if attention is None:  # transformers' own attention, which ours is compared with
        return type(self)._attn(self, q_BNCH, k_BNCH, v_BNCH, attention_mask)
    assert not isinstance(attention_mask, Tensor)
    terms = AttentionTerms(scaling=self.head_dim**-0.5, rule=rule_of(attention_mask))
    # CodeGen rotates queries in float32.
    return attention.attend(self.layer_idx, q_BNCH.to(k_BNCH.dtype), k_BNCH, v_BNCH, terms), None
