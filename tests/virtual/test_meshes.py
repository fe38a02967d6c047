"""Meshes: messages between stages and sums inside them meet, and never wait for each other in a circle."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runahead.config import Exchange, Transfer
from runahead.kv_transfer.copy import CopyTransfer
from runahead.ranks.accelerator import DIRECT_CTAS, OTHER_STREAMS, RELAY_CTAS, link_ctas, stage_ctas
from tests.virtual.device import Job, VirtualRanks, at_random, copies_early, copies_late, transfers_late
from tests.virtual.jobs import chain, exchange
from tests.virtual.machine import Budget
from tests.virtual.orders import stuck_after, stuck_in_any_order
from tests.virtual.test_orders import H100, LARGE_MESSAGE_CTAS, programs

BODIES: dict[str, Callable[[int, int], Callable[[VirtualRanks], None]]] = {
    "relay": lambda stages, shares: chain(stages, Transfer.relay, shares=shares),
    "direct": lambda stages, shares: chain(stages, Transfer.direct, shares=shares),
    "ring": lambda stages, shares: exchange(stages, Exchange.ring, shares=shares),
    "all_gather": lambda stages, shares: exchange(stages, Exchange.all_gather, shares=shares),
}
MESHES = [(2, 2), (3, 2), (2, 4), (1, 4)]


@pytest.mark.parametrize(("stages", "shares"), MESHES)
@pytest.mark.parametrize("name", BODIES)
def test_everything_meets_and_no_order_gets_stuck(name: str, stages: int, shares: int) -> None:
    issued = programs(BODIES[name](stages, shares), stages * shares)
    parts = {half: half.part.nbytes for program in issued for each in program for half in each.halves}
    assert parts and all(parts[half.other] == parts[half] for half in parts)
    assert stuck_in_any_order(issued, H100) is None


@pytest.mark.parametrize("name", BODIES)
def test_messages_travel_between_equal_shares_alone(name: str) -> None:
    issued = programs(BODIES[name](3, 2), 6)
    pairs = {(half.sender, half.receiver) for program in issued for each in program for half in each.halves}
    inside = {(a, b) for a, b in pairs if a // 2 == b // 2}
    assert inside == {(0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4)}
    assert pairs - inside and all(a % 2 == b % 2 for a, b in pairs - inside)


@pytest.mark.parametrize("name", ["relay", "ring", "all_gather"])
def test_one_hardware_queue_is_enough_without_direct_links(name: str) -> None:
    issued = programs(BODIES[name](3, 2), 6)
    assert stuck_in_any_order(issued, Budget(queues=1)) is None


def test_links_and_sums_that_do_not_fit_at_once_get_stuck() -> None:
    """Even a relay does, which by itself needs no multiprocessor for ever."""
    issued = programs(BODIES["relay"](3, 2), 6, LARGE_MESSAGE_CTAS)
    assert any(stuck_after(issued, Budget(multiprocessors=LARGE_MESSAGE_CTAS), seed) for seed in range(4))


@pytest.mark.parametrize("multiprocessors", [12, 20, 108, 132])
def test_links_and_sums_of_a_relay_fit_at_once(multiprocessors: int) -> None:
    budget = Budget(multiprocessors=multiprocessors)
    assert 2 * RELAY_CTAS + stage_ctas(multiprocessors) < multiprocessors
    for name in ("relay", "ring"):
        Job(6, choose=transfers_late, budget=budget).run(BODIES[name](3, 2))
        Job(6, choose=at_random(3), budget=budget).run(BODIES[name](3, 2))


def test_direct_links_that_leave_no_room_for_sums_are_not_let() -> None:
    direct = chain(4, Transfer.direct, num_layers=6, shares=2)
    assert any(stuck_after(programs(direct, 8, 40), H100, seed) for seed in range(4))
    fewest = 4 * 3 * DIRECT_CTAS - 2  # a half of them, less a quarter for sums, in whole numbers
    with pytest.raises(ValueError, match=r"3 links, whose kernels take 6 .*transfer=relay"):
        Job(8, budget=Budget(multiprocessors=fewest - 1)).run(direct)
    Job(8, budget=Budget(multiprocessors=fewest)).run(direct)


def test_sums_take_a_queue_of_their_own() -> None:
    direct = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert link_ctas(direct, 132, 3 + OTHER_STREAMS) == DIRECT_CTAS
    with pytest.raises(ValueError, match="hardware queues are too few"):
        link_ctas(direct, 132, 3 + OTHER_STREAMS, has_collectives=True)
    assert link_ctas(direct, 132, 4 + OTHER_STREAMS, has_collectives=True) == DIRECT_CTAS
    assert link_ctas([(0, 1), (1, 2)], 40, 8, has_collectives=True) == RELAY_CTAS


@pytest.mark.parametrize("transfer", list(Transfer))
@pytest.mark.parametrize("hosts", [(0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 1, 1), (0, 0, 1, 1, 1, 1)])
def test_copies_between_stages_do_not_race_or_get_stuck(transfer: Transfer, hosts: tuple[int, ...]) -> None:
    for choose in (copies_early, copies_late):
        body = chain(3, transfer, carrier=CopyTransfer, shares=2, prompts=2)
        Job(6, choose=choose, hosts=hosts, budget=Budget(queues=64)).run(body)


def test_kernels_of_a_stage_are_limited() -> None:
    job = Job(4)
    job.run(chain(2, Transfer.relay, shares=2))
    ctas = {each.ctas for program in job.programs for each in program if each.kind == "transfer"}
    assert ctas == {RELAY_CTAS, stage_ctas(132)} == {4, 32}
