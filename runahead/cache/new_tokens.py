"""The new tokens of one forward: a whole chunk in the first layer, fewer in later layers if a policy narrows them."""

# Legend: B batch, C new tokens of the chunk, c those that are left.

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from policies.layer_view import Phase
from policies.row_values import row_values
from runahead.cache.part import TextPart

T = TypeVar("T")


class NewTokens:
    """Tokens of the chunk [start, start + C) of a left-padded batch that the layers still compute.

    All rows have the same number left. A row with fewer tokens than that keeps some of its padding, on its left.

    Args:
        start: index of the chunk's first token in the padded batch.
        pads: left padding of every row.
        phase: `prefill` for given tokens, `decode` for generated ones.

    Attributes:
        left_Bc: indices within the chunk; None is all tokens.
        pending_Bc: the tokens that the next layer is to compute, as indices into those that were left before.
        chunk_tokens: C, known once a layer has asked for positions.
        ids_BC: token ids of the chunk, if the forward has shown them.
        part: which tokens of the text are stored here, if other ranks store the others.
    """

    def __init__(self, start: int, pads: list[int], phase: Phase = Phase.prefill) -> None:
        self.start, self.row_pads, self.phase = start, pads, phase
        self.left_Bc: Tensor | None = None
        self.pending_Bc: Tensor | None = None
        self.chunk_tokens = 0
        self.ids_BC: Tensor | None = None
        self.part: TextPart | None = None
        self._positions_BC: Tensor | None = None
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Call `make` once for these tokens, for all layers, and return its value."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def positions_BC(self, num_new: int, device: torch.device) -> Tensor:  # noqa: N802
        """Positions (B, c) of the tokens that are left in their rows, below 0 on padding."""
        if self._positions_BC is None:
            if self.left_Bc is None:
                self.chunk_tokens = num_new
                index_BC = torch.arange(self.start, self.start + num_new, device=device)[None]
            else:
                index_BC = self.start + self.left_Bc
            self._positions_BC = index_BC - row_values(self.row_pads, device)[:, None]
        assert self._positions_BC.shape[1] == num_new, (self._positions_BC.shape, num_new)
        return self._positions_BC

    def pads(self, num_new: int) -> list[int]:
        """Number of padding tokens among those that are left, by row: padding is dropped before tokens are."""
        chunk = range(self.start, self.start + (self.chunk_tokens or num_new))
        return [max(0, num_new - num_tokens_of(pad, chunk)) for pad in self.row_pads]

    def takes(self, num_new: int) -> bool:
        """Whether these tokens are stored here; called before each layer stores them."""
        return self.part is None or self.part.takes(self.start, num_new)

    def after(self, num: int) -> NewTokens:
        """These tokens without the first ones of those that are left."""
        tokens = NewTokens(self.start + (num if self.left_Bc is None else 0), self.row_pads, self.phase)
        if self.left_Bc is not None:
            tokens.left_Bc, tokens.chunk_tokens = self.left_Bc[:, num:], self.chunk_tokens
        tokens.part = self.part
        return tokens

    def leave_as(self, other: NewTokens) -> None:
        """Leave the tokens that are left of `other`, which are the same ones at other indices."""
        if self.left_Bc is not other.left_Bc:
            self.left_Bc, self.chunk_tokens, self._positions_BC = other.left_Bc, other.chunk_tokens, None
            self._made.clear()

    def narrow(self, selected_Bc: Tensor) -> None:
        """Let later layers compute only these of the tokens that are left, as ascending indices into them."""
        self.left_Bc = selected_Bc if self.left_Bc is None else self.left_Bc.gather(1, selected_Bc)
        self.pending_Bc, self._positions_BC = selected_Bc, None
        self._made.clear()


def num_tokens_of(pad: int, chunk: range) -> int:
    """Number of tokens of a chunk that are not padding."""
    return min(len(chunk), max(0, chunk.stop - pad))
