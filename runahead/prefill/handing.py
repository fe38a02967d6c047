"""Hands keys and values of prompts over, layer by layer, on the rank that has all of them.

In a chain that is the last rank, as soon as the prefix of a layer has arrived and its attention is computed.
"""

# Legend: T tokens, K kv heads, X = H + V key and value dims.

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from runahead.cache.attention import LayerCall, LayerHook
from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import KVSlab
from runahead.prefill.base import PrefillJob
from runahead.reuse.handover import Handover
from runahead.reuse.reused_kv import ReusedPart
from runahead.reuse.tiers.file_format import LayerShape


class HandsOver(LayerHook):
    """Puts each layer of some rows of a batch into their handovers.

    What a row reuses comes before what is computed of it. Under sliding windows of a chain the last rank lacks tokens
    that no later one sees, but for `BEFORE_WINDOW` of them.

    Args:
        cache: has the new tokens, in slabs that stay.
    """

    takes_blocks = True  # it reads a layer that is closed

    def __init__(self, job: PrefillJob, cache: KVCache) -> None:
        self._cache, self._pads, self._num_tokens = cache, job.batch.pads, job.batch.num_tokens
        self._handovers: Mapping[int, Handover] = job.handovers
        parts = [] if job.reused is None else job.reused.parts
        self._parts: dict[int, list[ReusedPart]] = {
            row: sorted((part for part in parts if row in part.rows and part.at), key=lambda part: part.at[0])
            for row in self._handovers
        }
        for row, handover in self._handovers.items():
            num_reused, shapes = sum(len(part.at) for part in self._parts[row]), list[LayerShape]()
            for layer in range(cache.num_layers):
                first = self._slab(row, layer).first
                assert not num_reused or first <= 0, f"tokens [0, {first}) are lacking between what is reused and new"
                own_TKX = self._own(row, layer)
                shape = (num_reused + len(own_TKX), *own_TKX.shape[1:])
                shapes.append(LayerShape(shape=shape, dtype=own_TKX.dtype))
            handover.begin(shapes)

    def _own(self, row: int, layer: int) -> Tensor:
        """The new tokens (T, K, X) of a row in a layer that are here, as a view."""
        slab = self._slab(row, layer)
        return slab.tokens(max(0, slab.first), self._num_tokens - self._pads[row])[:, 0]

    def _slab(self, row: int, layer: int) -> KVSlab:
        return self._cache.slab_index.row_slab(self._cache.slabs.by_layer[layer], row, self._pads[row])

    def closed(self, call: LayerCall) -> None:
        for row, handover in self._handovers.items():
            reused: Sequence[Tensor] = [part.layers_TKX[call.layer] for part in self._parts[row]]
            handover.put([*reused, self._own(row, call.layer)])
