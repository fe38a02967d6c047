"""All-gather of small tensors between a few ranks, as sharded decoding needs it once per layer and token.

On CPUs of one host the tensors go through memory that all members map: a member writes its own, raises its counter and
waits for the others' counters, which takes microseconds. Between hosts the backend of the ranks carries them.
"""

# Legend: P members.

from __future__ import annotations

import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from runahead.ranks.mapped.memory import LINE, Cell, SharedBytes, Unmapped, map_other
from runahead.ranks.ranks import Ranks
from runahead.ranks.worker import Worker

ATTENTION = "the attention"
"""Name of the tensor that a late member owes the others, for messages."""

SPIN_S = 3e-4
"""Seconds in which a member asks again and again before it sleeps: to be woken takes longer than most waits last."""

TAG = 1 << 28
"""Tag of messages over Gloo, above those of keys and values."""


class Gathering(ABC):
    """All-gather between members, which make the same calls in the same order.

    Args:
        members: their ranks, in the order of the result.

    Attributes:
        position: this rank's place among the members.
    """

    def __init__(self, ranks: Ranks, members: Sequence[int]) -> None:
        self.ranks, self.members = ranks, list(members)
        self.position = self.members.index(ranks.rank)

    @property
    def is_last(self) -> bool:
        return self.position == len(self.members) - 1

    @abstractmethod
    def __call__(self, own: Tensor, what: str = ATTENTION) -> Tensor:
        """The tensors (P, ...) of all members, which are valid until the next call.

        Args:
            own: this member's; all members' have the same shape and dtype.
            what: what is waited for, for messages.

        Raises:
            PeerFailure: a member is gone or silent.
        """

    def _others_named(self) -> str:
        return " or ".join(self.ranks.name(peer) for peer in self.members if peer != self.ranks.rank)

    def await_device(self) -> None:  # noqa: B027 (only a GPU runs behind its host)
        """Wait until all that was gathered is there, before the host asks the device for a value of it."""


class LoneGathering(Gathering):
    """Gathering of one member, which has everything."""

    def __call__(self, own: Tensor, what: str = ATTENTION) -> Tensor:
        return own.unsqueeze(0)


class MappedGathering(Gathering):
    """Gathering through host memory that all members map.

    There are two rooms per member, used in turn. A member that writes to a room for the second time has seen the
    counters of the call between, so all members have read what the room held.

    Args:
        memory: `num_bytes` bytes, zero at first: a counter per member, then the rooms.
        room_bytes: most bytes of a tensor.
    """

    def __init__(self, ranks: Ranks, members: Sequence[int], memory: Any, room_bytes: int) -> None:
        super().__init__(ranks, members)
        size = len(self.members)
        words = np.frombuffer(memory, np.uint32, count=size * LINE // 4)
        cells = [Cell(words, place * LINE // 4) for place in range(size)]
        self._own_cell = cells[self.position]
        self._others = [(peer, cell) for peer, cell in zip(self.members, cells, strict=True) if peer != self.ranks.rank]
        rooms = np.frombuffer(memory, np.uint8, count=2 * size * room_bytes, offset=size * LINE)
        self._rooms = torch.from_numpy(rooms.reshape(2, size, room_bytes))
        self._views: dict[tuple[torch.Size, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        self._number = 0

    @staticmethod
    def num_bytes(size: int, room_bytes: int) -> int:
        return size * (LINE + 2 * room_bytes)

    def __call__(self, own: Tensor, what: str = ATTENTION) -> Tensor:
        self._number += 1
        key = own.shape, own.dtype
        if key not in self._views:
            self._views[key] = [self._view(rooms, own) for rooms in self._rooms]
        mine, gathered = self._views[key][self._number % 2]
        mine.copy_(own)
        self._own_cell.set(self._number)
        for peer, cell in self._others:
            if not cell.reached(self._number):
                self._await(peer, cell, what)
        return gathered

    def _view(self, rooms: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Room of this member's tensor, and those of all members', in one half of the memory."""
        gathered = rooms[:, : own.nbytes].view(own.dtype).view(len(self.members), *own.shape)
        return gathered[self.position], gathered

    def _await(self, peer: int, cell: Cell, what: str) -> None:
        number, deadline = self._number, time.perf_counter() + SPIN_S
        while time.perf_counter() < deadline:
            os.sched_yield()  # the member may share this rank's processor
            if cell.reached(number):
                return
        self.ranks.wait_until(
            lambda block_s: cell.wait(number, block_s), f"{what} of {self.ranks.name(peer)}", self.members
        )


class BackendGathering(Gathering):
    """Gathering by messages over Gloo, through host memory; a thread sends and receives."""

    def __init__(self, ranks: Ranks, members: Sequence[int]) -> None:
        super().__init__(ranks, members)
        self._worker = Worker("gathering")
        weakref.finalize(self, self._worker.close)

    def __call__(self, own: Tensor, what: str = ATTENTION) -> Tensor:
        sent = own.cpu().contiguous()
        gathered = sent.new_empty(len(self.members), *sent.shape)
        gathered[self.position] = sent
        group = self.ranks.kv_group
        others = [(place, peer) for place, peer in enumerate(self.members) if place != self.position]

        def exchange() -> None:  # without `self`, which the thread would keep
            with torch.inference_mode():  # as in the thread that computes; the mode is a thread's own
                works = [dist.irecv(gathered[place], peer, group, TAG) for place, peer in others]
                works += [dist.isend(sent, peer, group, TAG) for _, peer in others]
                for work in works:
                    assert work is not None
                    work.wait()

        job = self._worker.submit(exchange)
        named = self._others_named()
        self.ranks.wait_until(lambda block_s: job.done.wait(block_s), f"{what} of {named}", self.members)
        if job.error is not None:
            raise self.ranks.lost_connection(f"{what} of {named}") from job.error
        return gathered.to(own.device)


class NcclGathering(Gathering):
    """Gathering over NCCL, one grouped operation per call. The host does not wait for it until `await_device`."""

    def __init__(self, ranks: Ranks, members: Sequence[int]) -> None:
        super().__init__(ranks, members)
        assert ranks.accelerator is not None, ranks.device
        self._communicator = ranks.nccl_between_stages()
        self._what = ATTENTION

    def __call__(self, own: Tensor, what: str = ATTENTION) -> Tensor:
        self._what = what
        gathered = own.new_empty(len(self.members), *own.shape)
        gathered[self.position].copy_(own)
        others = [(place, peer) for place, peer in enumerate(self.members) if place != self.position]
        received = [(gathered[place], peer) for place, peer in others]
        for work in self._communicator.exchange(received, [(gathered[self.position], peer) for _, peer in others]):
            work.wait()
        return gathered

    def await_device(self) -> None:
        self.ranks.await_device(f"{self._what} of {self._others_named()}", self.members)


class Gatherings:
    """The gatherings of a job, which are kept for the next prompts. Every rank makes the same calls."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._made: dict[tuple[int, ...], tuple[int, Gathering | None]] = {}

    def between(self, members: Sequence[int], num_bytes: int) -> Gathering | None:
        """The gathering of these ranks, for tensors of at most so many bytes; None on a rank that is not one of them.

        Ranks may name different members, as long as each is named by all of its members.
        """
        room_bytes, made = self._made.get(tuple(members), (-1, None))
        if room_bytes < num_bytes:
            made = _gathering(self._ranks, members, num_bytes)
            self._made[tuple(members)] = num_bytes, made
        return made


def _gathering(ranks: Ranks, members: Sequence[int], num_bytes: int) -> Gathering | None:
    """The fastest gathering that these ranks can have."""
    is_member = ranks.rank in members
    if len(members) == 1:
        return LoneGathering(ranks, members) if is_member else None
    if ranks.backend == "nccl":
        ranks.nccl_between_stages()  # every rank makes it
        return NcclGathering(ranks, members) if is_member else None
    if all(ranks.gather(ranks.device.type == "cpu", "the devices")) and ranks.map_memory():
        room_bytes = -(-max(num_bytes, 1) // LINE) * LINE
        memory = _shared_memory(ranks, members, MappedGathering.num_bytes(len(members), room_bytes))
        if memory is not None:
            return MappedGathering(ranks, members, memory, room_bytes)
    return BackendGathering(ranks, members) if is_member else None


def _shared_memory(ranks: Ranks, members: Sequence[int], num_bytes: int) -> Any:
    """Zeroed memory of the first member that all members have mapped; None if one of them cannot."""
    own, memory, owner = None, None, members[0]
    if ranks.rank == owner:
        with suppress(Unmapped):
            own = SharedBytes(num_bytes)
            memory = own.memory
    descriptors = ranks.gather(None if own is None else own.descriptor, "the memory that ranks share")
    descriptor = descriptors[owner]
    # Process numbers mean nothing on another host.
    if descriptor is not None and ranks.rank in members and (ranks.rank, owner) in ranks.mapped_links:
        with suppress(Unmapped):
            memory = map_other(ranks.present[owner].pid, descriptor, num_bytes)
    have = ranks.gather(memory is not None, "the memory that ranks have mapped")
    return memory if all(have[member] for member in members) else None
