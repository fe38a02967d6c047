"""Keys and values of a text from a cache that transformers filled, as layers of a conversation."""

# Legend: B batch, K kv heads, T tokens, H key dim, V value dim, X = H + V, C some tokens,
# S tokens of the padded text.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache

from policies.row_values import row_values
from runahead.attention.base import LayerAttention
from runahead.attention.partial import AttentionTerms
from runahead.cache.kept import KeptLayer
from runahead.cache.kept_cache import KeptCache
from runahead.cache.slabs import KVShape
from runahead.dynamic_cache.checked import LAYERS
from runahead.dynamic_cache.comparison import is_in_few_bits, kv_differ
from runahead.model.model import Model

PIECE_TOKENS = 4096
"""Tokens of which the first layer's keys and values are computed at a time."""


def taken(cache: Cache, model: Model, *, num_tokens: int, pads: Sequence[int]) -> KeptCache:
    """Copy what a cache of transformers holds of a text.

    Layers with a window may have lost the tokens that no later one sees.

    Args:
        num_tokens: of the padded text, which the cache has.
        pads: left padding of each row.

    Raises:
        ValueError: the cache has other layers, shapes, dtypes, rows or tokens than the model's own would have.
    """
    shapes = model.kv_shapes
    kinds = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in LAYERS})
    if kinds or len(cache.layers) != len(shapes):
        raise ValueError(
            f"the cache has {len(cache.layers)} layers ({' and '.join(kinds) or 'as those of DynamicCache'}), and "
            f"model {model.name} stores keys and values in {len(shapes)}; give the DynamicCache that its "
            "generate filled"
        )
    layers = list[KeptLayer]()
    for number, (layer, shape) in enumerate(zip(cache.layers, shapes, strict=True)):
        if layer.get_seq_length() != num_tokens:
            raise ValueError(
                f"layer {number} of the cache counts {layer.get_seq_length()} tokens, and layer 0 {num_tokens}; a "
                "layer with a window has to be given all tokens of a text, of which it keeps the last ones"
            )
        layers.append(_layer(layer.keys, layer.values, shape, model, number, num_tokens, pads))
    return KeptCache(layers)


def _layer(
    k_BKTH: Tensor | None,
    v_BKTV: Tensor | None,
    shape: KVShape,
    model: Model,
    number: int,
    num_tokens: int,
    pads: Sequence[int],
) -> KeptLayer:
    """One layer, as `taken`."""
    batch, heads = len(pads), shape.num_kv_heads
    found = [] if k_BKTH is None or v_BKTV is None else [k_BKTH, v_BKTV]
    widths = [(*each.shape[:2], each.shape[3], each.dtype) for each in found]
    if widths != [(batch, heads, dim, shape.dtype) for dim in (shape.key_dim, shape.value_dim)]:
        told = " and ".join(f"{tuple(each.shape)} {each.dtype}" for each in found) or "nothing"
        raise ValueError(
            f"layer {number} of the cache holds {told}, and keys and values of model {model.name} are ({batch}, "
            f"{heads}, tokens, {shape.key_dim}) and ({batch}, {heads}, tokens, {shape.value_dim}) in {shape.dtype}; "
            "give the cache of the same model, dtype and rows"
        )
    kv_TBKX = torch.cat([each.to(model.device) for each in found], dim=-1).permute(2, 0, 1, 3).contiguous()
    first = num_tokens - len(kv_TBKX)
    if first > (seen := first_seen(model, number, num_tokens, pads)):
        raise ValueError(
            f"layer {number} of the cache has the last {len(kv_TBKX)} of {num_tokens} tokens, and the next token sees "
            f"{num_tokens - seen} of them; give a cache that was made with the config of this model, or without one"
        )
    index_T1 = torch.arange(first, num_tokens, device=model.device)[:, None]
    return KeptLayer(
        shape=shape,
        slab_TBKX=kv_TBKX,
        placed_TBK=(index_T1 - row_values(pads, model.device))[:, :, None].int(),
        pads=list(pads),
        num_slots=len(kv_TBKX),
        first=first,
    )


def first_seen(model: Model, layer: int, token: int, pads: Sequence[int]) -> int:
    """Index in the padded text of the first token that a later one sees in a layer."""
    rule = model.rules[layer]
    return min(pad + (0 if rule is None else rule.first_key(token - pad)) for pad in pads)


class _FirstLayer(Exception):
    """Keys and values (B, K, C, X) of some tokens in the first layer, which need no others."""

    def __init__(self, kv_BKCX: Tensor) -> None:
        self.kv_BKCX = kv_BKCX


class _OfFirstLayer(LayerAttention):
    """Attention of a forward that ends as soon as the first layer's keys and values are there."""

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        raise _FirstLayer(torch.cat([k_BKCH, v_BKCV], dim=-1))


def require_same_ids(cache: KeptCache, model: Model, ids_BS: Tensor, pads: Sequence[int]) -> None:
    """Check that a cache is of this text: that its first layer has the keys and values of all tokens that it holds.

    Ids of tokens that it has lost, before its window, are in no layer's keys and values alone, and are not checked.

    Args:
        ids_BS: the padded text.
        pads: left padding of each row.

    Raises:
        ValueError: the ids or the padding are others, or the weights.
    """
    layer = cache.layers[0]
    for start in range(max(layer.first, min(pads)), layer.end, PIECE_TOKENS):
        ids_BC = ids_BS[:, start : start + PIECE_TOKENS]
        given_BKCX = layer.slab_TBKX[start - layer.first :][: ids_BC.shape[1]].permute(1, 2, 0, 3)
        index_C = torch.arange(start, start + ids_BC.shape[1], device=model.device)
        is_text_BC = index_C >= row_values(pads, model.device)[:, None]
        try:
            attention = _OfFirstLayer(start=start, pads=list(pads))
            model.forward(ids_BC, attention, start=start, pads=list(pads), length=ids_BS.shape[1])
        except _FirstLayer as found:
            mine_BKCX = found.kv_BKCX
        theirs, mine = (each.transpose(1, 2)[is_text_BC] for each in (given_BKCX, mine_BKCX))
        if off := kv_differ(theirs, mine, layer.shape.key_dim, in_few_bits=is_in_few_bits(model)):
            raise ValueError(
                f"the first layer of the cache has other keys or values than model {model.name} computes of these ids "
                f"({off}); give the ids of exactly its tokens, pads if they are padded on the left, and a cache of the "
                "same weights"
            )


def kv_of_last(cache: KeptCache) -> list[Tensor]:
    """Keys and values (B, K, X) of the last token in each layer, in place."""
    return [layer.slab_TBKX[layer.num_slots - 1] for layer in cache.layers]


def require_same(
    computed: Sequence[Tensor], given: Sequence[Tensor], cache: KeptCache, model: Model, pads: Sequence[int]
) -> bool:
    """Check that a text's last token has the keys and values that the model computes for it, as far as that can be.

    Args:
        computed, given: keys and values (B, K, X) of each layer, by the model and as they were taken.
        cache: the text, in which layers may have lost a token that the last one saw.
        pads: left padding of each row.

    Returns:
        whether all layers were compared: those after such a layer are not.

    Raises:
        ValueError: they differ.
    """
    for number, (mine_BKX, theirs_BKX) in enumerate(zip(computed, given, strict=True)):
        key_dim = cache.layers[number].shape.key_dim
        if off := kv_differ(theirs_BKX, mine_BKX, key_dim, in_few_bits=is_in_few_bits(model)):
            raise ValueError(
                f"layer {number} of the cache has other keys or values of the last token than model {model.name} "
                f"computes ({off}); give a cache of the same weights, with an attention that computes all of the "
                'model, as attn_implementation="eager" does'
            )
        layer = cache.layers[number]
        if layer.first > first_seen(model, number, layer.end - 1, pads):
            return False
    return True
