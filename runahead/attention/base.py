"""Interface between a model's attention layers and the runtime: the attention of one forward pass."""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim, D model dim.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from runahead.attention.partial import AttentionTerms


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


class LayerAttention(ABC):
    """Base class of the attention of one forward pass. Each of the model's attention layers calls `attend` once.

    Args:
        start: index of the first new token in the left-padded batch.
        pads: left padding of each row; the position of a token in row r is its index - pads[r].
    """

    def __init__(self, *, start: int, pads: list[int]) -> None:
        self.start, self.pads = start, pads

    @property
    def rotates(self) -> bool:
        """Whether this attention rotates queries and keys itself, so that the model must leave them at position 0."""
        return False

    def positions_BC(self, index_C: Tensor) -> Tensor | None:  # noqa: N802
        """Positions (B, C) of the tokens with these indices in the padded batch; None if they are index - pad."""
        return None

    def see_ids(self, ids_BC: Tensor) -> None:  # noqa: B027 (most attention does not look at tokens)
        """Called with the token ids of a forward before it."""

    def see_input(self, layer: int, given: LayerInput) -> None:  # noqa: B027 (most attention needs no inputs)
        """Called with the input of every decoder layer before the layer runs, if the model predicts queries."""

    def see_attention_input(self, layer: int, x_BCD: Tensor) -> None:  # noqa: B027 (as above)
        """Called before `attend` with the hidden states that a layer's attention is given, if the model shows them."""

    @abstractmethod
    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        """Output (B, N, C, V) of one layer for queries, keys and values of the new tokens."""

    def attend_shared(
        self, layer: int, source: int, q_BNCH: Tensor, terms: AttentionTerms, *, skipped: int = 0
    ) -> Tensor:
        """Output (B, N, C, V) of a layer that reads the keys and values of an earlier one, which has attended.

        Args:
            source: the layer that stores them.
            skipped: number of new tokens before those of the queries, which the layer does not compute.
        """
        raise NotImplementedError(f"{type(self).__name__} is for models whose layers all store keys and values")


class WrappedAttention(LayerAttention):
    """Attention around that of a forward, to which it hands on all calls.

    Attributes:
        wrapped: the attention of the forward.
    """

    def __init__(self, wrapped: LayerAttention) -> None:
        super().__init__(start=wrapped.start, pads=wrapped.pads)
        self.wrapped = wrapped

    @property
    def rotates(self) -> bool:
        return self.wrapped.rotates

    def positions_BC(self, index_C: Tensor) -> Tensor | None:  # noqa: N802
        return self.wrapped.positions_BC(index_C)

    def see_ids(self, ids_BC: Tensor) -> None:
        self.wrapped.see_ids(ids_BC)

    def see_input(self, layer: int, given: LayerInput) -> None:
        self.wrapped.see_input(layer, given)

    def see_attention_input(self, layer: int, x_BCD: Tensor) -> None:
        self.wrapped.see_attention_input(layer, x_BCD)

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        return self.wrapped.attend(layer, q_BNCH, k_BKCH, v_BKCV, terms)

    def attend_shared(
        self, layer: int, source: int, q_BNCH: Tensor, terms: AttentionTerms, *, skipped: int = 0
    ) -> Tensor:
        return self.wrapped.attend_shared(layer, source, q_BNCH, terms, skipped=skipped)


class Recording(LayerAttention):
    """Attention that records what the layers pass to it and returns zeros.

    Attributes:
        inputs: of every layer, if the model predicts queries.
        calls: layer, queries, keys, values and terms of every call of `attend`.
    """

    def __init__(self, *, start: int, pads: list[int]) -> None:
        super().__init__(start=start, pads=pads)
        self.inputs: list[LayerInput] = []
        self.calls: list[tuple[int, Tensor, Tensor, Tensor, AttentionTerms]] = []

    def see_input(self, layer: int, given: LayerInput) -> None:
        self.inputs.append(given)

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        self.calls.append((layer, q_BNCH, k_BKCH, v_BKCV, terms))
        return q_BNCH.new_zeros(*q_BNCH.shape[:3], v_BKCV.shape[-1])

    def attend_shared(
        self, layer: int, source: int, q_BNCH: Tensor, terms: AttentionTerms, *, skipped: int = 0
    ) -> Tensor:
        return q_BNCH.new_zeros(*q_BNCH.shape[:3], self.calls[source][3].shape[-1])
