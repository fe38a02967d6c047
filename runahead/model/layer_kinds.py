"""Kinds of layers that the runtime computes, and for a model that has others one sentence that says why it does not.

A layer attends once, by transformers' attention interface, to keys and values of its own or an earlier layer's: to all
that are stored, those in a sliding window or those in a chunk, and to none of later tokens. It may hold a state of the
text in transformers' cache beside or in place of these, or neither.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from runahead.features.layer_types import WITH_STATES, WITHOUT_CACHE

KINDS = ("full_attention", "sliding_attention", "chunked_attention")
"""Layer types of transformers' configs that attend to keys and values alone."""

COMPUTED = (*KINDS, *WITH_STATES, *WITHOUT_CACHE)
"""Layer types that the runtime computes."""

_OTHERS = {
    "indexed_attention": "chooses keys by an index",
    "minimax_m3_sparse": "chooses keys by an index",
    "compressed_sparse_attention": "compresses keys",
    "heavily_compressed_attention": "compresses keys",
}
"""Layer types that the runtime does not compute, and what these layers are or do."""


def decoder_config(config: Any) -> Any:
    """The config of the text decoder, of a checkpoint or of a model that was built from it.

    Models of an encoder and a decoder in one config count layers by the encoder's, once transformers has built the
    decoder alone.
    """
    if hasattr(config, "decoder_layers") and not config.is_encoder_decoder:
        config = copy.copy(config)
        config.is_encoder_decoder = True
    return config.get_text_config(decoder=True)


def other_kinds(config: Any) -> dict[str, int]:
    """Kinds of layers that the runtime does not compute, by a text model's config: their number, the most first."""
    kinds = getattr(config, "layer_types", None) or []
    return dict(Counter(described(kind) for kind in kinds if kind not in COMPUTED).most_common())


def described(kind: str) -> str:
    return f"{kind} ({_OTHERS[kind]})" if kind in _OTHERS else kind


def unsupported_kinds(config: Any) -> str | None:
    """Why a model is not computed, by its config; None if that gives no reason.

    Args:
        config: transformers' config of the text model.

    Returns:
        What follows the model's name in a sentence.
    """
    others = other_kinds(config)
    if not others:
        return None
    named = ", ".join(f"{number} {kind}" for kind, number in others.items())
    supported = f"{', '.join(COMPUTED[:-1])} and {COMPUTED[-1]}"
    return f"has layers that are not supported: {named} of {len(config.layer_types)}; {supported} are"


def unsupported_calls(layers: Sequence[int], num_layers: int, others: Collection[int] = ()) -> str | None:
    """Why a model is not computed, by the layers that called attention in one forward; None if that gives no reason.

    Args:
        layers: numbers of the layers, in the order of their calls.
        num_layers: number of layers.
        others: layers that need not call it.

    Returns:
        What follows the model's name in a sentence.
    """
    called = set(layers)
    if list(layers) == [layer for layer in range(num_layers) if layer in called or layer not in others]:
        return None if layers or others else "has no layer with attention, which is not supported"
    if len(layers) > len(called):
        what = f"calls attention {len(layers)} times in {len(called)} layers"
    elif silent := len(set(range(num_layers)) - called - set(others)):
        what = f"has layers that do not call transformers' attention interface ({silent} of {num_layers})"
    else:
        what = "calls attention in another order than that of its layers"
    return f"{what}, which is not supported"
