"""Set-up and run of one rank's part of a prefill: its slabs, its transfer of keys and values, its clock and report."""

# Legend: B batch, C tokens of this rank.

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import torch

from runahead.attention.base import ForwardEndsHere, LayerAttention
from runahead.attention.op import nothing
from runahead.cache.attention import End, LayerCall, LayerHook
from runahead.cache.base import KVStore
from runahead.cache.index import AfterPrefix
from runahead.cache.kv_cache import KVCache
from runahead.cache.new_tokens import NewTokens
from runahead.cache.slabs import Slabs
from runahead.kv_transfer import KVTransfer, NoTransfer
from runahead.kv_transfer.schedule import Message, Schedule, stored_slots
from runahead.prefill.base import PrefillCancelled, Prefilled, PrefillJob
from runahead.report import RankReport
from runahead.reuse.state_rows import row_shape
from runahead.rotary import Rotary
from runahead.timeline.clock import clock_for
from runahead.timeline.trace import TraceSpan

LEAST_ASIDE_S = 1e-3
"""Shorter spans are not drawn: the rank only looked whether there is something else to do."""


class ChainRun(LayerHook):
    """One rank's part of a prefill, as in the figure of the KV-Runahead paper.

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
        self.job, self.is_last, self._attends_last = job, schedule.is_last, attends_last
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
        self.cache = KVCache(of_kv, rotaries=rotaries) if own is None else KVCache(own, AfterPrefix(of_kv))
        self.cache.states = self._states = model.empty_states() if job.states is None else job.states
        self._carried = KVCache(slabs) if self._state_at else self.cache
        self._began_s, self._clock = time.perf_counter(), clock_for(job.ranks.device, job.model.ranges)
        self.transfer = carrier(schedule, self._carried, job.ranks, self._clock, depth, record=job.record)
        self._layer_ends = [self._clock.mark()]
        self._asides: list[tuple[int, object, object]] = []  # (layer, begin, end) of what it did besides

    @property
    def ends(self) -> End | None:
        """Where the forward ends on a rank of which nobody needs more; None: with the logits."""
        if self.is_last:
            return None
        if self._attends_last:
            return self.job.model.last_attention
        return None if self._ends_with_state else (self.cache.num_layers - 1, "saved")

    @property
    def _ends_with_state(self) -> bool:
        """Whether the last that this rank hands on is a state."""
        return not self.is_last and self._carried.num_layers - 1 in self._state_at

    def load_state(self, number: int) -> None:
        place = self._state_at[number]
        self._open(place)
        self._await_prefix(place)
        for message in self.transfer.schedule.receives(place):
            assert self._states is not None
            shape, [bytes_B1Z] = self.job.model.state_shapes[number], self.transfer.part(message)
            self._states.layers[number].read(bytes_B1Z.flatten(1), shape)

    def save_state(self, number: int) -> None:
        """Send a layer's state on.

        Raises:
            ForwardEndsHere: nothing is left to be handed on.
        """
        place = self._state_at[number]
        for message in self.transfer.schedule.sends(place):
            assert self._states is not None
            [bytes_B1Z] = self.transfer.part(message)
            self._states.layers[number].write(bytes_B1Z.flatten(1))
        self.transfer.send(place)
        self.transfer.close(place)
        self.job.ranks.progress()
        if self._ends_with_state and place == self._state_at[-1]:
            raise ForwardEndsHere
        self._done(place)

    def before_save(self, call: LayerCall) -> None:
        self._open(self._kv_at[call.layer])

    def _open(self, layer: int) -> None:
        """Wait until a layer's slab may be written. A rank with stored keys and values sends those of a later layer."""
        self.transfer.open(layer)
        self._settle_for_reuse()
        if self.job.stored is not None:
            self._place(layer)
        self._feed(range(layer + self.transfer.lead, layer + self.transfer.lead + 1))

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
        for layer in layers if self.transfer.lead else ():
            if layer < self._carried.num_layers:
                assert stored is not None and reused is not None
                for part in reused.parts:  # so that what is lost is computed before the layer's memory is filled
                    part.layers_TKX[layer]
                self.transfer.feed(layer, partial(stored.gather, reused, layer, stage=self.job.ranks.stage))

    def save(self, call: LayerCall) -> None:
        self.transfer.send(self._kv_at[call.layer])

    def wait_for_load(self, call: LayerCall) -> None:
        self._await_prefix(self._kv_at[call.layer])

    def _await_prefix(self, place: int) -> None:
        """Wait until all that this rank receives of a layer may be read."""
        self._until(place, self.transfer.schedule.receives(place))
        self.transfer.await_prefix(place)
        self._settle_for_reuse()

    def await_messages(self, layer: int, messages: list[Message]) -> None:
        """Wait until these messages of a layer may be read."""
        self._until(layer, messages)
        self.transfer.await_messages(layer, messages)

    def _until(self, layer: int, messages: list[Message]) -> None:
        """Do what the rank does besides, if anything, until these messages of a layer have arrived."""
        if self.job.meanwhile is not None:
            arrived, what = partial(self.transfer.has_messages, messages), f"the KV of layer {layer}"
            with self._aside(layer):
                self.job.meanwhile.until(arrived, what, self.transfer.schedule.peers)

    def _settle_for_reuse(self) -> None:
        """Attention to what is reused takes positions and queries from the host in each layer, and so asks the GPU."""
        if self.job.reused is not None or self.job.stored is not None:
            self.await_device()

    def await_device(self) -> None:
        """Called before the host asks the device for a value after messages of other ranks."""
        peers = self.transfer.schedule.peers
        if len(peers) > 1:  # this rank is one of them
            self.job.ranks.settle("the KV in flight", peers)

    def attended(self, call: LayerCall) -> None:
        """Release the slab of a layer for a later one.

        Raises:
            PrefillCancelled: nobody wants the prompts any more.
        """
        if call.source != call.layer:
            self.job.ranks.progress()
            return
        place = self._kv_at[call.layer]
        self.transfer.close(place)
        self.job.ranks.progress()
        self._done(place)

    def _done(self, place: int) -> None:
        """Note that a layer's part is computed, and let the rank do other work.

        Raises:
            PrefillCancelled: nobody wants the prompts any more.
        """
        if self.job.record:
            self._layer_ends.append(self._clock.mark())
        if self.job.meanwhile is not None:
            try:
                with self._aside(place + 1):
                    self.job.meanwhile.after_layer(place + 1, self._carried.num_layers)
            except PrefillCancelled:
                self._pass_on(place + 1)
                raise

    @contextmanager
    def _aside(self, layer: int) -> Iterator[None]:
        """Record the time of the block as one in which this rank does not compute its part."""
        if not self.job.record:
            yield
            return
        begin = self._clock.mark()
        yield
        self._asides.append((layer, begin, self._clock.mark()))

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

    def compute(
        self,
        attention: LayerAttention,
        runs: Sequence[range],
        *,
        store: KVStore | None = None,
        narrowed: NewTokens | None = None,
        finish: Callable[[], None] = nothing,
    ) -> Prefilled:
        """Run the model on this rank's tokens and report times and bytes.

        Args:
            attention: attention of this rank, which uses this run.
            runs: contiguous ranges of this rank's tokens, in order.
            store: KV cache for decoding, on the rank that decodes.
            narrowed: the tokens that are left in each layer, if policies narrow them.
            finish: called on the last rank once it has computed its tokens, as a part of the prefill.
        """
        job, ids_BS = self.job, self.job.batch.ids_BS
        start, index_C = runs[0].start, None
        if len(runs) == 1:
            ids_BC = ids_BS[:, start : runs[0].stop]
        else:
            index_C = torch.cat([torch.arange(run.start, run.stop, device=ids_BS.device) for run in runs])
            ids_BC = ids_BS[:, index_C]
        logits_BV, is_cancelled = None, False
        self._feed(range(self.transfer.lead))
        try:
            with job.model.ranges("chunk of tokens", *(f"{run.start}-{run.stop}" for run in runs)):
                logits_BV = job.model.forward(
                    ids_BC,
                    attention,
                    start=start,
                    pads=job.batch.pads,
                    length=job.batch.num_tokens,
                    index_C=index_C,
                    tokens=narrowed,
                )
                finish()
        except ForwardEndsHere:
            pass
        except PrefillCancelled:
            is_cancelled, store = True, None
        computed = self._clock.mark()
        self.transfer.finish()
        computed_s, log = self._clock.seconds(computed), self.transfer.log
        waits = [(self._clock.seconds(begin), self._clock.seconds(end)) for _, begin, end in log.waits]
        report = RankReport(
            rank=job.ranks.rank,
            chunk_tokens=sum(map(len, runs)),
            prefill_s=computed_s - self._began_s,
            wait_s=sum(end_s - begin_s for begin_s, end_s in waits if begin_s < computed_s),
            kv_sent_bytes=log.sent_bytes,
            kv_received_bytes=log.received_bytes,
            kv_peak_bytes=self._carried.num_bytes + self.transfer.fed_bytes,
            state_bytes=0 if self._states is None else self._states.num_bytes,
        )
        if store is not None:
            store.describe_prompt(report)
        if store is not None and store.peak_bytes:  # what policies left of all layers
            if self._states is not None:
                store.note_peak()
            report.kv_peak_bytes += store.peak_bytes
        else:
            report.kv_peak_bytes += report.state_bytes
        spans = self._spans(computed_s) if job.record else []
        return Prefilled(logits_BV=logits_BV, cache=store, report=report, is_cancelled=is_cancelled, spans=spans)

    def _spans(self, computed_s: float) -> list[TraceSpan]:
        """Timeline: a layer's compute lasts from the end of the previous layer's attention to the end of its own.

        Waits are spans of their own, and no compute.
        """
        seconds, log = self._clock.seconds, self.transfer.log
        ends_s = [*map(seconds, self._layer_ends), computed_s]
        if self._attends_last and not self.is_last:
            ends_s.pop()  # nothing follows the last attention
        layers = list(pairwise(ends_s))
        asides = [(at, seconds(b), seconds(e)) for at, b, e in self._asides]
        all_waits = [(at, seconds(b), seconds(e)) for at, b, e in log.waits]
        all_waits += [(at, b, e) for at, b, e in asides if e - b >= LEAST_ASIDE_S]
        all_waits.sort(key=lambda wait: wait[1])
        names = {len(layers) - 1: "last MLP and logits"} if self.is_last else {}
        spans = []
        for layer, (start, end) in enumerate(layers):
            waits = [(b, e) for at, b, e in all_waits if at == layer and e <= end]  # later ones wait for the last sends
            edges = [start, *(moment for wait in waits for moment in wait), end]
            at, detail = None if layer in names else layer, names.get(layer, "")
            spans += [
                TraceSpan(kind="compute", layer=at, start_s=b, end_s=e, detail=detail)
                for b, e in zip(edges[::2], edges[1::2], strict=True)
            ]
            spans += [TraceSpan(kind="wait", layer=at, start_s=b, end_s=e, detail="K,V") for b, e in waits]
        spans += [
            TraceSpan(kind="send", layer=sent.layer, start_s=seconds(begin), end_s=seconds(end), detail=str(sent))
            for sent, begin, end in log.sends
        ]
        return spans
