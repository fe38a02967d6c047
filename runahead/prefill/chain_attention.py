"""Attention of one rank's chunk in a chain of ranks: the loop body of KV-Runahead's figure, once per layer."""

# Legend: B batch, N query heads, K kv heads, C chunk, H head dim, V value dim.

from __future__ import annotations

from functools import partial

from torch import Tensor

from runahead.attention.causal import CausalAttention
from runahead.attention.partial import AttentionTerms
from runahead.cache.slabs import KVCache, KVSlab
from runahead.kv_transfer import KVTransfer
from runahead.model.model import PrefillEndsHere
from runahead.timeline.clock import Clock


class ChainAttention(CausalAttention):
    """Attention of one rank's chunk: the loop body of the paper's figure, once per layer."""

    def __init__(self, cache: KVCache, transfer: KVTransfer, clock: Clock, *, start: int, pads: list[int]) -> None:
        super().__init__(cache, start=start, pads=pads)
        self.transfer, self._clock = transfer, clock
        self.layer_ends = [clock.mark()]

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        self.transfer.open(layer)
        self.enter(layer, q_BNCH.shape[2])
        slab = self.cache.layer(layer)
        slab.write(self.start, k_BKCH, v_BKCV)
        self.transfer.send(layer)
        if layer == self.cache.num_layers - 1 and not self.transfer.schedule.is_last:
            raise PrefillEndsHere  # all that later ranks need of this one is on its way
        seen, q_BNCH = self.place(layer, slab, q_BNCH)
        out_BNCV = self.attend_to_slab(seen, q_BNCH, terms, partial(self.transfer.await_prefix, layer))
        self.leave(layer, slab, seen, q_BNCH, terms)
        self.transfer.close(layer)
        self.transfer.ranks.progress()
        self.layer_ends.append(self._clock.mark())
        return out_BNCV

    def enter(self, layer: int, num_new: int) -> None:
        """Before the layer's own K,V are stored."""

    def place(self, layer: int, slab: KVSlab, q_BNCH: Tensor) -> tuple[KVSlab, Tensor]:
        """K,V and queries as attention is to see them. The prefix may still be on its way."""
        return slab, q_BNCH

    def leave(self, layer: int, slab: KVSlab, seen: KVSlab, q_BNCH: Tensor, terms: AttentionTerms) -> None:
        """While the layer's K,V are still there; `seen` is how they were attended to."""
