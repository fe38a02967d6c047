"""What prefills have in common whose ranks give each other their K,V in every layer, in step."""

from __future__ import annotations

import time
from abc import abstractmethod

from runahead.cache.slabs import KVCache
from runahead.config import Exchange, PrefillOptions
from runahead.context import ContextPartition
from runahead.kv_transfer import EXCHANGES, ExchangeSchedule, KVTransfer
from runahead.prefill.base import Prefill, Prefilled, PrefillJob
from runahead.prefill.chunk_run import TimedAttention, run_chunk
from runahead.ranks.ranks import Ranks
from runahead.timeline.clock import Clock, clock_for

SLOTS = 2
"""While a rank attends to one layer, the next one's K,V may arrive from ranks that are ahead; none can be further."""


class ExchangingPrefill(Prefill):
    """Ranks exchange K,V layer by layer. The last rank has the last token: it keeps all K,V, and decodes."""

    def first_token_rank(self, partition: ContextPartition, num_ranks: int) -> int:
        return num_ranks - 1

    @abstractmethod
    def runs(self, partition: ContextPartition) -> list[list[range]]:
        """Contiguous tokens of every rank, in order, none of them empty; a rank without any takes no part."""

    @abstractmethod
    def exchange(self, options: PrefillOptions) -> Exchange:
        """How K,V travel."""

    @abstractmethod
    def attention(
        self, job: PrefillJob, cache: KVCache, transfer: KVTransfer, clock: Clock, schedule: ExchangeSchedule
    ) -> TimedAttention:
        """This rank's attention."""

    def connect(self, ranks: Ranks, partition: ContextPartition, options: PrefillOptions) -> None:
        if ranks.backend == "nccl" and ranks.size > 1:
            ranks.nccl_group()

    def run(self, job: PrefillJob) -> Prefilled:
        model, ranks, pads = job.model, job.ranks, job.batch.pads
        runs = self.runs(job.partition)
        if not runs[ranks.rank]:
            return Prefilled()
        schedule = ExchangeSchedule(
            runs,
            ranks.rank,
            self.exchange(job.options),
            num_layers=model.num_layers,
            first_needed=lambda layer, start: model.first_needed(layer, start, pads),
        )
        cache = KVCache(
            model.kv_shapes,
            batch=len(pads),
            spans=[(0, job.capacity if schedule.is_last else job.batch.num_tokens)] * model.num_layers,
            num_slots=model.num_layers if schedule.is_last else SLOTS,
            device=ranks.device,
        )
        began_s, clock = time.perf_counter(), clock_for(ranks.device)
        transfer = EXCHANGES[ranks.backend](schedule, cache, ranks, clock, SLOTS)
        attention = self.attention(job, cache, transfer, clock, schedule)
        return run_chunk(job, attention, clock, runs[ranks.rank], began_s=began_s)
