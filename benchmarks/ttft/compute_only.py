"""TTFT(p) on live ranks: KV-Runahead's chunks, computed as in a run, with all keys and values present from the start.

A bound from measured compute is as old as its measurement, and a machine's speed drifts. This bound runs in turn with
the variants that it bounds.
"""

# Legend: B batch, N query heads, K kv heads, C chunk, H key dim, V value dim.

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from runahead.attention.partial import AttentionTerms
from runahead.cache.attention import CausalAttention
from runahead.cache.kv_cache import KVCache
from runahead.context import ContextPartition
from runahead.model.model import Model, PrefillEndsHere
from runahead.ranks.ranks import Ranks
from runahead.timeline.clock import clock_for


class ComputeOnly:
    """Ranks of a chain that neither send nor wait. Every rank makes the same calls."""

    def __init__(self, model: Model, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks

    def ttft_s(self, ids: list[int], partition: ContextPartition) -> float:
        """Seconds that the slowest rank takes for its chunk."""
        self._ranks.barrier("all ranks to compute")
        seconds = self._ranks.on_all_ranks("the chunks alone", lambda: self._chunk_s(ids, partition))
        return max(self._ranks.gather(seconds, "the chunks' seconds"))

    def _chunk_s(self, ids: list[int], partition: ContextPartition) -> float:
        model, device = self._model, self._ranks.device
        chunk = partition.chunk(self._ranks.rank)
        if not chunk:
            return 0.0
        spans = [(model.first_needed(layer, chunk.start, [0]), chunk.stop) for layer in range(model.num_layers)]
        cache = KVCache(model.kv_shapes, batch=1, spans=spans, num_slabs=model.num_layers, device=device)
        for layer in range(model.num_layers):
            cache.layer(layer).slab_TBKX.normal_()  # the cost of attention does not depend on the values
        ids_1C = torch.tensor([ids[chunk.start : chunk.stop]], device=device)
        attention = _PrefixIsThere(cache, start=chunk.start, is_last=chunk.stop == partition.num_tokens)
        clock = clock_for(device)
        began = clock.mark()
        with suppress(PrefillEndsHere):
            model.forward(ids_1C, attention, start=chunk.start, pads=[0], length=partition.num_tokens)
        return clock.seconds(clock.mark()) - clock.seconds(began)


class _PrefixIsThere(CausalAttention):
    def __init__(self, cache: KVCache, *, start: int, is_last: bool) -> None:
        super().__init__(cache, start=start, pads=[0])
        self._is_last = is_last

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        if layer == self.cache.num_layers - 1 and not self._is_last:
            raise PrefillEndsHere
        return super().attend(layer, q_BNCH, k_BKCH, v_BKCV, terms)
