"""Forwards that go on from what an earlier forward of the same tokens has computed in the first layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def beginning_at(layers: Sequence[nn.Module], first: int, given: Any, kept: dict[int, Any]) -> Iterator[None]:
    """Context manager in which a forward computes nothing in the layers before one: they return `given`.

    All other code of the model runs as it is, so what layers are given beside hidden states is there. Layers that are
    left out store no keys and values: none of those that compute may read theirs.

    Args:
        layers: the decoder layers, in order.
        first: the first layer that computes.
        given: output of the layer before it in an earlier forward, as that has kept it; None if `first` is 0.
        kept: of each layer that it names, all after the first one, it gets the output of the layer before.
    """
    with ExitStack() as undo:
        for layer in layers[:first]:
            undo.callback(_set_forward, layer, vars(layer).get("forward"))
            layer.forward = partial(_returned, moved(given, next(layer.parameters()).device))
        for number in kept:
            hook = layers[number - 1].register_forward_hook(partial(_keep, kept, number))
            undo.callback(hook.remove)
        yield


def moved(output: Any, device: torch.device) -> Any:
    """Output of a layer, which is hidden states or a tuple with them, on a device."""
    if isinstance(output, tuple):
        return tuple(moved(part, device) for part in output)
    return output.to(device) if isinstance(output, Tensor) else output


def num_bytes(output: Any) -> int:
    """Bytes of a layer's output."""
    if isinstance(output, tuple):
        return sum(map(num_bytes, output))
    return output.nbytes if isinstance(output, Tensor) else 0


def _returned(given: Any, *_: Any, **__: Any) -> Any:
    return given


def _keep(kept: dict[int, Any], number: int, _: nn.Module, __: Any, output: Any) -> None:
    kept[number] = moved(output, torch.device("cpu"))


def _set_forward(layer: nn.Module, forward: Any) -> None:
    """Give a layer a forward of its own again, or that of its class."""
    if forward is None:
        del layer.forward
    else:
        layer.forward = forward
