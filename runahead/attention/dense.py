"""Dense masked attention: all scores are computed, also those of keys that a query does not see, then masked."""

# Legend: B batch, N query heads, K kv heads, C new tokens, S tokens of the prompt, H head dim, V value dim.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from runahead.attention.masks import MaskRule
from runahead.attention.op import Codec, Lengths, Part, Step, joined, nothing
from runahead.attention.partial import AttentionTerms, attend_at, cpu_flash, cuda_efficient, fused_kernel

ALIGNMENT = 16
"""Alignment of a mask's rows, in elements, that the CUDA kernel needs."""


class DenseAttention:
    """Attention to the keys and values of the whole prompt that skips no score.

    The fused kernels read the mask from memory: C x S elements of the queries' dtype, made once per forward for each
    kind of layer and padding. That is 134 MB for half of 8,192 tokens in float32, and four times as much for twice the
    length. Families with terms that no fused kernel supports are computed block by block and need no mask.

    Args:
        num_tokens: length of the padded prompt.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._masks: dict[tuple[MaskRule | None, int], Tensor] = {}

    def attend(
        self,
        q_BNCH: Tensor,
        steps: Sequence[Step],
        terms: AttentionTerms,
        *,
        await_prefix: Callable[[], None] = nothing,
        num_sequences: int | None = None,
    ) -> Part:
        """`op.attend` without skipped scores, to one run that holds the whole prompt, once all of it is there."""
        await_prefix()
        [[(keys, spans, _)], _], *_ = steps
        assert not isinstance(spans, Lengths) and not isinstance(keys, Codec), (keys, spans)
        parts = []
        for span in spans:
            q = q_BNCH[span.rows, :, span.queries.start :]
            k, v = (x[span.rows] for x in keys.read(span.pad, self.num_tokens))
            if terms.needs_scores or q.shape[-1] != v.shape[-1] or fused_kernel(q, k, v) is None:
                positions_S = torch.arange(k.shape[2], device=q.device)
                parts.append(
                    attend_at(q, k, v, terms, positions_S[span.positions[0] :][: len(span.queries)], positions_S)
                )
                continue
            mask = self._mask(terms.rule, span.pad, span.positions[0], q)
            if q.device.type == "cpu":
                parts.append(cpu_flash(q, k, v, False, terms.scaling, mask[None, None]))
            else:
                mask = mask.expand(*q.shape[:2], *mask.shape)
                parts.append(cuda_efficient(q, k, v, False, terms.scaling, mask))
        return joined(q_BNCH, keys.value_dim, [(span.rows, span.queries) for span in spans], parts)

    def _mask(self, rule: MaskRule | None, pad: int, q_start: int, q_BNCH: Tensor) -> Tensor:
        """Additive mask (C, S) without padding: 0 where a query sees a key, -inf where it does not."""
        if (rule, pad) not in self._masks:
            num_queries, num_keys = q_BNCH.shape[2], self.num_tokens - pad
            queries = torch.arange(num_queries, device=q_BNCH.device) + q_start
            keys = torch.arange(num_keys, device=q_BNCH.device)
            allowed = keys[None, :] <= queries[:, None] if rule is None else rule.allowed(queries, keys)
            room = math.ceil(num_keys / ALIGNMENT) * ALIGNMENT
            mask = q_BNCH.new_zeros(num_queries, room)[:, :num_keys]
            self._masks[rule, pad] = mask.masked_fill_(~allowed, -math.inf)
        return self._masks[rule, pad]
