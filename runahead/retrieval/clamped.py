"""Clamped distances: tokens before the recent ones are attended to as if they were at one distance (InfLLM).

Keys are stored before RoPE and rotated for each query, so a text may be longer than the model's context.
"""

# Legend: B batch, N query heads, K kv heads, X = N + K, C new tokens, n stored slots, w observed tokens, H key dim.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from policies.row_values import row_values
from runahead.cache.kept import KeptLayer


class ClampedDistances:
    """Positions at which queries meet keys, in all layers of a cache.

    Args:
        recent: last tokens at their own distances, which is also the distance of all tokens before them.
        max_positions: length of the model's context; None is no limit.
    """

    def __init__(self, recent: int, max_positions: int | None) -> None:
        self._recent, self._max_positions = recent, max_positions
        self._newest: dict[int, list[int]] = {}  # by layer: clamped position of the newest token of each row

    def fork(self) -> ClampedDistances:
        return ClampedDistances(self._recent, self._max_positions)

    def exceeds(self, num_tokens: int) -> bool:
        """Whether a text of so many tokens is longer than the model's context."""
        return self._max_positions is not None and num_tokens > self._max_positions

    def bases(self, layer: int, kept: KeptLayer, end: int, pads: Sequence[int]) -> list[int]:
        """Slot of each row, among those that new tokens see, at which positions begin; earlier slots are at 0, too.

        The last of them is as far from the newest token as the window is long. A row of which everything is seen, and
        which fits into the model's context, is at its own positions.

        Args:
            kept: the layer.
            end: number of slots that are seen, those of new tokens included.
            pads: number of them that are padding, by row.
        """
        first = self.first_slot(end)
        bases = [
            pad if end - pad == kept.num_slots - row_pad and not self.exceeds(end - pad) else first
            for pad, row_pad in zip(pads, kept.pads, strict=True)
        ]
        self._newest[layer] = [end - 1 - base for base in bases]
        return bases

    def first_slot(self, end: int) -> int:
        """The slot at which positions begin if distances are clamped among so many slots that are seen."""
        return max(0, end - 1 - self._recent)

    def seen_whole(self, layer: int) -> None:
        """Note that given tokens attend to all slots of a layer, each at its own position."""
        self._newest.pop(layer, None)

    def to_window(self, layer: int, positions_Bw: Tensor) -> Tensor:
        """Positions (B, w) by which queries of a layer's last tokens are turned to the distance of clamped keys.

        Args:
            positions_Bw: of these tokens in their rows; those of the last attention may have been at others.
        """
        if layer in self._newest:
            device, num_tokens = positions_Bw.device, positions_Bw.shape[1]
            newest_B = row_values(self._newest.pop(layer), device)
            positions_Bw = newest_B[:, None] + torch.arange(1 - num_tokens, 1, device=device)
        return self._recent - positions_Bw.clamp_min(0)

    def at_window(self, kept: KeptLayer, q_BNCH: Tensor) -> Tensor:
        """Unrotated queries, rotated to the distance of clamped keys."""
        assert kept.rotary is not None
        return kept.rotary.turned(q_BNCH, torch.full_like(q_BNCH[:, 0, :, 0], self._recent, dtype=torch.int64))

    def rotated(self, kept: KeptLayer, q_BNH: Tensor, k_BKnH: Tensor, k_BK1H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A new token's query, all keys and its key, unrotated, at the positions that they have for this query."""
        rotary, num_slots = kept.rotary, k_BKnH.shape[2]
        assert rotary is not None
        bases = [max(0, num_slots - self._recent)] * len(q_BNH)
        k_nBKH = rotary.rotated(k_BKnH.permute(2, 0, 1, 3), 0, bases)
        new_1BXH = rotary.rotated(torch.cat([q_BNH, k_BK1H[:, :, 0]], dim=1)[None], num_slots, bases)
        q_BNH, k_BKH = new_1BXH[0].split([q_BNH.shape[1], k_BK1H.shape[1]], dim=1)
        return q_BNH, k_nBKH.permute(1, 2, 0, 3), k_BKH.unsqueeze(2)
