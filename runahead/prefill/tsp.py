"""Tensor/sequence parallelism (TSP), the baseline of the KV-Runahead paper: even chunks, all-gathered in every layer.

Every rank computes the keys and values of its chunk, gathers those of all other ranks, and only then attends. As
published, it attends to all of the prompt's keys and masks the later ones (`dense`); `causal` skips them, as newer
kernels do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runahead.attention.dense import DenseAttention
from runahead.attention.op import Part, Run, Step, spans_of
from runahead.cache.index import SlabIndex
from runahead.cache.new_tokens import NewTokens
from runahead.cache.slabs import KVSlab
from runahead.config import Attention, Exchange, PrefillOptions
from runahead.context import ContextPartition, Partitioner, even
from runahead.kv_transfer.exchange import ExchangeSchedule
from runahead.prefill.base import PrefillJob
from runahead.prefill.exchanging import ExchangeRun, ExchangingPrefill


class GatheredIndex(SlabIndex):
    """Index of the gathered prompt, of which nothing is read before all is there."""

    is_whole = sees_last_alone = False

    def __init__(self, run: ExchangeRun, schedule: ExchangeSchedule) -> None:
        self._run, self._schedule = run, schedule

    def steps(self, layer: int, slab: KVSlab, tokens: NewTokens, num_new: int) -> Sequence[Step]:
        [gathered] = self._run.arriving(layer, [self._schedule.receives(layer)])
        slots = range(slab.first, tokens.start + num_new)
        spans = spans_of(slots, start=tokens.start, num_new=num_new, pads=tokens.row_pads)
        return [Step([Run(gathered, spans)], arrives=False)]


class TSP(ExchangingPrefill):
    """Prefill of even contiguous chunks, whatever the user's partition."""

    def split(self, num_tokens: int, num_stages: int, chosen: Partitioner) -> ContextPartition:
        return even(num_tokens, num_stages)

    def runs(self, partition: ContextPartition) -> list[list[range]]:
        chunks = [partition.chunk(rank) for rank in range(partition.num_ranks)]
        return [[chunk] if chunk else [] for chunk in chunks]

    def index(self, run: ExchangeRun, schedule: ExchangeSchedule) -> GatheredIndex:
        return GatheredIndex(run, schedule)

    def attend(self, job: PrefillJob) -> Callable[[int], Callable[..., Part]] | None:
        if job.options.attention is not Attention.dense:
            return None
        dense = DenseAttention(job.batch.num_tokens)
        return lambda layer: dense.attend

    def exchange(self, options: PrefillOptions) -> Exchange:
        return Exchange.all_gather
