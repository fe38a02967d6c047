"""The KV cache of a text over several stages: each attends to what it stores, and what they found is merged exactly."""

# Legend: P stages, B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from runahead.attention.base import LayerInput
from runahead.attention.op import nothing
from runahead.attention.partial import AttentionTerms, merge_parts
from runahead.cache.base import KVStore, LayerStore, SeenKV
from runahead.cache.new_tokens import NewTokens
from runahead.report import RankReport


class Gather(Protocol):
    """All-gather between the stages."""

    def __call__(self, own: Tensor, /) -> Tensor:
        """The tensors (P, ...) of all stages in their order, on every stage."""

    def settle(self) -> None:
        """Wait until all that was gathered is there."""


@dataclass(kw_only=True)
class SeenSharded(SeenKV):
    """The keys and values of a layer on all stages, together with the queries of the newest tokens.

    Attributes:
        own: what this stage stores.
    """

    own: SeenKV
    gather: Gather
    _lse_PBNC: Tensor | None = field(default=None, init=False, repr=False)

    def attend(self, terms: AttentionTerms, await_prefix: Callable[[], None] = nothing) -> tuple[Tensor, Tensor]:
        out, lse = self._parts(terms, await_prefix)
        return merge_parts(out, lse).to(self.q_BNCH.dtype), torch.logsumexp(lse, dim=0)

    def output(self, terms: AttentionTerms, await_prefix: Callable[[], None] = nothing) -> Tensor:
        if terms.sinks_N is not None:
            return super().output(terms, await_prefix)
        out_PBNCV, self._lse_PBNC = self._parts(terms, await_prefix)
        return merge_parts(out_PBNCV, self._lse_PBNC).to(self.q_BNCH.dtype)

    def read(self) -> tuple[Tensor, Tensor]:
        """As of `SeenKV`, of what this stage stores."""
        return self.own.read()

    def lse(self) -> Tensor:
        if self._lse_PBNC is None:
            return super().lse()
        return torch.logsumexp(self._lse_PBNC, dim=0)  # only policies ask, and before the next gathering

    def _parts(self, terms: AttentionTerms, await_prefix: Callable[[], None]) -> tuple[Tensor, Tensor]:
        """Outputs (P, B, N, C, V) and log-sum-exps (P, B, N, C) of all stages, in at least float32."""
        out_BNCV, lse_BNC = self.own.attend(terms, await_prefix)
        parts = self.gather(torch.cat([out_BNCV.to(lse_BNC.dtype), lse_BNC.unsqueeze(-1)], dim=-1))
        return parts[..., :-1], parts[..., -1]


class ShardedLayer(LayerStore):
    """One layer on all stages."""

    def __init__(self, own: LayerStore, gather: Gather) -> None:
        self._own, self._gather = own, gather

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        self._own.append(k_BKCH, v_BKCV, tokens)

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenSharded:
        return SeenSharded(q_BNCH=q_BNCH, own=self._own.seen(q_BNCH, tokens), gather=self._gather)

    @property
    def num_bytes(self) -> int:
        return self._own.num_bytes


class ShardedCache(KVStore):
    """The KV cache of a text of which every stage stores a part. All stages run the same forwards.

    Args:
        own: this stage's part.
        gather: gathers one tensor of every stage.
    """

    def __init__(self, own: KVStore, gather: Gather) -> None:
        self._own, self._gather = own, gather
        own.await_device_by(gather.settle)

    @property
    def layers(self) -> Sequence[LayerStore]:  # type: ignore[override]
        return [ShardedLayer(layer, self._gather) for layer in self._own.layers]

    @property
    def num_layers(self) -> int:
        return self._own.num_layers

    @property
    def num_bytes(self) -> int:
        return self._own.num_bytes

    @property
    def kept_layers(self) -> Sequence[LayerStore]:
        return self._own.kept_layers

    def open(self, layer: int, q_BNCH: Tensor, terms: AttentionTerms, tokens: NewTokens) -> LayerStore:
        return ShardedLayer(self._own.open(layer, q_BNCH, terms, tokens), self._gather)

    def put(self, layer: int, kept: LayerStore) -> None:
        self._own.put(layer, kept)

    def close(self, layer: int, *, room: int) -> None:
        self._own.close(layer, room=room)

    @property
    def rotates(self) -> bool:
        return self._own.rotates

    @property
    def repeats_steps(self) -> bool:
        return self._own.repeats_steps

    def positions_BC(self, index_C: Tensor, start: int) -> Tensor | None:  # noqa: N802
        return self._own.positions_BC(index_C, start)

    def look_ahead(self, layer: int, given: LayerInput) -> None:
        self._own.look_ahead(layer, given)

    def advance(self) -> None:
        self._own.advance()

    def await_device(self) -> None:
        self._gather.settle()

    def agreed(self, fine_1: Tensor) -> Tensor:
        return self._gather(fine_1).amin(dim=0)

    def describe_decoding(self, report: RankReport) -> None:
        self._own.describe_decoding(report)
