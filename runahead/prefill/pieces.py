"""Chunked prefill on one rank: a piece of the prompt at a time, over one cache.

Activations are those of one piece. What is exact stays exact: a policy whose budget is a share of the prompt sees all
of it before anything is dropped. A policy that keeps a fixed number of tokens drops behind every piece instead, so that
the K,V of a prompt of any length fit.
"""

# Legend: B batch, N query heads, K kv heads, C piece, H head dim, V value dim.

from __future__ import annotations

import time
from itertools import pairwise

from torch import Tensor

from policies.base import Phase
from runahead.attention.causal import CausalAttention
from runahead.attention.partial import AttentionTerms
from runahead.cache.host_layer import HostLayer
from runahead.cache.kept import KeptCache
from runahead.cache.slabs import KVCache
from runahead.model.new_tokens import NewTokens
from runahead.prefill.base import Prefilled, PrefillJob
from runahead.ranks.ranks import Ranks
from runahead.thinning.attention import KeptAttention
from runahead.thinning.steps import PolicySteps
from runahead.timeline.clock import clock_for
from runahead.timeline.span import Span


class WholePieceAttention(CausalAttention):
    """Attention of a piece, all K,V kept; others see that this rank is at work."""

    ranks: Ranks

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        out_BNCV = super().attend(layer, q_BNCH, k_BKCH, v_BKCV, terms)
        self.ranks.progress()
        return out_BNCV


class KeptPieceAttention(KeptAttention):
    """Attention of a piece under policies."""

    ranks: Ranks

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        out_BNCV = super().attend(layer, q_BNCH, k_BKCH, v_BKCV, terms)
        self.kept.peak_bytes = max(self.kept.peak_bytes, self.kept.num_bytes)
        self.ranks.progress()
        return out_BNCV


def run_in_pieces(job: PrefillJob, piece_tokens: int) -> Prefilled:
    """The whole prompt on this rank, so many tokens at a time."""
    model, batch, ranks = job.model, job.batch, job.ranks
    num_tokens, num_rows = batch.num_tokens, len(batch.pads)
    policies, bounded = job.policies.last, job.policies.most_slots(model.num_layers, Phase.prefill) is not None
    room = job.policies.room(job.capacity - num_tokens)
    cache: KVCache | KeptCache
    if job.policies:
        cache = job.policies.cache(model, batch=num_rows)
    else:
        cache = KVCache(
            model.kv_shapes,
            batch=num_rows,
            spans=[(0, job.capacity)] * model.num_layers,
            num_slots=model.num_layers,
            device=ranks.device,
        )
    edges = [*range(0, num_tokens, piece_tokens), num_tokens]
    began_s, clock = time.perf_counter(), clock_for(ranks.device)
    marks = [clock.mark()]
    logits_BV = None
    for start, end in pairwise(edges):
        tokens: NewTokens | None = None
        attention: WholePieceAttention | KeptPieceAttention
        if isinstance(cache, KVCache):
            attention = WholePieceAttention(cache, start=start, pads=batch.pads)
        else:
            tokens, is_last = NewTokens(start, batch.pads), end == num_tokens
            steps = PolicySteps(
                policies,
                tokens,
                phase=Phase.prefill,
                prompt_tokens=num_tokens,
                num_layers=model.num_layers,
                room=room if is_last else piece_tokens,
                cuts_back=bounded or is_last,
                retrieval=cache.retrieval,
            )
            attention = KeptPieceAttention(cache, steps)
        attention.ranks = ranks
        logits_BV = model.forward(
            batch.ids_BS[:, start:end], attention, start=start, pads=batch.pads, length=num_tokens, tokens=tokens
        )
        marks.append(clock.mark())
    result = Prefilled(logits_BV=logits_BV, cache=cache, chunk_tokens=num_tokens)
    if isinstance(cache, KeptCache):
        for layer in cache.layers:
            if not isinstance(layer, HostLayer) and layer.slab_TBKX.shape[0] != layer.num_slots + room:
                layer.copy_out(room=room)
        result.kv_peak_bytes, result.kept_tokens = cache.peak_bytes, cache.num_slots
        result.kv_host_bytes = cache.host_bytes
    result.kv_peak_bytes = max(result.kv_peak_bytes, cache.num_bytes)
    result.kv_kept_bytes = cache.num_bytes
    times_s = [clock.seconds(mark) for mark in marks]
    result.prefill_s = times_s[-1] - began_s
    if job.record:
        result.spans = [
            Span(kind="compute", layer=None, start_s=begin, end_s=done, detail=f"tokens {start} to {end}")
            for (begin, done), (start, end) in zip(pairwise(times_s), pairwise(edges), strict=True)
        ]
    return result
