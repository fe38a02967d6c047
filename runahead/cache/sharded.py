"""The KV cache of a text over several stages: each attends to what it stores, and what they found is merged exactly."""

# Legend: P stages, B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runahead.attention.base import LayerInput
from runahead.attention.causal import nothing
from runahead.attention.partial import AttentionTerms, merge_parts
from runahead.cache.base import KVStore, LayerStore, SeenKV
from runahead.cache.new_tokens import NewTokens
from runahead.report import RankReport

Gather = Callable[[Tensor], Tensor]
"""This stage's tensor -> the tensors (P, ...) of all stages in their order, on every stage."""


@dataclass(kw_only=True)
class SeenSharded(SeenKV):
    """What all stages store of a layer, together with the queries of the newest tokens.

    Attributes:
        own: what this stage stores.
    """

    own: SeenKV
    gather: Gather

    def attend(self, terms: AttentionTerms, await_prefix: Callable[[], None] = nothing) -> tuple[Tensor, Tensor]:
        out, lse = self._parts(terms, await_prefix)
        return merge_parts(out, lse).to(self.q_BNCH.dtype), torch.logsumexp(lse, dim=0)

    def output(self, terms: AttentionTerms, await_prefix: Callable[[], None] = nothing) -> Tensor:
        if terms.sinks_N is not None:
            return super().output(terms, await_prefix)
        return merge_parts(*self._parts(terms, await_prefix)).to(self.q_BNCH.dtype)

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

    layers: Sequence[ShardedLayer]

    def __init__(self, own: KVStore, gather: Gather) -> None:
        self._own, self._gather = own, gather
        self.layers = [ShardedLayer(layer, gather) for layer in own.layers]

    @property
    def rotates(self) -> bool:
        return self._own.rotates

    @property
    def repeats_steps(self) -> bool:
        return self._own.repeats_steps

    def positions_BC(self, index_C: Tensor) -> Tensor | None:  # noqa: N802
        return self._own.positions_BC(index_C)

    def look_ahead(self, layer: int, given: LayerInput) -> None:
        self._own.look_ahead(layer, given)

    def advance(self) -> None:
        self._own.advance()

    def agreed(self, fine_1: Tensor) -> Tensor:
        return self._gather(fine_1).amin(dim=0)

    def describe_decoding(self, report: RankReport) -> None:
        self._own.describe_decoding(report)
