"""Outputs of all queries of a forward, merged from parts that concern some of the queries each."""

# Legend: B batch, N query heads, C new tokens, Q some queries, P parts, F = B * C all queries, H head dim, V value dim.

from __future__ import annotations

import torch
from torch import Tensor

Index = slice | Tensor
"""Which of the F queries."""

FEW_QUERIES = 64
"""Parts of up to this many queries are merged all at once, at the end; those of more would take too much memory."""


class MergedParts:
    """Attention of all queries to the keys of all parts that were added."""

    def __init__(self, q_BNCH: Tensor, value_dim: int) -> None:
        self._q = q_BNCH
        batch, num_heads, num_new, _ = q_BNCH.shape
        wide = torch.promote_types(q_BNCH.dtype, torch.float32)
        self._q_FNH = q_BNCH.transpose(1, 2).flatten(0, 1)
        self._out_FNV = q_BNCH.new_zeros(batch * num_new, num_heads, value_dim, dtype=wide)
        self._lse_FN = q_BNCH.new_full((batch * num_new, num_heads), -torch.inf, dtype=wide)
        self._waiting: dict[object, tuple[Index, list[Tensor], list[Tensor]]] = {}

    def queries(self, index: Index) -> Tensor:
        """(1, N, Q, H)."""
        return self._q_FNH[index].transpose(0, 1)[None]

    def add(self, index: Index, out_BNQV: Tensor, lse_BNQ: Tensor) -> None:
        """One more part of some of the queries."""
        same = (index.start, index.stop) if isinstance(index, slice) else id(index)
        out_QNV, lse_QN = out_BNQV.transpose(1, 2).flatten(0, 1), lse_BNQ.transpose(1, 2).flatten(0, 1)
        if len(out_QNV) > FEW_QUERIES:  # all parts of a long text would take too much memory
            self._merge_one(index, out_QNV, lse_QN)
            return
        _, outs, lses = self._waiting.setdefault(same, (index, [], []))
        outs.append(out_QNV)
        lses.append(lse_QN)

    def result(self) -> tuple[Tensor, Tensor]:
        """Output (B, N, C, V) and log-sum-exp (B, N, C)."""
        for parts in self._waiting.values():
            self._merge(*parts)
        batch, _, num_new, _ = self._q.shape
        out_BNCV = self._out_FNV.unflatten(0, (batch, num_new)).transpose(1, 2).to(self._q.dtype)
        return out_BNCV, self._lse_FN.unflatten(0, (batch, num_new)).transpose(1, 2)

    def _merge_one(self, index: Index, out_QNV: Tensor, lse_QN: Tensor) -> None:
        """As `runahead.attention.partial.merge`."""
        before_QN, before_QNV = self._lse_FN[index], self._out_FNV[index]
        weight_QN = torch.sigmoid(lse_QN - before_QN).nan_to_num_(0.0)  # nan: neither part saw a key
        out_QNV = before_QNV.lerp_(out_QNV.to(before_QNV.dtype), weight_QN[..., None])
        self._lse_FN[index] = torch.logaddexp(before_QN, lse_QN)
        if isinstance(index, Tensor):  # else it was merged in place
            self._out_FNV[index] = out_QNV

    def _merge(self, index: Index, outs_QNV: list[Tensor], lses_QN: list[Tensor]) -> None:
        out_PQNV = torch.stack([self._out_FNV[index], *(out.to(self._out_FNV.dtype) for out in outs_QNV)])
        lse_PQN = torch.stack([self._lse_FN[index], *lses_QN])
        lse_QN = torch.logsumexp(lse_PQN, dim=0)
        weight_PQN = torch.exp(lse_PQN - lse_QN).nan_to_num_(0.0)  # at most 1; nan: no part saw a key
        self._out_FNV[index] = (out_PQNV * weight_PQN[..., None]).sum(dim=0)
        self._lse_FN[index] = lse_QN
