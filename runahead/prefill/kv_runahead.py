"""KV-Runahead (Cho et al., ICML 2024): ranks prefill uneven chunks of the prompt, about one layer apart.

Every rank runs the whole model on its chunk. In every layer it sends its own K,V on before anything else, attends to
its own chunk while the prefix is still on its way, and then to the prefix. Only the last rank ever holds all K,V;
the others keep a ring of a few layers. A chain of one rank is plain prefill.
"""

# Legend: B batch, N query heads, K kv heads, C chunk, H head dim, V value dim.

from __future__ import annotations

import time
from functools import partial

from torch import Tensor

from runahead.attention import AttentionTerms
from runahead.causal_attention import CausalAttention
from runahead.clock import Clock, clock_for
from runahead.config import PrefillOptions
from runahead.context import ContextPartition, Partitioner
from runahead.kv_cache import KVCache, KVSlab
from runahead.kv_transfer import TRANSFERS, KVTransfer, TransferSchedule, chain_links
from runahead.model import PrefillEndsHere
from runahead.prefill.base import Prefill, Prefilled, PrefillJob
from runahead.prefill.chunk_run import run_chunk
from runahead.ranks import Ranks


class RunaheadAttention(CausalAttention):
    """Attention of one rank's chunk: the loop body of the paper's figure, once per layer."""

    def __init__(self, cache: KVCache, transfer: KVTransfer, clock: Clock, *, start: int, pads: list[int]) -> None:
        super().__init__(cache, start=start, pads=pads)
        self.transfer, self._clock = transfer, clock
        self.layer_ends = [clock.mark()]

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        self.transfer.open(layer)
        self.enter(layer)
        slab = self.cache.layer(layer)
        slab.write(self.start, k_BKCH, v_BKCV)
        self.transfer.send(layer)
        if layer == self.cache.num_layers - 1 and not self.transfer.schedule.is_last:
            raise PrefillEndsHere  # all that later ranks need of this one is on its way
        out_BNCV = self.attend_to_slab(slab, q_BNCH, terms, partial(self.transfer.await_prefix, layer))
        self.leave(layer, slab, q_BNCH, terms)
        self.transfer.close(layer)
        self.transfer.ranks.progress()
        self.layer_ends.append(self._clock.mark())
        return out_BNCV

    def enter(self, layer: int) -> None:
        """Before the layer's own K,V are stored."""

    def leave(self, layer: int, slab: KVSlab, q_BNCH: Tensor, terms: AttentionTerms) -> None:
        """While the layer's K,V are still there."""


class KVRunahead(Prefill):
    """A chain of ranks along the user's partition."""

    def split(self, num_tokens: int, num_ranks: int, chosen: Partitioner) -> ContextPartition:
        return chosen(num_tokens, num_ranks).check(num_tokens, num_ranks)

    def first_token_rank(self, partition: ContextPartition, num_ranks: int) -> int:
        return partition.chain[-1]

    def connect(self, ranks: Ranks, partition: ContextPartition, options: PrefillOptions) -> None:
        if ranks.backend == "nccl":
            ranks.nccl_links(chain_links(partition, options.transfer))

    def run(self, job: PrefillJob) -> Prefilled:
        return run_in_chain(job, job.ranks.rank)


def run_in_chain(job: PrefillJob, rank: int) -> Prefilled:
    """The part of `rank` in the chain. Ranks with an empty chunk return at once."""
    model = job.model
    chunk, pads = job.partition.chunk(rank), job.batch.pads
    if not chunk:
        return Prefilled()
    schedule = TransferSchedule(
        job.partition, rank, job.options.transfer, lambda layer, start: model.first_needed(layer, start, pads)
    )
    # A sender that is many layers ahead needs that much more room here, or it would have to wait.
    depth = job.options.layers_in_flight + schedule.skew() - 1
    end = job.capacity if schedule.is_last else chunk.stop
    cache = KVCache(
        model.kv_shapes,
        batch=len(pads),
        spans=[(model.first_needed(layer, chunk.start, pads), end) for layer in range(model.num_layers)],
        num_slots=model.num_layers if schedule.is_last else depth,
        device=job.ranks.device,
    )
    began_s, clock = time.perf_counter(), clock_for(job.ranks.device)
    transfer = TRANSFERS[job.ranks.backend](schedule, cache, job.ranks, clock, depth)
    attention = RunaheadAttention(cache, transfer, clock, start=chunk.start, pads=pads)
    return run_chunk(job, attention, clock, [chunk], began_s=began_s)
