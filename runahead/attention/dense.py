"""Dense attention under a mask: scores of keys that a query may not see are computed too, then masked."""

# Legend: B batch, N query heads, K kv heads, C new tokens, S tokens of the prompt, H head dim, V value dim.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from runahead.attention.causal import KVReader, nothing, padded_together, row_groups
from runahead.attention.masks import MaskRule
from runahead.attention.partial import AttentionTerms, blockwise_attention, fused_kernel

ALIGNMENT = 16
"""Rows of a mask must begin at multiples of this many elements for the CUDA kernel."""


class DenseAttention:
    """Attention to keys and values of the whole prompt, none of whose scores are skipped.

    The fused kernels read the mask from memory: C x S elements of the queries' dtype, made once per forward for each
    kind of layer and padding. That is 134 MB for half of 8,192 tokens in float32, and four times as much for twice the
    length. Families with terms that no fused kernel knows go block by block and need no mask.

    Args:
        num_tokens: length of the padded prompt.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._masks: dict[tuple[MaskRule | None, int], Tensor] = {}

    def attend(
        self,
        q_BNCH: Tensor,
        kv: KVReader,
        terms: AttentionTerms,
        *,
        start: int,
        pads: Sequence[int],
        await_prefix: Callable[[], None] = nothing,
    ) -> tuple[Tensor, Tensor]:
        """As `attend_causally`. `kv` holds the whole prompt once `await_prefix` returned."""
        await_prefix()
        groups = row_groups(q_BNCH, terms, start=start, pads=pads)
        parts = []
        for group in groups:
            q = q_BNCH[group.rows, :, -group.num_queries :]
            k, v = (x[group.rows] for x in kv.read(group.pad, self.num_tokens))
            if fused_kernel(q, k, v) is None or terms.needs_scores:
                parts.append(blockwise_attention(q, k, v, terms, q_start=group.q_start, k_start=0, dense=True))
            else:
                parts.append(_masked(q, k, v, self._mask(terms.rule, group.pad, group.q_start, q), terms.scaling))
        return padded_together(q_BNCH, kv, groups, parts, start=start)

    def _mask(self, rule: MaskRule | None, pad: int, q_start: int, q_BNCH: Tensor) -> Tensor:
        """0 where a query sees a key, -inf where it does not: (C, S) without the padding."""
        if (rule, pad) not in self._masks:
            num_queries, num_keys = q_BNCH.shape[2], self.num_tokens - pad
            queries = torch.arange(num_queries, device=q_BNCH.device) + q_start
            keys = torch.arange(num_keys, device=q_BNCH.device)
            allowed = keys[None, :] <= queries[:, None] if rule is None else rule.allowed(queries, keys)
            room = math.ceil(num_keys / ALIGNMENT) * ALIGNMENT
            mask = q_BNCH.new_zeros(num_queries, room)[:, :num_keys]
            self._masks[rule, pad] = mask.masked_fill_(~allowed, -math.inf)
        return self._masks[rule, pad]


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of all queries and keys under an additive mask."""
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask[None, None], scale=scaling
        )
        return out, lse
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    bias = mask.expand(*q.shape[:2], *mask.shape)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, False, scale=scaling
    )
    return out, lse[:, :, : q.shape[2]]
