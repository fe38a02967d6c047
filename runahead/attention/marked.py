"""Attention to keys some of which are marked: they are seen by a number of queries only, and later evicted (DMS)."""

# Legend: B batch, N query heads, K kv heads, G = N / K, C queries, n keys, H key dim, V value dim.

from __future__ import annotations

import torch
from torch import Tensor

from runahead.attention.partial import AttentionTerms, attend_at


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
    num_new, slots_n = q_BNCH.shape[2], torch.arange(k_BKnH.shape[2], device=q_BNCH.device)
    last_BKn = torch.where(
        marked_keys(k_BKnH, positions_BKn), positions_BKn + terms.marked_window - 1, torch.iinfo(torch.int32).max
    )
    queries_BC = positions_BKn[:, 0, len(slots_n) - num_new :]

    def sees(queries: slice, keys: slice) -> Tensor:
        at_B11q1 = queries_BC[:, None, None, queries, None]
        keys_BK11s, last_BK11s = (x[:, :, None, None, keys] for x in (positions_BKn, last_BKn))
        return (keys_BK11s >= 0) & (keys_BK11s <= at_B11q1) & (at_B11q1 <= last_BK11s)

    def before(_: int, end: int) -> range:  # no query sees a later slot
        return range(len(slots_n) - num_new + end)

    return attend_at(q_BNCH, k_BKnH, v_BKnV, terms, slots_n[len(slots_n) - num_new :], slots_n, before, sees)
