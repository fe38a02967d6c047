"""Chosen slots of a cache's layers: copied to the device, and kept until the layer's attention reads them."""

# Legend: T slots with room, B batch, N query heads, K kv heads, G = N / K, C new tokens, n stored slots, m chosen ones,
# f fetched ones, o ones on the device, H key dim, X = H + V key and value dims, x some KV heads of all rows.

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from policies.retriever import Choice, OnDevice, Rest
from runahead.attention.op import Part
from runahead.attention.partial import AttentionTerms, attend
from runahead.cache.kept import KeptLayer
from runahead.cache.slabs import KVSlab, SlotsToCopy


@dataclass(kw_only=True)
class Fetched:
    """Chosen slots of a layer, copied or being copied to the device for attention.

    On a GPU they are gathered on a separate stream, by a kernel that reads host memory over the link; the layer's
    attention waits for that kernel alone. On a CPU the pool is ordinary memory, and gathering copies the chosen rows.

    Attributes:
        bring: returns the chosen slots and, after them, room for the new tokens.
        num_bytes: bytes of those.
        under_way: whether the copy has been started.
        pads: chosen slots on the left of each row that are padding.
        slots_BKm: numbers of the chosen slots; None is all slots, in order.
        num_held: number of the last of them that were on the device.
        rest: estimate of the attention to all other slots, if there is one.
        weigh: as of `Choice`.
    """

    bring: Callable[[], Tensor]
    num_bytes: int
    under_way: bool
    pads: list[int]
    slots_BKm: Tensor | None
    num_held: int = 0
    rest: Rest | None = None
    weigh: Callable[[Tensor, Tensor], Tensor] | None = None

    def slab(self, key_dim: int) -> KVSlab:
        """The chosen slots; later compute waits for their copy."""
        return KVSlab(slab_TBKX=self.bring(), key_dim=key_dim, first=0)

    def weighed(self, slab: KVSlab, q_BNCH: Tensor, terms: AttentionTerms, lse_BNC: Tensor) -> Part:
        """Attention of new tokens to these slots by the choice's weights, whatever else they see.

        Args:
            slab: the chosen slots, and any after them.
        """
        assert self.weigh is not None and self.slots_BKm is not None and terms.key_bias is None
        k_BKmH, v_BKmV = slab.read(0, self.slots_BKm.shape[2])
        logs_BXm = self.weigh(self.slots_BKm, k_BKmH)
        # Several new tokens ask as if their queries were those of further heads of their groups (X).
        q_BX1H = q_BNCH.unflatten(1, (k_BKmH.shape[1], -1)).flatten(1, 3).unsqueeze(2)
        weighing = replace(terms, key_bias=lambda at_m: logs_BXm[..., at_m])
        out_BX1V, lse_BX1 = attend(q_BX1H, k_BKmH, v_BKmV, weighing, q_start=k_BKmH.shape[2], k_start=0)
        num_new = q_BNCH.shape[2]
        return out_BX1V.squeeze(2).unflatten(1, (-1, num_new)), lse_BX1.squeeze(2).unflatten(1, (-1, num_new))

    def hit_mass(
        self, q_BNH: Tensor, k_BKnH: Tensor, k_BKCH: Tensor, pads: Sequence[int], scaling: float
    ) -> float | None:
        """Attention probability of these slots and of the new token: mean over heads, and over rows that see any token.

        None if every row is padding here. `k_BKCH` is the key of the new token, or of none if another rank stores it;
        `pads` is the padding of each row among the slots of `k_BKnH`.
        """
        assert self.slots_BKm is not None
        q_BKGH = q_BNH.unflatten(1, (k_BKnH.shape[1], -1)) * scaling
        scores_BKGn = (q_BKGH @ k_BKnH.transpose(-1, -2)).float()
        for row, pad in enumerate(pads):
            scores_BKGn[row, :, :, :pad] = -torch.inf
        own_BKGC = (q_BKGH @ k_BKCH.transpose(-1, -2)).float()
        probabilities = torch.cat([scores_BKGn, own_BKGC], dim=-1).softmax(dim=-1)
        slots_BKGm = self.slots_BKm[:, :, None].expand(-1, -1, q_BKGH.shape[2], -1)
        seen = probabilities.gather(3, slots_BKGm).sum(dim=-1) + probabilities[..., k_BKnH.shape[2] :].sum(dim=-1)
        sees_any = [row for row, pad in enumerate(pads) if pad < k_BKnH.shape[2] or k_BKCH.shape[2]]
        return float(seen[sees_any].mean()) if sees_any else None

    def with_heads(self, kept: KeptLayer, own_BKm: Tensor, again_BK: Tensor, again_x: Tensor) -> Fetched:
        """The same slots, but for some KV heads, for which others are fetched in their place.

        Args:
            own_BKm: the other slots, as many as these, in any order; those of the other heads are not used.
            again_BK, again_x: which heads, as a mask, and as their numbers in it.
        """
        assert self.slots_BKm is not None and own_BKm.shape == self.slots_BKm.shape
        slots_BKm = torch.where(again_BK.unsqueeze(2), _in_order(own_BKm, self.pads), self.slots_BKm)
        rows_mx = slots_BKm.flatten(0, 1)[again_x].T * again_BK.numel() + again_x
        bring_again = kept.gather(SlotsToCopy(rows_X=rows_mx.flatten(), room=0, heads=(1, len(again_x))))
        assert bring_again is not None

        def bring() -> Tensor:
            slab_TBKX = self.bring()
            slab_TBKX[: len(rows_mx)].flatten(1, 2)[:, again_x] = bring_again()[:, 0]
            return slab_TBKX

        return replace(self, bring=bring, slots_BKm=slots_BKm)


class Fetches:
    """Slots of several layers that are being fetched or wait for their layer's attention.

    Attributes:
        peak_bytes: most bytes of fetched slots that layers had not read yet.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._by_layer: dict[int, Fetched | None] = {}
        self._places_BK: Tensor | None = None

    def fork(self) -> Fetches:
        """Fetches of a forked cache, for which nothing has been chosen."""
        other = copy.copy(self)
        other._by_layer = {}
        return other

    def __contains__(self, layer: int) -> bool:
        return layer in self._by_layer

    def start(self, layer: int, kept: KeptLayer, choice: Choice | None, pads: list[int], *, room: int) -> None:
        """Start fetching slots of a layer, unless attention can read them in place.

        Args:
            choice: the chosen slots; None is all slots.
            pads: number of padding slots among them, by row.
            room: number of new tokens, which come after them.
        """
        self._by_layer[layer] = _all(kept, pads, room) if choice is None else self._some(kept, choice, pads, room)

    def drop(self, layer: int) -> None:
        """Forget what is fetched for a layer, if anything is."""
        self._by_layer.pop(layer, None)

    def take(self, layer: int) -> Fetched | None:
        """Slots fetched for a layer, whose attention comes now; None is all slots, which are read in place."""
        held = [each.num_bytes for at, each in self._by_layer.items() if each and (at == layer or each.under_way)]
        self.peak_bytes = max(self.peak_bytes, sum(held))
        return self._by_layer.pop(layer)

    def _some(self, kept: KeptLayer, choice: Choice, pads: list[int], room: int) -> Fetched | None:
        slots_BKm, on_device, num_held, skips_keys = choice.slots_BKm, choice.on_device, 0, False
        if on_device is not None:
            num_held, skips_keys = on_device.kv_BKoX.shape[2], on_device.keys is not None
            slots_BKm, held_BKo = slots_BKm.split([slots_BKm.shape[2] - num_held, num_held], dim=2)
        slots_BKm = _in_order(slots_BKm, pads)
        rows_fBK = self._rows(kept, slots_BKm)
        kept.expect(room)
        bring = kept.gather(SlotsToCopy(rows_X=rows_fBK, room=num_held + room, skips_keys=skips_keys))
        if bring is None:
            return None
        if on_device is not None:
            bring = partial(_completed, bring, on_device, slots_BKm)
            slots_BKm = torch.cat([slots_BKm, held_BKo], dim=2)
        return Fetched(
            bring=bring,
            num_bytes=kept.fetched_bytes(slots_BKm.shape[2], room=room),
            under_way=kept.on_host,
            pads=pads,
            slots_BKm=slots_BKm,
            num_held=num_held,
            rest=choice.rest,
            weigh=choice.weigh,
        )

    def _rows(self, kept: KeptLayer, slots_BKf: Tensor) -> Tensor:
        """Rows (f * B * K) of a layer's memory, as `KeptLayer.gather` takes them."""
        batch, heads = len(kept.pads), kept.shape.num_kv_heads
        if self._places_BK is None or self._places_BK.shape != (batch, heads):
            self._places_BK = torch.arange(batch * heads, device=slots_BKf.device).view(batch, heads)
        return torch.add(self._places_BK, slots_BKf.permute(2, 0, 1), alpha=batch * heads).flatten()


def _all(kept: KeptLayer, pads: list[int], room: int) -> Fetched | None:
    kept.expect(room)
    bring = kept.gather(SlotsToCopy(rows_X=None, room=room))
    if bring is None:
        return None
    num_bytes = kept.fetched_bytes(kept.num_slots, room=room)
    return Fetched(bring=bring, num_bytes=num_bytes, under_way=kept.on_host, pads=pads, slots_BKm=None)


def _in_order(slots_BKm: Tensor, pads: Sequence[int]) -> Tensor:
    """Chosen slots with their padding first; the order of tokens does not matter."""
    return slots_BKm.sort(dim=-1).values if any(pads) else slots_BKm


def _completed(bring: Callable[[], Tensor], on_device: OnDevice, fetched_BKf: Tensor) -> Tensor:
    """Fetched slots with what the index holds of them, and of the slots after them."""
    slab_TBKX = bring()
    on_device.complete(slab_TBKX, fetched_BKf)
    return slab_TBKX
