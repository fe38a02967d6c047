"""States as rows: the state of a layer is one token of bytes where slabs, messages and tiers hold keys and values."""

# Legend: B batch, Z bytes of a layer's state.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runahead.attention.states import States, StateShape
from runahead.cache.slabs import KVShape


def row_shape(shape: StateShape) -> KVShape:
    """The shape of a slab in which states take the place of tokens."""
    return KVShape(num_kv_heads=1, key_dim=shape.num_bytes, value_dim=0, dtype=torch.uint8)


def state_rows(states: States) -> list[Tensor]:
    """A copy of the states of one row: of each layer a token (1, 1, Z), all in one memory."""
    sizes, (*_, first) = [layer.num_bytes for layer in states.layers], next(states.layers[0].tensors())
    parts = torch.empty(sum(sizes), dtype=torch.uint8, device=first.device).split(sizes)
    for layer, part in zip(states.layers, parts, strict=True):
        layer.write(part[None])
    return [part.view(1, 1, -1) for part in parts]


def states_of(
    rows: Sequence[Sequence[Tensor] | None], shapes: Sequence[StateShape], nothing: States, device: torch.device
) -> States:
    """The states of a batch, which its forwards may change.

    Args:
        rows: of each row what `state_rows` returned; None: it has no token yet.
        nothing: the states of a text without tokens, which become those of the batch.
    """
    for number, (layer, shape) in enumerate(zip(nothing.layers, shapes, strict=True)):
        empty_Z = torch.zeros(1, dtype=torch.uint8, device=device).expand(shape.num_bytes)
        layer.read([empty_Z if row is None else row[number].flatten() for row in rows], shape)
    nothing.begun = [row for row, given in enumerate(rows) if given is not None]
    return nothing
