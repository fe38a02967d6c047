"""Cuts a layer back to the tokens that a policy keeps, which may be of different numbers in its KV heads."""

# Legend: B batch, K kv heads, m kept slots.

from __future__ import annotations

from torch import Tensor

from runahead.cache.kept import KeptLayer
from runahead.cache.quantised.layer import QuantisedLayer
from runahead.thinning.quantised_ragged import QuantisedRagged
from runahead.thinning.ragged import RaggedLayer


def cut_back(
    layer: KeptLayer, slots_BKm: Tensor, *, room: int, by_head: bool = True, compensates: bool = False
) -> KeptLayer:
    """The layer with these slots alone: dense if all heads of a row keep equally many, else ragged.

    A layer in few bits becomes ragged, however many each head keeps, and remains so: which tokens are quantised then
    does not depend on other rows.

    Args:
        slots_BKm: as `Policy.keep` returns them; with `compensates` for each KV head, and never padding.
        room: new tokens for which to make room.
        by_head: whether heads may keep different numbers (`Policy.keeps_ragged`); else -1 is padding of a whole row.
        compensates: whether the mean of what a head dropped stands for it. The layer then is ragged.
    """
    if isinstance(layer, QuantisedLayer):
        before, layer = layer.num_slots, QuantisedRagged.of_dense(layer)
        slots_BKm = (slots_BKm - (before - layer.num_slots)).clamp_min(-1)  # a ragged layer has no slots of padding
    if isinstance(layer, QuantisedRagged):
        return layer.cut_to(slots_BKm, room=room, compensates=compensates)
    alike = slots_BKm.shape[1] == 1 and not (by_head and layer.shape.num_kv_heads == 1)
    by_row = alike and not isinstance(layer, RaggedLayer) and len(set(layer.pads)) > 1
    if compensates or (not by_row and bool((slots_BKm < 0).any())):
        return RaggedLayer.of(layer, slots_BKm, room=room, compensates=compensates)
    if isinstance(layer, RaggedLayer):
        return layer.dense(slots_BKm, room=room)
    layer.keep(slots_BKm, room=room)
    return layer
