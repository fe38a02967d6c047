"""Layers after the last one that stores keys and values or a state, of which only the last token is needed.

Some models end with layers that store none and read those of an earlier layer (Gemma 3n, Gemma 4). They come after all
layers that store some. So a rank that computes no logits is done with its chunk once these have stored it, and where
logits are computed, what follows needs the last token alone, as in YOCO (arXiv 2405.05254). In every model that is true
of the rest of the last layer, after its keys and values, too: its code is run until its attention has stored them, and
once more for the last token.
"""

# Legend: B batch, C new tokens, D model dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import Any

from torch import Tensor, nn

from runahead.attention.partial import AttentionTerms
from runahead.model.layers.hooks import hook_before
from runahead.model.seam import SeamCache, for_tokens


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
    if last is not None and not (isinstance(own, partial) and own.func is _run_for_last):
        last.forward = update_wrapper(partial(_run_for_last, last.forward, not layers), last.forward)


def _run_for_last(forward: Callable[..., Any], widens: bool, /, *args: Any, **keywords: Any) -> Any:
    """Run a layer until it has stored keys and values, and again for the last token.

    Args:
        widens: modules after it may expect as many tokens as the model was given. Each is given the last one.
    """
    seam = SeamCache.among(args, keywords)
    if seam is None or not seam.ends_with_last:
        return forward(*args, **keywords)
    seam.width = (args[0] if args else keywords["hidden_states"]).shape[-2]  # if policies leave fewer, too

    def again() -> Any:
        last_args, last_keywords = _cut(seam, args, keywords)
        output = forward(*last_args, **last_keywords)
        if not widens and not seam.block_ends:
            return output
        hidden, *rest = output if isinstance(output, tuple) else (output,)
        hidden = hidden.expand(*hidden.shape[:-2], seam.width, -1)
        return (hidden, *rest) if isinstance(output, tuple) else hidden

    return seam.run_last(lambda: forward(*args, **keywords), again)


def _shortened(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any] | None:
    forward = SeamCache.among(args, keywords)
    return None if forward is None or not forward.ends_with_last else _cut(forward, args, keywords)


def _cut(forward: SeamCache, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments of a layer for the last token alone."""
    hidden = args[0] if args else keywords["hidden_states"]
    hidden = hidden[..., -1:, :]
    keywords = {name: _last(value, forward.width) for name, value in keywords.items()}
    if args:
        return (hidden, *(_last(value, forward.width) for value in args[1:])), keywords
    return args, keywords | {"hidden_states": hidden}


def _last(value: Any, num_new: int) -> Any:
    """Cut what a layer is given to the last token."""
    return for_tokens(value, num_new, lambda x: x[:, -1:])
