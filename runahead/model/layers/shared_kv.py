"""Layers that store no keys and values, but read those of an earlier layer (Gemma 3n, Gemma 4).

They come after all layers that store some. So a rank that computes no logits is done with its chunk once these have
run, and where logits are computed, the reading layers need the last token alone, as in YOCO (arXiv 2405.05254).
"""

# Legend: B batch, C new tokens, D model dim.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from runahead.attention.partial import AttentionTerms
from runahead.model.layers.hooks import hook_before
from runahead.model.seam import SeamCache


def find_sources(calls: Sequence[tuple[int, Tensor, Tensor, Tensor, AttentionTerms]]) -> dict[int, int]:
    """Layers that read the keys and values of earlier ones, by their being the same tensors.

    Args:
        calls: layer, queries, keys, values and terms of every layer in order, of one forward.

    Returns:
        layer that reads -> layer that stores.

    Raises:
        ValueError: a layer that stores comes after one that reads. The message has no remedy.
    """
    stored: dict[int, int] = {}
    sources = {layer: source for layer, _, k, _, _ in calls if (source := stored.setdefault(id(k), layer)) != layer}
    if sources and min(sources) + len(sources) != len(calls):
        raise ValueError("has layers that store keys and values after layers that read those of others")
    return sources


def end_with_last(layers: Sequence[nn.Module]) -> None:
    """Let these layers, the last ones of a model, compute only the last token of forwards that ask for it.

    Forward pre-hooks cut what the layers are given. Hidden states are (..., C, D), all else (B or 1, C, ...).
    """
    for layer in layers:
        hook_before(layer, _shortened)


def _shortened(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any] | None:
    forward = SeamCache.among(args, keywords)
    if forward is None or not forward.ends_with_last:
        return None
    hidden = args[0] if args else keywords["hidden_states"]
    hidden = hidden[..., -1:, :]
    keywords = {name: _last(value, forward.num_new) for name, value in keywords.items()}
    if args:
        return (hidden, *(_last(value, forward.num_new) for value in args[1:])), keywords
    return args, keywords | {"hidden_states": hidden}


def _last(value: Any, num_new: int) -> Any:
    """Cut every tensor (B or 1, C, ...) in `value` to the last token; anything else stays as it is."""
    if isinstance(value, tuple):
        return tuple(_last(part, num_new) for part in value)
    if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == num_new:
        return value[:, -1:]
    return value
