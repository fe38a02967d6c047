"""Layers that hold a state are given the tokens of a forward in pieces, between which states are kept.

A piece ends where the state inside a text is to be kept, and where a padded row begins from a given state. The rest of
a layer computes all tokens at once, and so do the other layers: only the module that asks for the state, found by a
forward of one token, is called piece by piece. It is that of the model's own code.

Some rules of transformers (Mamba 1, Jamba) begin from zero wherever several tokens are given. As they decode, they take
a token after a state. There each token after a given state is a piece.
"""

# Legend: B batch, C new tokens.

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from runahead.attention.base import LayerAttention, Recording
from runahead.attention.states import StateLayer
from runahead.model.seam import SeamCache


def give_in_pieces(module: nn.Module, run: Callable[[LayerAttention], None]) -> None:
    """Have layers with states compute the tokens of a forward in its pieces (`StatesOfForward.ends`), from now on.

    Args:
        module: the model.
        run: runs one token through the model, with this attention.
    """
    entered, asking = list[nn.Module](), _Asking(start=0, pads=[0])
    asking.entered = entered
    with ExitStack() as hooks:
        for child in module.modules():
            for hook in (
                child.register_forward_pre_hook(lambda child, _: entered.append(child)),
                child.register_forward_hook(lambda *_: _dropped(entered)),
            ):
                hooks.callback(hook.remove)
        run(asking)
    for child in asking.found:
        if "forward" not in vars(child):
            child.forward = _in_pieces(child.forward)


class _Asking(Recording):
    """Notes which modules ask for states.

    Attributes:
        entered: modules whose forward has begun and not ended, the innermost last.
        found: the innermost of them at each state.
    """

    entered: list[nn.Module]

    def __init__(self, *, start: int, pads: list[int]) -> None:
        super().__init__(start=start, pads=pads)
        self.found: list[nn.Module] = []

    def load_state(self, number: int) -> StateLayer:
        self.found.append(self.entered[-1])
        return super().load_state(number)


def _dropped(entered: list[nn.Module]) -> None:
    entered.pop()


def _in_pieces(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module, called for each piece of its tokens."""

    @wraps(forward)
    def computed(*args: Any, **keywords: Any) -> Any:
        cache = SeamCache.among(args, keywords)
        if cache is None or cache.states is None or len(cache.states.ends) == 1:
            return forward(*args, **keywords)
        num_new, found = cache.num_new, list[Any]()

        def of_piece(value: Any, first: int, end: int) -> Any:
            is_by_token = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == num_new
            return value[:, first:end] if is_by_token else value

        for first, end in cache.states.pieces():
            named = {name: of_piece(each, first, end) for name, each in keywords.items()}
            found.append(forward(*(of_piece(each, first, end) for each in args), **named))
        return _joined(found)

    return computed


def _joined(pieces: Sequence[Any]) -> Any:
    """Outputs of a module for all its tokens: one or several tensors (B, C, ...). The rest is of no token."""
    first = pieces[0]
    if isinstance(first, Tensor):
        return torch.cat(list(pieces), dim=1)
    return tuple(_joined(each) for each in zip(*pieces, strict=True)) if isinstance(first, tuple) else first
