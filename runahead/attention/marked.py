"""Attention to keys some of which are marked: they are seen by a number of queries only, and later evicted (DMS)."""

# Legend: B batch, N query heads, K kv heads, G = N / K, C queries, n keys, H key dim, V value dim.

from __future__ import annotations

import math

import torch
from torch import Tensor

from runahead.attention.partial import KEY_BLOCK, QUERY_BLOCK, AttentionTerms, merge


def marked_keys(k_BKnH: Tensor, positions_BKn: Tensor) -> Tensor:
    """Whether each key (B, K, n) is marked: the last dim of the key of the token right after it is above 0.

    If that token is not stored, it was evicted, and so would this one have been if it were marked.

    Args:
        positions_BKn: positions of the keys, ascending, below 0 on padding; or (B, 1, n) for all KV heads alike.
    """
    follows_BKm = positions_BKn[..., 1:] == positions_BKn[..., :-1] + 1
    marked_BKm = (k_BKnH[:, :, 1:, -1] > 0) & follows_BKm & (positions_BKn[..., :-1] >= 0)
    return torch.nn.functional.pad(marked_BKm, (0, 1))


def attend_marked(
    q_BNCH: Tensor, k_BKnH: Tensor, v_BKnV: Tensor, terms: AttentionTerms, positions_BKn: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of the last C tokens to themselves and those before, in O(block) memory.

    A marked key is seen by the queries of `terms.marked_window` tokens, from its own on.

    Args:
        positions_BKn: as of `marked_keys`; the queries' tokens are in the last places of all heads.

    Returns:
        output (B, N, C, V) in the queries' dtype and log-sum-exp (B, N, C); 0 and -inf on padding.
    """
    assert terms.marked_window is not None and not terms.needs_scores and terms.sinks_N is None
    wide, num_kv_heads = torch.promote_types(q_BNCH.dtype, torch.float32), k_BKnH.shape[1]
    last_BKn = torch.where(
        marked_keys(k_BKnH, positions_BKn), positions_BKn + terms.marked_window - 1, torch.iinfo(torch.int32).max
    )
    queries_BC = positions_BKn[:, 0, positions_BKn.shape[2] - q_BNCH.shape[2] :]
    outs, lses = [], []
    for row in range(0, q_BNCH.shape[2], QUERY_BLOCK):
        q_BKGqH = q_BNCH[:, :, row : row + QUERY_BLOCK].unflatten(1, (num_kv_heads, -1)) * terms.scaling
        at_B1q1 = queries_BC[:, None, row : row + QUERY_BLOCK, None]
        end = k_BKnH.shape[2] - q_BNCH.shape[2] + row + q_BKGqH.shape[3]  # no query sees a later slot
        out_BNqV = q_BNCH.new_zeros(*q_BNCH.shape[:2], q_BKGqH.shape[3], v_BKnV.shape[-1], dtype=wide)
        lse_BNq = out_BNqV.new_full(out_BNqV.shape[:3], -math.inf)
        for col in range(0, end, KEY_BLOCK):
            span = slice(col, min(col + KEY_BLOCK, end))
            keys_BK1s, last_BK1s = positions_BKn[:, :, None, span], last_BKn[:, :, None, span]
            seen_BKqs = (keys_BK1s >= 0) & (keys_BK1s <= at_B1q1) & (at_B1q1 <= last_BK1s)
            scores_BKGqs = (
                (q_BKGqH @ k_BKnH[:, :, None, span].mT).to(wide).masked_fill(~seen_BKqs[:, :, None], -math.inf)
            )
            part_lse = torch.logsumexp(scores_BKGqs, dim=-1)
            weights = torch.exp(scores_BKGqs - part_lse.unsqueeze(-1)).nan_to_num_(0.0)  # nan: no key is seen
            part = (weights.to(v_BKnV.dtype) @ v_BKnV[:, :, None, span]).to(wide)
            out_BNqV, lse_BNq = merge(out_BNqV, lse_BNq, part.flatten(1, 2), part_lse.flatten(1, 2))
        outs.append(out_BNqV.to(q_BNCH.dtype))
        lses.append(lse_BNq)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)
