"""Keys and values that a cache policy cuts back: one layer at a time, with room for what comes next.

As in the full KV cache memory is token-major, (T, B, K, H + V). A slot holds a token; which one may differ from row to
row and from KV head to KV head, but slots are in the order of the tokens' positions and padding is on the left, so
causal attention needs no mask. Keeping some slots copies them and frees the rest.
"""

# Legend: T slots with room, n stored slots, m kept ones, B batch, N query heads, K kv heads, C new tokens,
# X = H + V key and value dims.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runahead.attention.partial import AttentionTerms
from runahead.cache.base import KVStore, LayerStore, SeenKV
from runahead.cache.kv_cache import SeenSlab
from runahead.cache.new_tokens import NewTokens
from runahead.cache.slabs import KVShape, KVSlab
from runahead.report import RankReport
from runahead.rotary import Rotary

NEW_ROOM = 32
"""New tokens for which a layer has room after a prompt and after it was cut back; where more of them stay it grows."""


@dataclass(kw_only=True)
class KeptLayer(LayerStore):
    """One layer.

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

    on_host = False
    """Whether keys and values are in the memory of the host, and the device is another one."""

    @property
    def num_bytes(self) -> int:
        """Bytes allocated: keys and values, positions, and what is carried."""
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

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        num_new = k_BKCH.shape[2]
        self.store(k_BKCH, v_BKCV, tokens.positions_BC(num_new, k_BKCH.device), tokens.pads(num_new))

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenSlab:
        # In the numbering of slots, which are in causal order, whichever tokens they hold.
        return SeenSlab.of(self.slab(), q_BNCH, start=self.end - q_BNCH.shape[2], pads=self.pads, rotary=self.rotary)

    def store(self, k_BKCH: Tensor, v_BKCV: Tensor, positions_BC: Tensor, new_pads: list[int]) -> None:
        """Store new tokens after the others, making room if there is none.

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

    def keep(self, slots_BKm: Tensor, *, room: int) -> None:
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

    def free(self, *, room: int) -> None:
        if self.slab_TBKX.shape[0] != self.num_slots + room:
            self.copy_out(room=room)

    def brought(self) -> KeptLayer:
        """The same slots in the memory of the device."""
        return self

    def keys(self) -> Tensor:
        """Keys (B, K, n, H) of all slots, where they lie."""
        slab = self.slab()
        return slab.read(slab.first, slab.end)[0]

    def gather(self, rows_X: Tensor) -> Callable[[], Tensor]:
        """Copy some slots to the device, with room for one more after them.

        Args:
            rows_X: rows of the memory as a (T * B * K, X) matrix, all of a slot's side by side.

        Returns:
            gives slots (m + 1, B, K, X). Here they are copied only then, since in between a layer's weights would
            drive them out of the processor's cache.
        """
        _, batch, heads, width = self.slab_TBKX.shape
        source_TBKX = self.slab_TBKX

        def gathered() -> Tensor:
            num_chosen = len(rows_X) // (batch * heads)
            slab_TBKX = source_TBKX.new_empty(num_chosen + 1, batch, heads, width)
            out = slab_TBKX[:num_chosen].view(-1, width)
            torch.index_select(source_TBKX.view(-1, width), 0, rows_X, out=out)
            return slab_TBKX

        return gathered

    def gather_all(self) -> Callable[[], Tensor] | None:
        """As `gather`, of all slots; None if attention can read them where they lie."""
        return None

    def fork(self, *, copy: bool) -> KeptLayer:
        """The same slots for a cache that goes on on its own.

        Args:
            copy: give it memory of its own; else what is appended to it goes to new memory, and both share the rest.
        """
        if copy:
            other = replace(self)
            other.copy_out(room=0)
            return other
        n = self.num_slots
        return replace(
            self,
            slab_TBKX=self.slab_TBKX[:n],
            positions_TBK=self.positions_TBK[:n],
            carried_TBK=None if self.carried_TBK is None else self.carried_TBK[:n],
        )

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


class KeptCache(KVStore):
    """All layers of a batch, each of which a policy may cut back."""

    layers: list[KeptLayer]

    def __init__(self, layers: Sequence[KeptLayer]) -> None:
        self.layers = list(layers)

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
        return KeptCache(
            [
                KeptLayer.empty(
                    shape, batch=batch, room=0, device=device, rotary=None if rotaries is None else rotaries[layer]
                )
                for layer, shape in enumerate(shapes)
            ]
        )

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.layers[0].positions_TBK.device

    @property
    def rotates(self) -> bool:
        return any(layer.rotary is not None for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def slots_by_layer(self) -> list[int]:
        """Stored slots of each layer."""
        return [layer.num_slots for layer in self.layers]

    def free(self, *, room: int) -> None:
        """Give back what each layer does not need beyond room for `room` more tokens."""
        for layer in self.layers:
            layer.free(room=room)

    def index(
        self,
        layer: int,
        kept: KeptLayer,
        seen: SeenKV,
        positions_BC: Tensor,
        terms: AttentionTerms,
        *,
        room: int,
        was_cut: bool,
    ) -> None:
        """Called once the policies have decided what stays of a layer after the attention of given tokens.

        Args:
            kept: the layer, whose last slots are those of the new tokens.
            seen: what the queries of these tokens saw.
            positions_BC: of these tokens in their rows, below 0 on padding.
            room: tokens that will follow.
            was_cut: whether slots before the new ones were dropped.
        """

    def fork(self) -> KeptCache:
        """The same tokens for a conversation that goes on on its own. Until it does, both share memory."""
        return KeptCache([layer.fork(copy=False) for layer in self.layers])

    def describe_prompt(self, report: RankReport) -> None:
        super().describe_prompt(report)
        report.kept_tokens = self.slots_by_layer
