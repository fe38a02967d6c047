"""A layer's K,V in memory of the host, for a GPU that fetches some of them in every step.

Copies to the host run on a stream of their own and in order, as fetches do, so a fetch sees all that was stored before.
Nothing here waits for the device.
"""

# Legend: T slots with room, n stored slots, m fetched ones, B batch, K kv heads, X = H + V key and value dims.

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from runahead.host_memory import host_empty, on_device
from runahead.kept_cache import KeptLayer
from runahead.kv_cache import KVSlab


@dataclass(kw_only=True)
class HostLayer(KeptLayer):
    """Slots whose K,V are on the host; positions and what is carried stay on the device.

    Attributes:
        device: a GPU.
        stream: of all copies between it and this memory.
    """

    device: torch.device
    stream: torch.cuda.Stream

    @classmethod
    def of(cls, layer: KeptLayer, stream: torch.cuda.Stream, *, room: int) -> HostLayer:
        """The same slots, copied to the host in the background, with room for so many more."""
        device = layer.slab_TBKX.device
        host_TBKX = host_empty((layer.num_slots + room, *layer.slab_TBKX.shape[1:]), layer.shape.dtype, device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            host_TBKX[: layer.num_slots].copy_(layer.slab_TBKX[: layer.num_slots], non_blocking=True)
        layer.slab_TBKX.record_stream(stream)
        same = {field.name: getattr(layer, field.name) for field in fields(KeptLayer) if field.name != "slab_TBKX"}
        return cls(slab_TBKX=host_TBKX, device=device, stream=stream, **same)

    def brought(self) -> KeptLayer:
        """The same slots on the device."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        same = {field.name: getattr(self, field.name) for field in fields(KeptLayer) if field.name != "slab_TBKX"}
        slab_TBKX = self.slab_TBKX[: self.num_slots].to(self.device, non_blocking=True)
        self.stream.wait_stream(current)  # nothing is written here before it was read
        return KeptLayer(slab_TBKX=slab_TBKX, **same)

    def slab(self) -> KVSlab:
        return self.brought().slab()

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, positions_BC: Tensor, new_pads: list[int]) -> None:
        num_new, end = k_BKCH.shape[2], self.num_slots + k_BKCH.shape[2]
        if end > self.slab_TBKX.shape[0]:
            self._grow(end)
        if end > self.positions_TBK.shape[0]:
            self._room_on_device(end + end // 8)
        self._copy_in(end - num_new, torch.cat([k_BKCH, v_BKCV], dim=-1).permute(2, 0, 1, 3).contiguous())
        self.num_slots = end
        self.pads = [pad + new for pad, new in zip(self.pads, new_pads, strict=True)]
        self.positions_TBK[end - num_new : end] = positions_BC.T[:, :, None]
        if self.carried_TBK is not None:
            self.carried_TBK[end - num_new : end] = 0

    def copy_out(self, *, room: int) -> None:
        self.stream.synchronize()
        host_TBKX = host_empty((self.num_slots + room, *self.slab_TBKX.shape[1:]), self.shape.dtype, self.device)
        host_TBKX[: self.num_slots] = self.slab_TBKX[: self.num_slots]
        self.slab_TBKX = host_TBKX
        self._room_on_device(self.num_slots + room)

    def mapped_TBKX(self) -> Tensor:  # noqa: N802
        """The memory as the device sees it."""
        return on_device(self.slab_TBKX, self.device)

    def _copy_in(self, first: int, new_CBKX: Tensor) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self.slab_TBKX[first : first + len(new_CBKX)].copy_(new_CBKX, non_blocking=True)
        new_CBKX.record_stream(self.stream)

    def _put(self, slots_BK: Tensor, rows_B1: Tensor, heads_K: Tensor, new_BKX: Tensor) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self.mapped_TBKX()[slots_BK, rows_B1, heads_K] = new_BKX
        for tensor in (slots_BK, rows_B1, heads_K, new_BKX):
            tensor.record_stream(self.stream)

    def _room_on_device(self, room: int) -> None:
        for name in ("positions_TBK", "carried_TBK"):
            old = getattr(self, name)
            if old is not None:
                new = old.new_empty(room, *old.shape[1:])
                new[: self.num_slots] = old[: self.num_slots]
                setattr(self, name, new)
