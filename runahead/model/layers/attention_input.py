"""The hidden states that each attention layer is given: the layer's input after any norm before its attention.

The module of a layer that is given them and calls our attention is found by a forward of one token. From then on a
hook on it shows them to the attention of each forward.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens, H key dim, V value dim, D model dim.

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from runahead.attention.base import LayerAttention, Recording
from runahead.attention.partial import AttentionTerms
from runahead.model.seam import SeamCache


class _Finding(Recording):
    """Attention that notes which module called it.

    Attributes:
        running: modules that were given hidden states and have not returned, the innermost last.
        found: of each layer, the innermost of them.
    """

    def __init__(self, *, start: int, pads: list[int]) -> None:
        super().__init__(start=start, pads=pads)
        self.running: list[nn.Module] = []
        self.found: list[nn.Module | None] = []

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        self._note()
        return super().attend(layer, q_BNCH, k_BKCH, v_BKCV, terms)

    def attend_shared(
        self, layer: int, source: int, q_BNCH: Tensor, terms: AttentionTerms, *, skipped: int = 0
    ) -> Tensor:
        self._note()
        return super().attend_shared(layer, source, q_BNCH, terms, skipped=skipped)

    def _note(self) -> None:
        self.found.append(self.running[-1] if self.running else None)


class _Shown(Recording):
    """Attention that notes what it is shown."""

    def __init__(self, *, start: int, pads: list[int]) -> None:
        super().__init__(start=start, pads=pads)
        self.dims: dict[int, int] = {}

    def see_attention_input(self, layer: int, x_BCD: Tensor) -> None:
        self.dims[layer] = x_BCD.shape[2]


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
    shown = _Shown(start=0, pads=[0])
    run(shown)
    if len(shown.dims) < num_layers:
        for hook in hooks:
            hook.remove()
        missing = next(layer for layer in range(num_layers) if layer not in shown.dims)
        raise ValueError(f"does not tell the attention of layer {missing} which forward it is part of")
    return [shown.dims[layer] for layer in range(num_layers)]


def attention_modules(
    module: nn.Module, run: Callable[[LayerAttention], None], model_dim: int
) -> list[nn.Module | None]:
    """The module of each layer that is given hidden states and calls our attention; None if there is none.

    Args:
        module: the model.
        run: runs one token through the model, with this attention.
        model_dim: width of the hidden states.
    """
    finding = _Finding(start=0, pads=[0])

    def enter(child: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if hidden_states(args, keywords, model_dim) is not None:
            finding.running.append(child)

    def leave(child: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if finding.running and finding.running[-1] is child:
            finding.running.pop()

    hooks = [child.register_forward_pre_hook(enter, with_kwargs=True) for child in module.modules()]
    hooks += [child.register_forward_hook(leave) for child in module.modules()]
    try:
        run(finding)
    finally:
        for hook in hooks:
            hook.remove()
    return finding.found


def _showing(layer: int, model_dim: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    """Make a hook that shows the hidden states that a module is given to the attention of the forward."""

    def hook(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        x_BCD = hidden_states(args, keywords, model_dim)
        attention = next(_attentions(args, keywords), None)
        if x_BCD is not None and attention is not None:  # None while transformers' own attention computes
            attention.see_attention_input(layer, x_BCD)

    return hook


def _attentions(args: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[LayerAttention]:
    """The attention of the forward, as an argument or as a part of the cache in one."""
    for given in (*args, *keywords.values()):
        if isinstance(given, LayerAttention):
            yield given
        elif isinstance(given, SeamCache):
            yield given.attention


def hidden_states(args: tuple[Any, ...], keywords: dict[str, Any], model_dim: int) -> Tensor | None:
    """The first argument, if it is hidden states (B, C, D)."""
    given = args[0] if args else keywords.get("hidden_states")
    if isinstance(given, Tensor) and given.ndim == 3 and given.shape[2] == model_dim and given.is_floating_point():
        return given
    return None
