"""Placement of a batch's keys and values while decoding: all on the last stage, or on each stage those of its chunk.

Sharded, each stage reads its own keys and values alone, and the stages exchange a few numbers per layer. Which way is
faster depends on the machine: both are timed, at a length of the prompt's, unless earlier timings tell. The gain of
sharding grows with the length, so a length at which it is faster answers for all longer ones. Where the steps of an
answer are slower than they were timed, since the machine does other work now, they count in place of those.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

import torch
from torch import Tensor

from runahead.cache.base import KVStore
from runahead.cache.index import ShardIndex
from runahead.cache.kv_cache import KVCache
from runahead.cache.shard import Shard, shard_bytes, shard_slabs, shards
from runahead.cache.slabs import Slabs
from runahead.config import DecodeName, DecodeOptions
from runahead.context import ContextPartition
from runahead.decoding.forward import fastest_form, forward_over
from runahead.decoding.together import gathering_between
from runahead.kv_transfer.gathering import Gathering, Gatherings
from runahead.model.loading.memory import available_bytes, free_device_bytes
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks

LEAST_SHARE = 0.02
"""Share of the bytes that a decoding step reads below which saving them is not worth a measurement."""

LEAST_BYTES = 8 << 20
"""Bytes of keys and values that are read in about the time of the exchanges, so that nothing can be gained."""

MUCH_MEMORY = 0.25
"""Share of the memory that was free at first above which it is asked for again how much is free."""

TIMED_BYTES = 512 << 20
"""Most bytes of keys and values over which decoding steps are timed."""

ROUNDS, STEPS = 2, 3
"""Rounds of timing both ways, and decoding steps of each, of which the first does not count."""

SLOWER = 1.2
"""Ratio of the seconds of an answer's steps to the timed ones from which on they count in place of these."""

NEAR = 1.25
"""Largest ratio of lengths at which steps are compared."""

NOTED = 32
"""Answers after which steps are timed anew, once those of an answer count: what was timed before is old."""

Timed = Callable[[Tensor], Tensor]
"""A decoding step that is timed: token ids (B, 1) -> logits."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of a decoding step of a batch over so many tokens, on the last stage alone and on all of them.

    Attributes:
        num_noted: answers whose steps count since they were slower than timed.
    """

    batch: int
    num_tokens: int
    last_s: float
    sharded_s: float
    num_noted: int = 0

    @property
    def gain_s(self) -> float:
        return self.last_s - self.sharded_s


class Placement:
    """Chooses for each batch where its keys and values are while decoding. Every rank makes the same calls.

    Args:
        options: the choice, if it is not left to measurements.
        by_share: cache policies choose what is kept: of each stage's tokens its share.
        is_timed: whether `decode=auto` times both ways; else it shards only what the last stage has no memory for.
        lends: whether the last stage decodes with the threads of ranks that wait.

    Attributes:
        timings: of the lengths that were timed.
        timed_bytes: most bytes of keys and values that this rank allocated for a timing.
    """

    def __init__(
        self,
        model: Model,
        ranks: Ranks,
        options: DecodeOptions,
        *,
        by_share: bool = False,
        is_timed: bool = True,
        lends: bool = True,
    ) -> None:
        self._model, self._ranks, self._name = model, ranks, options.name
        self._by_share, self._is_timed, self._lends = by_share, is_timed, lends
        self._gatherings = Gatherings(ranks)
        self._memory: list[tuple[int, int]] | None = None
        self.timings: list[Timing] = []
        self.timed_bytes = self._held_bytes = 0

    def shards(
        self, partition: ContextPartition, *, batch: int, num_new: int, stored_on: Collection[int] = ()
    ) -> dict[int, Shard] | None:
        """The part of a batch of padded prompts that each stage stores; None if the last one stores everything.

        Args:
            batch: number of rows.
            num_new: number of new tokens per row that are stored.
            stored_on: stages that have stored a part of the prompts' beginning, which is read where it is.
        """
        if self._name is DecodeName.last or min(self._ranks.num_stages, len(partition.chain)) == 1:
            return None
        chosen = shards(partition, num_new, by_share=self._by_share)
        if self._name is DecodeName.sharded or any(stage != partition.chain[-1] for stage in stored_on):
            return chosen
        token_bytes = sum(shape.bytes_per_token(batch) for shape in self._model.kv_shapes)
        by_rank = self._memory_by_rank((partition.num_tokens + num_new) * token_bytes)
        if self._must_shard(chosen, batch, [free for free, _ in by_rank]):
            return chosen
        weights = max(weights for _, weights in by_rank)
        room = min(free for free, _ in by_rank)
        return chosen if num_new > 0 and self._is_faster(partition, chosen, batch, weights, room) else None

    def again(
        self, partition: ContextPartition, num_tokens: int, num_new: int, *, block: int = 1
    ) -> tuple[ContextPartition, dict[int, Shard]]:
        """Chunks and shards of a later prefill on the stages that store a batch, split about alike.

        Args:
            partition: of the batch.
            num_tokens: of the later, padded texts.
            num_new: number of new tokens per row that are stored after these.
            block: chunks are multiples of it.
        """
        later = partition.scaled(num_tokens, partition.chain).in_blocks(block)
        return later, shards(later, num_new, by_share=self._by_share)

    def note(self, *, batch: int, num_tokens: int, is_sharded: bool, step_s: float) -> None:
        """Compare the steps of an answer with the timed ones, for later prompts. Every rank tells the same.

        Keys and values stay where they are during an answer.

        Args:
            num_tokens: over which they were, on average.
            step_s: seconds of one.
        """
        timed = [each for each in self.timings if each.batch == batch]
        near = min(timed, key=lambda timing: _distance(timing, num_tokens), default=None)
        if near is None or _distance(near, num_tokens) > math.log(NEAR):
            return
        timed_s = near.sharded_s if is_sharded else near.last_s
        if near.num_noted == 0 and step_s <= SLOWER * timed_s:
            return
        self.timings.remove(near)
        if near.num_noted < NOTED:
            name = "sharded_s" if is_sharded else "last_s"
            self.timings.append(replace(near, **{name: step_s}, num_noted=near.num_noted + 1))  # type: ignore[arg-type]

    def gathering(self, chain: Sequence[int], num_queries: int) -> Gathering | None:
        """The gathering of this rank's share of these stages; None on a rank of another stage.

        Args:
            num_queries: as of `gathering_between`.
        """
        return gathering_between(chain, self._gatherings, self._ranks, self._model, num_queries)

    def _memory_by_rank(self, num_bytes: int) -> list[tuple[int, int]]:
        """Bytes of each rank's free memory and of its weights, the same on every rank.

        What was free at first is asked for once, and again only for keys and values that take much of it.

        Args:
            num_bytes: of all keys and values that are to be stored.
        """
        if self._memory is None or num_bytes > MUCH_MEMORY * min(free for free, _ in self._memory):
            device = self._ranks.device
            free = available_bytes() // self._ranks.local_size if device.type == "cpu" else free_device_bytes(device)
            self._memory = self._ranks.gather((free, self._weights), "the free memory")
        return self._memory

    @cached_property
    def _weights(self) -> int:
        return sum(parameter.nbytes for parameter in self._model.module.parameters())

    def _must_shard(self, chosen: dict[int, Shard], batch: int, free_by_rank: Sequence[int]) -> bool:
        """Whether the last stage has no room for everything, and every stage has room for its shard."""
        mesh = self._ranks.mesh
        needed = {stage: shard_bytes(self._model.kv_shapes, shard, batch) for stage, shard in chosen.items()}
        free = {stage: min(free_by_rank[rank] for rank in mesh.members(stage)) for stage in chosen}
        each_fits = all(needed[stage] <= free[stage] for stage in chosen)
        return each_fits and sum(needed.values()) > free[list(chosen)[-1]]

    def _is_faster(
        self, partition: ContextPartition, chosen: dict[int, Shard], batch: int, weights: int, room: int
    ) -> bool:
        """Whether a decoding step is faster sharded, by what was timed, or is timed now.

        Args:
            weights: bytes of the weights that a rank reads.
            room: bytes that are free on every rank.
        """
        if not self._is_timed:
            return False
        token_bytes = sum(shape.bytes_per_token(batch) for shape in self._model.kv_shapes)
        num_tokens = partition.num_tokens
        saved = (num_tokens - max(partition.chunk_lengths)) * token_bytes
        if saved < max(LEAST_BYTES, LEAST_SHARE * (weights + num_tokens * token_bytes)):
            return False
        for timing in sorted(self.timings, key=lambda timing: _distance(timing, num_tokens)):
            if timing.batch == batch and timing.gain_s > 0 and timing.num_tokens <= num_tokens:
                return True
            if timing.batch == batch and timing.gain_s <= 0 and timing.num_tokens >= num_tokens:
                return False
        longest = (self._model.max_positions or num_tokens + ROUNDS * STEPS) - ROUNDS * STEPS
        timed = max(len(chosen), min(num_tokens, longest, min(TIMED_BYTES, room // 2) // token_bytes))
        gain_s = self._timing(partition, timed, batch).gain_s
        if gain_s <= 0 and timed < num_tokens:  # extrapolated, along the line through a second length
            shorter = self._timing(partition, max(len(chosen), timed // 4), batch)
            slope_s = (gain_s - shorter.gain_s) / max(1, timed - shorter.num_tokens)
            gain_s += slope_s * (num_tokens - timed)
        return gain_s > 0

    def _timing(self, partition: ContextPartition, num_tokens: int, batch: int) -> Timing:
        """Time decoding steps both ways in turn, over zeros, split like `partition`."""
        for timing in self.timings:
            if (timing.batch, timing.num_tokens) == (batch, num_tokens):
                return timing
        ranks, last = self._ranks, partition.chain[-1]
        gather, source = self.gathering(partition.chain, batch), ranks.mesh.rank(last, 0)
        self._held_bytes = 0
        with ranks.busy():
            alone = self._alone(num_tokens, batch) if ranks.stage == last else None
            scaled = partition.scaled(num_tokens, partition.chain)
            sharded = None if gather is None else self._sharded(scaled, batch, gather)
        self.timed_bytes = max(self.timed_bytes, self._held_bytes)
        alone_s, sharded_s = list[float](), list[float]()
        for _ in range(ROUNDS):
            ranks.barrier("all ranks to time decoding steps")
            if alone is not None:
                with ranks.lending([last] if self._lends else []):  # as it decodes
                    alone_s += self._times(alone, batch)
            ranks.barrier("all ranks to time decoding steps")
            if sharded is not None:
                sharded_s += self._times(sharded, batch, gather)
        by_rank = ranks.gather((alone_s, sharded_s), "the time of decoding steps")
        timing = Timing(
            batch=batch,
            num_tokens=num_tokens,
            # What disturbs a step, and what it prepares for later ones, only adds to its time.
            last_s=min(by_rank[source][0]),
            sharded_s=min(by_rank[source][1]),
        )
        self.timings.append(timing)
        return timing

    def _times(self, forward: Timed, batch: int, gather: Gathering | None = None) -> list[float]:
        """Seconds of a few decoding steps, without the first."""
        ids_B1, seconds = torch.zeros(batch, 1, dtype=torch.long, device=self._ranks.device), []
        for _ in range(STEPS):
            began_s = time.perf_counter()
            logits_BV = forward(ids_B1)
            if gather is not None:
                gather.await_device()
            tokens_B = logits_BV.argmax(dim=-1) if logits_BV.shape[1] else ids_B1[:, 0]
            if gather is not None:
                tokens_B = gather(tokens_B, "the next token")[-1]
                gather.await_device()
            tokens_B.tolist()
            seconds.append(time.perf_counter() - began_s)
            self._ranks.progress()
        return seconds[1:]

    def _alone(self, num_tokens: int, batch: int) -> Timed:
        return self._forward(self._model.empty_cache(num_tokens + ROUNDS * STEPS, batch=batch).slabs, num_tokens, batch)

    def _sharded(self, partition: ContextPartition, batch: int, gather: Gathering) -> Timed:
        shard = shards(partition, ROUNDS * STEPS)[self._ranks.stage]
        slabs = shard_slabs(self._model.kv_shapes, shard, batch=batch, device=self._ranks.device)
        return self._forward(slabs, partition.num_tokens, batch, shard, gather)

    def _forward(
        self,
        slabs: Slabs,
        num_tokens: int,
        batch: int,
        shard: Shard | None = None,
        gather: Gathering | None = None,
    ) -> Timed:
        """A forward of single tokens over slabs of zeros."""
        pads, index = [0] * batch, count(num_tokens)
        self._held_bytes += slabs.num_bytes
        for slab in slabs.by_layer:
            slab.slab_TBKX.zero_()
        cache: KVStore = KVCache(slabs) if shard is None else KVCache(slabs, ShardIndex(shard, slabs.device))
        cache = fastest_form(cache, self._model, pads=pads, num_tokens=num_tokens)
        is_told = False
        if gather is not None:
            cache, is_told = cache.over_ranks(gather), not gather.is_last
        forward = forward_over(self._model, cache, [], pads=pads, prompt_tokens=num_tokens, is_told=is_told)
        return lambda ids_B1: forward(ids_B1, next(index))


def _distance(timing: Timing, num_tokens: int) -> float:
    """Log ratio of a length to a timed one."""
    return abs(math.log(timing.num_tokens / num_tokens))
