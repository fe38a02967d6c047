"""Passes of some layers over the tokens of a forward, since they read what a later one of them stores (sources.py).

The first of these layers runs all of them, in the model's own code, and the others return what they are given. Each
pass stores over what the one before has stored. Hooks beside attention are told of the last one alone.
"""

# Legend: C new tokens.

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import Any

from torch import Tensor, nn

from runahead.attention.base import ALL_ROWS, Block
from runahead.model.reading.sources import Reading
from runahead.model.seam import SeamCache

NOT_THE_LAST = Block(is_last=False)
"""All new tokens, for which the layer is called again."""


def give_in_passes(layers: Sequence[nn.Module], reading: Reading) -> None:
    """Have the layers of each group compute in passes, from now on.

    Args:
        layers: all of the model.
    """
    for group in reading.groups:
        members = [layers[layer] for layer in group]
        for place, member in enumerate(members):
            own = vars(member).get("forward")
            if not isinstance(own, partial) or own.func is not _in_passes:
                member.forward = update_wrapper(
                    partial(_in_passes, member.forward, reading, group, members, place), member.forward
                )


def _in_passes(
    forward: Callable[..., Any],
    reading: Reading,
    group: range,
    members: Sequence[nn.Module],
    place: int,
    /,
    *args: Any,
    **keywords: Any,
) -> Any:
    """The forward of the layer at a place of its group."""
    seam = SeamCache.among(args, keywords)
    if seam is None or seam.is_in_pass:
        return forward(*args, **keywords)
    hidden = args[0] if args else keywords["hidden_states"]
    rest = [*args[1:], *(value for name, value in keywords.items() if name != "hidden_states")]
    if place > 0:
        if any(one is not other for one, other in zip(rest, seam.given_to_group, strict=True)):
            raise ValueError("gives its layers different arguments, which those that run in passes must share")
        return hidden
    seam.given_to_group, seam.is_in_pass = rest, True
    num_passes = min(reading.most_passes, seam.num_new)  # more change nothing
    if seam.num_new > 1:
        seam.to_clear = {reading.kv_sources[layer] for layer in group if reading.kv_sources[layer] > layer}
    try:
        for number in range(num_passes):
            seam.attention.block = ALL_ROWS if number == num_passes - 1 else NOT_THE_LAST
            output = _through(members, hidden, args[1:], keywords, is_positional=bool(args))
    finally:
        seam.attention.block, seam.is_in_pass = ALL_ROWS, False
    return output


def _through(
    members: Sequence[nn.Module], hidden: Tensor, rest: Sequence[Any], keywords: dict[str, Any], *, is_positional: bool
) -> Tensor:
    """Hidden states after the layers."""
    for member in members:
        given = (hidden, *rest) if is_positional else ()
        hidden = member(*given, **(keywords if is_positional else keywords | {"hidden_states": hidden}))
        assert isinstance(hidden, Tensor), "layers that return more than hidden states do not run in passes"
    return hidden
