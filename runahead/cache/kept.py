"""K,V that a cache policy has thinned out: one layer at a time, with room for what comes next.

As in the KV cache a slab is token-major, (T, B, K, H + V). A slot holds a token; which one may differ from row to row
and from KV head to KV head, but slots are in the order of the tokens' positions and padding is on the left, so causal
attention needs no mask. Cutting a layer back copies what is kept and frees the rest.
"""

# Legend: T slots with room, n stored slots, m kept ones, B batch, K kv heads, X = H + V key and value dims.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runahead.cache.slabs import KVShape, KVSlab
from runahead.rotary import Rotary

if TYPE_CHECKING:
    from runahead.retrieval.retrieval import Retrieval

NEW_ROOM = 32
"""New tokens for which a layer has room behind a prompt and after it was cut back; where more of them stay it grows."""


@dataclass(kw_only=True)
class KeptLayer:
    """One layer's K,V.

    Attributes:
        slab_TBKX: slots, of which the first `num_slots` are in use.
        positions_TBK: of each slot's token in its row, below 0 on padding; (T, B, 1) while all KV heads have the same.
        pads: slots on the left of each row that are padding.
        first: number of the first slot; above 0 in a layer with a window, whose early tokens were never stored.
        carried_TBK: what a policy accumulates per slot.
        rotary: where positions are re-encoded: keys are stored unrotated, and rotated like this to their slots when
            they are attended to. Else they are rotated to where their tokens stood.
    """

    shape: KVShape
    slab_TBKX: Tensor
    positions_TBK: Tensor
    pads: list[int]
    num_slots: int = 0
    first: int = 0
    carried_TBK: Tensor | None = None
    rotary: Rotary | None = None

    @classmethod
    def empty(
        cls, shape: KVShape, *, batch: int, room: int, device: torch.device, rotary: Rotary | None = None
    ) -> KeptLayer:
        """A layer with room for so many tokens."""
        slab = torch.empty(
            room, batch, shape.num_kv_heads, shape.key_dim + shape.value_dim, dtype=shape.dtype, device=device
        )
        positions = torch.empty(room, batch, 1, dtype=torch.int32, device=device)
        return cls(shape=shape, slab_TBKX=slab, positions_TBK=positions, pads=[0] * batch, rotary=rotary)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated: K,V, positions, and what is carried."""
        carried = 0 if self.carried_TBK is None else self.carried_TBK.nbytes
        return self.slab_TBKX.nbytes + self.positions_TBK.nbytes + carried

    def slab(self) -> KVSlab:
        """The slots in use."""
        return KVSlab(slab_TBKX=self.slab_TBKX[: self.num_slots], key_dim=self.shape.key_dim, first=self.first)

    @property
    def end(self) -> int:
        """Number of the next slot."""
        return self.first + self.num_slots

    def positions_BKn(self) -> Tensor:  # noqa: N802
        return self.positions_TBK[: self.num_slots].permute(1, 2, 0)

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, positions_BC: Tensor, new_pads: list[int]) -> None:
        """Store new tokens behind the others, making room if there is none.

        Args:
            positions_BC: of the new tokens in their rows.
            new_pads: how many of them are padding, in each row.
        """
        num_new, end = k_BKCH.shape[2], self.num_slots + k_BKCH.shape[2]
        if end > self.slab_TBKX.shape[0]:
            self._grow(end)
        self.num_slots = end
        self.pads = [pad + new for pad, new in zip(self.pads, new_pads, strict=True)]
        self.slab().write(self.end - num_new, k_BKCH, v_BKCV)
        self.positions_TBK[end - num_new : end] = positions_BC.T[:, :, None]
        if self.carried_TBK is not None:
            self.carried_TBK[end - num_new : end] = 0

    def carry(self, values_BKn: Tensor) -> None:
        """Carry values along with the slots from now on."""
        if self.carried_TBK is None:
            self.carried_TBK = torch.zeros(
                self.slab_TBKX.shape[:3], dtype=values_BKn.dtype, device=self.slab_TBKX.device
            )
        self.carried_TBK[: self.num_slots] = values_BKn.permute(2, 0, 1)

    def carried_BKn(self) -> Tensor | None:  # noqa: N802
        return None if self.carried_TBK is None else self.carried_TBK[: self.num_slots].permute(1, 2, 0)

    def cut_back(self, slots_BKm: Tensor, *, room: int) -> None:
        """Keep these slots, (B, K, m) or (B, 1, m), and make room for so many more tokens."""
        assert self.first == 0, self.first
        num_kept = slots_BKm.shape[2]
        slots_mBK = slots_BKm.permute(2, 0, 1)
        pads_B = torch.tensor(self.pads, device=slots_mBK.device)
        kept_pads_BK = (slots_mBK < pads_B[:, None]).sum(dim=0)
        self.slab_TBKX = _taken(self.slab_TBKX, slots_mBK, room)
        if self.positions_TBK.shape[2] == 1 and slots_mBK.shape[2] > 1:
            self.positions_TBK = self.positions_TBK.expand(-1, -1, self.shape.num_kv_heads)
        self.positions_TBK = _taken(self.positions_TBK, slots_mBK, room)
        if self.carried_TBK is not None:
            self.carried_TBK = _taken(self.carried_TBK, slots_mBK, room)
        self.num_slots = num_kept
        # Which padding is dropped is the same for all KV heads: it is never kept before a token is.
        self.pads = kept_pads_BK[:, 0].tolist()
        assert (kept_pads_BK == kept_pads_BK[:, :1]).all(), "KV heads keep different amounts of padding"

    def copy_out(self, *, room: int) -> None:
        """Move to memory of its own, with room for so many more tokens."""
        self.slab_TBKX = _with_room(self.slab_TBKX[: self.num_slots], room)
        self.positions_TBK = _with_room(self.positions_TBK[: self.num_slots], room)
        if self.carried_TBK is not None:
            self.carried_TBK = _with_room(self.carried_TBK[: self.num_slots], room)

    def overwrite(self, slots_BK: Tensor, k_BK1H: Tensor, v_BK1V: Tensor, positions_B1: Tensor) -> None:
        """A new token in the place of another one, or of the last padding of its row, in every row and KV head.

        From then on slots are not in the order of positions.
        """
        batch, heads = slots_BK.shape
        if self.positions_TBK.shape[2] < heads:
            self.positions_TBK = self.positions_TBK.expand(-1, -1, heads).contiguous()
        rows_B1 = torch.arange(batch, device=slots_BK.device)[:, None]
        heads_K = torch.arange(heads, device=slots_BK.device)
        self._put(slots_BK, rows_B1, heads_K, torch.cat([k_BK1H, v_BK1V], dim=-1)[:, :, 0])
        self.positions_TBK[slots_BK, rows_B1, heads_K] = positions_B1.int()
        if self.carried_TBK is not None:
            self.carried_TBK[slots_BK, rows_B1, heads_K] = 0
        self.pads = [max(0, pad - 1) for pad in self.pads]

    def _put(self, slots_BK: Tensor, rows_B1: Tensor, heads_K: Tensor, new_BKX: Tensor) -> None:
        self.slab_TBKX[slots_BK, rows_B1, heads_K] = new_BKX

    def _grow(self, room: int) -> None:
        """More room, and an eighth of what is there, so that growing token by token stays cheap."""
        self.copy_out(room=room - self.num_slots + self.num_slots // 8)


def _with_room(old: Tensor, room: int) -> Tensor:
    """A copy with room behind it."""
    new = old.new_empty(old.shape[0] + room, *old.shape[1:])
    new[: old.shape[0]] = old
    return new


def _taken(source: Tensor, slots_mBK: Tensor, room: int) -> Tensor:
    """A new tensor with room behind these slots of (T, B, K, ...)."""
    num_kept = slots_mBK.shape[0]
    _, batch, heads = source.shape[:3]
    taken = source.new_empty(num_kept + room, *source.shape[1:])
    rows_B1 = torch.arange(batch, device=source.device)[:, None]
    heads_K = torch.arange(heads, device=source.device)
    # Rows of a flat view: whole contiguous runs are copied, not single numbers.
    flat_mBK = (slots_mBK * batch + rows_B1) * heads + heads_K
    flat = source.reshape(-1, *source.shape[3:])
    torch.index_select(flat, 0, flat_mBK.flatten(), out=taken[:num_kept].view(-1, *source.shape[3:]))
    return taken


@dataclass(kw_only=True)
class KeptCache:
    """All layers. `peak_bytes` is the most that was allocated at a time, on the device and in the pool of the host."""

    layers: list[KeptLayer]
    peak_bytes: int = field(default=0)
    retrieval: Retrieval | None = None
    """Of a policy that keeps all K,V and chooses what attention sees in a step."""

    @classmethod
    def empty(
        cls,
        shapes: Sequence[KVShape],
        *,
        batch: int,
        device: torch.device,
        rotaries: Sequence[Rotary] | None = None,
    ) -> KeptCache:
        """Layers without tokens. `rotaries`, one per layer, are for re-encoded positions."""
        return cls(
            layers=[
                KeptLayer.empty(
                    shape, batch=batch, room=0, device=device, rotary=None if rotaries is None else rotaries[layer]
                )
                for layer, shape in enumerate(shapes)
            ]
        )

    @property
    def device(self) -> torch.device:
        """Where it is computed."""
        return self.layers[0].positions_TBK.device

    @property
    def reencodes(self) -> bool:
        """Are keys stored unrotated?"""
        return any(layer.rotary is not None for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, without those in the host's pool."""
        index_bytes = 0 if self.retrieval is None else self.retrieval.num_bytes
        return sum(layer.num_bytes for layer in self.layers) - self.host_bytes + index_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the K,V that are in the host's pool. On a CPU that is memory like any other."""
        if self.retrieval is None:
            return 0
        layers = zip(self.layers, self.retrieval.in_pool, strict=True)
        return sum(layer.slab_TBKX.nbytes for layer, is_in in layers if is_in)

    @property
    def num_slots(self) -> list[int]:
        """Stored slots per layer."""
        return [layer.num_slots for layer in self.layers]
