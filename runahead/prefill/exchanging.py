"""Shared base of prefills that exchange keys and values between all stages in every layer (TSP, zigzag)."""

# Legend: B batch, K kv heads, C tokens of this rank, H head dim, V value dim.

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from runahead.attention.op import Part
from runahead.cache.attention import LayerCall
from runahead.cache.index import SlabIndex
from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import KVSlab
from runahead.config import Exchange, PrefillOptions
from runahead.context import ContextPartition
from runahead.kv_transfer import EXCHANGES
from runahead.kv_transfer.exchange import ExchangeSchedule
from runahead.kv_transfer.payloads import payloads_of
from runahead.kv_transfer.schedule import Message
from runahead.prefill.base import Prefill, Prefilled, PrefillJob
from runahead.prefill.chain_run import ChainRun
from runahead.ranks.ranks import Ranks
from runahead.report import RankReport

SLABS = 2
"""Slabs of a rank that does not decode: the layer at work, and the next one, which ranks that are ahead send."""


class Arriving:
    """A layer's slab, of which some tokens may be on their way until it is read.

    Args:
        await_arrival: returns once they may be read.
    """

    def __init__(self, slab: KVSlab, await_arrival: Callable[[], None]) -> None:
        self._slab, self._await_arrival, self._is_there = slab, await_arrival, False

    def arrive(self) -> None:
        """Wait for these tokens, if nobody has."""
        if not self._is_there:
            self._await_arrival()
            self._is_there = True

    @property
    def value_dim(self) -> int:
        return self._slab.value_dim

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        self.arrive()
        return self._slab.read(start, end)

    @property
    def sequences(self) -> tuple[Tensor, Tensor]:
        """Tokens that arrive are not in tensors of fixed shape."""
        raise AssertionError


@dataclass(frozen=True)
class NewKV:
    """A layer's keys and values of this rank's tokens, by number of the new token."""

    k_BKCH: Tensor
    v_BKCV: Tensor

    @property
    def value_dim(self) -> int:
        return self.v_BKCV.shape[-1]

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        return self.k_BKCH[:, :, start:end], self.v_BKCV[:, :, start:end]

    @property
    def sequences(self) -> tuple[Tensor, Tensor]:
        """New tokens are not in tensors of fixed shape."""
        raise AssertionError


class ExchangeRun(ChainRun):
    """One rank's part of such a prefill. Messages of a layer are waited for when attention comes to their tokens.

    Attributes:
        new: this rank's keys and values in the layer at work.
    """

    takes_blocks = False  # ranks would wait for the last block of the others
    new: NewKV
    _arriving: Sequence[Arriving] = ()

    def arriving(self, layer: int, messages: Sequence[Sequence[Message]]) -> Sequence[Arriving]:
        """A layer's slab as it is once these messages have arrived, for each list of them."""
        slab = self.cache.layer(layer)
        self._arriving = [Arriving(slab, partial(self.await_messages, layer, list(each))) for each in messages]
        return self._arriving

    def save(self, call: LayerCall) -> None:
        self.new = NewKV(call.k_BKCH, call.v_BKCV)
        super().save(call)

    def wait_for_load(self, call: LayerCall) -> None:
        """Wait for what no query has read, too, since it is stored."""
        for each in self._arriving:
            each.arrive()
        self._arriving = ()  # which refer to this run, and would keep its slabs


class ExchangingPrefill(Prefill):
    """Prefill in which all stages exchange keys and values layer by layer.

    The last stage has the last token, so it stores the KV cache of the whole prompt and decodes.
    """

    def first_token_stage(self, partition: ContextPartition, num_stages: int) -> int:
        return num_stages - 1

    @abstractmethod
    def runs(self, partition: ContextPartition) -> list[list[range]]:
        """Contiguous ranges of every stage's tokens, in order, none of them empty; one without any stays idle."""

    @abstractmethod
    def index(self, run: ExchangeRun, schedule: ExchangeSchedule) -> SlabIndex:
        """Places of this rank's tokens and others' in the slabs, and the order in which they are attended to.

        No step of it arrives: what does is an `Arriving`.
        """

    def attend(self, job: PrefillJob) -> Callable[[int], Callable[..., Part]] | None:
        """As of `CausalAttention`."""
        return None

    def exchange(self, options: PrefillOptions) -> Exchange:
        """The way in which ranks exchange keys and values."""
        return options.exchange

    def connect(
        self, ranks: Ranks, partition: ContextPartition, options: PrefillOptions, *, stored_on: Sequence[int] = ()
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
        run = ExchangeRun(
            job,
            EXCHANGES[ranks.backend],
            schedule,
            payloads_of(model.order),
            spans=[(0, job.capacity if schedule.is_last else job.batch.num_tokens)] * model.num_layers,
            num_slabs=model.num_layers if schedule.is_last else SLABS,
            depth=SLABS,
        )
        return run.compute(
            own,
            cache=KVCache(run.cache.slabs, self.index(run, schedule)),
            attend=self.attend(job),
            store=run.cache if schedule.is_last else None,
        )
