"""KV-Runahead under cache policies: deeper layers compute and send fewer tokens, and the last rank keeps fewer.

A layer's tokens lie side by side in its slab, whichever they are: those that earlier ranks left, then this rank's. So
the chain of ranks works as without policies, with other boundaries in every layer. All ranks, the last one too, have a
ring of slabs; there the policies cut a layer back once it was attended to, into memory of its own.
"""

# Legend: B batch, N query heads, C new tokens, H head dim.

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from policies.base import Phase
from runahead.attention.partial import AttentionTerms
from runahead.cache.kept import KeptCache, KeptLayer
from runahead.cache.slabs import KVCache, KVSlab
from runahead.cache.slot_positions import at_slots
from runahead.context import ContextPartition
from runahead.kv_transfer import TRANSFERS, TransferSchedule
from runahead.model.new_tokens import NewTokens, tokens_behind
from runahead.prefill.base import Prefilled, PrefillJob
from runahead.prefill.chain_attention import ChainAttention
from runahead.prefill.chunk_run import run_chunk
from runahead.rotary import Rotary
from runahead.thinning.steps import PolicySteps
from runahead.timeline.clock import clock_for


class ThinnedAttention(ChainAttention):
    """Attention of one rank's chunk, of which fewer tokens are left in every layer.

    Args:
        by_layer: the chunks of each layer.
        chunks: the chunks of the prompt.
        rank: this one.
        steps: policies at work behind each layer.
        kept: what stays for decoding, on the last rank.
        rotaries: of each layer, where positions are re-encoded: those of the tokens that are left, without gaps.
    """

    def __init__(
        self,
        *args: Any,
        by_layer: list[ContextPartition],
        chunks: ContextPartition,
        rank: int,
        steps: PolicySteps,
        kept: KeptCache | None,
        rotaries: Sequence[Rotary] | None,
        **keywords: Any,
    ) -> None:
        super().__init__(*args, **keywords)
        self._by_layer, self._chunks, self._rank = by_layer, chunks, rank
        self._row_pads, self.steps, self.kept = list(self.pads), steps, kept
        self._rotaries, self.rotates = rotaries, rotaries is not None

    def enter(self, layer: int, num_new: int) -> None:
        partition = self._by_layer[layer]
        self.start = partition.chunk(self._rank).start
        assert num_new == len(partition.chunk(self._rank)) or len(partition.chain) == 1, (layer, num_new)
        # Rows with fewer tokens than are left keep some of their padding, in front.
        self.pads = [
            sum(
                max(0, self._left(layer, rank, num_new) - tokens_behind(pad, self._chunks.chunk(rank)))
                for rank in partition.chain
                if rank <= self._rank
            )
            for pad in self._row_pads
        ]

    def _left(self, layer: int, rank: int, num_new: int) -> int:
        return num_new if rank == self._rank else len(self._by_layer[layer].chunk(rank))

    def place(self, layer: int, slab: KVSlab, q_BNCH: Tensor) -> tuple[KVSlab, Tensor]:
        if self._rotaries is None:
            return slab, q_BNCH
        return at_slots(self._rotaries[layer], slab, q_BNCH, new=self.start, pads=self.pads)

    def leave(self, layer: int, slab: KVSlab, seen: KVSlab, q_BNCH: Tensor, terms: AttentionTerms) -> None:
        num_new, device = q_BNCH.shape[2], q_BNCH.device
        end = self.start + num_new
        # Which tokens of the prefix are left is not known here; any positions before this rank's own will do.
        pads_B = torch.tensor(self.pads, device=device)
        before_nB = torch.arange(slab.first, self.start, device=device)[:, None] - pads_B
        own_nB = self.steps.tokens.positions_BC(num_new, device).T
        kept = KeptLayer(
            shape=self.cache.shapes[layer],
            slab_TBKX=slab.tokens(slab.first, end),
            positions_TBK=torch.cat([before_nB, own_nB.expand(-1, len(self.pads))])[:, :, None].int(),
            pads=list(self.pads),
            num_slots=end - slab.first,
            first=slab.first,
            rotary=None if self._rotaries is None else self._rotaries[layer],
        )
        borrowed = kept.slab_TBKX
        if self.kept is not None:
            self.kept.layers[layer] = kept
        self.steps.run(layer, kept, q_BNCH, terms, seen)
        if self.kept is not None:
            if kept.slab_TBKX is borrowed:
                kept.copy_out(room=self.steps.room)
            if self.kept.retrieval is not None:
                self.kept.retrieval.settle(layer, room=self.steps.room)
            self.kept.peak_bytes = max(self.kept.peak_bytes, self.kept.num_bytes + self.kept.host_bytes)


def run_thinned(job: PrefillJob, rank: int) -> Prefilled:
    """The part of `rank` in the chain."""
    model, pads, num_layers = job.model, job.batch.pads, job.model.num_layers
    by_layer = job.policies.by_layer(job.partition, num_layers)
    schedule = TransferSchedule(
        job.partition,
        rank,
        job.options.transfer,
        lambda layer, start: model.first_needed(layer, start, pads),
        by_layer,
    )
    depth = job.options.layers_in_flight + schedule.skew() - 1
    own = [partition.chunk(rank) for partition in by_layer]
    cache = KVCache(
        model.kv_shapes,
        batch=len(pads),
        spans=[(model.first_needed(layer, chunk.start, pads), chunk.stop) for layer, chunk in enumerate(own)],
        num_slots=depth,
        device=job.ranks.device,
    )
    kept = job.policies.cache(model, batch=len(pads)) if schedule.is_last else None
    tokens = NewTokens(own[0].start, pads)
    steps = PolicySteps(
        job.policies.of(is_last=schedule.is_last),
        tokens,
        phase=Phase.prefill,
        prompt_tokens=job.batch.num_tokens,
        num_layers=num_layers,
        room=job.policies.room(job.capacity - job.batch.num_tokens),
        cuts_back=schedule.is_last,
        retrieval=None if kept is None else kept.retrieval,
    )
    rotaries = job.policies.rotaries(model)
    began_s, clock = time.perf_counter(), clock_for(job.ranks.device)
    transfer = TRANSFERS[job.ranks.backend](schedule, cache, job.ranks, clock, depth)
    attention = ThinnedAttention(
        cache,
        transfer,
        clock,
        start=own[0].start,
        pads=pads,
        by_layer=by_layer,
        chunks=job.partition,
        rank=rank,
        steps=steps,
        kept=kept,
        rotaries=rotaries,
    )
    result = run_chunk(job, attention, clock, [own[0]], began_s=began_s, tokens=tokens)
    result.cache = kept
    if kept is not None:
        result.kv_peak_bytes += kept.peak_bytes
        result.kv_kept_bytes, result.kept_tokens = kept.num_bytes, kept.num_slots
        result.kv_host_bytes = kept.host_bytes
    return result
