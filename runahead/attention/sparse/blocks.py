"""Attention of blocks of queries to some blocks of keys each, as (output, log-sum-exp)."""

# Legend: B batch, N query heads, K kv heads, G query heads of a KV head, C queries, S keys, q blocks of queries,
# k blocks of keys, T tokens of a block, i items (a block of queries of a KV head), j blocks of keys of a KV head,
# H head dim (key), V head dim (value).

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from runahead.attention.partial import AttentionTerms, Kernel, attend_at, fused_kernel, merge
from runahead.attention.sparse import flex
from runahead.config import SPARSE_BLOCK
from runahead.kernels import operators

BLOCK = SPARSE_BLOCK
"""Tokens of a block, which are numbered by their indices in the padded batch."""
GATHERED_BYTES = 1 << 28
"""Most bytes of keys and values that are gathered for one call."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The blocks of keys that blocks of queries attend to.

    Attributes:
        blocks_BKqk: whether a block of queries sees one of keys, for the query heads of each KV head alike.
        first: number of the first of these blocks of queries; those of keys are numbered from the text's first on.
    """

    blocks_BKqk: Tensor
    first: int

    def of(self, rows: slice | Tensor, queries: range, keys: range) -> ChosenHere:
        """What queries with these indices in the padded batch see of keys with these, in some rows of the batch."""
        q_blocks, k_blocks = (slice(each.start // BLOCK, -(-each.stop // BLOCK)) for each in (queries, keys))
        q_blocks = slice(q_blocks.start - self.first, q_blocks.stop - self.first)
        blocks = self.blocks_BKqk[rows, :, q_blocks, k_blocks]
        assert blocks.shape[2:] == (q_blocks.stop - q_blocks.start, k_blocks.stop - k_blocks.start), (queries, keys)
        return ChosenHere(blocks.contiguous(), queries, keys)


class ChosenHere(NamedTuple):
    """`Chosen` for the queries and keys of one call, by their indices in the padded batch."""

    blocks_BKqk: Tensor
    queries: range
    keys: range

    @property
    def is_causal(self) -> bool:
        """Whether the keys end with the queries' own."""
        return self.keys.stop == self.queries.stop

    def allowed(self, device: torch.device) -> Tensor:
        """Whether each query sees each key (B, K, C, S)."""
        queries_C, keys_S = (torch.arange(each.start, each.stop, device=device) for each in (self.queries, self.keys))
        of_q, of_k = (at // BLOCK - at[0] // BLOCK for at in (queries_C, keys_S))
        return self.blocks_BKqk[:, :, of_q[:, None], of_k] & (keys_S <= queries_C[:, None])


def attend_to_chosen(
    q_BNCH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, terms: AttentionTerms, chosen: ChosenHere
) -> tuple[Tensor, Tensor]:
    """Attention as of `partial.attend`, to the keys of the chosen blocks alone. Every key is one that a query may see.

    Our kernel for CPUs copies the keys that it reads, so choosing costs it nothing, and FlexAttention reads what is
    listed. For other kernels chosen blocks are gathered. Where scores are modified all are computed, and masked.
    """
    assert terms.rule is None, "layers with windows see few keys"
    kernel = None if terms.needs_scores else fused_kernel(q_BNCH, k_BKSH, v_BKSV)
    queries, keys = chosen.queries, chosen.keys
    if kernel is operators.attend:
        firsts = BLOCK, queries.start % BLOCK, keys.start % BLOCK
        causal = chosen.is_causal and len(queries) > 1
        return operators.attend(q_BNCH, k_BKSH, v_BKSV, causal, terms.scaling, None, 0, chosen.blocks_BKqk, *firsts)
    if not terms.needs_scores and flex.takes(q_BNCH, k_BKSH, v_BKSV):
        return flex.attend(q_BNCH, k_BKSH, v_BKSV, terms.scaling, chosen.blocks_BKqk, queries, keys)
    if kernel is None or keys.start % BLOCK or queries.start % BLOCK:
        allowed = chosen.allowed(q_BNCH.device).unsqueeze(2)
        queries_C, keys_S = (torch.arange(each.start, each.stop, device=q_BNCH.device) for each in (queries, keys))
        return attend_at(q_BNCH, k_BKSH, v_BKSV, terms, queries_C, keys_S, sees=lambda q, k: allowed[..., q, k])
    return _attend_to_gathered(q_BNCH, k_BKSH, v_BKSV, terms.scaling, chosen, kernel)


def _attend_to_gathered(
    q_BNCH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, scaling: float, chosen: ChosenHere, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """Blocks of queries with equally many chosen blocks in one call each, merged with those of their own block."""
    batch, num_queries, num_kv_heads = len(q_BNCH), q_BNCH.shape[2], k_BKSH.shape[1]
    num_blocks, blocks_BKqk = -(-num_queries // BLOCK), chosen.blocks_BKqk

    def items(x_BXCH: Tensor, num: int) -> Tensor:
        """Whole blocks of each KV head (B K q, G, T, H), the last one filled up."""
        x_BXCH = torch.nn.functional.pad(x_BXCH, (0, 0, 0, num * BLOCK - x_BXCH.shape[2]))
        x_BKGqTH = x_BXCH.unflatten(2, (num, BLOCK)).unflatten(1, (num_kv_heads, -1))
        return x_BKGqTH.transpose(2, 3).flatten(0, 2)

    q_iGTH = items(q_BNCH, num_blocks)
    wide = torch.promote_types(q_BNCH.dtype, torch.float32)
    out_iGTV = q_iGTH.new_zeros(*q_iGTH.shape[:3], v_BKSV.shape[-1], dtype=wide)
    lse_iGT = q_iGTH.new_full(q_iGTH.shape[:3], -math.inf, dtype=wide)
    if chosen.is_causal:  # no query sees the keys that fill up its own block
        first_own = (chosen.queries.start - chosen.keys.start) // BLOCK
        k_i1TH, v_i1TV = (items(x[:, :, first_own * BLOCK :], num_blocks) for x in (k_BKSH, v_BKSV))
        out, lse = kernel(q_iGTH, k_i1TH, v_i1TV, True, scaling)
        is_own = blocks_BKqk[..., first_own:].diagonal(dim1=-2, dim2=-1).flatten()
        out_iGTV[is_own], lse_iGT[is_own] = out[is_own].to(wide), lse[is_own]
        blocks_BKqk = blocks_BKqk.clone()
        blocks_BKqk[..., first_own:].diagonal(dim1=-2, dim2=-1).fill_(False)
    num_whole = k_BKSH.shape[2] // BLOCK
    assert not blocks_BKqk[..., num_whole:].any(), "blocks before the queries' own are whole"
    k_jTH, v_jTV = (
        x[:, :, : num_whole * BLOCK].unflatten(2, (num_whole, BLOCK)).flatten(0, 2) for x in (k_BKSH, v_BKSV)
    )
    chosen_ik = blocks_BKqk[..., :num_whole].flatten(0, 2)
    counts_i = chosen_ik.sum(dim=-1)
    block_bytes = BLOCK * (k_jTH.shape[-1] + v_jTV.shape[-1]) * k_jTH.dtype.itemsize
    for count in counts_i.unique().tolist():
        of_count = (counts_i == count).nonzero().squeeze(1)
        for some in of_count.split(max(1, GATHERED_BYTES // (max(1, count) * block_bytes))) if count else ():
            blocks = chosen_ik[some].nonzero()[:, 1].view(-1, count) + (some // num_blocks * num_whole)[:, None]
            k_i1SH, v_i1SV = (x[blocks].flatten(1, 2).unsqueeze(1) for x in (k_jTH, v_jTV))
            out, lse = kernel(q_iGTH[some], k_i1SH, v_i1SV, False, scaling)
            out_iGTV[some], lse_iGT[some] = merge(out_iGTV[some], lse_iGT[some], out, lse)
    return _tokens(out_iGTV, lse_iGT, batch, num_queries, q_BNCH.dtype)


def _tokens(
    out_iGTV: Tensor, lse_iGT: Tensor, batch: int, num_queries: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Output (B, N, C, V) and log-sum-exp (B, N, C) of blocks of all KV heads."""
    num_blocks = -(-num_queries // BLOCK)
    out_BNCV, lse_BNC = (
        x.unflatten(0, (batch, -1, num_blocks)).transpose(2, 3).flatten(1, 2).flatten(2, 3)[:, :, :num_queries]
        for x in (out_iGTV, lse_iGT)
    )
    return out_BNCV.to(dtype), lse_BNC
