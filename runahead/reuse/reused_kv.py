"""Reused keys and values of a batch of prompts, and the positions of its new tokens."""

# Legend: B batch, K kv heads, C new tokens of a forward, S all new tokens, T tokens of a part or text, H head dim,
# V value dim, X = H + V.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import overload

import torch
from torch import Tensor

from policies.retriever import StoredPart
from policies.row_values import row_values
from runahead.cache.kept import KeptLayer
from runahead.cache.new_tokens import NewTokens
from runahead.cache.part import GappedRows
from runahead.cache.slabs import KVShape
from runahead.reuse.tiers.layer_rows import Layers

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
        segment: content key of the segment; "" if the part is of several, and nothing is stored of it.
        first: number of the part's first token among the stored ones of the segment.
        clusters_TKx: of each layer, clusters of all tokens of the segment; None if none are stored.
    """

    layers_TKX: Sequence[Tensor]
    positions_T: Tensor
    rows: tuple[int, ...]
    is_mapped: bool = False
    segment: str = ""
    first: int = 0
    clusters_TKx: Sequence[Tensor] | None = None

    @cached_property
    def at(self) -> Sequence[int]:
        """`positions_T`: a range where they are contiguous."""
        if len(self.positions_T) == 0:
            return []
        first, last = int(self.positions_T[0]), int(self.positions_T[-1])
        positions: list[int] = [] if last - first == len(self.positions_T) - 1 else self.positions_T.tolist()
        return positions or range(first, last + 1)


@dataclass(frozen=True)
class RowPositions(Sequence[int]):
    """Positions of a row's tokens [first, end): the given ones may have gaps, generated ones follow from `after` on."""

    given: Sequence[int]
    after: int
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    @overload
    def __getitem__(self, number: int) -> int: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[int]: ...
    def __getitem__(self, number: int | slice) -> int | Sequence[int]:
        if isinstance(number, slice):
            start, stop, _ = number.indices(len(self))
            return replace(self, first=self.first + start, end=self.first + max(start, stop))
        index = range(self.first, self.end)[number]
        return self.given[index] if index < len(self.given) else self.after + index - len(self.given)


@dataclass(frozen=True, kw_only=True)
class ReusedKV:
    """Reused parts of a batch of prompts, and the positions of its new tokens.

    Attributes:
        parts: the parts; no row sees two tokens at the same position.
        positions_BS: positions of the new tokens of the left-padded batch, 0 on padding; on the host.
        ends: position of the first generated token, by row.
        arrives: the parts arrive together with the prefix of earlier ranks, and are not read before it.
        blended: parts whose tokens are new tokens, too, see `policies.reuse.ReusingPrompt`.
        shares: of the blended tokens of each row, those that later layers compute.
    """

    parts: list[ReusedPart]
    positions_BS: Tensor
    ends: list[int]
    arrives: bool = False
    blended: list[ReusedPart] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    @classmethod
    def nothing(cls, num_tokens: int, pads: Sequence[int]) -> ReusedKV:
        """Prompts that reuse nothing, left-padded to so many tokens."""
        positions_BS = (torch.arange(num_tokens) - torch.tensor(pads)[:, None]).clamp_min(0)
        return cls(parts=[], positions_BS=positions_BS, ends=[num_tokens - pad for pad in pads])

    @cached_property
    def _in_line(self) -> list[int]:
        """Index of each row in the padded batch from which on its new tokens follow each other up to the generated."""
        num_new = self.positions_BS.shape[1]
        line_BS = torch.tensor(self.ends)[:, None] + torch.arange(-num_new, 0)
        return [
            int(apart_S.nonzero().max()) + 1 if bool(apart_S.any()) else 0 for apart_S in self.positions_BS != line_BS
        ]

    def positions(self, row: int, first: int, end: int) -> Sequence[int]:
        """Positions of a row's tokens with the indices [first, end) in the padded batch, generated ones too."""
        if first >= self._in_line[row]:
            offset = self.ends[row] - self.positions_BS.shape[1]
            return range(first + offset, end + offset)
        return RowPositions(self._given[row], self.ends[row], first, end)

    @cached_property
    def _given(self) -> list[list[int]]:
        given: list[list[int]] = self.positions_BS.tolist()
        return given

    def without_blended(self) -> ReusedKV:
        """The same once the new tokens are stored: the blended parts are among them."""
        return replace(self, blended=[])

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

    def whole(self, pads: Sequence[int]) -> WholeTexts:
        """All tokens of each row. `pads` is the left padding of the new tokens."""
        places, positions = list[list[tuple[ReusedPart | None, Tensor]]](), list[list[int]]()
        for row, pad in enumerate(pads):
            parts = [part for part in self.parts if row in part.rows]
            given = [*(part.positions_T for part in parts), self.positions_BS[row, pad:]]
            in_order, order = torch.cat(given).sort()
            numbers = order.argsort().split([len(each) for each in given])
            positions.append(in_order.tolist())
            places.append(list(zip([*parts, None], numbers, strict=True)))
        return WholeTexts(places=places, positions=positions, new_pads=list(pads), ends=self.ends)

    def row(self, row: int, pad: int) -> ReusedKV:
        """Reused keys and values of one row, without its padding."""
        parts = [replace(part, rows=(0,)) for part in self.parts if row in part.rows]
        return ReusedKV(parts=parts, positions_BS=self.positions_BS[row : row + 1, pad:], ends=[self.ends[row]])

    def positions_BC(self, index_C: Tensor) -> Tensor:  # noqa: N802
        """Positions (B, C) of the tokens with these indices in the padded batch, generated ones too; on the host."""
        num_new = self.positions_BS.shape[1]
        ends_B1 = torch.tensor(self.ends)[:, None]
        generated_BC = ends_B1 + (index_C - num_new)[None]
        if num_new == 0:
            return generated_BC
        given_BC = self.positions_BS[:, index_C.clamp_max(num_new - 1)]
        return torch.where(index_C[None] < num_new, given_BC, generated_BC)


@dataclass(frozen=True, kw_only=True)
class WholeTexts:
    """Reused and new tokens of a batch, those of each row in the order of their positions.

    Attributes:
        places: of each row its reused parts, and None for its new tokens, with the numbers of their tokens in the row;
            on the host.
        positions: of each row's tokens, in order.
        new_pads: left padding of the new tokens, by row.
        ends: position of the first generated token, by row.
    """

    places: list[list[tuple[ReusedPart | None, Tensor]]]
    positions: list[list[int]]
    new_pads: list[int]
    ends: list[int]

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each row."""
        return [sum(len(numbers_T) for _, numbers_T in row) for row in self.places]

    @property
    def gaps(self) -> list[int]:
        """Positions before the first generated token at which a row has no token."""
        return [end - length for end, length in zip(self.ends, self.lengths, strict=True)]

    @cached_property
    def gapped(self) -> GappedRows | None:
        """Where the tokens are, if there are gaps."""
        return GappedRows(given=self.positions, ends=self.ends) if any(self.gaps) else None

    def stored_parts(self) -> list[list[list[StoredPart]]]:
        """By layer and row, the segments whose clusters are stored; empty if there are none."""
        longest, rows = max(self.lengths), list[dict[str, tuple[Tensor, Sequence[Tensor]]]]()
        for length, places in zip(self.lengths, self.places, strict=True):
            segments = dict[str, tuple[Tensor, Sequence[Tensor]]]()
            in_order = sorted((each for each in places if len(each[1])), key=lambda each: int(each[1][0]))
            for part, numbers_T in in_order:
                if part is not None and part.clusters_TKx is not None:
                    nowhere_T = torch.full((len(part.clusters_TKx[0]),), -1)
                    slots_T, _ = segments.setdefault(part.segment, (nowhere_T, part.clusters_TKx))
                    slots_T[part.first : part.first + len(numbers_T)] = numbers_T + longest - length
            rows.append(segments)
        num_layers = max((len(clusters) for segments in rows for _, clusters in segments.values()), default=0)
        return [
            [
                [StoredPart(slots_T=slots_T, clusters_TKx=clusters[layer]) for slots_T, clusters in row.values()]
                for row in rows
            ]
            for layer in range(num_layers)
        ]

    def last_tokens(self, num: int) -> NewTokens:
        """The last tokens of the longest text, by their index in the padded batch of whole texts."""
        longest = max(self.lengths)
        return NewTokens(longest - num, [longest - length for length in self.lengths])

    def layer(self, number: int, shape: KVShape, new_SBKX: Tensor, *, room: int) -> KeptLayer:
        """A layer of the whole texts, in memory of its own; see `kv`."""
        longest = max(self.lengths)
        pads, device = [longest - length for length in self.lengths], new_SBKX.device
        index_T1 = torch.arange(longest + room, device=device)[:, None]
        return KeptLayer(
            shape=shape,
            slab_TBKX=self.kv(number, new_SBKX, room=room),
            placed_TBK=(index_T1 - row_values(pads, device))[:, :, None].int(),
            pads=pads,
            num_slots=longest,
            gapped=self.gapped,
        )

    def kv(self, layer: int, new_SBKX: Tensor, *, room: int) -> Tensor:
        """Keys and values (L + room, B, K, H + V) of a layer's whole texts, of which the longest has L tokens.

        Args:
            new_SBKX: of the new tokens of the padded batch.
            room: uninitialised tokens after them. On padding, which is on the left, there are zeros.
        """
        longest = max(self.lengths)
        whole_TBKX = new_SBKX.new_empty(longest + room, *new_SBKX.shape[1:])
        for row, (length, new_pad) in enumerate(zip(self.lengths, self.new_pads, strict=True)):
            row_TKX = whole_TBKX[longest - length : longest, row]
            whole_TBKX[: longest - length, row] = 0
            for part, numbers_T in self.places[row]:
                kv_TKX = new_SBKX[new_pad:, row] if part is None else part.layers_TKX[layer]
                if len(numbers_T) == 0:
                    continue
                start, end = int(numbers_T[0]), int(numbers_T[-1]) + 1
                if end - start == len(numbers_T):
                    row_TKX[start:end] = kv_TKX
                else:
                    row_TKX[numbers_T.to(row_TKX.device)] = kv_TKX
        return whole_TBKX


def _joined(parts: list[ReusedPart]) -> list[ReusedPart]:
    if len(parts) <= FEW_PARTS:
        return parts
    positions_T, order_T = torch.cat([part.positions_T for part in parts]).sort()
    return [ReusedPart(layers_TKX=_JoinedLayers(parts, order_T), positions_T=positions_T, rows=parts[0].rows)]


class _JoinedLayers(Layers):
    """Layers (T, K, H + V) of several parts, each concatenated when it is first used."""

    def __init__(self, parts: list[ReusedPart], order_T: Tensor) -> None:
        self._parts: list[list[Tensor]] = [
            list(parts) for parts in zip(*(each.layers_TKX for each in parts), strict=True)
        ]
        self._order_T = None if bool((order_T[1:] > order_T[:-1]).all()) else order_T

    def __len__(self) -> int:
        return len(self._parts)

    def layer(self, number: int) -> Tensor:
        parts = self._parts[number]
        if len(parts) > 1:
            joined_TKX = torch.cat(parts)
            if self._order_T is not None:
                joined_TKX = joined_TKX[self._order_T.to(joined_TKX.device)]
            parts[:] = [joined_TKX]
        return parts[0]
