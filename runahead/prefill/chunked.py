"""Chunked prefill on one rank: a fixed number of prompt tokens at a time, over one KV cache.

Activations take the memory of one chunk. A policy whose budget is a share of the prompt sees the whole prompt before it
drops anything, so results equal those of an unchunked prefill. A policy that keeps a fixed number of tokens drops after
every chunk instead, so that the KV cache of a prompt of any length fits.

Under policies what prompts reuse is stored together with what was computed, once the last chunk has attended to both.
"""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from itertools import count, pairwise

from torch import Tensor

from policies.layer_view import Phase
from runahead.attention.base import ForwardEndsHere
from runahead.attention.sparse.choice import BlockSparse
from runahead.cache.attention import CausalAttention, End, LayerCall, LayerHook
from runahead.cache.kept_cache import KeptCache
from runahead.cache.kv_cache import KVCache
from runahead.cache.new_tokens import NewTokens
from runahead.context import ContextPartition
from runahead.prefill.base import PrefillCancelled, Prefilled, PrefillJob, exact_layers
from runahead.prefill.kept_states import KeptStates
from runahead.report import RankReport, SparseReport
from runahead.reuse.cache import reusing
from runahead.reuse.reused_kv import ReusedKV, WholeTexts
from runahead.thinning.policy_hook import attention_under
from runahead.thinning.replay import decide_on_prompt
from runahead.thinning.steps import PolicySteps
from runahead.timeline.clock import clock_for
from runahead.timeline.trace import TraceSpan


def run_chunked(job: PrefillJob, chunks: int | ContextPartition) -> Prefilled:
    """Prefill the whole prompt on this rank, in its layers, chunk by chunk.

    Args:
        chunks: tokens that are computed at a time, or the chunks.
    """
    run = ChunkedRun(job, chunks)
    for start, end in pairwise(run.edges):
        try:
            run.compute(start, end)
        except PrefillCancelled:
            seconds = time.perf_counter() - run.began_s
            return Prefilled(report=RankReport(rank=job.ranks.rank, prefill_s=seconds), is_cancelled=True)
    return run.end()


class ChunkedRun:
    """One prompt batch in chunks: where these are stored, and the attention of each.

    Attributes:
        edges: where chunks begin and end, in tokens of the padded batch.
        began_s: by `time.perf_counter`.
    """

    def __init__(self, job: PrefillJob, chunks: int | ContextPartition) -> None:
        self._job, model, policies, reused = job, job.model, job.policies, job.reused
        num_tokens, pads = job.batch.num_tokens, job.batch.pads
        self._room = policies.room(job.capacity - num_tokens)
        self._drops_by_chunk = policies.most_slots(model.num_layers, Phase.prefill) is not None

        self._kept = kept = policies.cache(model, batch=len(pads)) if policies else None
        self._texts: WholeTexts | None = None
        if kept is not None and (reused is not None or job.gives_new):
            self._texts = texts = (reused or ReusedKV.nothing(num_tokens, pads)).whole(pads)
            kept.gaps, kept.stored_parts = texts.gaps, texts.stored_parts()
        self._new: KVCache | None = None
        if kept is None or self._texts is not None:
            self._new = model.empty_cache(job.capacity if kept is None else num_tokens, batch=len(pads))
        seen = kept if self._new is None else self._new if reused is None else reusing(self._new.slabs, reused)
        assert seen is not None
        self._seen, states = seen, model.empty_states() if job.states is None else job.states
        for each in (seen, kept):
            if each is not None:
                each.states = states

        # The queries that policies look at are in the last chunk.
        last = num_tokens - (0 if self._texts is None else policies.num_observed)
        steps_to_end = chunks.boundaries if isinstance(chunks, ContextPartition) else range(0, num_tokens, chunks)
        self.edges = sorted({*(edge for edge in steps_to_end if edge <= last), num_tokens})
        self._chunk_tokens = max(end - start for start, end in pairwise(self.edges))
        self._layers, self._num_layers = count(1), len(model.order) * (len(self.edges) - 1)

        self.began_s, self._clock = time.perf_counter(), clock_for(job.ranks.device)
        self._marks = [self._clock.mark()]
        self._logits_BV: Tensor | None = None
        self._states: KeptStates | None = None
        if states is not None:
            self._states = KeptStates(job.stops, states, model.state_shapes, job.ranks.device)
        self._hooks: list[LayerHook] = [] if self._states is None else [self._states]
        # Of a pipeline's chunks but the last one nobody needs what comes after the last keys and values.
        ends_early = model.boundary is not None and model.boundary.is_last
        self._last_stored: End | None = (model.num_layers - 1, "saved") if ends_early else None
        self._sparse: BlockSparse | None = None
        if job.options.is_sparse:
            self._sparse = BlockSparse.of(job.options, pads, exact_layers(model, job.options))

    def compute(self, start: int, end: int) -> None:
        """Compute a chunk in all layers. Raises: PrefillCancelled."""
        job, batch, scorer = self._job, self._job.batch, self._job.scorer
        model, policies, tokens = job.model, job.policies, NewTokens(start, batch.pads)
        is_last = end == batch.num_tokens
        if job.handovers and is_last and isinstance(self._seen, KVCache):
            from runahead.prefill.handing import HandsOver

            self._hooks.append(HandsOver(job, self._seen))
        if self._kept is None or (self._texts is not None and not is_last):
            attention: CausalAttention = self._plain(start, is_last=is_last)
        else:
            attention = self._under_policies(self._kept, tokens, end)
        kept_hidden = nullcontext() if scorer is None else scorer.keeping()
        with model.ranges("chunk of tokens", f"{start}-{end}"), kept_hidden, suppress(ForwardEndsHere):
            self._logits_BV = model.forward(
                batch.ids_BS[:, start:end],
                attention,
                start=start,
                pads=batch.pads,
                length=batch.num_tokens,
                tokens=tokens if policies.narrows else None,
                all_hidden=scorer is not None,
            )
        if scorer is not None:
            scorer.score([range(start, end)])
            if self._kept is not None and policies.needs_surprise:  # by which the next piece may retrieve
                self._kept.see_surprise(scorer.surprise(range(start, end)), start)
        self._marks.append(self._clock.mark())

    def _plain(self, start: int, *, is_last: bool) -> CausalAttention:
        """The attention of a chunk at which policies do nothing."""
        return CausalAttention(
            self._seen,
            start=start,
            pads=self._job.batch.pads,
            hooks=self._hooks,
            ends=None if is_last else self._last_stored,
            attend=None if self._sparse is None else self._sparse.of_layer,
            on_layer=self._after_layer,
            stops=self._job.stops,
        )

    def _under_policies(self, kept: KeptCache, tokens: NewTokens, end: int) -> CausalAttention:
        """The attention of a chunk that policies see: each where nothing is reused, else the last one."""
        job, texts, pads = self._job, self._texts, self._job.batch.pads
        is_last = end == job.batch.num_tokens
        steps = PolicySteps(
            job.model,
            job.policies.last,
            tokens if texts is None else texts.last_tokens(end - tokens.start),
            prompt_tokens=job.batch.num_tokens if texts is None else max(texts.lengths),
            room=self._room if is_last else self._chunk_tokens,
            evicts=self._drops_by_chunk or is_last,
            cache=kept,
        )
        if self._new is None or texts is None:
            return attention_under(steps, kept, on_layer=self._after_layer, hooks=self._hooks, stops=job.stops)
        return CausalAttention(
            self._seen,
            start=tokens.start,
            pads=pads,
            hooks=[*self._hooks, StoredTexts(self._new, texts, steps)],
            on_layer=self._after_layer,
            stops=job.stops,
        )

    def _after_layer(self) -> None:
        if self._kept is not None:
            self._kept.peak_bytes = max(self._kept.peak_bytes, self._kept.num_bytes)  # without a pool in host memory
        self._job.ranks.progress()
        if self._job.meanwhile is not None:
            self._job.meanwhile.after_layer(next(self._layers), self._num_layers)

    def end(self) -> Prefilled:
        """Let policies decide on the whole prompt, and report."""
        job, kept, new, clock = self._job, self._kept, self._new, self._clock
        if kept is not None:
            whole = job.texts or job.batch
            progress = job.ranks.progress
            decide_on_prompt(
                job.model, job.policies, kept, whole.ids_BS, whole.pads, room=self._room, on_layer=progress
            )
            if self._texts is None or job.policies.deciding is not None:
                kept.end_turn(room=self._room)
        cache = self._seen if kept is None else kept
        cache.peak_bytes = max(cache.peak_bytes, cache.num_bytes)
        finished, times_s = clock.mark(), [clock.seconds(mark) for mark in self._marks]
        report = RankReport(
            rank=job.ranks.rank,
            chunk_tokens=job.batch.num_tokens,
            prefill_s=clock.seconds(finished) - self.began_s,
            kv_peak_bytes=cache.peak_bytes + (0 if new is None or kept is None else new.num_bytes),
            state_bytes=cache.state_bytes,
        )
        if self._sparse is not None:
            report.attention = SparseReport(**self._sparse.by_layer())
        cache.describe_prompt(report)
        spans = [
            TraceSpan(kind="compute", layer=None, start_s=begin, end_s=done, detail=f"tokens {start} to {end}")
            for (begin, done), (start, end) in zip(pairwise(times_s), pairwise(self.edges), strict=True)
        ]
        prefilled = Prefilled(
            logits_BV=self._logits_BV,
            cache=cache,
            report=report,
            states={} if self._states is None else self._states.rows,
            spans=spans if job.record else [],
        )
        if job.gives_new and kept is not None:
            prefilled.given = new
        return prefilled


class StoredTexts(LayerHook):
    """Gives policies the whole texts of prompts that reuse others, once their last new tokens have attended to a layer.

    Args:
        new: has all new tokens, in slabs.
        texts: what is reused, and the new tokens.
        steps: the policies, and the cache in which whole texts are stored.
    """

    def __init__(self, new: KVCache, texts: WholeTexts, steps: PolicySteps) -> None:
        self._new, self._texts, self._steps = new, texts, steps

    def closed(self, call: LayerCall) -> None:
        layer, slabs = call.layer, self._new.slabs
        new_SBKX, shape = slabs.by_layer[layer].slab_TBKX, slabs.shapes[layer]
        whole = self._texts.layer(layer, shape, new_SBKX, room=self._steps.room)
        self._steps.input_BCD = call.input_BCD
        self._steps.store(layer, whole, call.seen, call.terms)
