"""Interface between a model's attention layers and the runtime: the attention of one forward pass."""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim, D model dim.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from runahead.attention.partial import AttentionTerms
from runahead.attention.states import StateLayer, States


@dataclass(frozen=True, kw_only=True)
class LayerInput:
    """Arguments of one call of a decoder layer.

    Attributes:
        x_BCD: hidden states.
        rest, keywords: the other positional arguments and the keyword arguments.
        start: index of the first token in the padded batch.
        pads: left padding of each row.
    """

    x_BCD: Tensor
    rest: tuple[Any, ...]
    keywords: dict[str, Any]
    start: int
    pads: Sequence[int]


class ForwardEndsHere(Exception):
    """Raised by attention to end a forward early, once the rest of it is not needed. Not an error."""


class BlockEndsHere(Exception):
    """Raised by attention to end a layer for a block of its rows, once the rest of it is not needed. Not an error."""


class Block(NamedTuple):
    """Some of the new tokens of a forward, for which a layer is called; the blocks before have gone through it.

    Attributes:
        first: number of the first of them.
        is_last: no new token comes after them.
        stores: keys and values are to be stored.
        attends: queries are to attend; if not, the layer is called again for the same tokens.
    """

    first: int = 0
    is_last: bool = True
    stores: bool = True
    attends: bool = True


ALL_ROWS = Block()


class LastTokenAlone(Exception):
    """Raised by attention to end the run of a layer that runs again, for the last new token alone. Not an error."""


class LayerAttention(ABC):
    """Base class of the attention of one forward pass. Each of the model's attention layers calls it once.

    It calls `attend`, or `attend_shared` if it reads the keys and values of another layer. Where a layer is computed
    in blocks of rows it is called once for each block, in order. The last layer that stores keys and values may call it
    once more for the last token alone, where nobody needs other tokens after it.

    Args:
        start: index of the first new token in the left-padded batch.
        pads: left padding of each row; the position of a token in row r is its index - pads[r].

    Attributes:
        states: of all tokens before, which the forward updates; None: no layer holds any, or no token is before.
        stops: indices in the padded batch before which the states of layers are kept.
        block: the new tokens for which a layer is called.
        takes_passes: layers may call it for the same tokens several times, and store over what they have stored (LCKV).
        needs_last_alone: nobody needs the output of the layer that calls for other tokens than the last.
        rotates: this attention rotates queries and keys itself, so that the model must leave them at position 0.
    """

    rotates = False
    stops: Collection[int] = ()
    block: Block = ALL_ROWS
    takes_passes = False
    needs_last_alone = False

    def __init__(self, *, start: int, pads: list[int]) -> None:
        self.start, self.pads = start, pads
        self.states: States | None = None

    def positions_BC(self, index_C: Tensor) -> Tensor | None:  # noqa: N802
        """Positions (B, C) of the tokens with these indices in the padded batch; None if they are index - pad."""
        return None

    def see_ids(self, ids_BC: Tensor) -> None:  # noqa: B027 (most attention does not look at tokens)
        """Called with the token ids of a forward before it."""

    def see_input(self, layer: int, given: LayerInput) -> None:  # noqa: B027 (most attention needs no inputs)
        """Called with the input of every decoder layer before the layer runs, if the model predicts queries."""

    def see_attention_input(self, layer: int, x_BCD: Tensor) -> None:  # noqa: B027 (as above)
        """Called before `attend` with the hidden states that a layer's attention is given, if the model shows them."""

    def load_state(self, number: int) -> StateLayer:
        """The n-th of the states, which the model's layer is about to read and to update."""
        assert self.states is not None, "the model has given the states of a text without tokens, if there are none"
        return self.states.layers[number]

    def keep_state(self, number: int, stop: int) -> None:  # noqa: B027 (most attention has no stops)
        """Called once the layer has updated it for the new tokens before one of `stops`."""

    def save_state(self, number: int) -> None:  # noqa: B027 (most attention has it in memory already)
        """Called once the layer has updated it for all new tokens."""

    @abstractmethod
    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        """Output (B, N, C, V) of one layer for queries, keys and values of the new tokens.

        Raises:
            ForwardEndsHere: the rest of the forward is not needed.
            BlockEndsHere: the rest of the layer is not needed for this block.
            LastTokenAlone: only if it `needs_last_alone`; keys and values are stored. The layer is to run again for the
                last token alone; this is called with its queries, and its keys and values, which are known.
        """

    def attend_shared(
        self,
        layer: int,
        source: int,
        q_BNCH: Tensor,
        k_BKCH: Tensor,
        v_BKCV: Tensor,
        terms: AttentionTerms,
        *,
        skipped: int = 0,
    ) -> Tensor:
        """Output (B, N, C, V) of a layer that reads the keys and values of another one, which has stored some.

        By default the layer attends to them as if they were its own, which is right where nothing is stored.

        Args:
            source: the layer that stores them.
            skipped: number of new tokens before those of the queries, which the layer does not compute.
        """
        return self.attend(layer, q_BNCH, k_BKCH, v_BKCV, terms)


class Recording(LayerAttention):
    """Attention that records what the layers pass to it, and returns zeros.

    Args:
        answer: layer and zeros -> what attention returns in place of these; called once the call is recorded.

    Attributes:
        inputs: of every layer, if the model predicts queries.
        attention_inputs: hidden states that the attention of a layer is given, by layer, if the model shows them.
        calls: layer, queries, keys, values and terms of every layer that stores keys and values, and of those that read
            them, too, until the model knows which these are.
        order: ("kv", n) for the n-th of these calls and ("state", n) whenever the n-th state was updated.
    """

    def __init__(
        self, *, start: int, pads: list[int], answer: Callable[[int, Tensor], Tensor] = lambda _, zeros: zeros
    ) -> None:
        super().__init__(start=start, pads=pads)
        self._answer = answer
        self.inputs: list[LayerInput] = []
        self.attention_inputs: dict[int, Tensor] = {}
        self.calls: list[tuple[int, Tensor, Tensor, Tensor, AttentionTerms]] = []
        self.order: list[tuple[Literal["kv", "state"], int]] = []

    def see_input(self, layer: int, given: LayerInput) -> None:
        self.inputs.append(given)

    def see_attention_input(self, layer: int, x_BCD: Tensor) -> None:
        self.attention_inputs[layer] = x_BCD

    def save_state(self, number: int) -> None:
        self.order.append(("state", number))

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        self.order.append(("kv", len(self.calls)))
        self.calls.append((layer, q_BNCH, k_BKCH, v_BKCV, terms))
        return self._answer(layer, q_BNCH.new_zeros(*q_BNCH.shape[:3], v_BKCV.shape[-1]))

    def attend_shared(
        self,
        layer: int,
        source: int,
        q_BNCH: Tensor,
        k_BKCH: Tensor,
        v_BKCV: Tensor,
        terms: AttentionTerms,
        *,
        skipped: int = 0,
    ) -> Tensor:
        return self._answer(layer, q_BNCH.new_zeros(*q_BNCH.shape[:3], v_BKCV.shape[-1]))
