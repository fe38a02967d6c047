"""Layers are given the tokens of a forward in pieces: in blocks of rows, and where states are kept between them.

A layer in blocks of rows needs memory for the activations of one block, beside what it is given and returns: all that
its code does with a token but attention needs no other token, and attention sees the blocks before (`Block`). The keys
and values of a layer are complete with the last block, as all of them are sent at once.

Where layers hold a state, a piece ends where the state inside a text is to be kept, and where a padded row begins from
a given state. Of these layers only the module that asks for the state, found by a forward of one token, is called piece
by piece. It is that of the model's own code.

Some rules of transformers (Mamba 1, Jamba) begin from zero wherever several tokens are given. As they decode, they take
a token after a state. There each token after a given state is a piece.
"""

# Legend: B batch, C new tokens, D model dim.

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial, update_wrapper, wraps
from typing import Any

from torch import Tensor, nn

from runahead.attention.base import BlockEndsHere, LayerAttention, Recording
from runahead.attention.states import StateLayer
from runahead.model.seam import SeamCache, for_tokens


def give_in_blocks(layers: Iterable[tuple[nn.Module, bool]]) -> None:
    """Have decoder layers compute the tokens of a forward in its blocks (`SeamCache.block_ends`), from now on.

    Args:
        layers: each with whether it stores keys and values.
    """
    for layer, has_kv in layers:
        own = vars(layer).get("forward")
        if not isinstance(own, partial) or own.func is not _in_blocks:
            layer.forward = update_wrapper(partial(_in_blocks, layer.forward, has_kv), layer.forward)


def _in_blocks(forward: Callable[..., Any], has_kv: bool, *args: Any, **keywords: Any) -> Any:
    """Call the forward of a decoder layer for each block of its tokens."""
    seam = SeamCache.among(args, keywords)
    if seam is None or not seam.block_ends:
        return forward(*args, **keywords)
    hidden = args[0] if args else keywords["hidden_states"]
    if hidden.shape[-2] != seam.num_new:  # the last token alone
        return forward(*args, **keywords)
    whole: Any = None
    for first, end in seam.blocks(has_kv=has_kv):
        block = hidden[..., first:end, :]
        rest, named = (_cut(each, seam.num_new, first, end) for each in (args[1:], keywords))
        given, named = ((block, *rest), named) if args else ((), named | {"hidden_states": block})
        with suppress(BlockEndsHere):
            output = forward(*given, **named)
            if whole is None and seam.in_place:
                whole = _room(output, hidden)
            whole = _put(whole, _by_token(output, block), first, seam.num_new, dim=-2)
    return whole


def _by_token(output: Any, block: Tensor) -> Any:
    """A layer's output for a block without tensors that are not of a token in each row, as the logits of a router.

    A model whose code needs them is found out: see `Model.wrong_in_blocks`.
    """
    if not isinstance(output, tuple):
        return output
    lead = block.shape[:-1]
    return output[0], *(None if isinstance(x, Tensor) and x.shape[:-1] != lead else x for x in output[1:])


def _room(output: Any, hidden: Tensor) -> Any:
    """The memory of a layer's input for its output, of which this is a block, where that is of the same form."""
    if isinstance(output, tuple):
        return (_room(output[0], hidden), *(None for _ in output[1:]))
    fits = output.dtype == hidden.dtype and output.shape[-1] == hidden.shape[-1] and hidden.is_contiguous()
    return hidden if fits and output.shape[:-2] == hidden.shape[:-2] else None


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
        width = 0 if cache is None else cache.width
        if cache is None or cache.states is None or cache.states.are_at_once(width):
            return forward(*args, **keywords)
        whole: Any = None
        for first, end in cache.states.pieces(width):
            given, named = (_cut(each, width, first, end) for each in (args, keywords))
            whole = _put(whole, forward(*given, **named), first, width, dim=1)
        return whole

    return computed


def _cut(value: Any, num_tokens: int, first: int, end: int) -> Any:
    """Cut what a module is given to the tokens [first, end)."""
    return for_tokens(value, num_tokens, lambda x: x[:, first:end])


def _put(whole: Any, part: Any, first: int, num_tokens: int, *, dim: int) -> Any:
    """Put the outputs of a module for some tokens, tensors with these in `dim`, to those for all tokens.

    The rest is of no token.
    """
    if isinstance(part, tuple):
        wholes = [None] * len(part) if whole is None else whole
        return tuple(_put(*each, first, num_tokens, dim=dim) for each in zip(wholes, part, strict=True))
    if not isinstance(part, Tensor) or part.ndim < 2:
        return part
    if whole is None:
        shape = list(part.shape)
        shape[dim] = num_tokens
        whole = part.new_empty(shape)
    whole.narrow(dim, first, part.shape[dim]).copy_(part)
    return whole
