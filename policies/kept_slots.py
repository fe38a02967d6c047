"""Slots to keep, as `Policy.keep` returns them, from scores or from an order."""

# Legend: B batch, K kv heads, n stored slots, m kept slots.

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from policies.layer_view import LayerView
from policies.row_values import sent


def kept_by_row(view: LayerView, num_kept: int, limit: int) -> list[int] | None:
    """Number of slots that each row keeps: `num_kept` if it has more tokens than `limit`, else all; None if all do.

    So a row that is padded is cut back when it would be alone.
    """
    if max(view.row_tokens) <= limit:
        return None
    return [num_kept if tokens > limit else tokens for tokens in view.row_tokens]


def best_slots(
    score_BKn: Tensor, kept_B: Sequence[int], view: LayerView, *, sinks: Sequence[int], recent: int
) -> Tensor:
    """Slots (B, K, m) to keep, ascending: sinks, recent tokens, then the highest scores; padding last.

    Args:
        score_BKn: (B, 1, n) for all KV heads alike.
        kept_B: number of slots that each row keeps, of which m is the largest. A row that keeps fewer has padding or
            -1 in its first places.
        sinks: number of sink tokens of each row.
    """
    if view.head_pads is not None:
        score_BKn = score_BKn.expand(-1, view.num_kv_heads, -1)
    score_BKn = score_BKn.clone()
    score_BKn[..., score_BKn.shape[-1] - recent :] = math.inf
    for row, heads, pad in view.heads_by_pad():
        score_BKn[row, heads, :pad] = -math.inf
        score_BKn[row, heads, pad : pad + sinks[row]] = math.inf
    # A stable sort keeps the earlier of two equal (pooled) scores, wherever padding has moved them.
    best_first_BKm = score_BKn.sort(dim=-1, descending=True, stable=True).indices[..., : max(kept_B)]
    for row, (kept, tokens) in enumerate(zip(kept_B, view.row_tokens, strict=True)):
        if kept < tokens:
            best_first_BKm[row, :, kept:] = -1
    return best_first_BKm.sort(dim=-1).values


def best_first(scores_BKn: Tensor, *, sinks: int, recent: int) -> tuple[Tensor, Tensor]:
    """Scores in descending order, infinite where a token stays anyhow, and their slots.

    Args:
        scores_BKn: minus infinity on padding, which is last.
        sinks, recent: first and last tokens that stay.
    """
    is_token_BKn = ~scores_BKn.isneginf()
    stays_BKn = is_token_BKn.cumsum(dim=-1) <= sinks
    stays_BKn[..., scores_BKn.shape[-1] - recent :] = True
    # A stable sort keeps the earlier of two equal scores, wherever padding has moved them.
    best_BKn, slots_BKn = scores_BKn.masked_fill(is_token_BKn & stays_BKn, math.inf).sort(
        dim=-1, descending=True, stable=True
    )
    return best_BKn, slots_BKn


def first_slots(best_first_BKn: Tensor, kept_BK: Sequence[Sequence[int]], tokens_BK: Sequence[Sequence[int]]) -> Tensor:
    """The first slots of each head, ascending, as `Policy.keep` returns them.

    Where heads keep equally many, but for rows that have no more tokens, these rows keep padding and none has -1.

    Args:
        best_first_BKn: slots in the order in which they are kept, those of padding last.
        kept_BK: number of tokens that each head keeps.
        tokens_BK: number of tokens of each head.
    """
    most = max(map(max, kept_BK))
    slots_BKm = best_first_BKn[..., :most]
    if any(
        len(set(kept_K)) > 1 or (kept_K[0] < most and list(kept_K) != list(tokens_K))
        for kept_K, tokens_K in zip(kept_BK, tokens_BK, strict=True)
    ):
        places_m = torch.arange(most, device=slots_BKm.device)
        kept_BK1 = sent(torch.tensor(kept_BK), slots_BKm.device)[..., None]
        slots_BKm = slots_BKm.masked_fill(places_m >= kept_BK1, -1)
    return slots_BKm.sort(dim=-1).values
