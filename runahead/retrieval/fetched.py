"""Chosen K,V on their way from the pool to attention.

On a GPU they are gathered on a stream of its own, by a kernel that reads the host's memory over the link; the layer's
attention waits for that kernel alone. On a CPU the pool is memory like any other, and gathering is a copy of the rows
that are chosen.
"""

# Legend: B batch, K kv heads, m chosen slots, T slots with room, X = H + V key and value dims.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runahead.cache.host_layer import HostLayer
from runahead.cache.kept import KeptLayer
from runahead.cache.slabs import KVSlab


@dataclass(kw_only=True)
class Fetched:
    """What attention sees of a layer, on the device.

    Attributes:
        bring: gives the chosen slots and, behind them, room for the new token.
        num_bytes: of those.
        under_way: are they being copied already? Where nothing has to travel they are gathered when they are needed:
            until then a layer's weights would have driven them out of the processor's cache.
        pads: of the chosen slots, those on the left of each row that are padding.
        slots_BKm: which they are; None is all, in order.
    """

    bring: Callable[[], Tensor]
    num_bytes: int
    under_way: bool
    pads: list[int]
    slots_BKm: Tensor | None

    def slab(self, key_dim: int) -> KVSlab:
        """Once the copy is there."""
        return KVSlab(slab_TBKX=self.bring(), key_dim=key_dim, first=0)


class Gather:
    """Copies slots of a layer to the device, with room for one more behind them."""

    def __init__(self) -> None:
        self._places_BK: Tensor | None = None

    def __call__(self, kept: KeptLayer, slots_BKm: Tensor, pads: list[int]) -> Fetched:
        """`pads`: of the chosen slots, those that are padding."""
        num_chosen = slots_BKm.shape[2]
        if any(pads):  # it comes first; the order of tokens does not matter
            slots_BKm = slots_BKm.sort(dim=-1).values
        batch, heads = len(kept.pads), kept.shape.num_kv_heads
        if self._places_BK is None or self._places_BK.shape != (batch, heads):
            self._places_BK = torch.arange(batch * heads, device=slots_BKm.device).view(batch, heads)
        rows_mBK = torch.add(self._places_BK, slots_BKm.permute(2, 0, 1), alpha=batch * heads).flatten()
        if isinstance(kept, HostLayer):
            return _under_way(kept, *kept.fetch(rows_mBK), pads, slots_BKm)
        width = kept.slab_TBKX.shape[3]

        def gather() -> Tensor:
            slab_TBKX = kept.slab_TBKX.new_empty(num_chosen + 1, batch, heads, width)
            out = slab_TBKX[:num_chosen].view(-1, width)
            torch.index_select(kept.slab_TBKX.view(-1, width), 0, rows_mBK, out=out)
            return slab_TBKX

        num_bytes = (num_chosen + 1) * kept.shape.bytes_per_token(batch)
        return Fetched(bring=gather, num_bytes=num_bytes, under_way=False, pads=pads, slots_BKm=slots_BKm)


def fetch_all(kept: HostLayer) -> Fetched:
    """All slots of a layer, with room for one more."""
    return _under_way(kept, *kept.fetch(None), list(kept.pads), None)


def _under_way(kept: HostLayer, slab_TBKX: Tensor, mark: Any, pads: list[int], slots_BKm: Tensor | None) -> Fetched:
    def bring() -> Tensor:
        kept.copies.hold_compute(mark)
        return slab_TBKX

    return Fetched(bring=bring, num_bytes=slab_TBKX.nbytes, under_way=True, pads=pads, slots_BKm=slots_BKm)
