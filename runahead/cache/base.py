"""The interface of all stores of keys and values: append new tokens, attend to what is stored, keep some, free others.

A store holds one object per layer. Whatever it is made of (slabs, layers that a policy cuts back, host memory, reused
segments), prefill and decoding take the same way through it: `append`, then `seen` and its `attend`, then `keep`.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens, n stored tokens, m kept ones, H head dim, V value dim.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from runahead.attention.base import LayerInput
from runahead.attention.causal import nothing
from runahead.attention.partial import AttentionTerms, with_sinks
from runahead.cache.new_tokens import NewTokens
from runahead.report import RankReport


@dataclass(kw_only=True)
class SeenKV(ABC):
    """Keys and values of one layer as the queries of the newest tokens see them.

    Attributes:
        q_BNCH: the queries, rotated to the slots of their tokens where positions are re-encoded.
    """

    q_BNCH: Tensor

    @abstractmethod
    def attend(self, terms: AttentionTerms, await_prefix: Callable[[], None] = nothing) -> tuple[Tensor, Tensor]:
        """Output (B, N, C, V) and log-sum-exp (B, N, C) of the newest tokens' attention to all tokens up to their own.

        Args:
            await_prefix: returns once the tokens of earlier ranks are stored; they are not read before.
        """

    @abstractmethod
    def read(self) -> tuple[Tensor, Tensor]:
        """All keys (B, K, n, H) and values (B, K, n, V), those of the newest tokens last."""

    def output(self, terms: AttentionTerms, await_prefix: Callable[[], None] = nothing) -> Tensor:
        """Output (B, N, C, V) of `attend`, with the family's attention sinks."""
        return with_sinks(*self.attend(terms, await_prefix), terms)


class LayerStore(ABC):
    """Keys and values of one layer, for the tokens of a batch."""

    @abstractmethod
    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        """Store new tokens after all others."""

    @abstractmethod
    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenKV:
        """What the queries of the tokens see that were appended last."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes allocated."""

    def keep(self, slots_BKm: Tensor, *, room: int) -> None:
        """Keep the tokens in these slots, (B, K, m) or (B, 1, m), free all others, and make room for `room` more."""
        raise NotImplementedError(f"{type(self).__name__} keeps all tokens")

    def free(self, *, room: int) -> None:  # noqa: B027 (nothing to give back where memory is allocated once)
        """Give back memory but for the stored tokens and `room` more."""


class KVStore(ABC):
    """Keys and values of all layers of a batch.

    Attributes:
        layers: one per layer of the model.
        peak_bytes: the most bytes that were allocated at a time, as far as it was noted.
    """

    layers: Sequence[LayerStore]
    peak_bytes: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def rotates(self) -> bool:
        """Whether keys are stored unrotated."""
        return False

    def positions_BC(self, index_C: Tensor) -> Tensor | None:  # noqa: N802
        """Positions of the tokens with these indices in the padded batch; None if they are index - pad."""
        return None

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes allocated on the device, with what is needed to find tokens."""

    def open(self, layer: int, q_BNCH: Tensor, terms: AttentionTerms, tokens: NewTokens) -> LayerStore:
        """The store to which new tokens of a layer are appended, and which their queries `q_BNCH` see."""
        return self.layers[layer]

    def look_ahead(self, layer: int, given: LayerInput) -> None:  # noqa: B027 (most stores need no preparation)
        """Called before the layer in front of `layer` computes, with its input."""

    def close(self, layer: int, *, room: int) -> None:  # noqa: B027 (most layers stay where they are)
        """Called after the attention of several new tokens; `room` is for the tokens that will follow."""

    def for_decoding(self) -> KVStore:
        """The same tokens, in the form in which single tokens attend to them fastest."""
        return self

    def note_peak(self) -> None:
        """Remember the bytes that are allocated now, if they are the most so far."""
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def describe_prompt(self, report: RankReport) -> None:
        """Fill in what is stored of the prompt, for decoding."""
        report.kv_kept_bytes = self.num_bytes

    def describe_decoding(self, report: RankReport) -> None:
        """Fill in what was stored at most, and how decoding used it."""
        report.kv_peak_bytes = max(report.kv_peak_bytes, self.num_bytes)
