"""Hidden states on their way through a pipeline: a stage receives those of a chunk, and hands its own on.

They travel as keys and values do in a chain, over the same transfers: what is a layer there is a chunk here.
"""

# Legend: B batch, C tokens of a chunk, D model dim.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import KVShape, Slabs
from runahead.kv_transfer import TRANSFERS, KVTransfer
from runahead.kv_transfer.schedule import Message, Schedule
from runahead.ranks.mesh import Mesh
from runahead.ranks.ranks import Ranks
from runahead.report import RankReport
from runahead.timeline.clock import Clock, clock_for
from runahead.timeline.trace import TraceSpan

DEPTH = 3
"""Chunks whose hidden states have memory: the one at work, one on its way in, one on its way out."""
KIND = "hidden states"


class HiddenSchedule(Schedule):
    """The messages of one rank: the hidden states of each chunk, from the stage before it and to the one after it.

    Args:
        chunks: in the order in which they are computed. A layer of the schedule is one of them.
    """

    def __init__(self, rank: int, chunks: Sequence[range], mesh: Mesh) -> None:
        super().__init__(rank, list(range(mesh.num_stages)), mesh)
        self._chunks = chunks

    def kind(self, layer: int) -> str:
        return KIND

    def name(self, layer: int, which: str = "") -> str:
        return f"the {which}{KIND} of tokens {self._chunks[layer].start} to {self._chunks[layer].stop}"

    def receives(self, layer: int) -> list[Message]:
        return self._messages(layer, self.position - 1)

    def sends(self, layer: int) -> list[Message]:
        return self._messages(layer, self.position + 1)

    def forwards(self, layer: int, chunk: int) -> list[Message]:
        return []

    def _messages(self, layer: int, peer: int) -> list[Message]:
        if peer not in self.chain:
            return []
        chunk = self._chunks[layer]
        rank = self._rank(peer)
        return [Message(peer=rank, layer=layer, chunk=0, start=chunk.start, end=chunk.stop, tag=layer)]

    def _stage_links(self) -> list[tuple[int, int]]:
        return list(pairwise(self.chain))


class Passage:
    """The chunks of some forwards, whose hidden states come and go in the memory of a few.

    Args:
        width, dtype: of hidden states.
        record: note when each message was sent.

    Attributes:
        cache: memory of the chunks, each a layer.
    """

    def __init__(
        self,
        ranks: Ranks,
        chunks: Sequence[range],
        *,
        batch: int,
        width: int,
        dtype: torch.dtype,
        clock: Clock,
        record: bool = False,
    ) -> None:
        self._schedule = HiddenSchedule(ranks.rank, chunks, ranks.mesh)
        shape = KVShape(num_kv_heads=1, key_dim=width, value_dim=0, dtype=dtype)
        carrier = TRANSFERS[ranks.backend]
        with torch.inference_mode(False):  # threads receive into them
            slabs = Slabs.empty(
                [shape] * len(chunks),
                batch=batch,
                spans=[(chunk.start, chunk.stop) for chunk in chunks],
                num_slabs=DEPTH,
                device=ranks.device,
                allocate=carrier.allocator(ranks, self._schedule),
            )
            self.cache = KVCache(slabs)
            self.transfer: KVTransfer = carrier(self._schedule, self.cache, ranks, clock, DEPTH, record=record)
        self._chunks, self._number, self._clock = chunks, 0, clock

    @property
    def is_over(self) -> bool:
        return self._number == len(self._chunks)

    def receive(self, own_BCD: Tensor) -> Tensor:
        """The hidden states (B, C, D) of the next chunk; of the first stage its own, the embeddings."""
        number, schedule = self._number, self._schedule
        self.transfer.open(number)
        if not schedule.receives(number):
            return own_BCD
        self.transfer.await_prefix(number)
        given_BCD = self._part(number).transpose(0, 1).clone()  # whose memory is that of what is sent
        assert given_BCD.shape == own_BCD.shape, f"{given_BCD.shape} arrived for tokens of {own_BCD.shape}"
        if schedule.is_last:
            self._close()
        return given_BCD

    def send(self, x_BCD: Tensor) -> None:
        """Hand on the hidden states of the chunk that was received last."""
        self._part(self._number).copy_(x_BCD.transpose(0, 1))
        self.transfer.send(self._number)
        self._close()

    def finish(self) -> None:
        """Wait until all has left."""
        assert self.is_over, f"chunk {self._number} of {len(self._chunks)} was not computed"
        self.transfer.finish()

    def describe(self, report: RankReport) -> None:
        """Add bytes and waits to the report of a prefill."""
        log, seconds = self.transfer.log, self._clock.seconds
        report.kv_sent_bytes, report.kv_received_bytes = log.sent_bytes, log.received_bytes
        report.wait_s = sum(seconds(end) - seconds(begin) for _, begin, end in log.waits)
        report.kv_peak_bytes += self.cache.num_bytes

    def spans(self) -> list[TraceSpan]:
        """The span that a timeline shows of it."""
        log, seconds = self.transfer.log, self._clock.seconds
        waits = [
            TraceSpan(kind="wait", layer=None, start_s=seconds(begin), end_s=seconds(end), detail=KIND)
            for _, begin, end in log.waits
        ]
        return waits + [
            TraceSpan(kind="send", layer=None, start_s=seconds(begin), end_s=seconds(end), detail=str(sent))
            for sent, begin, end in log.sends
        ]

    def _part(self, number: int) -> Tensor:
        """Memory (C, B, D) of a chunk."""
        chunk = self._chunks[number]
        return self.cache.tokens(number, chunk.start, chunk.stop)[:, :, 0]

    def _close(self) -> None:
        self.transfer.close(self._number)
        self._number += 1


class Boundary:
    """The ends of a stage: every forward of its model receives hidden states and hands its own on.

    All stages make the same forwards, in the same order. One outside of `chunks` is a passage of its own.

    Args:
        width, dtype: of hidden states.

    Attributes:
        is_closed: forwards neither receive nor hand on.
    """

    def __init__(self, ranks: Ranks, *, width: int, dtype: torch.dtype) -> None:
        self.ranks, self._width, self._dtype = ranks, width, dtype
        self.is_last = ranks.stage == ranks.num_stages - 1
        self._passage: Passage | None = None
        self._is_announced, self.is_closed = False, False

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Context manager in which forwards are of this stage's layers alone, which are timed so."""
        assert self._passage is None, "hidden states are on their way"
        self.is_closed = True
        try:
            yield
        finally:
            self.is_closed = False

    @contextmanager
    def chunks(self, chunks: Sequence[range], *, batch: int, record: bool = False) -> Iterator[Passage]:
        """Context manager in which forwards are of these chunks, so that the next one travels while one is computed."""
        passage = self._passage = self._passing(chunks, batch, record=record)
        self._is_announced = True
        try:
            yield passage
            passage.finish()
        finally:
            self._passage, self._is_announced = None, False

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's hidden states."""
        return self._width * self._dtype.itemsize

    def receive(self, own_BCD: Tensor, start: int) -> Tensor:
        """Hidden states of the stage before; of the first one its own.

        Args:
            start: index of the first token.
        """
        if self._passage is None:
            self._passage = self._passing([range(start, start + own_BCD.shape[1])], own_BCD.shape[0])
        x_BCD = self._passage.receive(own_BCD)
        self._end()
        return x_BCD

    def send(self, x_BCD: Tensor) -> None:
        """Hand hidden states on to the next stage."""
        assert self._passage is not None, "a forward begins with what it receives"
        self._passage.send(x_BCD)
        self._end()

    def _passing(self, chunks: Sequence[range], batch: int, *, record: bool = False) -> Passage:
        clock = clock_for(self.ranks.device)
        return Passage(
            self.ranks, chunks, batch=batch, width=self._width, dtype=self._dtype, clock=clock, record=record
        )

    def _end(self) -> None:
        """End a passage that is over, if it was begun for one forward."""
        if not self._is_announced and self._passage is not None and self._passage.is_over:
            passage, self._passage = self._passage, None
            passage.finish()
