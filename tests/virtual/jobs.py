"""Jobs for virtual GPUs: a prefill of a tiny model, and the loop over layers alone, without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from policies.base import Policy
from runahead.cache.base import LayerStore
from runahead.cache.kept import KeptLayer
from runahead.cache.kv_cache import KVCache, SlabLayer
from runahead.cache.quantised.wire import sent_shape
from runahead.cache.slabs import KVShape, Slabs
from runahead.config import Exchange, PrefillOptions, Transfer
from runahead.context import ContextPartition
from runahead.kv_transfer import KVTransfer, TransferSchedule
from runahead.kv_transfer.exchange import ExchangeSchedule
from runahead.kv_transfer.gathering import NcclGathering
from runahead.kv_transfer.nccl import NcclTransfer
from runahead.kv_transfer.nccl_exchange import NcclExchange
from runahead.kv_transfer.schedule import stored_slots
from runahead.model.model import Model
from runahead.pipeline.hidden import Passage
from runahead.prefill import Prefill, PrefillJob, PromptBatch
from runahead.prefill.zigzag import Zigzag
from runahead.ranks.mapped.memory import ALIGNMENT
from runahead.reuse.reused_kv import ReusedKV
from runahead.thinning.rank_policies import RankPolicies
from runahead.timeline.clock import Clock
from tests.ranks.tasks import slots_of
from tests.virtual.deferred import Deferred
from tests.virtual.device import Choose, Job, VirtualRanks, transfers_early

SHAPE = KVShape(num_kv_heads=1, key_dim=1, value_dim=1, dtype=torch.float32)
CHUNK = 2
"""Tokens of a rank, where only their order matters."""


def settled(model: Model) -> Model:
    """The model, once it has found out about itself what it does once, for which a host waits."""
    for name in ("known_rotaries", "rotations", "query_prediction", "token_kinds", "output_projections", "fingerprint"):
        getattr(model, name)
    return model


@lru_cache
def tiny_llama(copy: int, num_layers: int) -> Model:
    """The same random weights for every `copy`; each rank has one of its own."""
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(5)
    return Model(AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval())


@dataclass(kw_only=True)
class Outcome:
    """A prefill on virtual GPUs.

    Attributes:
        kernels: kernels that each rank queued, without those before its prefill.
        synchronizations, uploads: of all ranks; see `Deferred`.
        logits_BV: of the last rank.
        layers: what the last rank stores.
    """

    kernels: list[int]
    synchronizations: int = 0
    uploads: int = 0
    logits_BV: torch.Tensor | None = None
    layers: Sequence[LayerStore] = ()

    @property
    def values(self) -> list[torch.Tensor]:
        """The last rank's logits, and its keys and values by layer, which are slabs."""
        assert self.logits_BV is not None
        return [self.logits_BV, *map(_kv, self.layers)]


def prefill(
    strategy: Prefill,
    boundaries: tuple[int, ...],
    options: PrefillOptions,
    *,
    choose: Choose = transfers_early,
    policies: Sequence[Policy] = (),
    num_layers: int = 3,
    watched: bool = True,
    hosts: Sequence[int] | None = None,
    rows: int = 1,
    reused: ReusedKV | None = None,
) -> Outcome:
    """Prefill a prompt on virtual GPUs, all operations on tensors included.

    Args:
        rows: of a batch, each the same prompt.

    Raises:
        Race: if `watched`, accesses to a slab race.
    """
    partition = ContextPartition(boundaries=boundaries)
    size = partition.num_ranks // (2 if isinstance(strategy, Zigzag) else 1)
    ids = torch.randint(61, (boundaries[-1],), generator=torch.Generator().manual_seed(3)).tolist()
    outcome = Outcome(kernels=[0] * size)

    def body(ranks: VirtualRanks) -> None:
        strategy.connect(ranks, partition, options)
        batch = PromptBatch.from_prompts([ids] * rows, ranks.device)
        model, thinning = tiny_llama(ranks.rank, num_layers), RankPolicies.everywhere(policies)
        thinning.check(model)  # as `Engine` does before the first prompt
        before = ranks.accelerator.num_kernels
        as_sent = sent_shape(model.kv_shapes[0], options.wire_bits)  # slabs of both kinds consist of such rows
        row_bytes = gcd(model.kv_shapes[0].bytes_per_token(rows), as_sent.bytes_per_token(rows)) if watched else None
        if row_bytes is not None and options.streams:  # some heads alone
            row_bytes //= as_sent.num_kv_heads
        with Deferred(ranks.accelerator, row_bytes=row_bytes) as device:
            prefilled = strategy.run(
                PrefillJob(
                    model=model,
                    ranks=ranks,
                    batch=batch,
                    partition=partition,
                    capacity=batch.num_tokens,
                    options=options,
                    policies=thinning,
                    reused=reused,
                )
            )
        outcome.kernels[ranks.rank] = ranks.accelerator.num_kernels - before
        outcome.synchronizations += device.num_synchronizations
        outcome.uploads += device.num_uploads
        if prefilled.logits_BV is not None and prefilled.cache is not None:
            outcome.logits_BV, outcome.layers = prefilled.logits_BV, prefilled.cache.layers

    Job(size, choose=choose, hosts=hosts).run(body)
    return outcome


def _kv(layer: LayerStore) -> torch.Tensor:
    """Keys and values that a layer stores."""
    assert isinstance(layer, (SlabLayer, KeptLayer)), type(layer)
    return (layer.slab if isinstance(layer, SlabLayer) else layer.slab()).slab_TBKX


def walk(ranks: VirtualRanks, transfer: Any, own: list[range], *, in_steps: bool = False) -> None:
    """The loop of a prefill over its layers: what it queues, without a model.

    Where ranks share a model, their sums follow attention and MLP, as compute: it waits for each.

    Args:
        in_steps: attend to messages as they arrive, rather than to the whole prefix.
    """
    gpu, cache, ends = ranks.accelerator, transfer.cache, list[Any]()
    fed = [] if transfer._stored is None else [slab.slab_TBKX for slab in transfer._stored.by_layer]
    for slab_TBKX in fed:
        gpu.watch(slab_TBKX, SHAPE.bytes_per_token())
    in_stage = ranks.nccl_in_stage() if ranks.num_shares > 1 else None

    def add_up() -> None:
        if in_stage is not None:
            in_stage.all_reduce(torch.zeros(1)).wait()
            gpu.kernel()

    def feed(layers: range) -> None:
        for layer in layers if fed else ():
            if layer < cache.num_layers:
                transfer.feed(layer, lambda part: gpu.kernel(writes=[part]))

    feed(range(transfer.lead))
    for layer in range(cache.num_layers):
        slab = cache.layer(layer)
        parts = [slab.tokens(tokens.start, tokens.stop) for tokens in own]
        transfer.open(layer)
        assert all(end.has_happened for end in ends[: max(0, layer + 1 - transfer.depth)]), "too far ahead of the GPU"
        feed(range(layer + transfer.lead, layer + transfer.lead + 1))
        gpu.kernel(writes=parts)
        transfer.send(layer)
        if layer == cache.num_layers - 1 and not transfer.schedule.is_last:
            break
        gpu.kernel(reads=parts)
        if in_steps:
            for messages in transfer.schedule.steps(layer):
                transfer.await_messages(layer, messages)
                gpu.kernel(reads=[slab.tokens(message.start, message.end) for message in messages])
        else:
            transfer.await_prefix(layer)
            gpu.kernel(reads=[slab.tokens(slab.first, own[-1].stop)])
        ends.append(gpu.mark())
        transfer.close(layer)
        add_up()
        add_up()
    transfer.finish()
    assert all(record.is_done for record in ranks.records.all()), "transfers are left"
    memory = [cache.layer(layer).slab_TBKX for layer in range(cache.num_layers)]
    gpu.kernel(writes=[*memory, *fed])  # whoever gets the memory


class Marks(Clock):
    """A clock whose marks are events of the current stream."""

    def __init__(self, ranks: VirtualRanks) -> None:
        super().__init__()
        self._accelerator = ranks.accelerator

    def mark(self) -> object:
        return self._accelerator.mark()

    def seconds(self, mark: object) -> float:
        raise NotImplementedError


def connect_stages(ranks: VirtualRanks, shares: int) -> None:
    """Connect stages as loading a model in shares does: before anything is queued, since it waits for the whole GPU."""
    ranks.arrange(shares)
    if shares > 1:
        ranks.nccl_in_stage()


def chain(
    size: int,
    transfer: Transfer,
    *,
    num_layers: int = 4,
    layers_in_flight: int = 2,
    carrier: type[KVTransfer] = NcclTransfer,
    prompts: int = 1,
    shares: int = 1,
    num_stored: int = 0,
    in_parts: bool = False,
    grows: bool = False,
    after: Callable[[VirtualRanks, Any], None] = lambda ranks, transfer: None,
) -> Callable[[VirtualRanks], None]:
    """Part of a rank in a chain of `size` stages of `shares` ranks each, the last of which has stored some tokens.

    Args:
        in_parts: each of them has stored as many.
        grows: each prompt is longer than the one before, so that it needs more memory.
    """

    def body(ranks: VirtualRanks) -> None:
        connect_stages(ranks, shares)
        for number in range(prompts):
            chunk = CHUNK + number * grows * ALIGNMENT // SHAPE.bytes_per_token()
            partition = ContextPartition(boundaries=tuple(range(0, chunk * size + 1, chunk)))
            last, stages = chunk * (size - 1), range(size) if in_parts else [size - 1]
            stored = dict.fromkeys(stages if num_stored else (), num_stored)

            def first_needed(layer: int, start: int, last: int = last, stored: dict[int, int] = stored) -> int:
                needs_all = start < last and layer < num_layers - 1
                return (0 if needs_all else stored.get(size - 1, 0)) - sum(stored.values())

            schedule = TransferSchedule(
                partition,
                ranks.rank,
                transfer,
                first_needed,
                joined=carrier.joins_prefix,
                mesh=ranks.mesh,
                num_stored=stored,
            )
            ranks.nccl_links(carrier.backend_links(ranks, schedule.links()))
            depth, own = layers_in_flight + schedule.layer_skew() - 1, partition.chunk(ranks.stage)
            spans = [(first_needed(layer, own.start), own.stop) for layer in range(num_layers)]
            cache = slabs(ranks, spans, num_layers if schedule.is_last else depth, carrier, schedule)
            made = carrier(schedule, cache, ranks, Marks(ranks), depth, record=True)
            placed = stored_slots(stored).get(0, range(0)) if ranks.stage == 0 else range(0)
            walk(ranks, made, [placed, own] if placed else [own])
            after(ranks, made)
            if grows:
                del made, cache
                ranks.accelerator.watched.clear()  # so that the memory is free

    return body


def exchange(
    size: int,
    way: Exchange,
    *,
    num_layers: int = 4,
    carrier: type[NcclExchange] = NcclExchange,
    shares: int = 1,
    after: Callable[[VirtualRanks, Any], None] = lambda ranks, transfer: None,
) -> Callable[[VirtualRanks], None]:
    """Part of a rank where all `size` stages exchange the keys and values of zigzag chunks."""
    runs = [[range(CHUNK * at, CHUNK * (at + 1)) for at in (size - 1 - rank, size + rank)] for rank in range(size)]

    def body(ranks: VirtualRanks) -> None:
        connect_stages(ranks, shares)
        ranks.nccl_between_stages()
        schedule = ExchangeSchedule(
            runs, ranks.rank, way, num_layers=num_layers, first_needed=lambda layer, start: 0, mesh=ranks.mesh
        )
        spans = [(0, 2 * CHUNK * size)] * num_layers
        cache = slabs(ranks, spans, num_layers if schedule.is_last else 2)
        made = carrier(schedule, cache, ranks, Marks(ranks), 2, record=True)
        walk(ranks, made, runs[ranks.stage], in_steps=way is Exchange.ring)
        after(ranks, made)

    return body


def pipeline(
    size: int, *, num_chunks: int = 5, seen: list[torch.Tensor] | None = None
) -> Callable[[VirtualRanks], None]:
    """Part of a rank of a pipeline, each stage of which adds 1 to the hidden states of a chunk.

    Args:
        seen: gets what the last stage receives; None where only the order of operations matters.
    """
    chunks = [range(CHUNK * at, CHUNK * (at + 1)) for at in range(num_chunks)]

    def body(ranks: VirtualRanks) -> None:
        connect_stages(ranks, 1)
        ranks.nccl_links([(stage, stage + 1) for stage in range(size - 1)])
        with Deferred(ranks.accelerator, row_bytes=2 * torch.float32.itemsize) if seen is not None else nullcontext():
            passage = Passage(ranks, chunks, batch=1, width=2, dtype=torch.float32, clock=Marks(ranks))
            for number in range(num_chunks):
                own_1CD = torch.full((1, CHUNK, 2), 10.0 * number, device=ranks.device)
                given_1CD = passage.receive(own_1CD)
                if ranks.stage < size - 1:
                    passage.send(given_1CD + 1)
                elif seen is not None:
                    seen.append(given_1CD)
            passage.finish()

    return body


def slabs(
    ranks: VirtualRanks,
    spans: list[tuple[int, int]],
    num_slabs: int,
    carrier: type[KVTransfer] = NcclTransfer,
    schedule: Any = None,
) -> KVCache:
    """A cache whose accesses are watched."""
    cache = KVCache(
        Slabs.empty(
            [SHAPE] * len(spans),
            batch=1,
            spans=spans,
            num_slabs=num_slabs,
            device=ranks.device,
            allocate=carrier.allocator(ranks, schedule),
        )
    )
    for slab in slots_of(cache.slabs):
        ranks.accelerator.watch(slab, SHAPE.bytes_per_token())
    return cache


def decoding(size: int, *, num_layers: int = 2, steps: int = 2) -> Callable[[VirtualRanks], None]:
    """Part of a rank in a chain of ranks that then decode together: they gather in each layer, and each token."""

    def body(ranks: VirtualRanks) -> None:
        chain(size, Transfer.relay, num_layers=num_layers)(ranks)
        gather, gpu = NcclGathering(ranks, range(size)), ranks.accelerator
        for _ in range(steps):
            for _ in range(num_layers):
                part = torch.zeros(3)
                gpu.kernel(writes=[part])
                gpu.kernel(reads=[gather(part)])
            gather.await_device()
            gather(torch.zeros(1), "the next token")
            gather.await_device()

    return body
