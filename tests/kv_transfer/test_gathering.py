"""Gathering through mapped memory: every call gives all members' tensors, however far they run apart."""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from runahead.failures import PeerFailure
from runahead.kv_transfer.gathering import SPIN_S, MappedGathering
from runahead.ranks.mesh import Mesh

ROOM = 4096


class Member:
    """A rank of a job of threads, as far as gathering needs it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.waited: list[str] = []
        self.on_wait: Callable[[], object] = lambda: None
        self.name = Mesh().name

    def wait_until(self, ready: Callable[[float], bool], what: str, peers: Iterable[int]) -> None:
        self.waited.append(what)
        self.on_wait()
        deadline = time.monotonic() + 60.0
        while not ready(0.05):
            if time.monotonic() > deadline:
                raise PeerFailure(what)


def members(size: int, calls: int = 0) -> list[MappedGathering]:
    """The members of a job that has made so many calls before."""
    memory = mmap.mmap(-1, MappedGathering.num_bytes(size, ROOM))
    ranks: list[Any] = [Member(2 * place) for place in range(size)]
    made = [MappedGathering(each, [other.rank for other in ranks], memory, ROOM) for each in ranks]
    for gather in made:
        gather._number = calls
        gather._own_cell.set(calls)
    return made


def run(size: int, body: Callable[[MappedGathering], None], calls: int = 0) -> None:
    """Run `body` for each member in a thread of its own. Raises what any of them raises."""
    errors: list[BaseException] = []

    def guarded(gather: MappedGathering) -> None:
        try:
            body(gather)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(gather,)) for gather in members(size, calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("size", [2, 3])
def test_all_tensors_arrive_in_order_in_every_call(size: int) -> None:
    def body(gather: MappedGathering) -> None:
        pause = random.Random(gather.position)
        for number in range(300):
            own = torch.full((2, 3), number * 10.0 + gather.position, dtype=torch.float64)
            gathered = gather(own)
            assert gathered.shape == (size, 2, 3)
            if pause.random() < 0.05:
                time.sleep(pause.random() * 4 * SPIN_S)
            assert gathered[:, 0, 0].tolist() == [number * 10.0 + place for place in range(size)]

    run(size, body)


def test_shapes_and_dtypes_take_turns() -> None:
    def body(gather: MappedGathering) -> None:
        for number in range(20):
            floats = gather(torch.full((number % 3 + 1, 2), float(number)))
            assert (floats == number).all() and floats.shape == (2, number % 3 + 1, 2)
            tokens = gather(torch.tensor([number, gather.position]), "the next token")
            assert tokens.tolist() == [[number, 0], [number, 1]]

    run(2, body)


def test_a_rank_that_comes_late_is_waited_for_by_name() -> None:
    waits = threading.Event()

    def body(gather: MappedGathering) -> None:
        ranks: Any = gather.ranks
        if gather.position == 0:
            ranks.on_wait = waits.set
        else:
            assert waits.wait(30)
        gather(torch.zeros(1))
        if gather.position == 0:
            assert ranks.waited == ["the attention of rank 2"]

    run(2, body)


def test_counters_wrap_around() -> None:
    def body(gather: MappedGathering) -> None:
        for number in range(6):
            assert gather(torch.tensor([number])).tolist() == [[number], [number]]

    run(2, body, calls=2**32 - 3)
