"""Bytes that a rank of a mesh holds at its peak: weights, keys and values, and activations."""

# Legend: D model dim, F width of the MLP.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heapreplace

from partitioner.cost.streaming import Streams
from partitioner.meshes.model_size import ModelSize
from runahead.cache.kept import NEW_ROOM
from runahead.config import PrefillOptions
from runahead.context import ContextPartition
from runahead.model.memory import row_tokens_in

WIDE_BYTES = 4
"""Bytes of a number in float32, in which norms are computed."""
LONGEST_PIECE = 1 << 16
"""Tokens that a single stage computes at a time, if its activations for the whole prompt do not fit;
halves of that, down to 512, are tried too."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work that is planned for: prompts, new tokens, and limits of the mesh.

    Attributes:
        tokens: length of the prompts.
        tensor: shares of a stage; None for any.
        sharded: whether decoding is sharded; None for either.
        reserve: bytes that a rank needs beside what is counted.
        prefill: its options.
        streams: KV heads that stream in it, and keep no more than that while decoding.
    """

    tokens: int
    batch: int = 1
    new_tokens: int = 256
    tensor: int | None = None
    sharded: bool | None = None
    reserve: int = 0
    prefill: PrefillOptions = field(default_factory=PrefillOptions)
    streams: Streams | None = None


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Peak of one rank, in bytes.

    Attributes:
        kv: keys and values of its chunk, of the ring through which the prefix passes, and room for new tokens.
        activations: of one layer, the layer with most.
        reserve: what the device and its libraries take beside them.
    """

    weights: int
    kv: int
    activations: int
    reserve: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations + self.reserve


@dataclass(frozen=True, kw_only=True)
class MeshMemory:
    """Memory of the ranks of a mesh under one way to decode.

    Attributes:
        sharded: whether decoding is sharded.
        piece_tokens: `prefill.chunk_tokens` of a single stage; None for the whole prompt at a time.
        row_tokens: most tokens that a layer computes at a time, as `prefill.row_tokens` is by default.
        memory: peak of a rank of each stage.
        room: bytes that are left on the fullest rank; negative if it does not fit.
    """

    sharded: bool
    piece_tokens: int | None
    row_tokens: int
    memory: list[RankMemory]
    room: int


def kv_bytes(
    size: ModelSize, work: Workload, num_shares: int, partition: ContextPartition, *, sharded: bool
) -> list[int]:
    """Bytes of keys and values, and states, that a rank of each stage holds, as the runtime allocates them.

    A stage has a ring of `layers_in_flight` slabs for its prefix and chunk, the last one a slab per layer for all
    tokens (runahead/prefill/kv_runahead.py). If decoding is sharded, each stage has a ring for its prefix, and slabs of
    all layers for its chunk and some new tokens. What travels in few bits has a ring of its own. A state is where the
    model computes with it, and in a slab as it arrives from the stage before and as it goes to the next one.
    Where heads stream, all stages have a ring, what travels has one, too, and what is kept of each layer is copied.
    """
    layers, each = size.num_attending, work.batch * size.kv_bytes_per_token(num_shares)
    ring = min(work.prefill.layers_in_flight, len(size.places))
    states = [work.batch * num_bytes for num_bytes in size.places.state_bytes]
    if work.streams is not None:
        return _kv_bytes_streaming(size, work, work.streams, num_shares, partition, sharded=sharded)
    room = work.new_tokens - 1  # the last new token is not computed
    new = new_by_stage(partition, room)
    held = []
    for stage in range(partition.num_ranks):
        chunk = partition.chunk(stage)
        is_last = stage == partition.chain[-1]
        tokens = 0
        if chunk and is_last and (not sharded or len(partition.chain) == 1):
            tokens = layers * (chunk.stop + room)
        elif chunk and sharded:
            # One slot more takes what a step over tensors of fixed shape writes for another stage.
            tokens = ring * chunk.start + layers * (len(chunk) + new[stage] + (1 if room else 0))
        elif chunk:
            tokens = ring * chunk.stop
        num_bytes = tokens * each
        if chunk and size.places.states:
            copies = (chunk.start > 0) + (not is_last)
            kv_tokens = tokens // (layers if is_last else ring)
            slabs = [copies * state if state else kv_tokens * each for state in states]
            num_bytes = sum(states) + sum(slabs if is_last else (max(slabs[slot::ring]) for slot in range(ring)))
        if chunk and work.prefill.wire_bits is not None and len(partition.chain) > 1:
            sent = work.batch * size.sent_bytes_per_token(num_shares, work.prefill.wire_bits)
            num_bytes += ring * (chunk.start if is_last else chunk.stop) * sent
        held.append(num_bytes)
    return held


def _kv_bytes_streaming(
    size: ModelSize, work: Workload, streams: Streams, num_shares: int, partition: ContextPartition, *, sharded: bool
) -> list[int]:
    """The same where heads stream, as far as it is known without knowing which."""
    each, layers = work.batch * size.kv_bytes_per_token(num_shares), size.num_attending
    ring, room = min(work.prefill.layers_in_flight, layers), min(NEW_ROOM, work.new_tokens)
    sent = work.batch * size.sent_bytes_per_token(num_shares, work.prefill.wire_bits)
    states, held = [work.batch * state for state in size.places.state_bytes], list[int]()
    for stage in range(partition.num_ranks):
        chunk = partition.chunk(stage)
        is_last = stage == partition.chain[-1]
        num_bytes = 0.0
        if chunk:
            num_bytes += sum(states) + ring * chunk.stop * each
            if is_last or sharded:
                num_bytes += layers * (streams.kept_tokens(len(chunk) if sharded else chunk.stop) + room) * each
            if len(partition.chain) > 1:
                own = 0 if is_last else len(chunk)  # of heads that stream all of it lies there, and some is sent
                exact = (1 - streams.share) * (chunk.start + own) * sent
                streamed = streams.share * (min(chunk.start, streams.tokens) + own) * sent
                copies = (chunk.start > 0) + (not is_last)
                # A layer has three slabs of a ring, for the first tokens of heads that stream one that is next to
                # nothing, and a state one.
                slabs = [slab for state in states for slab in ([copies * state] if state else [exact, 0.0, streamed])]
                slots = 3 * work.prefill.layers_in_flight
                num_bytes += sum(max(slabs[slot::slots], default=0.0) for slot in range(slots))
        held.append(round(num_bytes))
    return held


def new_by_stage(partition: ContextPartition, num_new: int) -> dict[int, int]:
    """Number of new tokens that each stage stores if decoding is sharded: each goes to the stage with fewest tokens."""
    stored = [(len(partition.chunk(stage)), stage) for stage in partition.chain]
    heapify(stored)
    for _ in range(num_new):
        tokens, stage = stored[0]
        heapreplace(stored, (tokens + 1, stage))  # the first of several
    return {stage: tokens - len(partition.chunk(stage)) for tokens, stage in stored}


def activation_bytes(size: ModelSize, num_shares: int, num_tokens: int, batch: int = 1) -> int:
    """Most bytes of activations of a forward of `num_tokens` tokens, in the layer's step that has most of them.

    The embeddings and the layer's input stay throughout. Beside them are, in turn: the normed input with queries, keys
    and values before and after rotation and the attention's two parts; the residual with the norm's input and square in
    float32 and its output; the residual and the normed input with the MLP's activated gate, its other half, and their
    product.
    """
    shape, item = size.shape, size.item_bytes
    D, F = shape.model_dim, max(0.0, size.mlp_dim(num_shares))
    queries = shape.num_heads // num_shares * shape.head_dim
    keys = size.kv_heads(num_shares) * shape.head_dim
    attention = item * (D + 4 * queries + 4 * keys)
    norm = item * 2 * D + 2 * WIDE_BYTES * D
    mlp = item * (2 * D + 3 * F)
    return int(batch * num_tokens * (2 * D * item + max(attention, norm, mlp)))


def rank_memory(
    size: ModelSize,
    work: Workload,
    num_shares: int,
    partition: ContextPartition,
    *,
    sharded: bool,
    piece_tokens: int | None = None,
    row_tokens: int | None = None,
) -> list[RankMemory]:
    """Peak memory of a rank of each stage. In blocks of rows the layers' input alone is of all tokens of a chunk."""
    held = kv_bytes(size, work, num_shares, partition, sharded=sharded)
    weights = size.weight_bytes(num_shares)
    computed = [piece_tokens or len(partition.chunk(stage)) for stage in range(partition.num_ranks)]
    hidden, found = work.batch * size.shape.model_dim * size.item_bytes, list[int]()
    for tokens in computed:
        at_once = tokens if row_tokens is None else min(tokens, row_tokens)
        found.append(
            activation_bytes(size, num_shares, at_once, work.batch) + (hidden * tokens if at_once < tokens else 0)
        )
    return [
        RankMemory(
            weights=weights,
            kv=kv,
            activations=activations,
            reserve=work.reserve,
        )
        for kv, activations in zip(held, found, strict=True)
    ]


def ways(
    size: ModelSize, memory_bytes: int, work: Workload, num_shares: int, partition: ContextPartition
) -> Iterator[MeshMemory]:
    """Memory of the ranks under each way to decode. A single stage has one way, and computes pieces if it has to."""
    is_single = len(partition.chain) == 1
    rows = row_tokens_in(memory_bytes, activation_bytes(size, num_shares, 1, work.batch))
    # Only the last stage has the states of the whole prompt.
    either = [False, True] if work.sharded is None and not size.places.states else [work.sharded or False]
    for sharded in [False] if is_single else either:
        pieces: list[int | None] = [None]
        if is_single and work.streams is None:  # whose queries see their own last tokens, in pieces or not
            halved = (LONGEST_PIECE >> halvings for halvings in range(8))
            pieces += [piece for piece in halved if piece < work.tokens and piece % work.prefill.block == 0]
        for piece in pieces:
            memory = rank_memory(
                size, work, num_shares, partition, sharded=sharded, piece_tokens=piece, row_tokens=rows
            )
            held = MeshMemory(
                sharded=sharded,
                piece_tokens=piece,
                row_tokens=rows,
                memory=memory,
                room=memory_bytes - max(each.total for each in memory),
            )
            if held.room >= 0:
                break
        yield held
