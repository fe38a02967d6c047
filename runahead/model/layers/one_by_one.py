"""Layers that take a given state for a single token alone: they are given the tokens after it one by one.

Some rules of transformers (Mamba 1, Jamba) begin from zero wherever several tokens are given. As they decode, they take
a token after a state. So the module of a layer that asks for the state, found by a forward of one token, computes the
tokens of a text's beginning at once, and those that come after a state one after another.
"""

# Legend: B batch, C new tokens.

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from runahead.attention.base import LayerAttention, Recording
from runahead.attention.states import StateLayer
from runahead.model.seam import SeamCache


def give_one_by_one(module: nn.Module, run: Callable[[LayerAttention], None]) -> None:
    """Have layers with states compute the tokens after a given state one by one, from now on.

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
            child.forward = _one_by_one(child.forward)


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


def _one_by_one(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of a module, called for each token that comes after a given state."""

    @wraps(forward)
    def computed(*args: Any, **keywords: Any) -> Tensor:
        cache = SeamCache.among(args, keywords)
        if cache is None or cache.num_new == 1 or cache.states is None or not cache.states.are_given:
            return forward(*args, **keywords)
        num_new, states = cache.num_new, cache.states

        def of_token(value: Any, place: int) -> Any:
            is_by_token = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == num_new
            return value[:, place : place + 1] if is_by_token else value

        tokens = []
        for place in range(num_new):
            states.goes_on = place < num_new - 1
            named = {name: of_token(each, place) for name, each in keywords.items()}
            tokens.append(forward(*(of_token(each, place) for each in args), **named))
        return torch.cat(tokens, dim=1)

    return computed
