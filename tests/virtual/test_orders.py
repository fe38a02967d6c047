"""Messages meet, and nothing waits in a circle: in any order, and with as much of a GPU as there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from runahead.config import Exchange, Transfer
from runahead.ranks.accelerator import DIRECT_CTAS, OTHER_STREAMS, RELAY_CTAS, link_ctas
from tests.virtual.device import Deadlock, Job, VirtualRanks, at_random, transfers_early, transfers_late
from tests.virtual.jobs import chain, decoding, exchange, pipeline
from tests.virtual.machine import Budget, Half, Operation
from tests.virtual.orders import stuck_after, stuck_in_any_order

PLENTY = Budget(multiprocessors=10**6, queues=10**6)
H100 = Budget(multiprocessors=132, queues=32)
LARGE_MESSAGE_CTAS = 32
"""CTAs that NCCL takes for a message above 256 MB if it is not limited."""

BODIES: dict[str, Callable[[int], Callable[[VirtualRanks], None]]] = {
    "relay": lambda size: chain(size, Transfer.relay),
    "direct": lambda size: chain(size, Transfer.direct),
    "relay of what is stored": lambda size: chain(size, Transfer.relay, num_stored=3),
    "what is stored, direct": lambda size: chain(size, Transfer.direct, num_stored=3),
    "relay of what each has stored": lambda size: chain(size, Transfer.relay, num_stored=3, in_parts=True),
    "what each has stored, direct": lambda size: chain(size, Transfer.direct, num_stored=3, in_parts=True),
    "ring": lambda size: exchange(size, Exchange.ring),
    "all_gather": lambda size: exchange(size, Exchange.all_gather),
    "sharded decoding": decoding,
    "pipeline": pipeline,
}


def programs(body: Callable[[VirtualRanks], None], size: int, ctas: int | None = None) -> list[list[Operation]]:
    """Operations that the hosts issue, with nothing in short supply."""
    job = Job(size, budget=PLENTY, ctas=ctas)
    job.run(body)
    return job.programs


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.sampled(2)
def test_every_send_meets_a_receipt_of_its_size(name: str, size: int) -> None:
    halves = [half for program in programs(BODIES[name](size), size) for each in program for half in each.halves]
    assert len(set(halves)) == len(halves) > 0
    parts = {half: half.part.nbytes for half in halves}
    assert all(parts[half.other] == parts[half] for half in halves)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", BODIES)
def test_no_order_gets_stuck(name: str, size: int) -> None:
    assert stuck_in_any_order(programs(BODIES[name](size), size), H100) is None


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.sampled(2)
def test_eight_ranks_do_not_get_stuck(name: str) -> None:
    issued = programs(BODIES[name](8), 8)
    assert not any(stuck_after(issued, H100, seed) for seed in range(3))


@pytest.mark.parametrize("choose", [transfers_early, transfers_late, at_random(1), at_random(2)])
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.sampled(2)
def test_what_hosts_issue_does_not_depend_on_the_order(name: str, choose: Callable[..., Operation]) -> None:
    job = Job(3, choose=choose)
    job.run(BODIES[name](3))
    assert [list(map(str, each)) for each in job.programs] == [list(map(str, p)) for p in programs(BODIES[name](3), 3)]


def test_links_that_take_a_whole_gpu_get_stuck_and_are_not_let() -> None:
    direct = chain(8, Transfer.direct, num_layers=12)
    assert stuck_after(programs(direct, 8, LARGE_MESSAGE_CTAS), H100, seed=0) is not None
    with pytest.raises(ValueError, match=r"7 links, whose kernels take 14 of the GPU's 27 .*transfer=relay"):
        Job(8, budget=Budget(multiprocessors=27)).run(direct)


@pytest.mark.parametrize(
    ("name", "size", "queues", "num_links"),
    [("direct", 3, 1, 2), ("direct", 8, 8, 7), ("relay of what is stored", 2, 1, 2)],
)
def test_links_that_share_hardware_queues_get_stuck_and_are_not_let(
    name: str, size: int, queues: int, num_links: int
) -> None:
    """Eight is CUDA's default."""
    body, budget = BODIES[name](size), Budget(queues=queues)
    assert stuck_in_any_order(programs(body, size), budget) is not None
    message = rf"{num_links} links, and {queues} hardware queues are too few .*CUDA_DEVICE_MAX_CONNECTIONS=32"
    with pytest.raises(ValueError, match=message):
        Job(size, budget=budget).run(body)


@pytest.mark.parametrize("size", [2, 3])
def test_the_default_of_hardware_queues_is_enough_for_what_is_stored(size: int) -> None:
    body = BODIES["relay of what is stored"](size)
    assert link_ctas([(0, 1), (1, 0)], 132, 8) == RELAY_CTAS
    assert stuck_in_any_order(programs(body, size), Budget(queues=8)) is None


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["relay", "ring", "all_gather", "sharded decoding"])
def test_one_hardware_queue_is_enough_without_direct_links(name: str, size: int) -> None:
    """Any other number of queues holds up less."""
    assert stuck_in_any_order(programs(BODIES[name](size), size), Budget(queues=1)) is None


def test_ctas_are_few_where_links_are_many() -> None:
    relay, direct = [(0, 1), (1, 2)], [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert link_ctas(relay, 40, 8) == RELAY_CTAS
    assert link_ctas(direct, 4 * 3, 3 + OTHER_STREAMS) == DIRECT_CTAS
    assert link_ctas([], 132, 8) == RELAY_CTAS


@pytest.mark.parametrize("size", [2, 5, 8])
def test_a_relaying_rank_has_few_messages_wherever_it_is(size: int) -> None:
    """It has its own chunk and the prefix, in and out, in each of four layers; the first rank passes no prefix on."""
    job = Job(size)
    job.run(chain(size, Transfer.relay))
    warm_ups = Counter(rank for link in zip(range(size), range(1, size), strict=False) for rank in link)
    per_layer = [(ranks.accelerator.num_messages - warm_ups[ranks.rank]) / 4 for ranks in job.ranks]
    assert per_layer == [*([1, 3] + [4] * size)[: size - 1], min(2, size - 1)]


@pytest.mark.parametrize("transfer", list(Transfer))
def test_prompts_share_their_streams(transfer: Transfer) -> None:
    """torch's pool has 32, so streams made for every prompt would be those of a link after some prompts."""
    used = []
    for prompts in (1, 40):
        job = Job(3, budget=PLENTY)
        job.run(chain(3, transfer, num_layers=2, prompts=prompts))
        used.append([{each.stream for each in program if each.stream >= 0} for program in job.programs])
    assert used[0] == used[1]


def half(sender: int, receiver: int, number: int, *, is_send: bool, communicator: int = 0) -> Half:
    return Half(communicator, sender, receiver, number, is_send, None)


def crossed(ctas: int) -> list[list[Operation]]:
    """Two ranks, two links: one rank sends on both, and the other receives."""
    return [
        [
            Operation(
                rank=rank,
                stream=link,
                kind="transfer",
                halves=(half(0, 1, 1, is_send=rank == 0, communicator=link),),
                ctas=ctas,
            )
            for link in (1, 2)
        ]
        for rank in (0, 1)
    ]


def test_all_orders_are_tried() -> None:
    assert stuck_in_any_order(crossed(ctas=10), Budget(multiprocessors=19)) is not None
    assert stuck_in_any_order(crossed(ctas=10), Budget(multiprocessors=21)) is None


def test_a_send_without_a_receipt_is_a_deadlock() -> None:
    def body(ranks: VirtualRanks) -> None:
        link = ranks.nccl_links([(0, 1)])[0, 1]
        if ranks.rank == 0:
            link.isend(torch.zeros(1), 1).wait()
            assert ranks.accelerator.mark().query()

    with pytest.raises(Deadlock, match="rank 0, stream 33: transfer 0->1 #2"):
        Job(2).run(body)
