"""Orders in which the operations of a job may run, within what its GPUs have; and the one in which they get stuck."""

from __future__ import annotations

import random

from tests.virtual.machine import Budget, Machine, Operation

MOST_STATES = 20_000


def stuck_after(programs: list[list[Operation]], budget: Budget, seed: int) -> str | None:
    """Run the programs in one random order; returns what every stream stands at if they get stuck.

    A transfer whose other end has not started goes first, since it occupies its GPU for longest.
    """
    machine, rng = Machine(programs, budget), random.Random(seed)
    while True:
        _settle(machine, set())
        starts = list(machine.ready())
        if not starts:
            return None if machine.is_finished else machine.describe()
        lonely = [each for each in starts if not any(half.other in machine.started for half in each.halves)]
        machine.advance(rng.choice(lonely or starts))


def stuck_in_any_order(programs: list[list[Operation]], budget: Budget) -> str | None:
    """Run the programs in all orders; returns what every stream stands at where they get stuck.

    Orders differ only in which transfer starts first on a GPU whose multiprocessors do not suffice for all of its
    links. Anything else that can run can still run later, whatever runs before it, so it runs at once.
    """
    demand = [_demand(program) for program in programs]
    never_short = {rank for rank, ctas in enumerate(demand) if ctas < budget.multiprocessors}
    states, seen = [Machine(programs, budget)], set()
    while states:
        machine = states.pop()
        _settle(machine, never_short)
        if machine.key in seen:
            continue
        seen.add(machine.key)
        assert len(seen) < MOST_STATES, "too many orders to try"
        starts = list(machine.ready())
        if not starts and not machine.is_finished:
            return machine.describe()
        for start in starts:
            other = machine.copy()
            other.advance(start)
            states.append(other)
    return None


def _demand(program: list[Operation]) -> int:
    """Multiprocessors that a rank's links occupy together: each runs one transfer at a time."""
    return sum({each.stream: each.ctas for each in program if each.kind == "transfer"}.values())


def _settle(machine: Machine, never_short: set[int]) -> None:
    """Run all that takes no multiprocessors from a transfer that may want them."""
    is_running = True
    while is_running:
        _issue(machine)
        ready = list(machine.ready())
        free = [
            each for each in ready if each.kind != "transfer" or each in machine.running or each.rank in never_short
        ]
        is_running = bool(free)
        for operation in free:
            if machine.can_run(operation):
                machine.advance(operation)


def _issue(machine: Machine) -> None:
    for rank in range(len(machine.programs)):
        while machine.issue(rank):
            pass
