"""A layer that shares the directions of its keys and values with a neighbour, but for the newest tokens.

Attention reads the layer as it is restored, in memory that is freed after it. Tokens of a prompt or turn are merged
once all of them have attended to each other, generated ones in blocks.
"""

# Legend: T slots with room, B batch, K kv heads, C new tokens, S merged slots, H key dim, V value dim, X = H + V.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policies.experiments.shared_directions import SharedDirections
from runahead.attention.op import rows_by_pad
from runahead.cache.base import SeenKV
from runahead.cache.kept import KeptLayer
from runahead.cache.kv_cache import seen_in
from runahead.cache.new_tokens import NewTokens
from runahead.cache.slabs import KVShape, KVSlab

BLOCK = 32
"""Generated tokens that are merged at once, since that copies what is merged already."""


@dataclass(frozen=True, kw_only=True)
class MergedRows:
    """The merged tokens of rows with the same padding.

    Attributes:
        rows: all rows of the batch, or one.
        pad: their slots of padding.
    """

    rows: slice
    pad: int
    keys: SharedDirections
    values: SharedDirections


@dataclass(kw_only=True)
class MergedTokens:
    """Tokens that two layers share.

    Attributes:
        options: of `SharedDirections.merge`.
        parts: the merged tokens of all rows.
        end: number of the slot after them.
    """

    options: Mapping[str, float]
    parts: Sequence[MergedRows] = ()
    end: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(part.keys.num_bytes + part.values.num_bytes for part in self.parts)

    def add(self, lower: KVSlab, upper: KVSlab, pads: Sequence[int]) -> None:
        """Merge the tokens of two slabs, which begin with the first slot that is not merged, or with padding before."""
        parts = []
        for place, (rows, pad) in enumerate(rows_by_pad(pads)):
            start = max(pad, self.end)
            (k_lower, v_lower), (k_upper, v_upper) = (
                [x[rows] for x in slab.read(start, slab.end)] for slab in (lower, upper)
            )
            keys, values = (
                SharedDirections.merge(k_lower, k_upper, **self.options),
                SharedDirections.merge(v_lower, v_upper, **self.options),
            )
            if self.parts:
                keys, values = self.parts[place].keys.followed_by(keys), self.parts[place].values.followed_by(values)
            parts.append(MergedRows(rows=rows, pad=pad, keys=keys, values=values))
        self.parts, self.end = parts, upper.end


@dataclass(kw_only=True)
class MergedLayer(KeptLayer):
    """One layer of a pair: the padding of each row, its merged tokens, and after these its newest ones.

    Attributes:
        merged: shared with the other layer; its bytes count as the upper layer's.
        lower: the other layer, in the upper one.
    """

    merged: MergedTokens
    lower: MergedLayer | None = None

    @classmethod
    def pair_of(
        cls, lower: KeptLayer, upper: KeptLayer, options: Mapping[str, float], *, room: int
    ) -> tuple[MergedLayer, MergedLayer]:
        """Merge two layers, whose memory is only read, and make room for so many new tokens."""
        assert lower.first == upper.first == 0 and lower.pads == upper.pads, (lower.pads, upper.pads)
        merged = MergedTokens(options=options)

        def made(layer: KeptLayer, below: MergedLayer | None) -> MergedLayer:
            return cls(**layer.fields_of(KeptLayer), merged=merged, lower=below)

        below = made(lower, None)
        above = made(upper, below)
        above.merge(room=room)
        return below, above

    def merge(self, *, room: int) -> None:
        """Merge all tokens of this layer, the upper one, with those of the lower, and make room for new ones."""
        lower, end = self.lower, self.num_slots
        assert lower is not None and end <= lower.num_slots, "the lower layer stores a token first"
        if end > self.merged.end:
            self.merged.add(lower._window(end), self._window(end), self.pads)
        lower.copy_out(room=room)
        self.copy_out(room=room)

    def _window(self, end: int) -> KVSlab:
        """The slots from `start` to `end`, in place."""
        return self.memory_of(self.slab_TBKX[: end - self.start])

    @property
    def _first_exact(self) -> int:
        return self.merged.end

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + (0 if self.lower is None else self.merged.num_bytes)

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        if self.lower is not None and k_BKCH.shape[2] == 1 and self.num_slots - self.merged.end >= BLOCK:
            self.merge(room=BLOCK)
        super().append(k_BKCH, v_BKCV, tokens)

    def slab(self) -> KVSlab:
        """All slots, restored, in new memory; padding is 0."""
        key_dim, end = self.shape.key_dim, self.start
        slab_TBKX = self.slab_TBKX.new_empty(self.num_slots, *self.slab_TBKX.shape[1:])
        for part in self.merged.parts:
            slab_TBKX[: part.pad, part.rows] = 0
            slots_SBKX = slab_TBKX[part.pad : end, part.rows]
            upper = self.lower is not None
            for dims, shared in ((slice(key_dim), part.keys), (slice(key_dim, None), part.values)):
                slots_SBKX[..., dims] = shared.read(upper=upper).permute(2, 0, 1, 3)
        slab_TBKX[end:] = self.slab_TBKX[: self.num_slots - end]
        return KVSlab(slab_TBKX=slab_TBKX, key_dim=key_dim, first=0)

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenKV:
        start, positions = self.num_slots - q_BNCH.shape[2], self.positions_BKn
        return seen_in(self.slab(), q_BNCH, start=start, pads=self.pads, rotary=self.rotary, positions=positions)

    def keep(
        self, slots_BKm: Tensor, *, room: int, tokens_B: Sequence[int] | None = None, compensates: bool = False
    ) -> KeptLayer:
        raise NotImplementedError("a token that one layer drops is still in the other")

    def _reserve(self, num_new: int) -> None:
        if self.num_slots + num_new > self.start + self.slab_TBKX.shape[0]:
            self.copy_out(room=num_new - 1 + BLOCK)


class MergedLayers:
    """Form of a cache whose upper layers share directions in pairs; implements `policies.base.LayerForm`.

    Args:
        pairs: layers that are merged, lower and upper one.
        options: of `SharedDirections.merge`.
    """

    def __init__(self, pairs: Sequence[tuple[int, int]], options: Mapping[str, float]) -> None:
        self._pairs, self._options = list(pairs), options

    def store(self, layers: list[KeptLayer], number: int, *, room: int) -> bool:
        lower = next((lower for lower, upper in self._pairs if upper == number), None)
        if lower is not None:
            self._merge(layers, lower, number, room=room)
        return lower is not None

    def settle(self, layers: list[KeptLayer], *, room: int) -> None:
        for lower, upper in self._pairs:
            self._merge(layers, lower, upper, room=room)
        for layer in layers:
            layer.free(room=room)

    def complete(self, layers: list[KeptLayer], number: int, *, room: int) -> bool:
        return False

    def forked(self, layers: list[KeptLayer]) -> None:
        for lower, upper in ((layers[lower], layers[upper]) for lower, upper in self._pairs):
            if isinstance(lower, MergedLayer) and isinstance(upper, MergedLayer):  # a pair of their own
                upper.merged = lower.merged = replace(upper.merged)
                upper.lower = lower

    def _merge(self, layers: list[KeptLayer], lower: int, upper: int, *, room: int) -> None:
        above = layers[upper]
        if isinstance(above, MergedLayer):
            above.merge(room=room)
        else:
            layers[lower], layers[upper] = MergedLayer.pair_of(layers[lower], above, self._options, room=room)


def paired_layers(
    shapes: Sequence[KVShape], sees_all: Sequence[bool], first_share: float, numbers: Sequence[int]
) -> list[tuple[int, int]]:
    """Pairs (lower, upper) of neighbours that see the whole text and have the same shape, each layer in one pair.

    Args:
        sees_all: whether each layer sees the whole text.
        first_share: of all layers, that are left as they are.
        numbers: of these layers in the model; those between which another layer lies are no neighbours.
    """
    pairs, layer = [], int(first_share * len(shapes))
    while layer + 1 < len(shapes):
        are_alike = sees_all[layer] and sees_all[layer + 1] and shapes[layer] == shapes[layer + 1]
        if are_alike and numbers[layer + 1] == numbers[layer] + 1:
            pairs.append((layer, layer + 1))
            layer += 1
        layer += 1
    return pairs


def merged_bytes(
    shapes: Sequence[KVShape],
    pairs: Sequence[tuple[int, int]],
    num_tokens: int,
    *,
    exact_share: float,
    batch: int = 1,
    room: int = 0,
) -> int:
    """Bytes of a cache of prompts of `num_tokens` tokens: what pairs share, other layers, room, and positions."""
    total, merged = 0, {layer for pair in pairs for layer in pair}
    for layer, shape in enumerate(shapes):
        total += (room if layer in merged else num_tokens + room) * shape.bytes_per_token(batch)
        total += (num_tokens + room) * batch * torch.int32.itemsize
    for lower, _ in pairs:
        shape = shapes[lower]
        for dim in (shape.key_dim, shape.value_dim):
            of_head = SharedDirections.bytes_of(num_tokens, dim, shape.dtype, exact_share)
            total += batch * shape.num_kv_heads * of_head
    return total
