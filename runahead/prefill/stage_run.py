"""One rank's part of a prefill: the forward over its tokens, with a clock, and what is reported of it."""

# Legend: B batch, C tokens of this rank, S all tokens.

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise

import torch
from torch import Tensor

from runahead.attention.base import ForwardEndsHere
from runahead.attention.op import Part, nothing
from runahead.attention.sparse.blocks import BLOCK
from runahead.attention.sparse.choice import BlockSparse
from runahead.attention.sparse.streaming import Streaming
from runahead.cache.attention import CausalAttention, End, LayerHook
from runahead.cache.base import KVStore
from runahead.cache.kv_cache import KVCache
from runahead.cache.new_tokens import NewTokens
from runahead.kv_transfer import TransferLog
from runahead.prefill.base import PrefillCancelled, Prefilled, PrefillJob, exact_layers
from runahead.prefill.kept_states import KeptStates
from runahead.report import RankReport, SparseReport
from runahead.timeline.clock import clock_for
from runahead.timeline.trace import TraceSpan

LEAST_ASIDE_S = 1e-3
"""Shorter spans are not drawn: the rank only looked whether there is something else to do."""


class StageRun:
    """One rank's part of a prefill, and all of it where its stage is alone; in a chain it is a `ChainRun`.

    Layers are numbered by `Model.order`: keys and values or a state.

    Args:
        cache: stores the keys and values of its tokens. It is given the states.

    Attributes:
        is_last: the stage computes the first token.
        ends: where the forward ends on a rank of which nobody needs more; None: with the logits.
        log: messages of this rank.
        num_done: layers so far.
        sparse: what attends in layers, if not every query to all keys before it.
        takes_blocks: layers may compute their tokens in blocks of rows.
    """

    is_last = takes_blocks = True
    ends: End | None = None

    def __init__(self, job: PrefillJob, cache: KVCache) -> None:
        self.job, self.cache, self.log, self.num_done = job, cache, TransferLog(), 0
        cache.states = job.model.empty_states() if job.states is None else job.states
        self.sparse: BlockSparse | Streaming | None = None
        if job.options.is_sparse:
            self.sparse = BlockSparse.of(job.options, job.batch.pads, exact_layers(job.model, job.options))
        elif job.options.streams:
            self.sparse = job.streaming
        self._kept: KeptStates | None = None
        self._began_s, self._clock = time.perf_counter(), clock_for(job.ranks.device, job.model.ranges)
        self._layer_ends = [self._clock.mark()]
        self._asides: list[tuple[int, object, object]] = []  # (layer, begin, end) of what it did besides

    @property
    def hooks(self) -> list[LayerHook]:
        """Hooks of its own."""
        return [] if self._kept is None else [self._kept]

    @property
    def slab_bytes(self) -> int:
        """Bytes that it has allocated, without states."""
        return self.cache.slabs.num_bytes

    def await_device(self) -> None:
        """Called before the host asks the device for a value after messages of other ranks."""

    def compute(
        self,
        runs: Sequence[range],
        *,
        cache: KVStore | None = None,
        tokens: NewTokens | None = None,
        narrows: bool = False,
        hooks: Sequence[LayerHook] = (),
        attend: Callable[[int], Callable[..., Part]] | None = None,
        store: KVStore | None = None,
        finish: Callable[[], None] = nothing,
    ) -> Prefilled:
        """Run the model on this rank's tokens and report times and bytes.

        Args:
            runs: contiguous ranges of this rank's tokens, in order.
            cache: the cache of this run as its tokens see it, if they see more.
            tokens, attend: as of `CausalAttention`.
            narrows: policies leave fewer of the tokens in each layer.
            hooks: inside those of its own. Where one looks at all tokens of a layer, it computes these at once.
            store: KV cache for decoding, on the rank that decodes.
            finish: called on the last rank once it has computed its tokens, as a part of the prefill.
        """
        job, start, pads = self.job, runs[0].start, self.job.batch.pads
        num_tokens = sum(map(len, runs))
        row_tokens = job.row_tokens if self.takes_blocks and all(hook.takes_blocks for hook in hooks) else None
        row_tokens = None if row_tokens is None or row_tokens >= num_tokens else row_tokens
        if job.stops and self.is_last:
            assert self.cache.states is not None
            self._kept = KeptStates(job.stops, self.cache.states, job.model.state_shapes, job.ranks.device)
        attention = CausalAttention(
            self.cache if cache is None else cache,
            start=start,
            pads=pads,
            tokens=tokens,
            hooks=[*self.hooks, *hooks],
            ends=self.ends,
            attend=attend if self.sparse is None else self.sparse.of_layer,
            on_layer=self._after_layer,
            stops=job.stops,
        )
        (ids_BC, index_C), logits_BV, is_cancelled = self._own_ids(runs), None, False
        self._begin()
        if job.model.held is not None and max(pads) > start:  # transformers asks whether any token is padding
            self.await_device()
        try:
            with job.model.ranges("chunk of tokens", *(f"{run.start}-{run.stop}" for run in runs)):
                with nullcontext() if job.scorer is None else job.scorer.keeping():
                    logits_BV = job.model.forward(
                        ids_BC,
                        attention,
                        start=start,
                        pads=pads,
                        length=job.batch.num_tokens,
                        index_C=index_C,
                        tokens=tokens if narrows else None,
                        all_hidden=job.scorer is not None,
                        row_tokens=row_tokens,
                        row_multiple=BLOCK if job.options.is_sparse else 1,
                        stores_first=row_tokens is not None and self.stores_first(runs[0]),
                    )
                if job.scorer is not None:
                    self.await_device()
                    job.scorer.score(runs)
                finish()
        except ForwardEndsHere:
            pass
        except PrefillCancelled:
            is_cancelled, store = True, None
        computed = self._clock.mark()
        self._end()
        computed_s = self._clock.seconds(computed)
        return Prefilled(
            logits_BV=logits_BV,
            cache=store,
            report=self._report(num_tokens, row_tokens, computed_s, store),
            states={} if is_cancelled or self._kept is None else self._kept.rows,
            is_cancelled=is_cancelled,
            spans=self._spans(computed_s) if job.record else [],
        )

    def _own_ids(self, runs: Sequence[range]) -> tuple[Tensor, Tensor | None]:
        """Token ids (B, C) of these ranges, and their indices (C,) if there are several."""
        ids_BS = self.job.batch.ids_BS
        if len(runs) == 1:
            return ids_BS[:, runs[0].start : runs[0].stop], None
        index_C = torch.cat([torch.arange(run.start, run.stop, device=ids_BS.device) for run in runs])
        return ids_BS[:, index_C], index_C

    def _report(self, num_tokens: int, row_tokens: int | None, computed_s: float, store: KVStore | None) -> RankReport:
        """The report of this rank, whose messages have been sent. `computed_s` is when it had computed its tokens."""
        seconds, log = self._clock.seconds, self.log
        waits = [(seconds(begin), seconds(end)) for _, begin, end in log.waits]
        report = RankReport(
            rank=self.job.ranks.rank,
            chunk_tokens=num_tokens,
            row_tokens=row_tokens,
            prefill_s=computed_s - self._began_s,
            wait_s=sum(end_s - begin_s for begin_s, end_s in waits if begin_s < computed_s),
            kv_sent_bytes=log.sent_bytes,
            kv_received_bytes=log.received_bytes,
            kv_peak_bytes=self.slab_bytes,
            state_bytes=self.cache.state_bytes,
        )
        if self.sparse is not None:
            report.attention = SparseReport(**self.sparse.by_layer())
        if store is not None:
            store.describe_prompt(report)
        if store is not None and store.peak_bytes:  # what policies left of all layers
            if store.states is not None:
                store.note_peak()
            report.kv_peak_bytes += store.peak_bytes
        else:
            report.kv_peak_bytes += report.state_bytes
        return report

    def stores_first(self, chunk: range) -> bool:
        """Whether layers in blocks of rows store all keys and values before any token attends: others wait for them."""
        return False

    def _layer_of(self, place: int) -> int:
        """The layer, by `Model.order`, of a place of the transfer."""
        return place

    def _begin(self) -> None:
        """Called before the forward."""

    def _end(self) -> None:
        """Called after the forward."""

    def _after_layer(self) -> None:
        """Note that a layer's part is computed, and let the rank do other work.

        Raises:
            PrefillCancelled: nobody wants the prompts any more.
        """
        job = self.job
        job.ranks.progress()
        self.num_done += 1
        if job.record:
            self._layer_ends.append(self._clock.mark())
        if job.meanwhile is not None:
            with self._aside(self.num_done):
                job.meanwhile.after_layer(self.num_done, len(job.model.order))

    @contextmanager
    def _aside(self, layer: int) -> Iterator[None]:
        """Record the time of the block as one in which this rank does not compute its part."""
        if not self.job.record:
            yield
            return
        begin = self._clock.mark()
        yield
        self._asides.append((layer, begin, self._clock.mark()))

    def _spans(self, computed_s: float) -> list[TraceSpan]:
        """Timeline: a layer's compute lasts from the end of the previous layer's attention to the end of its own.

        Waits are spans of their own, and no compute.
        """
        seconds, log = self._clock.seconds, self.log
        ends_s = [*map(seconds, self._layer_ends), computed_s]
        if self.ends is not None and self.ends[1] == "attended":
            ends_s.pop()  # nothing follows the last attention
        layers = list(pairwise(ends_s))
        asides = [(at, seconds(b), seconds(e)) for at, b, e in self._asides]
        all_waits = [(self._layer_of(at), seconds(b), seconds(e)) for at, b, e in log.waits]
        all_waits += [(at, b, e) for at, b, e in asides if e - b >= LEAST_ASIDE_S]
        all_waits.sort(key=lambda wait: wait[1])
        names = {len(layers) - 1: "last MLP and logits"} if self.is_last or self.job.scorer is not None else {}
        order = self.job.model.named_order
        states = {place for place, (kind, _) in enumerate(order) if kind == "state"}
        spans = []
        for layer, (start, end) in enumerate(layers):
            waits = [(b, e) for at, b, e in all_waits if at == layer and e <= end]  # later ones wait for the last sends
            edges = [start, *(moment for wait in waits for moment in wait), end]
            at, detail = None if layer in names else order[layer][1], names.get(layer, "")
            spans += [
                TraceSpan(kind="compute", layer=at, start_s=b, end_s=e, detail=detail)
                for b, e in zip(edges[::2], edges[1::2], strict=True)
            ]
            awaited = "state" if layer in states else "K,V"
            spans += [TraceSpan(kind="wait", layer=at, start_s=b, end_s=e, detail=awaited) for b, e in waits]
        spans += [
            TraceSpan(
                kind="send",
                layer=order[self._layer_of(sent.layer)][1],
                start_s=seconds(begin),
                end_s=seconds(end),
                detail=str(sent),
            )
            for sent, begin, end in log.sends
        ]
        return spans
