"""Removal of the tokens that a policy dropped from the hidden states, before each decoder layer.

Forward pre-hooks on the model's decoder layers do this, so the model's code stays untouched. The tensors that a model
makes once for the whole chunk (rotary tables, position ids) are cut to the same tokens. The hooks stay, and each call
tells them by its `SeamCache` which tokens of its own forward are left.
"""

# Legend: B batch, C new tokens of the chunk, c those that are not dropped.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runahead.model.layers.hooks import hook_after, hook_before
from runahead.model.seam import SeamCache, for_tokens


def decoder_layers(module: nn.Module, num_layers: int) -> list[nn.Module]:
    """Find the decoder layers of a model, in order.

    Raises:
        ValueError: the model has no `ModuleList` of so many layers.
    """
    for child in module.modules():
        if isinstance(child, nn.ModuleList) and len(child) == num_layers:
            return list(child)
    raise ValueError(
        f"{type(module).__name__} has no list of its {num_layers} layers, so none can compute fewer tokens; "
        "use a policy that only evicts"
    )


def narrow(layers: Sequence[nn.Module]) -> None:
    """Let all decoder layers, in order, compute only the tokens that are left in the forward that runs them."""
    for layer in layers:
        hook_before(layer, _narrowed, first=True)  # others cut what is left to the last token
    # Modules after the layers may expect the whole chunk. Zeros do no harm: only the last token's output is used.
    hook_after(layers[-1], _widened)


def _narrowed(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any] | None:
    forward = SeamCache.among(args, keywords)
    if forward is None or forward.tokens is None or forward.tokens.left_Bc is None:
        return None
    tokens, left_Bc, num_new = forward.tokens, forward.tokens.left_Bc, forward.num_new
    hidden = args[0] if args else keywords["hidden_states"]
    if tokens.pending_Bc is not None:
        hidden = _taken(hidden, tokens.pending_Bc)
        tokens.pending_Bc = None
    rest = {name: _cut(value, num_new, left_Bc) for name, value in keywords.items() if name != "hidden_states"}
    if args:
        return (hidden, *(_cut(value, num_new, left_Bc) for value in args[1:])), rest
    return args, {"hidden_states": hidden, **rest}


def _widened(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
    forward = SeamCache.among(args, keywords)
    if forward is None or forward.tokens is None or forward.tokens.left_Bc is None:
        return None
    hidden = output[0] if isinstance(output, tuple) else output
    whole = hidden.new_zeros(hidden.shape[0], forward.num_new, hidden.shape[2])
    whole.scatter_(1, forward.tokens.left_Bc[:, :, None].expand_as(hidden), hidden)
    return (whole, *output[1:]) if isinstance(output, tuple) else whole


def _cut(value: Any, num_new: int, left_Bc: Tensor) -> Any:
    """Select the tokens of what a layer is given."""
    return for_tokens(value, num_new, lambda x: _taken(x, left_Bc))


def _taken(x_BCx: Tensor, index_Bc: Tensor) -> Tensor:
    """Select tokens: (B or 1, C, ...) at indices (B, c) -> (B, c, ...)."""
    rows_B1 = torch.arange(len(index_Bc), device=x_BCx.device)[:, None]
    return x_BCx.expand(len(index_Bc), *x_BCx.shape[1:])[rows_B1, index_Bc]
