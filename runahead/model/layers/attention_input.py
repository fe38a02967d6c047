"""The hidden states that each attention layer is given: the layer's input after any norm before its attention.

The module of a layer that is given them and calls our attention is found by a forward of one token. From then on a
hook on it shows them to the attention of each forward.
"""

# Legend: B batch, N query heads, C new tokens, V value dim, D model dim.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from runahead.attention.base import LayerAttention, Recording
from runahead.model.seam import SeamCache


def show_attention_inputs(
    module: nn.Module, run: Callable[[LayerAttention], None], num_layers: int, model_dim: int
) -> list[int]:
    """Show the input of each layer's attention to the attention of every later forward.

    Args:
        module: the model.
        run: runs one token through the model, with this attention.
        model_dim: width of the hidden states.

    Returns:
        width D of each layer's attention input.

    Raises:
        ValueError: it is not known what a layer's attention is given. The message has no remedy.
    """
    modules = [child for child in attention_modules(module, run, model_dim) if child is not None]
    if len(modules) < num_layers or len(set(modules)) < num_layers:
        raise ValueError("calls attention from no module of a layer's own that is given hidden states")
    hooks = [
        child.register_forward_pre_hook(_showing(layer, model_dim), with_kwargs=True)
        for layer, child in enumerate(modules)
    ]
    recording = Recording(start=0, pads=[0])
    run(recording)
    shown = recording.attention_inputs
    if len(shown) < num_layers:
        for hook in hooks:
            hook.remove()
        missing = next(layer for layer in range(num_layers) if layer not in shown)
        raise ValueError(f"does not tell the attention of layer {missing} which forward it is part of")
    return [shown[layer].shape[2] for layer in range(num_layers)]


def attention_modules(
    module: nn.Module, run: Callable[[LayerAttention], None], model_dim: int
) -> list[nn.Module | None]:
    """The module of each layer that is given hidden states and calls our attention; None if there is none.

    Args:
        module: the model.
        run: runs one token through the model, with this attention.
        model_dim: width of the hidden states.
    """
    running, found = list[nn.Module](), list[nn.Module | None]()

    def note(layer: int, out_BNCV: Tensor) -> Tensor:
        found.append(running[-1] if running else None)
        return out_BNCV

    def enter(child: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if hidden_states(args, keywords, model_dim) is not None:
            running.append(child)

    def leave(child: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if running and running[-1] is child:
            running.pop()

    hooks = [child.register_forward_pre_hook(enter, with_kwargs=True) for child in module.modules()]
    hooks += [child.register_forward_hook(leave) for child in module.modules()]
    try:
        run(Recording(start=0, pads=[0], answer=note))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _showing(layer: int, model_dim: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    """Make a hook that shows the hidden states that a module is given to the attention of the forward."""

    def hook(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        x_BCD = hidden_states(args, keywords, model_dim)
        forward = SeamCache.among(args, keywords)
        if x_BCD is not None and forward is not None:  # None while transformers' own attention computes
            forward.attention.see_attention_input(layer, x_BCD)

    return hook


def hidden_states(args: tuple[Any, ...], keywords: dict[str, Any], model_dim: int) -> Tensor | None:
    """The first argument, if it is hidden states (B, C, D)."""
    given = args[0] if args else keywords.get("hidden_states")
    if isinstance(given, Tensor) and given.ndim == 3 and given.shape[2] == model_dim and given.is_floating_point():
        return given
    return None
