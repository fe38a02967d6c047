"""Attention of a few runs of contiguous tokens to keys and values that arrive in parts, merged as they arrive."""

# Legend: B batch, N query heads, K kv heads, C new tokens, S keys, H head dim, V value dim.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from runahead.attention.op import KVReader
from runahead.attention.partial import AttentionTerms, attend, merge_


class RunsAttention:
    """One layer's attention of rows with the same padding: to their own tokens, then to parts of the other ranks'.

    Calls are as few as the family allows. If attention is plainly causal, all runs attend to themselves and to each
    other in one causal call, since they are in order, and share one call to keys that come before several of them.

    Args:
        q_BNCH, k_BKCH, v_BKCV: queries, keys and values of the new tokens of these rows, without padding. The queries
            attend to these keys at once.
        rows: the rows of the batch.
        pad: their left padding.
        runs: positions of the new tokens, in order.

    Attributes:
        out: attention (B, N, C, V) to all keys so far, in at least float32.
        lse: its log-sum-exp (B, N, C).
    """

    def __init__(
        self,
        q_BNCH: Tensor,
        k_BKCH: Tensor,
        v_BKCV: Tensor,
        terms: AttentionTerms,
        *,
        rows: slice,
        pad: int,
        runs: Sequence[range],
    ) -> None:
        self._q, self._terms, self.rows, self._pad, self._runs = q_BNCH, terms, rows, pad, runs
        self._slices = [slice(start, end) for start, end in pairwise(accumulate(map(len, runs), initial=0))]
        # A bias depends on a key's position and a window on its distance, and both are wrong once runs are joined.
        causal = terms.rule is None or terms.rule.is_causal(0, runs[-1].stop)
        self._joined = len(runs) == 1 or (causal and terms.key_bias is None)
        if self._joined:
            self._terms, start = terms if len(runs) == 1 else replace(terms, rule=None), runs[0].start
            out, self.lse = attend(q_BNCH, k_BKCH, v_BKCV, self._terms, q_start=start, k_start=start)
            self.out = out.to(self.lse.dtype)
            return
        parts = []
        for at, run in zip(self._slices, runs, strict=True):
            q, k, v = (x[:, :, at] for x in (q_BNCH, k_BKCH, v_BKCV))
            parts.append(attend(q, k, v, terms, q_start=run.start, k_start=run.start))
        self.lse = torch.cat([lse for _, lse in parts], dim=2)
        self.out = torch.cat([out for out, _ in parts], dim=2).to(self.lse.dtype)
        for at, run in zip(self._slices, runs, strict=True):
            self._attend_earlier(k_BKCH[:, :, at], v_BKCV[:, :, at], run)

    def attend(self, slab: KVReader, tokens: range) -> None:
        """Attend to tokens of the padded batch that other ranks computed."""
        start, end = max(tokens.start, self._pad), tokens.stop
        if start < end:
            k, v = (x[self.rows] for x in slab.read(start, end))
            self._attend_earlier(k, v, range(start - self._pad, end - self._pad))

    def _attend_earlier(self, k_BKSH: Tensor, v_BKSV: Tensor, keys: range) -> None:
        """Attend to `keys` from all runs that come after them."""
        after = [(at, run.start) for at, run in zip(self._slices, self._runs, strict=True) if run.start >= keys.stop]
        if after and self._joined:
            at, q_start = after[0]
            after = [(slice(at.start, None), q_start)]
        for at, q_start in after:
            first = 0 if self._terms.rule is None else self._terms.rule.first_key(q_start)
            k_start = max(keys.start, first)
            if k_start < keys.stop:
                k, v = (x[:, :, k_start - keys.start :] for x in (k_BKSH, v_BKSV))
                part = attend(self._q[:, :, at], k, v, self._terms, q_start=q_start, k_start=k_start)
                merge_(self.out[:, :, at], self.lse[:, :, at], *part)
