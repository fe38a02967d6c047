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

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from runahead.cache.attention import LayerHook
from runahead.cache.index import ShardIndex
from runahead.cache.kv_cache import KVCache
from runahead.cache.new_tokens import NewTokens
from runahead.cache.part import TextPart
from runahead.cache.shard import Shard, shard_slabs
from runahead.cache.slabs import Slabs
from runahead.config import SPARSE_BLOCK, Attention, PrefillOptions, Transfer
from runahead.context import ContextPartition, Partitioner
from runahead.kv_transfer import TRANSFERS, KVTransfer, TransferSchedule, chain_carrier, chain_links
from runahead.kv_transfer.payloads import payloads_of
from runahead.prefill.base import Prefill, Prefilled, PrefillJob
from runahead.prefill.chain_policies import ChainPolicies
from runahead.prefill.chain_run import ChainRun
from runahead.prefill.kept_states import StatePlaces
from runahead.prefill.stage_run import StageRun
from runahead.ranks.ranks import Ranks
from runahead.report import RankReport
from runahead.reuse.cache import ReusedIndex, reusing
from runahead.reuse.reused_kv import ReusedKV
from runahead.thinning.replay import decide_on_prompt

if TYPE_CHECKING:
    from runahead.reuse.blend import Blend


BEFORE_WINDOW = 256
"""Tokens before a window that are handed over where there are any. Other engines keep whole blocks of a window layer,
of 16 to 128 tokens, for later prompts, which attend to those."""


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
        if len(partition.chain) == 1:
            return
        carrier = chain_carrier(options.carrier, ranks)
        if ranks.backend == "nccl":
            links = ranks.mesh.links(chain_links(partition, options.transfer, stored_on=stored_on))
            ranks.nccl_links(carrier.backend_links(ranks, links))

    def run(self, job: PrefillJob) -> Prefilled:
        is_alone = len(job.partition.chain) == 1
        return run_in_chain(job, None if is_alone else chain_carrier(job.options.carrier, job.ranks))


class Single(KVRunahead):
    """Prefill by a chain of one stage: the last one computes the whole prompt, the others stay idle."""

    def split(self, num_tokens: int, num_stages: int, chosen: Partitioner) -> ContextPartition:
        return ContextPartition(boundaries=(0,) * num_stages + (num_tokens,))


class OneStage(Single):
    """Prefill by all ranks as one stage: tensor parallelism without a chain."""


def run_in_chain(job: PrefillJob, carrier: type[KVTransfer] | None = None) -> Prefilled:
    """Run the part of this rank in the chain. Ranks of a stage with an empty chunk return at once."""
    model, pads, policies, ranks = job.model, job.batch.pads, job.policies, job.ranks
    if job.options.attention is Attention.xattention:  # so that all splits choose alike
        inner = {end for end in job.partition.boundaries if end != job.batch.num_tokens}
        assert not any(end % SPARSE_BLOCK for end in inner), f"{job.partition} is not in blocks of {SPARSE_BLOCK}"
    chunk = job.partition.chunk(ranks.stage)
    if not chunk:
        return Prefilled(report=RankReport(rank=ranks.rank))
    if job.chunk_tokens is not None:
        from runahead.prefill.chunked import run_chunked

        return run_chunked(job, job.chunk_tokens)
    by_layer = policies.by_layer(job.partition, model.num_layers, keep_parts=job.shards is not None)
    kept, chain = None, job.partition.chain
    if policies and (ranks.stage == chain[-1] or job.shard is not None):
        kept = job.own_policies.cache(model, batch=len(pads))
    run = _alone(job) if len(chain) == 1 else _linked(job, carrier, by_layer, attends_last=kept is not None)
    reused = job.reused
    if job.stored is not None:
        reused = job.stored.seen(run.cache, job.reused, ranks.stage, is_last=run.is_last)
    if job.shard is not None and not policies:
        return _run_sharded(run, job.shard, reused)
    cache = run.cache if reused is None else reusing(run.cache.slabs, reused.without_blended())
    cache.states = run.cache.states
    tokens, hooks = NewTokens(chunk.start, pads), list[LayerHook]()
    blend: Blend | None = None
    if reused is not None and reused.blended:
        from runahead.reuse.blend import Blend

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
    if job.handovers and run.is_last:
        from runahead.prefill.handing import HandsOver

        hooks.append(HandsOver(job, cache))
    if kept is not None or policies.narrows or policies.on_rank(is_last=run.is_last):
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
                kept.end_turn(room=room)

    prefilled = run.compute(
        [chunk],
        cache=cache,
        tokens=tokens,
        narrows=policies.narrows or blend is not None,
        hooks=hooks,
        store=kept if policies else cache if run.is_last else None,
        finish=decide,
    )
    if policies and run.is_last and job.gives_new:
        prefilled.given = run.cache
    if blend is not None:
        prefilled.recomputed_tokens = blend.mean_computed
    return prefilled


def _alone(job: PrefillJob) -> StageRun:
    """The run of a stage that has the whole prompt."""
    policies, model = job.policies, job.model
    return StageRun(
        job,
        model.empty_cache(
            job.batch.num_tokens if policies else job.capacity,
            batch=len(job.batch.pads),
            num_slabs=_layers_in_memory(job, 1, is_last=True) if policies and not job.gives_new else None,
            rotaries=policies.rotaries(model),
        ),
    )


def _layers_in_memory(job: PrefillJob, layer_skew: int, *, is_last: bool) -> int:
    """Number of slabs of a ring.

    Under policies the last stage has a ring, too, since each layer's kept tokens are copied to memory of their own.

    Args:
        layer_skew: most layers by which a sender is ahead. It needs as many slabs here, or it would have to wait.
    """
    model, is_sharded, num = job.model, job.shard is not None, job.options.layers_in_flight + layer_skew - 1
    if model.stores_after_reading:  # while later layers arrive, earlier ones are still read
        return model.num_layers
    # Slabs of layers that others read are needed until those have run.
    if (job.policies and (is_last or is_sharded)) or (is_sharded and is_last):
        num = max([num, *(model.num_layers - source for source in model.reads_kv_of.values())])
    return num


class StageTokens:
    """Tokens of each payload of a chain's transfer that this rank's stage needs, stores and sends.

    Args:
        by_layer: chunks of each layer.

    Attributes:
        payloads: of the transfer; a place is that of one among them.
        chunks: by place, the tokens of each stage.
        num_stored: by stage, number of slots of what it has stored of the prompts' beginning.
        is_last: the stage computes the first token.
        own: memory of its shard, if the ring is for the prefix alone.
    """

    def __init__(self, job: PrefillJob, by_layer: Sequence[ContextPartition]) -> None:
        model, batch, self._job = job.model, len(job.batch.pads), job
        self.num_stored = {} if job.stored is None else job.stored.num_slots(batch)
        self.payloads = payloads_of(model.order, job.streaming)
        # A state is handed on as the last token of its stage, and each stage needs that of the one before; the first
        # one that of what is stored. The last stage needs those that are kept inside of chunks, too.
        states = StatePlaces(partition=job.partition, stops=job.stops, batch=batch)
        self._kept_at = [each.token for stage in job.partition.chain[:-1] for each in states.of(stage)]
        self._last_state = states.tokens.chunk(job.partition.chain[-1]).start
        self.chunks = [
            each.chunks(by_layer[each.number], job.streaming) if each.kind == "kv" else states.tokens
            for each in self.payloads
        ]
        self._own_chunks = [partition.chunk(job.ranks.stage) for partition in self.chunks]
        self.is_last = job.ranks.stage == job.partition.chain[-1]
        self.own: Slabs | None = None
        if job.shard is not None and not job.policies:
            self.own = shard_slabs(model.kv_shapes, job.shard, batch=batch, device=job.ranks.device)

    def first_needed(self, place: int, start: int) -> int:
        """First token of a payload that a stage needs whose own tokens of it begin at `start`."""
        payload, job = self.payloads[place], self._job
        if payload.kind == "kv":
            return payload.first_needed(start, self._first_exact(payload.number, start), job.streaming)
        if start == 0:
            return -1 if job.stored is not None else 0
        brings_kept = job.options.transfer is Transfer.relay or start == self._last_state
        return min([start - 1, *self._kept_at]) if brings_kept else start - 1

    def _first_exact(self, layer: int, start: int) -> int:
        """The same of a layer's keys and values, of heads that see all tokens."""
        job, model, last = self._job, self._job.model, self._job.partition.chain[-1]
        if job.stored is not None:  # in the last layer it is for the last stage alone, which has a part of it
            is_read = layer < model.num_layers - 1 or model.order[-1][0] == "state"
            needs_all = start < job.partition.chunk(last).start and is_read
            return (0 if needs_all else self.num_stored.get(last, 0)) - sum(self.num_stored.values())
        # With reused segments, adjacent new tokens may be far apart in the prompt. And groups of quantised tokens begin
        # at a row's first token, on whatever number of ranks.
        needs_all = job.reused is not None or job.policies.storage.bits is not None
        if job.hands_over:
            start = min(start, job.batch.num_tokens - BEFORE_WINDOW - 1)
        return 0 if needs_all else model.first_needed(layer, start, job.batch.pads)

    def stored_spans(self) -> list[tuple[int, int]]:
        """Tokens [first, end) that each slab stores, in the order of `Model.order`."""
        spans = list[tuple[int, int]]()
        for place, (each, chunk) in enumerate(zip(self.payloads, self._own_chunks, strict=True)):
            if each.at < len(spans):
                continue
            # Heads that stream lie beside the others, as do tokens of theirs that do not arrive and are never read.
            is_whole = each.kind == "kv" and self._job.streaming is not None
            end = self._job.capacity if each.kind == "kv" and self.is_last and not self._job.policies else chunk.stop
            if self.own is not None or (each.kind == "state" and self.is_last):  # which hands on none
                end = chunk.start
            first = self._first_exact(each.number, chunk.start) if is_whole else self.first_needed(place, chunk.start)
            spans.append((first, end))
        return spans

    def sent_spans(self) -> list[tuple[int, int]] | None:
        """As of `ChainRun`. The last stage sends none of its own tokens."""
        if self._job.options.wire_bits is None and self._job.streaming is None:
            return None
        ends = [chunk.start if self.is_last else chunk.stop for chunk in self._own_chunks]
        return [(self.first_needed(place, chunk.start), ends[place]) for place, chunk in enumerate(self._own_chunks)]


def _linked(
    job: PrefillJob, carrier: type[KVTransfer] | None, by_layer: Sequence[ContextPartition], *, attends_last: bool
) -> ChainRun:
    """The run of a stage in a chain of several. `by_layer` has chunks, `attends_last` is as of `ChainRun`."""
    model, policies, ranks, tokens = job.model, job.policies, job.ranks, StageTokens(job, by_layer)
    carrier, order = carrier or TRANSFERS[ranks.backend], model.named_order
    schedule = TransferSchedule(
        job.partition,
        ranks.rank,
        job.options.transfer,
        tokens.first_needed,
        tokens.chunks if policies or model.held is not None else None,
        joined=carrier.joins_prefix,
        mesh=ranks.mesh,
        num_stored=tokens.num_stored,
        names=[order[each.at] for each in tokens.payloads],
    )
    keeps_all = tokens.is_last and (job.gives_new if policies else tokens.own is None)
    depth = _layers_in_memory(job, schedule.layer_skew(), is_last=tokens.is_last)
    return ChainRun(
        job,
        carrier,
        schedule,
        tokens.payloads,
        spans=tokens.stored_spans(),
        num_slabs=len(model.order) if keeps_all else depth,
        depth=depth if job.streaming is None else 3 * depth,  # payloads of a layer
        rotaries=policies.rotaries(model),
        own=tokens.own,
        sent_spans=tokens.sent_spans(),
        attends_last=attends_last,
    )


def _run_sharded(run: StageRun, shard: Shard, reused: ReusedKV | None) -> Prefilled:
    """Run a rank's part, whose chunk is computed in the memory of the rank's shard.

    Args:
        reused: what the prompts reuse, as this rank reads it.
    """
    job, own, inner = run.job, run.cache.slabs, run.cache.slab_index
    cache, index = run.cache, ShardIndex(shard, own.device)
    store = KVCache(own, index)
    if reused is not None:
        # Segments are on all ranks, and decoding reads them on the last.
        is_held = job.reused is not None and (job.stored is not None or run.is_last)
        held = job.reused if is_held and job.reused is not None else replace(reused, parts=[])
        cache, store = (
            KVCache(own, ReusedIndex(*each)) for each in ((reused, own.device, inner), (held, own.device, index))
        )
    return run.compute([shard.chunk], cache=cache, store=store)
