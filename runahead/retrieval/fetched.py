"""Chosen keys and values on their way from the pool to attention.

On a GPU they are gathered on a stream of their own, by a kernel that reads the host's memory over the link; the layer's
attention waits for that kernel alone. On a CPU the pool is memory like any other, and gathering is a copy of the rows
that are chosen.
"""

# Legend: B batch, K kv heads, m chosen slots, T slots with room, X = H + V key and value dims.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runahead.cache.kept import KeptLayer
from runahead.cache.slabs import KVSlab


@dataclass(kw_only=True)
class Fetched:
    """What attention sees of a layer, on the device.

    Attributes:
        bring: gives the chosen slots and, after them, room for the new token.
        num_bytes: of those.
        under_way: whether they are being copied already.
        pads: of the chosen slots, those on the left of each row that are padding.
        slots_BKm: which they are; None is all, in order.
    """

    bring: Callable[[], Tensor]
    num_bytes: int
    under_way: bool
    pads: list[int]
    slots_BKm: Tensor | None

    def slab(self, key_dim: int) -> KVSlab:
        """The chosen slots, once the copy is there."""
        return KVSlab(slab_TBKX=self.bring(), key_dim=key_dim, first=0)


class Gather:
    """Copies slots of a layer to the device, with room for one more after them."""

    def __init__(self) -> None:
        self._places_BK: Tensor | None = None

    def __call__(self, kept: KeptLayer, slots_BKm: Tensor, pads: list[int]) -> Fetched:
        """`pads`: of the chosen slots, those that are padding."""
        if any(pads):  # it comes first; the order of tokens does not matter
            slots_BKm = slots_BKm.sort(dim=-1).values
        batch, heads = len(kept.pads), kept.shape.num_kv_heads
        if self._places_BK is None or self._places_BK.shape != (batch, heads):
            self._places_BK = torch.arange(batch * heads, device=slots_BKm.device).view(batch, heads)
        rows_mBK = torch.add(self._places_BK, slots_BKm.permute(2, 0, 1), alpha=batch * heads).flatten()
        return _fetched(kept, kept.gather(rows_mBK), slots_BKm.shape[2], pads, slots_BKm)

    def everything(self, kept: KeptLayer) -> Fetched | None:
        """All slots of a layer; None if attention can read them where they lie."""
        bring = kept.gather_all()
        return None if bring is None else _fetched(kept, bring, kept.num_slots, list(kept.pads), None)


def _fetched(
    kept: KeptLayer, bring: Callable[[], Tensor], num_chosen: int, pads: list[int], slots_BKm: Tensor | None
) -> Fetched:
    num_bytes = (num_chosen + 1) * kept.shape.bytes_per_token(len(kept.pads))
    return Fetched(bring=bring, num_bytes=num_bytes, under_way=kept.on_host, pads=pads, slots_BKm=slots_BKm)
