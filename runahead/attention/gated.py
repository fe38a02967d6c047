"""Attention to all tokens mixed with attention to the first and last ones, by a gate per KV head that can be trained.

Of DuoAttention (Xiao et al., ICLR 2025, arXiv 2410.10819, Sec. 2.2). Gradients go through it, unlike through the
attention that serves prompts.
"""

# Legend: B batch, N query heads, K kv heads, C tokens, H key dim, V value dim.

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runahead.attention.base import LayerAttention
from runahead.attention.partial import AttentionTerms


class GatedAttention(LayerAttention):
    """Causal attention of a text without padding to itself.

    Args:
        gates: of the KV heads (K) of each layer, 1 for attention to all tokens and 0 for the first and last ones; None
            is attention to all. Layers with windows are left alone.
        sinks: number of first tokens that all queries see.
        recent: number of last tokens that a query sees, its own among them.
    """

    def __init__(self, gates: Sequence[Tensor] | None, *, sinks: int = 0, recent: int = 0) -> None:
        super().__init__(start=0, pads=[0])
        self._gates, self._sinks, self._recent = gates, sinks, recent
        self._streaming_CC: Tensor | None = None

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        """Raises: ValueError: the family's attention has terms of its own, through which gates are not trained."""
        if terms.needs_scores or terms.sinks_N is not None:
            raise ValueError(
                "the attention of this model has a soft cap, a bias or sinks, through which gates are not trained; use "
                "by=kvzip"
            )
        places_C = torch.arange(q_BNCH.shape[2], device=q_BNCH.device)
        attend = partial(scaled_dot_product_attention, q_BNCH, k_BKCH, v_BKCV, scale=terms.scaling, enable_gqa=True)
        if terms.rule is not None:
            return attend(attn_mask=terms.rule.allowed(places_C, places_C))
        full_BNCV = attend(is_causal=True)
        if self._gates is None:
            return full_BNCV
        streaming_BNCV = attend(attn_mask=self._streaming(places_C))
        gates_K = self._gates[layer].to(full_BNCV.dtype)
        gates_N11 = gates_K.repeat_interleave(q_BNCH.shape[1] // len(gates_K))[:, None, None]
        return gates_N11 * full_BNCV + (1 - gates_N11) * streaming_BNCV

    def _streaming(self, places_C: Tensor) -> Tensor:
        """Whether queries see keys (C, C)."""
        if self._streaming_CC is None:
            behind_CC = places_C[:, None] - places_C
            self._streaming_CC = (behind_CC >= 0) & ((behind_CC < self._recent) | (places_C < self._sinks))
        return self._streaming_CC
