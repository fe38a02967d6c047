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

from policies.base import Phase
from runahead.attention.base import ForwardEndsHere
from runahead.attention.sparse.choice import BlockSparse
from runahead.cache.attention import CausalAttention, End, LayerCall, LayerHook
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
    model, batch, ranks, policies, reused = job.model, job.batch, job.ranks, job.policies, job.reused
    num_tokens, pads = batch.num_tokens, batch.pads
    bounded = policies.most_slots(model.num_layers, Phase.prefill) is not None
    room = policies.room(job.capacity - num_tokens)
    kept = policies.cache(model, batch=len(pads)) if policies else None
    texts = None
    if kept is not None and (reused is not None or job.gives_new):
        texts = (reused or ReusedKV.nothing(num_tokens, pads)).whole(pads)
    new: KVCache | None = None
    if kept is None or texts is not None:
        new = model.empty_cache(job.capacity if kept is None else num_tokens, batch=len(pads))
    if kept is not None and texts is not None:
        kept.gaps, kept.stored_parts = texts.gaps, texts.stored_parts()
    seen = kept if new is None else new if reused is None else reusing(new.slabs, reused)
    assert seen is not None
    states = model.empty_states() if job.states is None else job.states
    for each in (seen, kept):
        if each is not None:
            each.states = states

    # The queries that policies look at are in the last chunk.
    last = num_tokens - (0 if texts is None else policies.num_observed)
    steps_to_end = chunks.boundaries if isinstance(chunks, ContextPartition) else range(0, num_tokens, chunks)
    edges = sorted({*(edge for edge in steps_to_end if edge <= last), num_tokens})
    chunk_tokens = max(end - start for start, end in pairwise(edges))
    layers, num_layers = count(1), len(model.order) * (len(edges) - 1)

    def after_layer() -> None:
        if kept is not None:
            kept.peak_bytes = max(kept.peak_bytes, kept.num_bytes)  # without a pool in host memory
        ranks.progress()
        if job.meanwhile is not None:
            job.meanwhile.after_layer(next(layers), num_layers)

    began_s, clock = time.perf_counter(), clock_for(ranks.device)
    marks = [clock.mark()]
    logits_BV, stops = None, job.stops
    kept_states = [] if states is None else [KeptStates(stops, states, model.state_shapes, ranks.device)]
    inside = list[LayerHook](kept_states)
    # Of a pipeline's chunks but the last one nobody needs what comes after the last keys and values.
    ends_early = model.boundary is not None and model.boundary.is_last
    last_stored: End | None = (model.num_layers - 1, "saved") if ends_early else None
    sparse = BlockSparse.of(job.options, pads, exact_layers(model, job.options)) if job.options.is_sparse else None
    attend = None if sparse is None else sparse.of_layer
    for start, end in pairwise(edges):
        tokens = NewTokens(start, pads)
        is_last = end == num_tokens
        if job.handovers and is_last and isinstance(seen, KVCache):
            from runahead.prefill.handing import HandsOver

            inside.append(HandsOver(job, seen))
        if kept is None or (texts is not None and not is_last):
            attention = CausalAttention(
                seen,
                start=start,
                pads=pads,
                hooks=inside,
                ends=last_stored if not is_last else None,
                attend=attend,
                on_layer=after_layer,
                stops=stops,
            )
        else:
            steps = PolicySteps(
                model,
                policies.last,
                tokens if texts is None else texts.last_tokens(end - start),
                prompt_tokens=num_tokens if texts is None else max(texts.lengths),
                room=room if is_last else chunk_tokens,
                evicts=bounded or is_last,
                cache=kept,
            )
            if new is None or texts is None:
                attention = attention_under(steps, kept, on_layer=after_layer, hooks=inside, stops=stops)
            else:
                attention = CausalAttention(
                    seen,
                    start=start,
                    pads=pads,
                    hooks=[*inside, StoredTexts(new, texts, steps)],
                    on_layer=after_layer,
                    stops=stops,
                )
        try:
            kept_hidden = nullcontext() if job.scorer is None else job.scorer.keeping()
            with model.ranges("chunk of tokens", f"{start}-{end}"), kept_hidden, suppress(ForwardEndsHere):
                logits_BV = model.forward(
                    batch.ids_BS[:, start:end],
                    attention,
                    start=start,
                    pads=pads,
                    length=num_tokens,
                    tokens=tokens if policies.narrows else None,
                    all_hidden=job.scorer is not None,
                )
            if job.scorer is not None:
                job.scorer.score([range(start, end)])
                if kept is not None and policies.needs_surprise:  # by which the next piece may retrieve
                    kept.see_surprise(job.scorer.surprise(start + 1), start + 1)
        except PrefillCancelled:
            seconds = time.perf_counter() - began_s
            return Prefilled(report=RankReport(rank=ranks.rank, prefill_s=seconds), is_cancelled=True)
        marks.append(clock.mark())
    if kept is not None:
        whole = job.texts or batch
        decide_on_prompt(model, policies, kept, whole.ids_BS, whole.pads, room=room, on_layer=ranks.progress)
        if texts is None or policies.deciding is not None:
            kept.end_turn(room=room)
    cache = seen if kept is None else kept
    cache.peak_bytes = max(cache.peak_bytes, cache.num_bytes)
    finished, times_s = clock.mark(), [clock.seconds(mark) for mark in marks]
    report = RankReport(
        rank=ranks.rank,
        chunk_tokens=num_tokens,
        prefill_s=clock.seconds(finished) - began_s,
        kv_peak_bytes=cache.peak_bytes + (0 if new is None or kept is None else new.num_bytes),
        state_bytes=cache.state_bytes,
    )
    if sparse is not None:
        report.attention = SparseReport(**sparse.by_layer())
    cache.describe_prompt(report)
    spans = [
        TraceSpan(kind="compute", layer=None, start_s=begin, end_s=done, detail=f"tokens {start} to {end}")
        for (begin, done), (start, end) in zip(pairwise(times_s), pairwise(edges), strict=True)
    ]
    prefilled = Prefilled(
        logits_BV=logits_BV,
        cache=cache,
        report=report,
        states=kept_states[0].rows if kept_states else {},
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
