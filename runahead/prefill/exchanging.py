"""Shared base of prefills that exchange keys and values between all stages in every layer (TSP, zigzag)."""

from __future__ import annotations

from abc import abstractmethod

from runahead.attention.base import LayerAttention
from runahead.config import Exchange, PrefillOptions
from runahead.context import ContextPartition
from runahead.kv_transfer import EXCHANGES, ExchangeSchedule
from runahead.prefill.base import Prefill, Prefilled, PrefillJob
from runahead.prefill.chain_run import ChainRun
from runahead.ranks.ranks import Ranks
from runahead.report import RankReport

SLABS = 2
"""Slabs of a rank that does not decode: the layer at work, and the next one, which ranks that are ahead send."""


class ExchangingAttention(LayerAttention):
    """Attention of one rank's tokens to themselves and to those that other ranks send, once per layer."""

    def __init__(self, run: ChainRun, schedule: ExchangeSchedule) -> None:
        super().__init__(start=schedule.own[0].start, pads=run.job.batch.pads)
        self.run, self.schedule = run, schedule


class ExchangingPrefill(Prefill):
    """Prefill in which all stages exchange keys and values layer by layer.

    The last stage has the last token, so it stores the KV cache of the whole prompt and decodes.
    """

    attention: type[ExchangingAttention]
    """This rank's attention."""

    def first_token_stage(self, partition: ContextPartition, num_stages: int) -> int:
        return num_stages - 1

    @abstractmethod
    def runs(self, partition: ContextPartition) -> list[list[range]]:
        """Contiguous ranges of every stage's tokens, in order, none of them empty; one without any stays idle."""

    def exchange(self, options: PrefillOptions) -> Exchange:
        """The way in which ranks exchange keys and values."""
        return options.exchange

    def connect(
        self, ranks: Ranks, partition: ContextPartition, options: PrefillOptions, *, has_stored: bool = False
    ) -> None:
        if ranks.backend == "nccl" and ranks.num_stages > 1:
            ranks.nccl_between_stages()

    def run(self, job: PrefillJob) -> Prefilled:
        model, ranks, pads = job.model, job.ranks, job.batch.pads
        runs = self.runs(job.partition)
        own = runs[ranks.stage]
        if not own:
            return Prefilled(report=RankReport(rank=ranks.rank))
        schedule = ExchangeSchedule(
            runs,
            ranks.rank,
            self.exchange(job.options),
            num_layers=model.num_layers,
            first_needed=lambda layer, start: model.first_needed(layer, start, pads),
            mesh=ranks.mesh,
        )
        run = ChainRun(
            job,
            EXCHANGES[ranks.backend],
            schedule,
            spans=[(0, job.capacity if schedule.is_last else job.batch.num_tokens)] * model.num_layers,
            num_slabs=model.num_layers if schedule.is_last else SLABS,
            depth=SLABS,
        )
        attention = self.attention(run, schedule)
        return run.compute(attention, own, store=run.cache if schedule.is_last else None)
