"""Cuts a layer back to the tokens that a policy keeps, which may be of different numbers in its KV heads."""

# Legend: B batch, K kv heads, m kept slots.

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from runahead.cache.kept import KeptLayer
from runahead.cache.quantised.layer import QuantisedLayer
from runahead.thinning.quantised_ragged import QuantisedRagged
from runahead.thinning.ragged import RaggedLayer


def cut_back(
    layer: KeptLayer,
    slots_BKm: Tensor,
    *,
    room: int,
    tokens_B: Sequence[int] | None = None,
    compensates: bool = False,
) -> KeptLayer:
    """The layer with these slots alone: dense if all heads of a row keep equally many, else ragged.

    A layer in few bits becomes ragged, however many each head keeps, and remains so: which tokens are quantised then
    does not depend on other rows.

    Args:
        slots_BKm: as `Policy.keep` returns them; with `compensates` for each KV head, and never padding.
        room: new tokens for which to make room.
        tokens_B: number of tokens that all heads of a row keep (`Policy.tokens_after`), so that -1 is padding of the
            row; None if heads may keep different numbers.
        compensates: whether the mean of what a head dropped stands for it. The layer then is ragged.
    """
    if isinstance(layer, QuantisedLayer):
        before, layer = layer.num_slots, QuantisedRagged.of_dense(layer)
        slots_BKm = (slots_BKm - (before - layer.num_slots)).clamp_min(-1)  # a ragged layer has no slots of padding
    if isinstance(layer, QuantisedRagged):
        return layer.cut_to(slots_BKm, room=room, compensates=compensates)
    by_row = tokens_B is not None and not isinstance(layer, RaggedLayer)
    if compensates or (not by_row and bool((slots_BKm < 0).any())):
        return RaggedLayer.of(layer, slots_BKm, room=room, compensates=compensates)
    if isinstance(layer, RaggedLayer):
        return layer.dense(slots_BKm, room=room)
    layer.keep(slots_BKm, room=room, tokens_B=tokens_B)
    return layer
