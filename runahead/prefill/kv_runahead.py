"""KV-Runahead (Cho et al., ICML 2024): a chain of stages prefills uneven chunks of the prompt, about one layer apart.

A stage is one rank with the whole model, or several that share it. It runs the model on its chunk. In every layer it
first sends its keys and values to the next stage, then attends to its own chunk while the prefix arrives, and then to
the prefix. Only the last stage holds the KV cache of the whole prompt; the others have a ring of a few layers. For
sharded decoding every stage keeps its own chunk instead, or what its policies leave of it, and all have a ring for the
prefix. A chain of one stage is ordinary prefill.

What stages have stored of the prompts' beginning is not computed: they send those keys and values to the first stage, a
few layers ahead, and they are passed on like more chunks before all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from runahead.cache.attention import CausalAttention, LayerHook
from runahead.cache.index import ShardIndex
from runahead.cache.kv_cache import KVCache
from runahead.cache.new_tokens import NewTokens
from runahead.cache.part import TextPart
from runahead.cache.shard import Shard, shard_slabs
from runahead.config import PrefillOptions
from runahead.context import ContextPartition, Partitioner
from runahead.kv_transfer import TRANSFERS, KVTransfer, TransferSchedule, chain_carrier, chain_links
from runahead.prefill.base import Prefill, Prefilled, PrefillJob
from runahead.prefill.chain_policies import ChainPolicies
from runahead.prefill.chain_run import ChainRun
from runahead.prefill.chunked import run_chunked
from runahead.ranks.ranks import Ranks
from runahead.report import RankReport
from runahead.reuse.blend import Blend
from runahead.reuse.cache import ReusedIndex, reusing
from runahead.thinning.replay import decide_on_prompt


class KVRunahead(Prefill):
    """Prefill by a chain of stages, with the chunks of the user's partition."""

    can_run_alone = True

    def split(self, num_tokens: int, num_stages: int, chosen: Partitioner) -> ContextPartition:
        return chosen(num_tokens, num_stages).check(num_tokens, num_stages)

    def first_token_stage(self, partition: ContextPartition, num_stages: int) -> int:
        return partition.chain[-1]

    def connect(
        self, ranks: Ranks, partition: ContextPartition, options: PrefillOptions, *, stored_on: Sequence[int] = ()
    ) -> None:
        carrier = chain_carrier(options.carrier, ranks)
        if ranks.backend == "nccl":
            links = ranks.mesh.links(chain_links(partition, options.transfer, stored_on=stored_on))
            ranks.nccl_links(carrier.backend_links(ranks, links))

    def run(self, job: PrefillJob) -> Prefilled:
        return run_in_chain(job, chain_carrier(job.options.carrier, job.ranks))


class Single(KVRunahead):
    """Prefill by a chain of one stage: the last one computes the whole prompt, the others stay idle."""

    def split(self, num_tokens: int, num_stages: int, chosen: Partitioner) -> ContextPartition:
        return ContextPartition(boundaries=(0,) * num_stages + (num_tokens,))


class OneStage(Single):
    """Prefill by all ranks as one stage: tensor parallelism without a chain."""


def run_in_chain(job: PrefillJob, carrier: type[KVTransfer] | None = None) -> Prefilled:
    """Run the part of this rank in the chain. Ranks of a stage with an empty chunk return at once."""
    model, pads, policies, ranks = job.model, job.batch.pads, job.policies, job.ranks
    chunk = job.partition.chunk(ranks.stage)
    if not chunk:
        return Prefilled(report=RankReport(rank=ranks.rank))
    if job.chunk_tokens is not None or job.stops:
        return run_chunked(job, job.chunk_tokens or job.batch.num_tokens)

    stored = job.stored if len(job.partition.chain) > 1 else None
    num_stored = {} if stored is None else stored.num_slots(len(pads))
    last = job.partition.chain[-1]
    last_start, total = job.partition.chunk(last).start, sum(num_stored.values())

    def first_needed(layer: int, start: int) -> int:
        if stored is not None:  # in the last layer it is for the last stage alone, which has a part of it
            needs_all = start < last_start and layer < model.num_layers - 1
            return (0 if needs_all else num_stored.get(last, 0)) - total
        # With reused segments, adjacent new tokens may be far apart in the prompt. And groups of quantised tokens begin
        # at a row's first token, on whatever number of ranks.
        needs_all = job.reused is not None or policies.storage.bits is not None
        return 0 if needs_all else model.first_needed(layer, start, pads)

    by_layer = policies.by_layer(job.partition, model.num_layers, keep_parts=job.shards is not None)
    # A state is handed on as if it were the one token of its stage, and each stage needs that of the one before.
    order, handed_on = model.order, job.partition.one_each()
    chunks = [by_layer[number] if kind == "kv" else handed_on for kind, number in order]

    def first_of(place: int, start: int) -> int:
        kind, number = order[place]
        return first_needed(number, start) if kind == "kv" else max(0, start - 1)

    carrier = carrier or TRANSFERS[ranks.backend]
    schedule = TransferSchedule(
        job.partition,
        ranks.rank,
        job.options.transfer,
        first_of,
        chunks if policies or model.held is not None else None,
        joined=carrier.joins_prefix,
        mesh=ranks.mesh,
        num_stored=num_stored,
    )
    # A sender that is several layers ahead needs as many more slabs here, or it would have to wait.
    depth = job.options.layers_in_flight + schedule.layer_skew() - 1
    is_sharded = job.shard is not None
    # Slabs of layers that others read are needed until those have run.
    if (policies and (schedule.is_last or is_sharded)) or (is_sharded and schedule.is_last):
        depth = max([depth, *(model.num_layers - source for source in model.kv_sources.values())])
    if job.shard is not None and not policies:
        return _run_sharded(job, job.shard, carrier, schedule, depth, first_needed)
    # Under policies the last stage has a ring, too, since each layer's kept tokens are copied to memory of their own.
    decodes_from_slabs = schedule.is_last and not policies
    keeps_slabs = schedule.is_last and (not policies or job.gives_new)
    decodes = schedule.is_last or job.shard is not None
    kept = job.own_policies.cache(model, batch=len(pads)) if policies and decodes else None

    def last_of(kind: str, own: range) -> int:
        if kind == "state":  # the last stage hands on none
            return own.start if schedule.is_last else own.stop
        return job.capacity if decodes_from_slabs else own.stop

    own_chunks = [partition.chunk(ranks.stage) for partition in chunks]
    run = ChainRun(
        job,
        carrier,
        schedule,
        spans=[
            (first_of(place, own.start), last_of(kind, own))
            for place, ((kind, _), own) in enumerate(zip(order, own_chunks, strict=True))
        ],
        num_slabs=len(order) if keeps_slabs else depth,
        depth=depth,
        rotaries=policies.rotaries(model),
        attends_last=kept is not None,
    )
    reused = job.reused
    if stored is not None:
        reused = stored.seen(run.cache, job.reused, ranks.stage, is_last=schedule.is_last)
    cache = run.cache if reused is None else reusing(run.cache.slabs, reused.without_blended())
    cache.states = run.cache.states
    tokens, hooks, blend = NewTokens(chunk.start, pads), list[LayerHook]([run]), None
    if reused is not None and reused.blended:
        blend = Blend(
            reused,
            chunk,
            pads,
            tokens,
            num_layers=model.num_layers,
            device=ranks.device,
            mean_over_shares=model.mean_over_shards,
        )
        hooks.append(blend)
    if policies:
        hooks.append(ChainPolicies(run, tokens, by_layer, ranks.stage, kept, reused))
    if kept is not None:
        kept.states = run.cache.states
    if kept is not None and job.shard is not None:
        kept.part = TextPart(job.shard.chunk, pads=pads, owns=job.shard.owns)

    def decide() -> None:
        if kept is not None:
            if policies.deciding is not None:
                run.await_device()
            room, texts = policies.room(job.own_new_tokens), job.texts or job.batch
            decide_on_prompt(model, policies, kept, texts.ids_BS, texts.pads, room=room, on_layer=ranks.progress)
            if policies.deciding is not None:
                kept.settle(room=room)

    attention = CausalAttention(cache, start=chunk.start, pads=pads, tokens=tokens, hooks=hooks, ends=run.ends)
    stored_in = kept if policies else cache if schedule.is_last else None
    narrowed = tokens if policies.narrows or blend is not None else None
    prefilled = run.compute(attention, [chunk], store=stored_in, narrowed=narrowed, finish=decide)
    if policies and schedule.is_last and job.gives_new:
        prefilled.given = run.cache
    if blend is not None:
        prefilled.recomputed_tokens = blend.mean_computed
    return prefilled


def _run_sharded(
    job: PrefillJob,
    shard: Shard,
    carrier: type[KVTransfer],
    schedule: TransferSchedule,
    depth: int,
    first_needed: Callable[[int, int], int],
) -> Prefilled:
    """Run a rank's part, with a ring for the prefix and memory for the rank's shard, in which its chunk is computed."""
    model, pads, chunk = job.model, job.batch.pads, shard.chunk
    own = shard_slabs(model.kv_shapes, shard, batch=len(pads), device=job.ranks.device)
    run = ChainRun(
        job,
        carrier,
        schedule,
        spans=[(first_needed(layer, chunk.start), chunk.start) for layer in range(model.num_layers)],
        num_slabs=depth,
        depth=depth,
        own=own,
    )
    device, inner, index, reused = own.device, run.cache.slab_index, ShardIndex(shard, own.device), job.reused
    cache, store, held = run.cache, KVCache(own, index), job.reused
    if job.stored is not None:
        reused = job.stored.seen(run.cache, job.reused, job.ranks.stage, is_last=schedule.is_last)
    elif reused is not None and not schedule.is_last:  # segments are on all ranks, and decoding reads them on the last
        held = replace(reused, parts=[])
    if reused is not None:
        held = held or replace(reused, parts=[])
        cache, store = (KVCache(own, ReusedIndex(*each)) for each in ((reused, device, inner), (held, device, index)))
    attention = CausalAttention(cache, start=chunk.start, pads=pads, hooks=[run], ends=run.ends)
    return run.compute(attention, [chunk], store=store)
