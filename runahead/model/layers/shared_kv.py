"""Layers after the last one that stores keys and values or a state, of which only the last token is needed.

Some models end with layers that store none and read those of an earlier layer (Gemma 3n, Gemma 4). They come after all
layers that store some. So a rank that computes no logits is done with its chunk once these have stored it, and where
logits are computed, what follows needs the last token alone, as in YOCO (arXiv 2405.05254). In every model that is true
of the rest of the last layer, after its keys and values, too: its code is run until its attention has stored them, and
once more for the last token.
"""

# Legend: B batch, C new tokens, D model dim.

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, update_wrapper
from typing import Any

from torch import Tensor, nn

from runahead.attention.partial import AttentionTerms
from runahead.model.layers.hooks import hook_before
from runahead.model.seam import SeamCache, run_for_last


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


def end_with_last(layers: Sequence[nn.Module], last: nn.Module | None = None) -> None:
    """Let layers compute only the last token of forwards that ask for it.

    Hidden states are (..., C, D), all else (B or 1, C, ...).

    Args:
        layers: those after the last one that stores anything. Forward pre-hooks cut what they are given.
        last: this one, if it stores keys and values alone. Its `forward` is called twice, inside of its hooks.
    """
    for layer in layers:
        hook_before(layer, _shortened)
    own = None if last is None else vars(last).get("forward")
    if last is not None and not (isinstance(own, partial) and own.func is run_for_last):
        last.forward = update_wrapper(partial(run_for_last, last.forward, not layers), last.forward)


def _shortened(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any] | None:
    forward = SeamCache.among(args, keywords)
    return None if forward is None or not forward.ends_with_last else forward.last_alone(args, keywords)
