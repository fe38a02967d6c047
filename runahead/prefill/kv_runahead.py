"""KV-Runahead (Cho et al., ICML 2024): ranks prefill uneven chunks of the prompt, about one layer apart.

Every rank runs the whole model on its chunk. In every layer it sends its own K,V on before anything else, attends to
its own chunk while the prefix is still on its way, and then to the prefix. Only the last rank ever holds all K,V;
the others keep a ring of a few layers. A chain of one rank is plain prefill.
"""

# Legend: B batch, N query heads, K kv heads, C chunk, H head dim, V value dim.

from __future__ import annotations

import time

from runahead.cache.slabs import KVCache
from runahead.config import PrefillOptions
from runahead.context import ContextPartition, Partitioner
from runahead.kv_transfer import TRANSFERS, TransferSchedule, chain_links
from runahead.prefill.base import Prefill, Prefilled, PrefillJob
from runahead.prefill.chain_attention import ChainAttention
from runahead.prefill.chunk_run import run_chunk
from runahead.prefill.pieces import run_in_pieces
from runahead.prefill.reused_chain import ReusedChainAttention
from runahead.prefill.thinned_chain import run_thinned
from runahead.ranks.ranks import Ranks
from runahead.timeline.clock import clock_for


class KVRunahead(Prefill):
    """A chain of ranks along the user's partition."""

    takes_policies = True

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
    if job.pieces_of is not None:
        return run_in_pieces(job, job.pieces_of)
    if job.policies:
        return run_thinned(job, rank)

    def first_needed(layer: int, start: int) -> int:
        # Beside reused K,V, tokens that lie side by side here may be far apart in the prompt.
        return 0 if job.reused is not None else model.first_needed(layer, start, pads)

    schedule = TransferSchedule(job.partition, rank, job.options.transfer, first_needed)
    # A sender that is many layers ahead needs that much more room here, or it would have to wait.
    depth = job.options.layers_in_flight + schedule.skew() - 1
    end = job.capacity if schedule.is_last else chunk.stop
    cache = KVCache(
        model.kv_shapes,
        batch=len(pads),
        spans=[(first_needed(layer, chunk.start), end) for layer in range(model.num_layers)],
        num_slots=model.num_layers if schedule.is_last else depth,
        device=job.ranks.device,
    )
    began_s, clock = time.perf_counter(), clock_for(job.ranks.device)
    transfer = TRANSFERS[job.ranks.backend](schedule, cache, job.ranks, clock, depth)
    if job.reused is None:
        attention = ChainAttention(cache, transfer, clock, start=chunk.start, pads=pads)
    else:
        attention = ReusedChainAttention(cache, transfer, clock, start=chunk.start, pads=pads)
        attention.reuse(job.reused)
    return run_chunk(job, attention, clock, [chunk], began_s=began_s)
