"""Copies into mapped slabs, on virtual GPUs: they do not race or get stuck, and every wait is needed.

Values do not depend on when copies are made.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from runahead.config import Carrier, PrefillOptions, Transfer
from runahead.kv_transfer import copy
from runahead.kv_transfer.copy import CopyTransfer
from runahead.prefill.kv_runahead import KVRunahead
from runahead.ranks.mapped import queues
from tests.virtual.clocks import Unordered
from tests.virtual.device import Choose, Deadlock, Job, at_random, copies_early, copies_late
from tests.virtual.jobs import chain, prefill
from tests.virtual.machine import Budget
from tests.virtual.test_values import alone

ORDERS = {"early": copies_early, "late": copies_late, "random": at_random(7)}
HOSTS = {"one host": (0, 0, 0, 0), "two hosts": (0, 0, 1, 1), "the middle apart": (0, 1, 1, 0)}


def check(carrier: Any = CopyTransfer, choose: Choose = copies_late, hosts: tuple[int, ...] = (0, 0, 0, 0)) -> None:
    """Three prompts over four ranks, whose slabs are each other's ring. Raises: Unordered, Deadlock, AssertionError."""
    for transfer in Transfer:
        body = chain(4, transfer, num_layers=6, carrier=carrier, prompts=3)
        # Without queues that streams share: which streams those are is not known for a real GPU.
        Job(4, choose=choose, hosts=hosts, budget=Budget(queues=64)).run(body)
    stored = chain(2, Transfer.relay, num_layers=8, carrier=carrier, prompts=2, num_stored=3)
    Job(2, choose=choose, hosts=hosts[1:3], budget=Budget(queues=64)).run(stored)


@pytest.mark.parametrize("choose", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
@pytest.mark.sampled(2)
def test_nothing_races_or_gets_stuck(hosts: tuple[int, ...], choose: Choose) -> None:
    check(choose=choose, hosts=hosts)


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("transfer", list(Transfer))
def test_values_do_not_depend_on_when_copies_are_made(transfer: Transfer, hosts: tuple[int, ...]) -> None:
    options = PrefillOptions(transfer=transfer, carrier=Carrier.copy)
    for choose in ORDERS.values():
        values = prefill(KVRunahead(), (0, 5, 8, 8, 16), options, choose=choose, hosts=hosts).values
        assert all(torch.allclose(mine, one, rtol=0, atol=1e-12) for mine, one in zip(values, alone(), strict=True))


def test_a_relay_of_copies_needs_few_hardware_queues() -> None:
    for choose in ORDERS.values():
        Job(4, choose=choose, hosts=(0, 0, 0, 0), budget=Budget(queues=4)).run(
            chain(4, Transfer.relay, num_layers=6, carrier=CopyTransfer)
        )


def test_copies_take_no_multiprocessors() -> None:
    job = Job(8, hosts=[0] * 8, budget=Budget(multiprocessors=1))
    job.run(chain(8, Transfer.direct, carrier=CopyTransfer))
    assert not any(each.kind == "transfer" for program in job.programs for each in program)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_a_relaying_rank_makes_few_copies_wherever_it_is(size: int) -> None:
    """It copies its own chunk and the prefix in each of four layers."""
    job = Job(size, hosts=[0] * size)
    job.run(chain(size, Transfer.relay, carrier=CopyTransfer))
    copies = [sum(each.kind == "copy" for each in program) / 4 for program in job.programs]
    assert copies == [*([1] + [2] * size)[: size - 1], 0]


class TestEveryWaitIsNeeded:
    """Each test takes one of the protocol's waits away, and finds a race or a deadlock."""

    def test_of_attention_for_messages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(CopyTransfer, "await_prefix", lambda self, layer: None)
        self.fails()

    def test_of_copies_for_compute(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def queue(self: Any, waits: Any, move: Any, then: Any, logged: Any) -> None:
            with self._gpu.on(self._stream):
                for cell, number in waits:
                    self._gpu.wait_value(cell, number)
                move()
                for cell, number in then:
                    self._gpu.write_value(cell, number)

        monkeypatch.setattr(queues.DeviceQueue, "_queue", queue)
        self.fails()

    @pytest.mark.parametrize("what", ["room", "credit", "passing on", "passed on", "left", "arrived", "prompt", "fed"])
    def test_of(self, what: str) -> None:
        old, new = {
            "room": ('self._wait(self._leave(sends), layer, f"room', 'self._wait([], layer, f"room'),
            "fed": ("self._wait(self._leave(sends), layer, what,", "self._wait([], layer, what,"),
            "credit": ("[begun, credit, *waits]", "[begun, *waits]"),
            "passing on": ("[self._arrives[each] for each in received]", "[]"),
            "passed on": ("set(self._leave(self._all_sends(layer)), credits)", "set([], credits)"),
            "left": ('self._wait(self._leave(sends), layer, f"{self', 'self._wait([], layer, f"{self'),
            "arrived": ("            self.await_messages(layer, receives)", "            pass"),
            "prompt": ("self._copying.after_compute(*self._credit(peer, first))", SET_BY_THE_HOST),
        }[what]
        source = inspect.getsource(copy)
        assert source.count(old) == 1, old
        namespace: dict[str, Any] = {"__name__": copy.__name__}
        exec(compile(source.replace(old, new), copy.__name__, "exec"), namespace)
        self.fails(namespace["CopyTransfer"])

    def fails(self, carrier: Any = CopyTransfer) -> None:
        with pytest.raises((Unordered, Deadlock, AssertionError)):
            for choose in ORDERS.values():
                check(carrier, choose)


SET_BY_THE_HOST = "self._credit(peer, first)[0].set(self._credit(peer, first)[1])"
