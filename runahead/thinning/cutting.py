"""Cuts a layer back to the tokens that a policy keeps, which may be of different numbers in its KV heads."""

# Legend: B batch, K kv heads, S = B * K, m kept slots.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from policies.row_values import sent
from runahead.cache.kept import KeptLayer
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
    does not depend on other rows. The host waits once for the numbers of tokens, or not at all with `tokens_B` if all
    tokens are exact.

    Args:
        slots_BKm: as `Policy.keep` returns them; with `compensates` for each KV head, and never padding.
            Leading places may be -1 in all heads; they are cut off.
        room: new tokens for which to make room.
        tokens_B: number of tokens that all heads of a row keep (`Policy.tokens_after`), so that -1 is padding of the
            row; None if heads may keep different numbers.
        compensates: whether the mean of what a head dropped stands for it. The layer then is ragged.
    """
    cut = _cut(layer, slots_BKm, room=room, tokens_B=tokens_B, compensates=compensates)
    if cut is not layer:
        cut.queries = layer.queries_left(cut.tokens_BK)
    return cut


def _cut(
    layer: KeptLayer, slots_BKm: Tensor, *, room: int, tokens_B: Sequence[int] | None, compensates: bool
) -> KeptLayer:
    """`cut_back` to a layer that has no queries, if it is another one."""
    if layer.codes is not None:
        before, layer = layer.num_slots, RaggedLayer.of_codes(layer)
        slots_BKm = (slots_BKm - (before - layer.num_slots)).clamp_min(-1)  # a ragged layer has no slots of padding
    if isinstance(layer, RaggedLayer) and layer.coded is not None:
        return layer.cut_to(layer.coded, slots_BKm, room=room, compensates=compensates)
    if tokens_B is None or compensates or layer.head_pads is not None:
        kept_S, tokens_S = _counts(layer, slots_BKm)
        slots_BKm = slots_BKm[..., slots_BKm.shape[2] - max(1, *kept_S) :]
        if compensates or min(kept_S) < slots_BKm.shape[2]:
            return RaggedLayer.from_slots(layer, slots_BKm, room=room, compensates=compensates, lengths=kept_S)
        heads = len(tokens_S) // len(slots_BKm)
        tokens_B = tokens_S[::heads]
        assert tokens_S == [tokens for tokens in tokens_B for _ in range(heads)], "heads of a row keep equally many"
    return layer.keep(slots_BKm, room=room, tokens_B=tokens_B)


def _counts(layer: KeptLayer, slots_BKm: Tensor) -> tuple[list[int], list[int]]:
    """Number of slots (S) of each row and head that are not -1, and number of those that hold tokens."""
    first_BK1 = sent(torch.tensor(layer.head_pads or [[pad] for pad in layer.pads]), slots_BKm.device)[..., None]
    are = torch.broadcast_tensors(slots_BKm >= 0, slots_BKm >= first_BK1)
    kept_S, tokens_S = torch.stack(are).sum(dim=-1).flatten(1).tolist()
    return kept_S, tokens_S
