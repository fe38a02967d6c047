"""One rank's part of a prefill by several stages: slabs for what it sends and receives, and the transfer."""

# Legend: B batch, Z bytes of a row's state.

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from runahead.attention.base import ForwardEndsHere
from runahead.attention.states import StateLayer
from runahead.cache.attention import LayerCall, LayerHook
from runahead.cache.index import AfterPrefix
from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import Slabs
from runahead.kv_transfer import KVTransfer, NoTransfer
from runahead.kv_transfer.schedule import Message, Schedule, stored_slots
from runahead.prefill.base import PrefillCancelled, PrefillJob
from runahead.prefill.stage_run import StageRun
from runahead.reuse.state_rows import received_rows, row_shape
from runahead.rotary import Rotary


def _write_state(state: StateLayer, slots_1B1Z: Tensor) -> None:
    """Write the state of a batch to where it is sent from."""
    state.write(slots_1B1Z.flatten(0, 2))


class ChainRun(StageRun, LayerHook):
    """One rank's part of a prefill by several stages, as in the figure of the KV-Runahead paper.

    In each layer its attention stores the chunk's keys and values, sends them on, attends to the own chunk, awaits the
    prefix, and attends to it. The state of a layer arrives from the stage before, and goes on to the next one: it is
    one more place of the transfer, in which each stage has one token, of as many bytes as the state.

    Args:
        carrier: class that transfers keys and values over the backend of the ranks.
        schedule: messages that this rank sends and receives.
        spans: tokens [first, end) that each slab stores, in the order of `Model.order`.
        num_slabs: number of slabs; with fewer than layers they form a ring.
        depth: most layers in flight.
        rotaries: of each layer, if keys are stored unrotated.
        own: stores what follows the spans, in memory that stays.
        attends_last: whether the last layer's attention is computed on every rank, not only where the first token is.

    Raises:
        ValueError: the memory of the slabs cannot be allocated.
    """

    def __init__(
        self,
        job: PrefillJob,
        carrier: type[KVTransfer],
        schedule: Schedule,
        *,
        spans: Sequence[tuple[int, int]],
        num_slabs: int,
        depth: int,
        rotaries: Sequence[Rotary] | None = None,
        own: Slabs | None = None,
        attends_last: bool = False,
    ) -> None:
        if len(schedule.chain) == 1:
            carrier = NoTransfer
        model, order = job.model, job.model.order
        self._kv_at, self._state_at = (
            [place for place, (kind, _) in enumerate(order) if kind == wanted] for wanted in ("kv", "state")
        )
        slabs = Slabs.empty(
            [model.kv_shapes[n] if kind == "kv" else row_shape(model.state_shapes[n]) for kind, n in order],
            batch=len(job.batch.pads),
            spans=spans,
            num_slabs=num_slabs,
            device=job.ranks.device,
            allocate=carrier.allocator(job.ranks, schedule),
        )
        of_kv = slabs.only(self._kv_at) if self._state_at else slabs
        cache = KVCache(of_kv, rotaries=rotaries) if own is None else KVCache(own, AfterPrefix(of_kv))
        super().__init__(job, cache)
        if job.states is not None:  # which are for the first stage
            cache.states = model.empty_states()
        if cache.states is not None and job.stored is not None:
            cache.states.begun = [row for row, num in enumerate(job.stored.num_reused) if num]
        self._received = list[Tensor]()
        self._carried = KVCache(slabs) if self._state_at else cache
        self.transfer = carrier(schedule, self._carried, job.ranks, self._clock, depth, record=job.record)
        self.log, self.is_last, self._attends_last = self.transfer.log, schedule.is_last, attends_last
        self._ends_with_state = not self.is_last and len(order) - 1 in self._state_at
        if attends_last and not self.is_last:
            self.ends = model.last_attention
        elif not self.is_last and not self._ends_with_state:
            self.ends = cache.num_layers - 1, "saved"

    @property
    def hooks(self) -> list[LayerHook]:
        return [self]

    @property
    def slab_bytes(self) -> int:
        return self._carried.num_bytes + self.transfer.fed_bytes

    def _begin(self) -> None:
        self._feed(range(self.transfer.lead))

    def _end(self) -> None:
        """Wait until all that this rank sends or passes on has left."""
        self.transfer.finish()

    @property
    def _keeps_received(self) -> bool:
        """Whether states are kept with which this stage begins."""
        return self.is_last and bool(self.job.stops)

    @property
    def kept_states(self) -> dict[tuple[int, int], list[Tensor]]:
        stops = self.job.stops.items() if self._keeps_received else ()
        return {(at, row): received_rows(self._received, row) for at, rows in stops for row in rows}

    def load_state(self, number: int) -> None:
        place = self._state_at[number]
        self._open(place)
        self._await_prefix(place)
        for message in self.transfer.schedule.receives(place):
            assert self.cache.states is not None
            shape, [bytes_B1Z] = self.job.model.state_shapes[number], self.transfer.part(message)
            self.cache.states.layers[number].read(bytes_B1Z.flatten(1).unbind(), shape)
            if self._keeps_received:
                self._received.append(bytes_B1Z.flatten(1).clone())

    def save_state(self, number: int) -> None:
        """Send a layer's state on.

        Raises:
            ForwardEndsHere: nothing is left to be handed on.
        """
        place = self._state_at[number]
        for message in self.transfer.schedule.sends(place):
            assert self.cache.states is not None
            [bytes_B1Z] = self.transfer.part(message)
            self.cache.states.layers[number].write(bytes_B1Z.flatten(1))
        self.transfer.send(place)
        self.transfer.close(place)
        if self._ends_with_state and place == self._state_at[-1]:
            raise ForwardEndsHere

    def before_save(self, call: LayerCall) -> None:
        self._open(self._kv_at[call.layer])

    def _open(self, place: int) -> None:
        """Wait until the slab of a place may be written. A rank with stored keys and values sends those of a later one.

        A state asks the device for nothing, so the host need not wait for it.
        """
        self.transfer.open(place)
        fed = range(place + self.transfer.lead, place + self.transfer.lead + 1)
        if any(each in self._kv_at for each in (place, *(fed if self.transfer.lead else ()))):
            self._await_device_for_reuse()
        kind, number = self.job.model.order[place]
        if self.job.stored is not None and kind == "kv":
            self._place(number)
        self._feed(fed)

    def _place(self, layer: int) -> None:
        """Put stored keys and values of the first stage to where they are sent from, as others will arrive there."""
        stored, reused, stage = self.job.stored, self.job.reused, self.job.ranks.stage
        assert stored is not None
        if reused is None or stage != self.job.partition.chain[0]:
            return
        slots = stored_slots(stored.num_slots(len(self.job.batch.pads))).get(stage)
        if slots is not None and self.cache.layer(layer).first <= slots.start:
            stored.gather(reused, layer, self.cache.tokens(layer, slots.start, slots.stop), stage)

    def _feed(self, layers: range) -> None:
        """Send stored keys and values of these layers, on the rank that has them."""
        stored, reused = self.job.stored, self.job.reused
        for place in layers if self.transfer.lead else ():
            if place >= self._carried.num_layers:
                continue
            assert stored is not None and reused is not None
            kind, number = self.job.model.order[place]
            if kind == "state":
                assert self.job.states is not None
                self.transfer.feed(place, partial(_write_state, self.job.states.layers[number]))
                continue
            for part in reused.parts:  # so that what is lost is computed before the layer's memory is filled
                part.layers_TKX[number]
            self.transfer.feed(place, partial(stored.gather, reused, number, stage=self.job.ranks.stage))

    def save(self, call: LayerCall) -> None:
        self.transfer.send(self._kv_at[call.layer])

    def wait_for_load(self, call: LayerCall) -> None:
        self._await_prefix(self._kv_at[call.layer])
        self._await_device_for_reuse()

    def _await_prefix(self, place: int) -> None:
        """Wait until all that this rank receives of a place may be read."""
        self._until(place, self.transfer.schedule.receives(place))
        self.transfer.await_prefix(place)

    def await_messages(self, layer: int, messages: list[Message]) -> None:
        """Wait until these messages of a layer may be read."""
        self._until(layer, messages)
        self.transfer.await_messages(layer, messages)

    def _until(self, layer: int, messages: list[Message]) -> None:
        """Do what the rank does besides, if anything, until these messages of a layer have arrived."""
        if self.job.meanwhile is not None:
            arrived, what = partial(self.transfer.has_messages, messages), self.transfer.schedule.name(layer)
            with self._aside(layer):
                self.job.meanwhile.until(arrived, what, self.transfer.schedule.peers)

    def _await_device_for_reuse(self) -> None:
        """Attention to what is reused takes positions and queries from the host in each layer, and so asks the GPU."""
        if self.job.reused is not None or self.job.stored is not None:
            self.await_device()

    def await_device(self) -> None:
        """Called before the host asks the device for a value after messages of other ranks."""
        peers = self.transfer.schedule.peers
        if len(peers) > 1:  # this rank is one of them
            self.job.ranks.await_device("the KV in flight", peers)

    def attended(self, call: LayerCall) -> None:
        """Release the slab of a layer for a later one."""
        if call.source == call.layer:
            self.transfer.close(self._kv_at[call.layer])

    def _after_layer(self) -> None:
        try:
            super()._after_layer()
        except PrefillCancelled:
            self._pass_on(self.num_done)
            raise

    def _pass_on(self, first: int) -> None:
        """Send and receive what is left, from this layer on, without computing it.

        So no rank waits for a cancelled one, whenever each learns of it. Zeros are sent, as whatever is in the slabs
        might not be finite, and a rank that knows later than others computes with it.
        """
        last = self._carried.num_layers - 1
        for layer in range(first, last + 1):
            self._open(layer)
            for message in self.transfer.schedule.sends(layer):
                self.transfer.part(message).zero_()
            self.transfer.send(layer)
            if layer < last or self.is_last or self._attends_last:
                self.transfer.await_prefix(layer)
                self.transfer.close(layer)
            self.job.ranks.progress()
