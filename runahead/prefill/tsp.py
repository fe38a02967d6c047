"""Tensor/sequence parallelism (TSP), the baseline of the KV-Runahead paper: even chunks, all-gathered in every layer.

Every rank computes the keys and values of its chunk, gathers those of all other ranks, and only then attends. As
published, it attends to all of the prompt's keys and masks the later ones (`dense`); `causal` skips them, as newer
kernels do.
"""

# Legend: B batch, N query heads, K kv heads, C chunk, H head dim, V value dim.

from __future__ import annotations

from torch import Tensor

from runahead.attention.dense import DenseAttention
from runahead.attention.op import Run, Step, attend, finish, spans_of
from runahead.attention.partial import AttentionTerms
from runahead.config import Attention, Exchange, PrefillOptions
from runahead.context import ContextPartition, Partitioner, even
from runahead.kv_transfer import ExchangeSchedule
from runahead.prefill.chain_run import ChainRun
from runahead.prefill.exchanging import ExchangingAttention, ExchangingPrefill


class TSPAttention(ExchangingAttention):
    """Attention of one rank's even chunk to the gathered prompt."""

    def __init__(self, run: ChainRun, schedule: ExchangeSchedule) -> None:
        super().__init__(run, schedule)
        dense = run.job.options.attention is Attention.dense
        self._attend = DenseAttention(run.job.batch.num_tokens).attend if dense else attend

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        self.run.open(layer)
        slab = self.run.cache.layer(layer)
        slab.write(self.start, k_BKCH, v_BKCV)
        self.run.send(layer)
        self.run.await_prefix(layer)
        num_new = q_BNCH.shape[2]
        slots = range(slab.first, self.start + num_new)
        spans = spans_of(slots, start=self.start, num_new=num_new, pads=self.pads)
        out_BNCV = finish(self._attend(q_BNCH, [Step([Run(slab, spans)])], terms), terms, q_BNCH.dtype)
        self.run.close(layer)
        return out_BNCV


class TSP(ExchangingPrefill):
    """Prefill of even contiguous chunks, whatever the user's partition."""

    attention = TSPAttention

    def split(self, num_tokens: int, num_stages: int, chosen: Partitioner) -> ContextPartition:
        return even(num_tokens, num_stages)

    def runs(self, partition: ContextPartition) -> list[list[range]]:
        chunks = [partition.chunk(rank) for rank in range(partition.num_ranks)]
        return [[chunk] if chunk else [] for chunk in chunks]

    def exchange(self, options: PrefillOptions) -> Exchange:
        return Exchange.all_gather
