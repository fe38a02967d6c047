"""Attention of a few runs of contiguous tokens to K,V that arrive in pieces, merged as they come."""

# Legend: B batch, N query heads, K kv heads, C new tokens, S keys, H head dim, V value dim.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from runahead.attention.causal import KVReader
from runahead.attention.partial import AttentionTerms, attend


class RunsAttention:
    """One layer's attention of rows with the same padding: to their own tokens first, then to pieces of the others'.

    Calls are as few as the family allows. Where attention is plainly causal, all runs attend to themselves and to each
    other in one causal call, since they are in order, and share one call to keys that come before several of them.

    Args:
        q_BNCH: queries of these rows, without padding.
        rows: which of the batch they are.
        pad: their left padding.
        runs: positions of the queries, in order.

    Attributes:
        out: (B, N, C, V) of what was attended to so far, in at least float32; `lse` its log-sum-exp (B, N, C).
    """

    out: Tensor
    lse: Tensor

    def __init__(self, q_BNCH: Tensor, terms: AttentionTerms, *, rows: slice, pad: int, runs: Sequence[range]) -> None:
        self._q, self._terms, self._rows, self._pad, self._runs = q_BNCH, terms, rows, pad, runs
        self._slices = [slice(start, end) for start, end in pairwise(accumulate(map(len, runs), initial=0))]
        # A bias depends on where a key is, and a window on how far back: side by side, runs would be somewhere else.
        causal = terms.rule is None or terms.rule.is_causal(0, runs[-1].stop)
        self._together = len(runs) == 1 or (causal and terms.key_bias is None)
        if self._together and len(runs) > 1:
            self._terms = replace(terms, rule=None)

    def own(self, k_BKCH: Tensor, v_BKCV: Tensor) -> None:
        """Attend to the new tokens: keys and values of these rows and runs."""
        if self._together:
            start = self._runs[0].start
            out, self.lse = attend(self._q, k_BKCH, v_BKCV, self._terms, q_start=start, k_start=start)
            self.out = out.to(self.lse.dtype)
            return
        parts = []
        for at, run in zip(self._slices, self._runs, strict=True):
            q, k, v = (x[:, :, at] for x in (self._q, k_BKCH, v_BKCV))
            parts.append(attend(q, k, v, self._terms, q_start=run.start, k_start=run.start))
        self.out = torch.cat([out for out, _ in parts], dim=2).to(parts[0][1].dtype)
        self.lse = torch.cat([lse for _, lse in parts], dim=2)
        for at, run in zip(self._slices, self._runs, strict=True):
            self._earlier(k_BKCH[:, :, at], v_BKCV[:, :, at], run)

    def others(self, slab: KVReader, tokens: range) -> None:
        """Attend to tokens of the padded batch that other ranks computed."""
        start, end = max(tokens.start, self._pad), tokens.stop
        if start < end:
            k, v = (x[self._rows] for x in slab.read(start, end))
            self._earlier(k, v, range(start - self._pad, end - self._pad))

    def _earlier(self, k_BKSH: Tensor, v_BKSV: Tensor, keys: range) -> None:
        """Let the runs behind these keys attend to them."""
        behind = [(at, run.start) for at, run in zip(self._slices, self._runs, strict=True) if run.start >= keys.stop]
        if behind and self._together:
            at, q_start = behind[0]
            behind = [(slice(at.start, None), q_start)]
        for at, q_start in behind:
            first = 0 if self._terms.rule is None else self._terms.rule.first_key(q_start)
            k_start = max(keys.start, first)
            if k_start < keys.stop:
                k, v = (x[:, :, k_start - keys.start :] for x in (k_BKSH, v_BKSV))
                part = attend(self._q[:, :, at], k, v, self._terms, q_start=q_start, k_start=k_start)
                self._merge(at, *part)

    def _merge(self, at: slice, out_b: Tensor, lse_b: Tensor) -> None:
        """As `runahead.attention.partial.merge`, in place."""
        out, lse = self.out[:, :, at], self.lse[:, :, at]
        weight_b = torch.sigmoid(lse_b - lse).nan_to_num_(0.0)  # nan: neither side saw a key
        out.lerp_(out_b.to(out.dtype), weight_b.unsqueeze(-1))
        torch.logaddexp(lse, lse_b, out=lse)
