"""Slots to keep, as `Policy.keep` returns them, from scores or from an order."""

# Legend: B batch, K kv heads, n stored slots, m kept slots.

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def best_slots(score_BKn: Tensor, num_kept: int, *, sinks: Sequence[int], recent: int, pads: list[int]) -> Tensor:
    """Slots (B, K, num_kept) to keep, ascending: sinks, recent tokens, then the highest scores; padding last.

    Args:
        sinks: number of sink tokens of each row.
    """
    score_BKn = score_BKn.clone()
    score_BKn[..., score_BKn.shape[-1] - recent :] = math.inf
    for row, (pad, num_sinks) in enumerate(zip(pads, sinks, strict=True)):
        score_BKn[row, :, :pad] = -math.inf
        score_BKn[row, :, pad : pad + num_sinks] = math.inf
    # A stable sort keeps the earlier of two equal (pooled) scores, wherever padding has moved them.
    best_first = score_BKn.sort(dim=-1, descending=True, stable=True).indices
    return best_first[..., :num_kept].sort(dim=-1).values


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
        kept_BK1 = torch.tensor(kept_BK, device=slots_BKm.device)[..., None]
        slots_BKm = slots_BKm.masked_fill(places_m >= kept_BK1, -1)
    return slots_BKm.sort(dim=-1).values
