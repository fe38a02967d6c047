"""Attention of all queries of a forward, merged from parts that each cover some of the queries."""

# Legend: B batch, N query heads, C new tokens, Q some queries, P parts, F = B * C all queries, H head dim, V value dim.

from __future__ import annotations

import torch
from torch import Tensor

from runahead.attention.partial import merge_

Index = slice | Tensor
"""Indices into the F queries."""

FEW_QUERIES = 64
"""Most queries of a part that is merged with all others at the end; larger ones are merged at once to save memory."""


class MergedParts:
    """Running merge of attention parts: the result is attention of all queries to the keys of all added parts.

    Args:
        q_BNCH: all queries.
        value_dim: V.
    """

    def __init__(self, q_BNCH: Tensor, value_dim: int) -> None:
        self._q = q_BNCH
        batch, num_heads, num_new, _ = q_BNCH.shape
        wide = torch.promote_types(q_BNCH.dtype, torch.float32)
        self._q_FNH = q_BNCH.transpose(1, 2).flatten(0, 1)
        self._out_FNV = q_BNCH.new_zeros(batch * num_new, num_heads, value_dim, dtype=wide)
        self._lse_FN = q_BNCH.new_full((batch * num_new, num_heads), -torch.inf, dtype=wide)
        self._waiting: dict[object, tuple[Index, list[Tensor], list[Tensor]]] = {}

    def queries(self, index: Index) -> Tensor:
        """Some of the queries, (1, N, Q, H)."""
        return self._q_FNH[index].transpose(0, 1)[None]

    def add(self, index: Index, out_BNQV: Tensor, lse_BNQ: Tensor) -> None:
        """Add output (B, N, Q, V) and log-sum-exp (B, N, Q) of some of the queries over one more set of keys."""
        out_QNV, lse_QN = out_BNQV.transpose(1, 2).flatten(0, 1), lse_BNQ.transpose(1, 2).flatten(0, 1)
        if len(out_QNV) <= FEW_QUERIES:
            same = (index.start, index.stop) if isinstance(index, slice) else id(index)
            _, outs, lses = self._waiting.setdefault(same, (index, [], []))
            outs.append(out_QNV)
            lses.append(lse_QN)
            return
        merged_QNV, merged_QN = self._out_FNV[index], self._lse_FN[index]
        merge_(merged_QNV, merged_QN, out_QNV, lse_QN)
        if isinstance(index, Tensor):  # a copy, where a slice is a view
            self._out_FNV[index], self._lse_FN[index] = merged_QNV, merged_QN

    def result(self, sinks_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Output (B, N, C, V), with attention sinks if there are any, and log-sum-exp (B, N, C) without them."""
        for index, outs_QNV, lses_QN in self._waiting.values():
            out_PQNV = torch.stack([self._out_FNV[index], *(out.to(self._out_FNV.dtype) for out in outs_QNV)])
            lse_PQN = torch.stack([self._lse_FN[index], *lses_QN])
            lse_QN = torch.logsumexp(lse_PQN, dim=0)
            weight_PQN = torch.exp(lse_PQN - lse_QN).nan_to_num_(0.0)  # at most 1; nan: no part saw a key
            self._out_FNV[index] = (out_PQNV * weight_PQN[..., None]).sum(dim=0)
            self._lse_FN[index] = lse_QN
        batch, _, num_new, _ = self._q.shape
        out_FNV = self._out_FNV
        if sinks_N is not None:  # before the output is rounded to the model's dtype
            out_FNV = out_FNV * torch.sigmoid(self._lse_FN - sinks_N.to(self._lse_FN.dtype))[..., None]
        out_BNCV = out_FNV.unflatten(0, (batch, num_new)).transpose(1, 2).to(self._q.dtype)
        return out_BNCV, self._lse_FN.unflatten(0, (batch, num_new)).transpose(1, 2)
