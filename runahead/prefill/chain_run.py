"""One rank's part of a prefill by several stages: slabs for what it sends and receives, and the transfer."""

# Legend: B batch, Z bytes of a row's state in a layer.

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from runahead.attention.base import ForwardEndsHere
from runahead.attention.states import StateLayer
from runahead.cache.attention import LayerCall, LayerHook
from runahead.cache.index import AfterPrefix
from runahead.cache.kv_cache import KVCache
from runahead.cache.quantised.wire import decode, encode
from runahead.cache.slabs import Slabs
from runahead.kv_transfer import KVTransfer, NoTransfer
from runahead.kv_transfer.payloads import Payload
from runahead.kv_transfer.schedule import STORED, Message, Schedule, stored_slots
from runahead.prefill.base import PrefillCancelled, PrefillJob
from runahead.prefill.kept_states import StatePlaces
from runahead.prefill.row_blocks import chunk_projects_twice
from runahead.prefill.stage_run import StageRun
from runahead.reuse.state_rows import row_shape
from runahead.rotary import Rotary


def _write_state(state: StateLayer, slots_1B1Z: Tensor) -> None:
    """Write the state of a batch to where it is sent from."""
    state.write(slots_1B1Z.flatten(0, 2))


class ChainRun(StageRun, LayerHook):
    """One rank's part of a prefill by several stages, as in the figure of the KV-Runahead paper.

    In each layer its attention stores the chunk's keys and values, sends them on, attends to the own chunk, awaits the
    prefix, and attends to it. The state of a layer arrives from the stage before, and goes on to the next one: it is
    one more payload of the transfer, in which each stage has a token of as many bytes as the state, and before it those
    of the states that are kept inside its chunk, for the last stage.

    Args:
        carrier: class that transfers keys and values over the backend of the ranks.
        schedule: messages that this rank sends and receives.
        payloads: of the transfer; below, a place is that of one among them.
        spans: tokens [first, end) that each slab stores, in the order of `Model.order`.
        num_slabs: number of slabs; with fewer than layers they form a ring.
        depth: most places in flight.
        rotaries: of each layer, if keys are stored unrotated.
        own: stores what follows the spans, in memory that stays.
        sent_spans: tokens [first, end) of each slab from which is sent and into which is received, in the order of the
            places, where keys and values travel in a ring of their own: as records (`prefill.wire_bits`), or some of
            them alone.
        attends_last: whether the last layer's attention is computed on every rank, not only where the first token is.

    Raises:
        ValueError: the memory of the slabs cannot be allocated.
    """

    def __init__(
        self,
        job: PrefillJob,
        carrier: type[KVTransfer],
        schedule: Schedule,
        payloads: Sequence[Payload],
        *,
        spans: Sequence[tuple[int, int]],
        num_slabs: int,
        depth: int,
        rotaries: Sequence[Rotary] | None = None,
        own: Slabs | None = None,
        sent_spans: Sequence[tuple[int, int]] | None = None,
        attends_last: bool = False,
    ) -> None:
        if len(schedule.chain) == 1:
            carrier = NoTransfer
        model, order = job.model, job.model.order
        self._payloads, self._packs, self._bits = payloads, sent_spans is not None, job.options.wire_bits
        of_layers = [[n for n, each in enumerate(payloads) if each.at == at] for at in range(len(order))]
        self._kv_at = [found for found, (kind, _) in zip(of_layers, order, strict=True) if kind == "kv"]
        self._state_at = [found[0] for found, (kind, _) in zip(of_layers, order, strict=True) if kind == "state"]
        slabs = Slabs.empty(
            [
                each.shape(model.kv_shapes[each.number], self._bits)
                if each.kind == "kv"
                else row_shape(model.state_shapes[each.number])
                for each in payloads
            ],
            batch=len(job.batch.pads),
            spans=spans if sent_spans is None else sent_spans,
            num_slabs=num_slabs if sent_spans is None else depth,
            device=job.ranks.device,
            allocate=carrier.allocator(job.ranks, schedule),
        )
        of_kv = slabs
        if self._packs:
            of_kv = Slabs.empty(
                model.kv_shapes,
                batch=len(job.batch.pads),
                spans=[span for span, (kind, _) in zip(spans, order, strict=True) if kind == "kv"],
                num_slabs=num_slabs,
                device=job.ranks.device,
            )
        elif self._state_at:
            of_kv = slabs.only([place for [place] in self._kv_at])
        cache = KVCache(of_kv, rotaries=rotaries) if own is None else KVCache(own, AfterPrefix(of_kv))
        super().__init__(job, cache)
        if job.states is not None:  # which are for the first stage
            cache.states = model.empty_states()
        if cache.states is not None and job.stored is not None:
            cache.states.begun = [row for row, num in enumerate(job.stored.num_reused) if num]
        self._states = StatePlaces(partition=job.partition, stops=job.stops, batch=len(job.batch.pads))
        self._carried = cache if of_kv is slabs else KVCache(slabs)
        self.transfer = carrier(schedule, self._carried, job.ranks, self._clock, depth, record=job.record)
        for number, place in enumerate(self._state_at):
            if schedule.receives(place):  # the model's code takes hold of it before it has arrived
                assert cache.states is not None
                shape, batch = model.state_shapes[number], len(job.batch.pads)
                cache.states.layers[number].allocate(shape, batch, job.ranks.device)
        self.log, self.is_last = self.transfer.log, schedule.is_last
        computes_all = self.is_last or job.scorer is not None  # to the logits
        self._attends_last = attends_last or job.scorer is not None
        self._ends_with_state = not computes_all and len(payloads) - 1 in self._state_at
        if attends_last and not computes_all:
            self.ends = model.last_attention
        elif not computes_all and not self._ends_with_state:
            self.ends = cache.num_layers - 1, "saved"

    @property
    def hooks(self) -> list[LayerHook]:
        return [self, *super().hooks]

    @property
    def slab_bytes(self) -> int:
        exact_bytes = self.cache.num_bytes - self.cache.state_bytes if self._packs else 0
        return exact_bytes + self._carried.num_bytes + self.transfer.fed_bytes

    def stores_first(self, chunk: range) -> bool:
        chain = self.job.partition.chain
        return not self.is_last and chunk_projects_twice(self.job.model, chunk, len(chain))

    def _begin(self) -> None:
        self._feed(range(self.transfer.lead))

    def _end(self) -> None:
        """Wait until all that this rank sends or passes on has left."""
        self.transfer.finish()

    def load_state(self, number: int) -> None:
        place, stage, chain = self._state_at[number], self.job.ranks.stage, self.job.partition.chain
        self._open(place)
        self._await_prefix(place)
        if self.transfer.schedule.receives(place):
            bytes_BZ = self._state_bytes(place, self._states.tokens.chunk(stage).start - 1)
            self._layer(number).read(bytes_BZ.unbind(), self.job.model.state_shapes[number])
        for earlier in chain[: chain.index(stage)] if self._kept is not None else ():
            for each in self._states.of(earlier):
                assert self._kept is not None
                self._kept.put(each.stop, each.row, number, self._state_bytes(place, each.token)[each.lane])

    def _layer(self, number: int) -> StateLayer:
        assert self.cache.states is not None
        return self.cache.states.layers[number]

    def _state_bytes(self, place: int, token: int) -> Tensor:
        """A token (B, Z) of the slab of a state."""
        return self._carried.tokens(place, token, token + 1).flatten(2)[0]

    def keep_state(self, number: int, stop: int) -> None:
        for each in () if self.is_last else self._states.of(self.job.ranks.stage):
            if each.stop == stop:
                bytes_Z = self._state_bytes(self._state_at[number], each.token)[each.lane]
                self._layer(number).write_row(each.row, bytes_Z)

    def save_state(self, number: int) -> None:
        """Send a layer's state on.

        Raises:
            ForwardEndsHere: nothing is left to be handed on.
        """
        place = self._state_at[number]
        if self.transfer.schedule.sends(place):
            self._layer(number).write(self._state_bytes(place, self._states.handed_on(self.job.ranks.stage)))
        self.transfer.send(place)
        self.transfer.close(place)
        if self._ends_with_state and place == self._state_at[-1]:
            raise ForwardEndsHere

    def before_save(self, call: LayerCall) -> None:
        for place in self._kv_at[call.layer]:
            self._open(place)

    def _open(self, place: int) -> None:
        """Wait until the slab of a place may be written. A rank with stored keys and values sends those of a later one.

        A state asks the device for nothing, so the host need not wait for it.
        """
        self.transfer.open(place)
        fed = range(place + self.transfer.lead, place + self.transfer.lead + 1)
        reached = [self._payloads[place], *(self._payloads[fed.start : fed.stop] if self.transfer.lead else ())]
        if any(each.kind == "kv" for each in reached):
            self._await_device_for_reuse()
        if self.job.stored is not None and self._payloads[place].kind == "kv":
            self._place(self._payloads[place].number)
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
            for place in self._kv_at[layer]:
                self._pack(place, slots.start, slots.stop)

    def _feed(self, layers: range) -> None:
        """Send stored keys and values of these layers, on the rank that has them."""
        stored, reused = self.job.stored, self.job.reused
        for place in layers if self.transfer.lead else ():
            if place >= self._carried.num_layers:
                continue
            assert stored is not None and reused is not None
            number = self._payloads[place].number
            if self._payloads[place].kind == "state":
                assert self.job.states is not None
                self.transfer.feed(place, partial(_write_state, self.job.states.layers[number]))
                continue
            for part in reused.parts:  # so that what is lost is computed before the layer's memory is filled
                part.layers_TKX[number]
            gather = partial(stored.gather, reused, number, stage=self.job.ranks.stage)
            self.transfer.feed(place, gather if self._bits is None else partial(self._gather_codes, gather, number))

    def _gather_codes(self, gather: Callable[[Tensor], object], layer: int, records_SBKW: Tensor) -> None:
        """Write the records of stored keys and values of a layer, which `gather` writes as they are."""
        assert self._bits is not None
        shape, (num_tokens, batch, heads, _) = self.job.model.kv_shapes[layer], records_SBKW.shape
        size = num_tokens, batch, heads, shape.key_dim + shape.value_dim
        gather(kv_SBKX := torch.empty(size, dtype=shape.dtype, device=self.job.ranks.device))
        encode(kv_SBKX, shape.key_dim, self._bits, records_SBKW)

    def save(self, call: LayerCall) -> None:
        for place in self._kv_at[call.layer]:
            # A receiver of a sliding window needs fewer of the own tokens than another.
            own = [each for each in self.transfer.schedule.sends(place) if each.chunk > STORED]
            if own:
                self._pack(place, min(each.start for each in own), own[0].end)
            self.transfer.send(place)

    def _pack(self, place: int, start: int, end: int) -> None:
        """Write what travels of tokens of this rank to where it is sent from, if that is not where they are stored."""
        if not self._packs:
            return
        payload, sent_SBKW = self._payloads[place], self._carried.tokens(place, start, end)
        stored_SBKX = self.cache.tokens(payload.number, start, end)
        if self._bits is not None:
            some_SBKX = stored_SBKX if payload.heads is None else payload.heads.select(stored_SBKX, 2)
            encode(some_SBKX, self.job.model.kv_shapes[payload.number].key_dim, self._bits, sent_SBKW)
        elif payload.heads is None:
            sent_SBKW.copy_(stored_SBKX)
        else:
            for stored, sent in payload.heads.pairs(stored_SBKX, sent_SBKW, dim=2):
                sent.copy_(stored)

    def _unpack(self, place: int, start: int, end: int) -> None:
        """Write tokens that have arrived to where they are stored."""
        payload, some_SBKX = self._payloads[place], self._carried.tokens(place, start, end)
        stored_SBKX = self.cache.tokens(payload.number, start, end)
        if self._bits is not None:
            records_SBKW, key_dim = some_SBKX, self.job.model.kv_shapes[payload.number].key_dim
            some_SBKX = stored_SBKX if payload.heads is None else torch.empty_like(payload.heads.select(stored_SBKX, 2))
            decode(records_SBKW, key_dim, self._bits, some_SBKX)
        if payload.heads is not None:
            for stored, some in payload.heads.pairs(stored_SBKX, some_SBKX, dim=2):
                stored.copy_(some)
        elif self._bits is None:
            stored_SBKX.copy_(some_SBKX)

    def wait_for_load(self, call: LayerCall) -> None:
        for place in self._kv_at[call.layer]:
            self._await_prefix(place)
        self._await_device_for_reuse()

    def _await_prefix(self, place: int) -> None:
        """Wait until all that this rank receives of a place may be read."""
        received = self.transfer.schedule.receives(place)
        self._until(place, received)
        self.transfer.await_prefix(place)
        if self._packs and self._payloads[place].kind == "kv":
            for each in received:
                self._unpack(place, each.start, each.end)

    def await_messages(self, layer: int, messages: list[Message]) -> None:
        """Wait until these messages of a layer may be read."""
        self._until(layer, messages)
        self.transfer.await_messages(layer, messages)

    def _until(self, layer: int, messages: list[Message]) -> None:
        """Do what the rank does besides, if anything, until these messages of a layer have arrived."""
        if self.job.meanwhile is not None:
            arrived, what = partial(self.transfer.has_messages, messages), self.transfer.schedule.name(layer)
            with self._aside(self._layer_of(layer)):
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
            for place in self._kv_at[call.layer]:
                self.transfer.close(place)

    def _layer_of(self, place: int) -> int:
        return self._payloads[place].at

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
        last = self._payloads[-1].at
        for place, each in enumerate(self._payloads):
            if each.at < first:
                continue
            self._open(place)
            for message in self.transfer.schedule.sends(place):
                self.transfer.part(message).zero_()
            self.transfer.send(place)
            if each.at < last or self.is_last or self._attends_last:
                self.transfer.await_prefix(place)
                self.transfer.close(place)
            self.job.ranks.progress()
