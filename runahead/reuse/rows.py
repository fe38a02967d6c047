"""Rows that are decoded together and reuse parts of the same texts: each part is read once for all of them.

As Hydragen (Juravsky et al., 2024): the queries of all rows attend to a shared part in one product, each row attends to
its own tokens, and the outputs merge exactly. Which rows share what is found when they are put together.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens (1), R rows that see a part, H head dim, V value dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policies.row_values import row_values
from runahead.attention.merging import MergedParts
from runahead.attention.op import nothing
from runahead.attention.partial import AttentionTerms, attend
from runahead.cache.base import KVStore, LayerStore, SeenKV
from runahead.cache.kv_cache import SlabRow
from runahead.cache.new_tokens import NewTokens
from runahead.cache.rows import RowsCache
from runahead.cache.slabs import KVSlab
from runahead.reuse.cache import ReusedCache
from runahead.reuse.reused_kv import ReusedPart


def rows_cache(rows: Sequence[KVStore], pads: Sequence[int]) -> KVStore:
    """The caches of rows that are decoded together as one.

    Args:
        rows: caches of one row each.
        pads: padding of each.
    """
    prefixed = [_Prefixed.of(row) for row in rows]
    known = [each for each in prefixed if each is not None]
    if len(known) == len(rows) and (parts := _parts(known)):
        return SharingRows(known, pads, parts)
    return RowsCache(rows, pads)


@dataclass(frozen=True, kw_only=True)
class _Prefixed:
    """A row whose reused parts come before all its other tokens.

    Attributes:
        own: its other tokens.
        start: position of the first of them.
        parts: reused ones, each of consecutive tokens.
    """

    own: SlabRow
    start: int
    parts: Sequence[ReusedPart]

    @classmethod
    def of(cls, row: KVStore) -> _Prefixed | None:
        """None if the row is of another kind."""
        if isinstance(row, SlabRow):
            return cls(own=row, start=0, parts=[])
        if not isinstance(row, ReusedCache) or not isinstance(row.own, SlabRow):
            return None
        reused = row.reused
        [given_S], [end] = reused.positions_BS, reused.ends
        start = end - len(given_S)
        is_whole = (len(given_S) == 0 or int(given_S[0]) == start) and all(
            int(part.positions_T[-1]) - int(part.positions_T[0]) == len(part.positions_T) - 1
            and int(part.positions_T[-1]) < start
            for part in reused.parts
        )
        return cls(own=row.own, start=start, parts=reused.parts) if is_whole else None


def _parts(rows: Sequence[_Prefixed]) -> list[ReusedPart]:
    """The parts of all rows, each once."""
    found: dict[tuple[int, int, int], tuple[ReusedPart, list[int]]] = {}
    for number, row in enumerate(rows):
        for part in row.parts:
            where = part.layers_TKX[0].data_ptr(), int(part.positions_T[0]), len(part.positions_T)
            found.setdefault(where, (part, []))[1].append(number)
    return [replace(part, rows=tuple(users)) for part, users in found.values()]


class SharingRows(KVStore):
    """KV cache of a decoding step, some of whose rows see parts, several of them the same.

    Args:
        rows: of one batch.
        pads: padding of each.
        parts: of all rows.
    """

    def __init__(self, rows: Sequence[_Prefixed], pads: Sequence[int], parts: Sequence[ReusedPart]) -> None:
        self._offsets = [row.start - pad for row, pad in zip(rows, pads, strict=True)]
        device = rows[0].own.device
        shared = [
            _SharedPart(part=part, first=int(part.positions_T[0]), index_R=row_values(part.rows, device))
            for part in parts
        ]
        self.layers = [
            SharingLayer(
                slabs=[
                    replace(layer.slab, first=layer.slab.first + row.start)
                    for row, layer in zip(rows, layers, strict=True)
                ],
                offsets=self._offsets,
                parts=shared,
                number=number,
            )
            for number, layers in enumerate(zip(*(row.own.layers for row in rows), strict=True))
        ]

    def positions_BC(self, index_C: Tensor) -> Tensor:  # noqa: N802
        return torch.stack([index_C + offset for offset in self._offsets])


@dataclass(frozen=True, eq=False, kw_only=True)
class _SharedPart:
    """A part, the position of its first token, and the rows that see it on the device."""

    part: ReusedPart
    first: int
    index_R: Tensor

    @property
    def end(self) -> int:
        return self.first + len(self.part.positions_T)

    def read(self, layer: int, start: int, key_dim: int) -> tuple[Tensor, Tensor]:
        """Keys (1, K, T, H) and values (1, K, T, V) of the tokens from a position on, as views."""
        kv_1KTX = self.part.layers_TKX[layer][start - self.first :].permute(1, 0, 2)[None]
        return kv_1KTX[..., :key_dim], kv_1KTX[..., key_dim:]


@dataclass(kw_only=True)
class SharingLayer(LayerStore):
    """One layer of all rows.

    Attributes:
        slabs: own tokens of each row, by position.
        offsets: of each row, the position of a new token less its index in the padded batch.
    """

    slabs: list[KVSlab]
    offsets: list[int]
    parts: list[_SharedPart]
    number: int

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        for slab, offset, k_1KCH, v_1KCV in zip(
            self.slabs, self.offsets, k_BKCH.split(1), v_BKCV.split(1), strict=True
        ):
            slab.write(tokens.start + offset, k_1KCH, v_1KCV)

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenSharing:
        assert q_BNCH.shape[2] == 1, q_BNCH.shape
        return SeenSharing(q_BNCH=q_BNCH, layer=self, positions=[tokens.start + offset for offset in self.offsets])

    @property
    def num_bytes(self) -> int:
        return sum(slab.slab_TBKX.nbytes for slab in self.slabs)


@dataclass(kw_only=True)
class SeenSharing(SeenKV):
    """Own tokens and parts of one layer together with the query of each row's newest token.

    Attributes:
        positions: of these tokens.
    """

    layer: SharingLayer
    positions: list[int]

    def attend(self, terms: AttentionTerms, await_prefix: Callable[[], None] = nothing) -> tuple[Tensor, Tensor]:
        q_BN1H, layer, rule = self.q_BNCH, self.layer, terms.rule
        key_dim = layer.slabs[0].key_dim
        first_keys = [0 if rule is None else rule.first_key(position) for position in self.positions]
        queries = list(zip(q_BN1H.split(1), self.positions, first_keys, strict=True))
        await_prefix()
        own = []
        for slab, (q_1N1H, position, first) in zip(layer.slabs, queries, strict=True):
            start = max(slab.first, first)
            k, v = slab.read(start, position + 1)
            own.append(attend(q_1N1H, k, v, terms, q_start=position, k_start=start))
        merged = MergedParts(q_BN1H, layer.slabs[0].value_dim)
        merged.add(slice(0, len(own)), torch.cat([out for out, _ in own]), torch.cat([lse for _, lse in own]))
        for part in layer.parts:
            if rule is None or rule.sees_everything:
                k, v = part.read(layer.number, part.first, key_dim)
                # Any position after the part serves, since all rows see all of it.
                found = attend(merged.queries(part.index_R), k, v, terms, q_start=part.end, k_start=part.first)
                merged.add(part.index_R, *found)
                continue
            for row in part.part.rows:  # windows of different rows end at different tokens
                q_1N1H, position, first = queries[row]
                if (start := max(part.first, first)) < part.end:
                    k, v = part.read(layer.number, start, key_dim)
                    merged.add(slice(row, row + 1), *attend(q_1N1H, k, v, terms, q_start=position, k_start=start))
        return merged.result()
