"""The KV cache whose upper layers share directions in pairs: which layers, when they are merged, and the bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from policies.base import LayerPairs
from runahead.cache.kept import KeptCache, KeptLayer
from runahead.cache.merged.directions import SharedDirections
from runahead.cache.merged.layer import MergedLayer, link
from runahead.cache.slabs import KVShape


def paired_layers(shapes: Sequence[KVShape], sees_all: Sequence[bool], first_share: float) -> list[tuple[int, int]]:
    """Pairs (lower, upper) of neighbours that see the whole text and have the same shape, each layer in one pair.

    Args:
        sees_all: whether each layer sees the whole text.
        first_share: of all layers, that are left as they are.
    """
    pairs, layer = [], int(first_share * len(shapes))
    while layer + 1 < len(shapes):
        if sees_all[layer] and sees_all[layer + 1] and shapes[layer] == shapes[layer + 1]:
            pairs.append((layer, layer + 1))
            layer += 1
        layer += 1
    return pairs


class MergedCache(KeptCache):
    """KV cache of a batch. Tokens of a prompt are exact until all of them have attended to each other.

    Args:
        layers: empty or exact ones, or those of another such cache.
        pairs: layers that are merged.
        options: how.
    """

    def __init__(self, layers: Sequence[KeptLayer], pairs: Sequence[tuple[int, int]], options: LayerPairs) -> None:
        super().__init__(layers)
        self._pairs, self._options = list(pairs), options

    def own(self, layer: int, *, room: int, is_borrowed: bool) -> None:
        lower = next((lower for lower, upper in self._pairs if upper == layer), None)
        if lower is None:
            super().own(layer, room=room, is_borrowed=is_borrowed)
            return
        self._merge(lower, layer, room=room)
        self.close(layer, room=room)

    def settle(self, *, room: int) -> None:
        for lower, upper in self._pairs:
            self._merge(lower, upper, room=room)
        self.free(room=room)

    def _forked(self) -> KeptCache:
        other = MergedCache([layer.fork(copy=False) for layer in self.layers], self._pairs, self._options)
        for lower, upper in ((other.layers[lower], other.layers[upper]) for lower, upper in self._pairs):
            if isinstance(lower, MergedLayer) and isinstance(upper, MergedLayer):
                link(lower, upper)
        return other

    def _merge(self, lower: int, upper: int, *, room: int) -> None:
        above = self.layers[upper]
        if isinstance(above, MergedLayer):
            above.merge(room=room)
        else:
            self.layers[lower], self.layers[upper] = MergedLayer.pair_of(
                self.layers[lower], above, self._options, room=room
            )


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
