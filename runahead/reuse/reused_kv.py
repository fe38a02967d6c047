"""Reused keys and values of a batch of prompts, and the positions of its new tokens."""

# Legend: B batch, K kv heads, C new tokens of a forward, S all new tokens, T tokens of a part, H head dim, V value dim.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor

FEW_PARTS = 3
"""Most parts that decoding reads in place; concatenating so few saves too little time to be worth the memory."""


@dataclass(frozen=True, kw_only=True)
class ReusedPart:
    """Keys and values of contiguous tokens of a segment, which some rows of a batch see.

    Attributes:
        layers_TKX: keys and values of each layer, (T, K, H + V).
        positions_T: positions of the tokens, ascending; on the host.
        rows: rows of the batch that see the part.
        is_mapped: whether it is mapped from a file, since memory may have no room for it.
    """

    layers_TKX: Sequence[Tensor]
    positions_T: Tensor
    rows: tuple[int, ...]
    is_mapped: bool = False


@dataclass(frozen=True, kw_only=True)
class ReusedKV:
    """Reused parts of a batch of prompts, and the positions of its new tokens.

    Attributes:
        parts: the parts; no row sees two tokens at the same position.
        positions_BS: positions of the new tokens of the left-padded batch, 0 on padding; on the host.
        ends: position of the first generated token, by row.
    """

    parts: list[ReusedPart]
    positions_BS: Tensor
    ends: list[int]

    def joined(self) -> ReusedKV:
        """Concatenate the parts that the same rows see, since each part takes a call per layer and generated token.

        A few parts are left as they are, and so are mapped ones. Layers are copied when they are first used, and their
        sources are freed unless the segment store holds them.
        """
        groups: dict[tuple[int, ...], list[ReusedPart]] = {}
        for part in self.parts:
            if not part.is_mapped:
                groups.setdefault(part.rows, []).append(part)
        joined = [part for group in groups.values() for part in _joined(group)]
        return replace(self, parts=joined + [part for part in self.parts if part.is_mapped])

    def row(self, row: int, pad: int) -> ReusedKV:
        """Reused keys and values of one row, without its padding."""
        parts = [replace(part, rows=(0,)) for part in self.parts if row in part.rows]
        return ReusedKV(parts=parts, positions_BS=self.positions_BS[row : row + 1, pad:], ends=[self.ends[row]])

    def positions_BC(self, index_C: Tensor) -> Tensor:  # noqa: N802
        """Positions (B, C) of the tokens with these indices in the padded batch, generated ones too; on the host."""
        num_new = self.positions_BS.shape[1]
        ends_B1 = torch.tensor(self.ends)[:, None]
        generated_BC = ends_B1 + (index_C - num_new)[None]
        given_BC = self.positions_BS[:, index_C.clamp_max(num_new - 1)]
        return torch.where(index_C[None] < num_new, given_BC, generated_BC)


def _joined(parts: list[ReusedPart]) -> list[ReusedPart]:
    if len(parts) <= FEW_PARTS:
        return parts
    positions_T, order_T = torch.cat([part.positions_T for part in parts]).sort()
    return [replace(parts[0], layers_TKX=_JoinedLayers(parts, order_T), positions_T=positions_T)]


class _JoinedLayers(Sequence[Tensor]):
    """Layers (T, K, H + V) of several parts, each concatenated when it is first used."""

    def __init__(self, parts: list[ReusedPart], order_T: Tensor) -> None:
        self._parts: list[list[Tensor]] = [
            list(parts) for parts in zip(*(each.layers_TKX for each in parts), strict=True)
        ]
        self._order_T = None if bool((order_T[1:] > order_T[:-1]).all()) else order_T

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, layer: int) -> Tensor: ...
    @overload
    def __getitem__(self, layer: slice) -> list[Tensor]: ...
    def __getitem__(self, layer: int | slice) -> Tensor | list[Tensor]:
        if isinstance(layer, slice):
            return [self[each] for each in range(len(self))[layer]]
        parts = self._parts[layer]
        if len(parts) > 1:
            joined_TKX = torch.cat(parts)
            if self._order_T is not None:
                joined_TKX = joined_TKX[self._order_T.to(joined_TKX.device)]
            parts[:] = [joined_TKX]
        return parts[0]
