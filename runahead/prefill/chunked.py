"""Chunked prefill on one rank: a fixed number of prompt tokens at a time, over one KV cache.

Activations take the memory of one chunk. A policy whose budget is a share of the prompt sees the whole prompt before it
drops anything, so results equal those of an unchunked prefill. A policy that keeps a fixed number of tokens drops after
every chunk instead, so that the KV cache of a prompt of any length fits.
"""

from __future__ import annotations

import time
from itertools import count, pairwise

from policies.base import Phase
from runahead.cache.attention import CausalAttention
from runahead.cache.base import KVStore
from runahead.cache.new_tokens import NewTokens
from runahead.prefill.base import PrefillCancelled, Prefilled, PrefillJob
from runahead.report import RankReport
from runahead.thinning.policy_hook import attention_under
from runahead.thinning.replay import decide_on_prompt
from runahead.thinning.steps import PolicySteps
from runahead.timeline.clock import clock_for
from runahead.timeline.trace import TraceSpan


def run_chunked(job: PrefillJob, chunk_tokens: int) -> Prefilled:
    """Prefill the whole prompt on this rank, `chunk_tokens` tokens at a time."""
    model, batch, ranks, policies = job.model, job.batch, job.ranks, job.policies
    num_tokens, num_rows = batch.num_tokens, len(batch.pads)
    bounded = policies.most_slots(model.num_layers, Phase.prefill) is not None
    room = policies.room(job.capacity - num_tokens)
    kept = policies.cache(model, batch=num_rows) if policies else None
    cache: KVStore = kept or model.empty_cache(job.capacity, batch=num_rows)

    edges = [*range(0, num_tokens, chunk_tokens), num_tokens]
    layers, num_layers = count(1), model.num_layers * (len(edges) - 1)

    def after_layer() -> None:
        if kept is not None:
            kept.peak_bytes = max(kept.peak_bytes, kept.num_bytes)  # without a pool in host memory
        ranks.progress()
        if job.meanwhile is not None:
            job.meanwhile.after_layer(next(layers), num_layers)

    began_s, clock = time.perf_counter(), clock_for(ranks.device)
    marks = [clock.mark()]
    logits_BV = None
    for start, end in pairwise(edges):
        tokens = NewTokens(start, batch.pads)
        is_last = end == num_tokens
        if kept is None:
            attention = CausalAttention(cache, start=start, pads=batch.pads, on_layer=after_layer)
        else:
            steps = PolicySteps(
                model,
                policies.last,
                tokens,
                prompt_tokens=num_tokens,
                room=room if is_last else chunk_tokens,
                evicts=bounded or is_last,
                cache=kept,
            )
            attention = attention_under(steps, kept, on_layer=after_layer)
        try:
            with model.ranges("chunk of tokens", f"{start}-{end}"):
                logits_BV = model.forward(
                    batch.ids_BS[:, start:end],
                    attention,
                    start=start,
                    pads=batch.pads,
                    length=num_tokens,
                    tokens=tokens if policies.narrows else None,
                )
        except PrefillCancelled:
            seconds = time.perf_counter() - began_s
            return Prefilled(report=RankReport(rank=ranks.rank, prefill_s=seconds), is_cancelled=True)
        marks.append(clock.mark())
    if kept is not None:
        decide_on_prompt(model, policies, kept, batch.ids_BS, batch.pads, room=room, on_layer=ranks.progress)
        kept.settle(room=room)
    cache.peak_bytes = max(cache.peak_bytes, cache.num_bytes)
    finished, times_s = clock.mark(), [clock.seconds(mark) for mark in marks]
    report = RankReport(
        rank=ranks.rank,
        chunk_tokens=num_tokens,
        prefill_s=clock.seconds(finished) - began_s,
        kv_peak_bytes=cache.peak_bytes,
    )
    cache.describe_prompt(report)
    spans = [
        TraceSpan(kind="compute", layer=None, start_s=begin, end_s=done, detail=f"tokens {start} to {end}")
        for (begin, done), (start, end) in zip(pairwise(times_s), pairwise(edges), strict=True)
    ]
    return Prefilled(logits_BV=logits_BV, cache=cache, report=report, spans=spans if job.record else [])
