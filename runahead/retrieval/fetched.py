"""Fetching of chosen keys and values from the pool for attention.

On a GPU they are gathered on a separate stream, by a kernel that reads host memory over the link; the layer's attention
waits for that kernel alone. On a CPU the pool is ordinary memory, and gathering copies the chosen rows.
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
    """Chosen slots of a layer, copied or being copied to the device.

    Attributes:
        bring: returns the chosen slots and, after them, room for the new token.
        num_bytes: bytes of those.
        under_way: whether the copy has been started.
        pads: chosen slots on the left of each row that are padding.
        slots_BKm: numbers of the chosen slots; None is all slots, in order.
    """

    bring: Callable[[], Tensor]
    num_bytes: int
    under_way: bool
    pads: list[int]
    slots_BKm: Tensor | None

    def slab(self, key_dim: int) -> KVSlab:
        """The chosen slots; later compute waits for their copy."""
        return KVSlab(slab_TBKX=self.bring(), key_dim=key_dim, first=0)


class Gather:
    """Copies chosen slots of a layer to the device, with room for one more after them."""

    def __init__(self) -> None:
        self._places_BK: Tensor | None = None

    def __call__(self, kept: KeptLayer, slots_BKm: Tensor | None, pads: list[int]) -> Fetched | None:
        """Fetch slots of a layer; None if attention can read them in place.

        Args:
            slots_BKm: the chosen slots; None is all slots.
            pads: number of padding slots among the chosen ones, by row.
        """
        batch, heads, num_chosen, rows_mBK = len(kept.pads), kept.shape.num_kv_heads, kept.num_slots, None
        if slots_BKm is not None:
            num_chosen = slots_BKm.shape[2]
            if any(pads):  # padding comes first; the order of tokens does not matter
                slots_BKm = slots_BKm.sort(dim=-1).values
            if self._places_BK is None or self._places_BK.shape != (batch, heads):
                self._places_BK = torch.arange(batch * heads, device=slots_BKm.device).view(batch, heads)
            rows_mBK = torch.add(self._places_BK, slots_BKm.permute(2, 0, 1), alpha=batch * heads).flatten()
        bring = kept.gather(rows_mBK)
        if bring is None:
            return None
        num_bytes = (num_chosen + 1) * kept.shape.bytes_per_token(batch)
        return Fetched(bring=bring, num_bytes=num_bytes, under_way=kept.on_host, pads=pads, slots_BKm=slots_BKm)
