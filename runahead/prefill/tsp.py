"""Tensor/sequence parallelism, the baseline of the KV-Runahead paper: even chunks, K,V gathered in every layer.

Every rank computes the K,V of its chunk, gathers those of all the others, and only then attends. As published, it
attends to all of the prompt's keys and masks those that come later (`dense`); `causal` skips them, as kernels since do.
"""

# Legend: B batch, N query heads, K kv heads, C chunk, H head dim, V value dim.

from __future__ import annotations

from torch import Tensor

from runahead.attention.causal import CausalAttention
from runahead.attention.dense import DenseAttention
from runahead.attention.partial import AttentionTerms
from runahead.cache.slabs import KVCache
from runahead.config import Attention, Exchange, PrefillOptions
from runahead.context import ContextPartition, Partitioner, even
from runahead.kv_transfer import ExchangeSchedule, KVTransfer
from runahead.model.model import PrefillEndsHere
from runahead.prefill.base import PrefillJob
from runahead.prefill.exchanging import ExchangingPrefill
from runahead.timeline.clock import Clock


class TSPAttention:
    """Gather, then attend: once per layer.

    Args:
        rows: attention of this chunk to what the slab holds.
    """

    def __init__(self, rows: CausalAttention, cache: KVCache, transfer: KVTransfer, clock: Clock) -> None:
        self.cache, self.transfer, self._rows, self._clock = cache, transfer, rows, clock
        self.layer_ends = [clock.mark()]

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        self.transfer.open(layer)
        slab = self.cache.layer(layer)
        slab.write(self._rows.start, k_BKCH, v_BKCV)
        self.transfer.send(layer)
        if layer == self.cache.num_layers - 1 and not self.transfer.schedule.is_last:
            raise PrefillEndsHere
        self.transfer.await_prefix(layer)
        out_BNCV = self._rows.attend_to_slab(slab, q_BNCH, terms)
        self.transfer.close(layer)
        self.transfer.ranks.progress()
        self.layer_ends.append(self._clock.mark())
        return out_BNCV


class TSP(ExchangingPrefill):
    """Even contiguous chunks, whatever the user's partition."""

    def split(self, num_tokens: int, num_ranks: int, chosen: Partitioner) -> ContextPartition:
        return even(num_tokens, num_ranks)

    def runs(self, partition: ContextPartition) -> list[list[range]]:
        chunks = [partition.chunk(rank) for rank in range(partition.num_ranks)]
        return [[chunk] if chunk else [] for chunk in chunks]

    def exchange(self, options: PrefillOptions) -> Exchange:
        return Exchange.all_gather

    def attention(
        self, job: PrefillJob, cache: KVCache, transfer: KVTransfer, clock: Clock, schedule: ExchangeSchedule
    ) -> TSPAttention:
        start, pads = job.partition.chunk(job.ranks.rank).start, job.batch.pads
        if job.options.attention is Attention.dense:
            rows: CausalAttention = DenseAttention(cache, start=start, pads=pads, num_tokens=job.batch.num_tokens)
        else:
            rows = CausalAttention(cache, start=start, pads=pads)
        return TSPAttention(rows, cache, transfer, clock)
