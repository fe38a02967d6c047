"""A layer's keys and values in host memory, from which a GPU fetches some slots in every step.

Copies to the host run in order with fetches, so a fetch sees everything that was stored before. The host waits for the
device only when memory grows or is freed.
"""

# Legend: T slots with room, n stored slots, m fetched ones, B batch, K kv heads, C new tokens,
# X = H + V key and value dims.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runahead.cache.base import SeenKV
from runahead.cache.host.copy_stream import CopyStream
from runahead.cache.host.memory import host_empty, on_device
from runahead.cache.kept import KeptLayer
from runahead.cache.new_tokens import NewTokens
from runahead.cache.slabs import KVSlab, SlotsToCopy
from runahead.ranks.accelerator import Event


@dataclass(kw_only=True)
class HostLayer(KeptLayer):
    """A layer whose keys and values are in host memory; positions and carried values stay on the device.

    Attributes:
        copies: stream of all copies between the device and this memory.
    """

    copies: CopyStream
    _mapped_TBKX: Tensor | None = field(default=None, init=False, repr=False)

    @property
    def on_host(self) -> bool:
        return True

    @classmethod
    def copied_from(cls, layer: KeptLayer, copies: CopyStream, *, room: int, spare: int) -> HostLayer:
        """Copy a layer to the host in the background.

        Args:
            room: slots that must fit after the stored ones. If they fit into the host memory that the layer was brought
                from, that memory is reused and only new slots are copied.
            spare: room after the stored slots in newly allocated memory.
        """
        known, n = layer.host, layer.num_slots
        if known is not None and known.slab_TBKX.shape[0] >= n + room:
            host_TBKX, start = known.slab_TBKX, known.num_slots
        else:
            host_TBKX, start = _empty(layer, n + spare, copies), 0
        with copies.copying(layer.slab_TBKX):
            host_TBKX[start:n].copy_(layer.slab_TBKX[start:n], non_blocking=True)
        copies.pace()
        return cls(slab_TBKX=host_TBKX, copies=copies, **layer.fields_of(KeptLayer, "slab_TBKX", "host"))

    @property
    def device(self) -> torch.device:
        """The GPU that fetches slots."""
        return self.copies.device

    def to_device(self) -> KeptLayer:
        """Copy the layer to the device."""
        self.copies.hold_compute()
        slab_TBKX = self.slab_TBKX[: self.num_slots].to(self.device, non_blocking=True, copy=True)
        return KeptLayer(slab_TBKX=slab_TBKX, host=self, **self.fields_of(KeptLayer, "slab_TBKX", "host"))

    def gather(self, wanted: SlotsToCopy) -> Callable[[], Tensor]:
        slab_TBKX, mark = self.fetch(wanted)

        def fetched() -> Tensor:
            self.copies.hold_compute(mark)
            return slab_TBKX

        return fetched

    def fetch(self, wanted: SlotsToCopy) -> tuple[Tensor, Event]:
        """Start the copy of `gather`. Returns what that returns, and the mark to wait for before reading."""
        with self.copies.copying(*([] if wanted.rows_X is None else [wanted.rows_X])):
            if wanted.rows_X is None:
                shape = self.num_slots + wanted.room, *self.slab_TBKX.shape[1:]
                slab_TBKX = torch.empty(shape, dtype=self.slab_TBKX.dtype, device=self.device)
                slab_TBKX[: self.num_slots].copy_(self.slab_TBKX[: self.num_slots], non_blocking=True)
            else:
                slab_TBKX = self._gathered(wanted, wanted.rows_X)
        return slab_TBKX, self.copies.mark()

    def slab(self) -> KVSlab:
        return self.to_device().slab()

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenKV:
        return self.to_device().seen(q_BNCH, tokens)

    def kv_BKnX(self) -> Tensor:  # noqa: N802
        self.copies.hold_compute()
        return self.mapped_TBKX()[: self.num_slots].permute(1, 2, 0, 3)

    def free(self, *, room: int) -> None:
        """Keep all memory, since it is the host's and page-locked memory is slow to allocate."""

    def _write(self, k_BKCH: Tensor, v_BKCV: Tensor) -> None:
        num_new, end = k_BKCH.shape[2], self.num_slots + k_BKCH.shape[2]
        if end > self.placed_TBK.shape[0]:
            self._resize_positions(num_new + end // 8)
        new_CBKX = torch.cat([k_BKCH, v_BKCV], dim=-1).permute(2, 0, 1, 3).contiguous()
        with self.copies.copying(new_CBKX):
            self.slab_TBKX[end - num_new : end].copy_(new_CBKX, non_blocking=True)

    def copy_out(self, *, room: int) -> None:
        self.copies.finish()
        host_TBKX = _empty(self, self.num_slots + room, self.copies)
        host_TBKX[: self.num_slots] = self.slab_TBKX[: self.num_slots]
        self._hold(host_TBKX)
        self._mapped_TBKX = None
        self._resize_positions(room)

    def mapped_TBKX(self) -> Tensor:  # noqa: N802
        if self._mapped_TBKX is None:
            self._mapped_TBKX = on_device(self.slab_TBKX, self.device)
        return self._mapped_TBKX

    def _put(self, place: tuple[slice | Tensor, ...], new: Tensor) -> None:
        with self.copies.copying(new, *(each for each in place if isinstance(each, Tensor))):
            self.mapped_TBKX()[place] = new


def _empty(layer: KeptLayer, num_slots: int, copies: CopyStream) -> Tensor:
    shape = num_slots, *layer.slab_TBKX.shape[1:]
    return host_empty(shape, layer.shape.dtype, copies.device, before_free=copies.finish)
