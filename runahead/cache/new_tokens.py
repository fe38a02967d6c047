"""The new tokens of one forward: all of a chunk at first, fewer from layer to layer where a policy narrows them."""

# Legend: B batch, C new tokens of the chunk, c those that are left.

from __future__ import annotations

import torch
from torch import Tensor

from policies.base import Phase


class NewTokens:
    """The tokens of the chunk [start, start + C) of a left-padded batch that the layers still compute.

    Every row has equally many left. A row with fewer tokens than that keeps some of its padding, on its left.

    Args:
        start: index of the chunk's first token.
        pads: left padding of every row.
        phase: whether the tokens are given or generated.

    Attributes:
        left_Bc: indices within the chunk; None is all of them.
        pending_Bc: of those that were left before, the ones that the next layer is to compute.
        chunk_tokens: C, known once a layer has asked for positions.
    """

    def __init__(self, start: int, pads: list[int], phase: Phase = Phase.prefill) -> None:
        self.start, self.row_pads, self.phase = start, pads, phase
        self.left_Bc: Tensor | None = None
        self.pending_Bc: Tensor | None = None
        self.chunk_tokens = 0
        self._positions_BC: Tensor | None = None

    def positions_BC(self, num_new: int, device: torch.device) -> Tensor:  # noqa: N802
        """Positions in their rows of the tokens that are left, below 0 on padding."""
        if self._positions_BC is None:
            if self.left_Bc is None:
                self.chunk_tokens = num_new
                index_BC = torch.arange(self.start, self.start + num_new, device=device)[None]
            else:
                index_BC = self.start + self.left_Bc
            self._positions_BC = index_BC - torch.tensor(self.row_pads, device=device)[:, None]
        assert self._positions_BC.shape[1] == num_new, (self._positions_BC.shape, num_new)
        return self._positions_BC

    def pads(self, num_new: int) -> list[int]:
        """Padding among the tokens that are left, by row: padding goes before tokens do."""
        chunk = range(self.start, self.start + (self.chunk_tokens or num_new))
        return [max(0, num_new - num_tokens_of(pad, chunk)) for pad in self.row_pads]

    def narrow(self, selected_Bc: Tensor) -> None:
        """Go on with these of the tokens that are left, ascending, from the next layer on."""
        self.left_Bc = selected_Bc if self.left_Bc is None else self.left_Bc.gather(1, selected_Bc)
        self.pending_Bc, self._positions_BC = selected_Bc, None


def num_tokens_of(pad: int, chunk: range) -> int:
    """Tokens of a chunk that are not padding."""
    return min(len(chunk), max(0, chunk.stop - pad))
