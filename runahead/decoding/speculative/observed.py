"""Computes the last tokens of a prompt once more: their queries say which keys and values before them matter."""

# Legend: B batch, C last tokens.

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from policies.row_values import sent
from runahead.attention.base import ForwardEndsHere
from runahead.attention.partial import AttentionTerms
from runahead.attention.states import States
from runahead.cache.attention import CausalAttention, LayerCall, LayerHook
from runahead.cache.base import KVStore, SeenKV
from runahead.cache.index import ALL_TOKENS
from runahead.cache.kept import KeptLayer
from runahead.cache.kept_cache import KeptCache
from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import Slabs
from runahead.model.model import Model

Observe = Callable[[int, SeenKV, AttentionTerms], object]
"""Called after each layer's attention with the number of the layer, its keys, values and queries, and the terms."""


def slabs_of(row: KVStore) -> Slabs:
    """The memory of a row, which holds all that its queries see."""
    if isinstance(row, KeptCache):  # of a conversation without policies: each slot has its own number's token
        assert not any(pad for layer in row.layers for pad in layer.pads), "a token's slot is its index without padding"
        return Slabs.each_its_own([layer.memory for layer in row.layers])
    assert row.slabs is not None and row.slab_index is ALL_TOKENS, (type(row), row.slab_index)
    return row.slabs


def first_observed(model: Model, whole: Slabs, num_tokens: int, num_last: int) -> int:
    """First of a row's last `num_last` tokens that can be computed again.

    In a layer with a sliding window, a rank stores no keys before those that the first token of its own chunk sees.

    Args:
        whole: keys and values of the row.
        num_tokens: number of its tokens.
    """
    start = max(0, num_tokens - num_last)
    for number, slab in enumerate(whole.by_layer):
        while model.first_needed(number, start, [0]) < slab.first:
            start += 1
    return start


def observe(
    model: Model, whole: Slabs, ids: Sequence[int], start: int, each_layer: Observe, states: States | None = None
) -> None:
    """Compute the last tokens of a row that is stored; nothing is stored.

    Args:
        whole: keys and values of the row.
        ids: its tokens.
        start: first token that is computed; see `first_observed`.
        states: before it, in layers that hold one; they are changed.
    """
    ids_1C = sent(torch.tensor([list(ids[start:])]), model.device)
    cache = KVCache(whole)
    cache.states = states
    attention = CausalAttention(cache, start=start, pads=[0], hooks=[_Observing(each_layer)], ends=model.last_attention)
    with suppress(ForwardEndsHere):
        model.forward(ids_1C, attention, start=start, pads=[0], length=len(ids))


def as_kept(model: Model, whole: Slabs, layer: int, num_tokens: int, *, has_room: bool = False) -> KeptLayer:
    """One layer of a row as policies see it, in the same memory.

    Args:
        num_tokens: the first tokens of the row, which the layer has.
        has_room: the memory for later tokens belongs to the layer, too.
    """
    slab = whole.by_layer[layer]
    end = slab.end if has_room else num_tokens
    positions_T = torch.arange(slab.first, end, dtype=torch.int32, device=model.device)
    return KeptLayer(
        shape=model.kv_shapes[layer],
        slab_TBKX=slab.tokens(slab.first, end),
        placed_TBK=positions_T[:, None, None],
        pads=[0],
        num_slots=num_tokens - slab.first,
        first=slab.first,
    )


class _Observing(LayerHook):
    """Shows what each layer has seen, and lets it store nothing."""

    def __init__(self, each_layer: Observe) -> None:
        self._each_layer = each_layer

    def before_save(self, call: LayerCall) -> None:
        call.stores = False

    def closed(self, call: LayerCall) -> None:
        self._each_layer(call.layer, call.seen, call.terms)
