"""Both ends of every link derive the same messages in the same order, and together they bring each rank its prefix."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runahead.config import Transfer
from runahead.context import ContextPartition
from runahead.kv_transfer import Message, TransferSchedule
from runahead.kv_transfer.schedule import STORED, stored_slots
from tests.partitions import boundaries

NUM_LAYERS = 3


def window(size: int) -> Callable[[int], int]:
    return lambda start: max(0, start - size + 1)


def chunks(size: int) -> Callable[[int], int]:
    return lambda start: start // size * size


reaches = st.one_of(
    st.just(window(10**9)), st.integers(1, 30).map(window), st.integers(1, 30).map(chunks)
)  # all of the prefix, a sliding window, chunked attention


@dataclass(frozen=True)
class Job:
    """A partition, how far back each layer looks, and the schedule of every rank with a chunk.

    Attributes:
        joined: pass the prefix on as one message, as over NCCL, rather than chunk by chunk, as over Gloo.
        num_stored: tokens before the first that each stage has stored; then every layer looks back to the first.
    """

    partition: ContextPartition
    reach: list[Callable[[int], int]]
    transfer: Transfer
    joined: bool = False
    num_stored: Mapping[int, int] = field(default_factory=dict)

    @property
    def schedules(self) -> dict[int, TransferSchedule]:
        return {
            rank: TransferSchedule(
                self.partition,
                rank,
                self.transfer,
                self.first_needed,
                joined=self.joined,
                num_stored=self.num_stored,
            )
            for rank in self.partition.chain
        }

    def first_needed(self, layer: int, start: int) -> int:
        if not self.num_stored:
            return self.reach[layer](start)
        last, total = self.partition.chain[-1], sum(self.num_stored.values())
        is_last = start >= self.partition.chunk(last).start
        return (self.num_stored.get(last, 0) if is_last else 0) - total

    def needs(self, rank: int, layer: int) -> set[int]:
        """Tokens before its chunk that a rank gets: the first one has its stored ones in place."""
        start = self.partition.chunk(rank).start
        return set(range(self.first_needed(layer, start), start)) - set(self.placed(rank))

    def placed(self, rank: int) -> range:
        is_first = rank == self.partition.chain[0]
        return stored_slots(self.num_stored).get(rank, range(0)) if is_first else range(0)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    num_tokens, num_ranks = draw(st.integers(1, 60)), draw(st.integers(1, 6))
    partition = ContextPartition(boundaries=draw(boundaries(num_tokens, num_ranks)))
    stages = st.just([]) | st.just(partition.chain[-1:]) | st.lists(st.sampled_from(partition.chain), unique=True)
    return Job(
        partition=partition,
        reach=[draw(reaches) for _ in range(NUM_LAYERS)],
        transfer=draw(st.sampled_from(Transfer)),
        joined=draw(st.booleans()),
        num_stored={stage: draw(st.sampled_from([1, 13])) for stage in draw(stages)},
    )


def sent(schedule: TransferSchedule, layer: int) -> list[Message]:
    """Messages in the order of issue: what is stored, the own chunk, then what is passed on."""
    own = schedule.feeds(layer) + schedule.sends(layer)
    return own + [each for _, onward in schedule.onward(layer) for each in onward]


def by_link(job: Job, messages_of: Callable[[TransferSchedule, int], list[Message]], outgoing: bool) -> dict:
    """(from rank, to rank) -> its messages over all layers, without the peer, which both ends see differently."""
    links: dict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)
    for rank, schedule in job.schedules.items():
        for layer in range(NUM_LAYERS):
            for m in messages_of(schedule, layer):
                link = (rank, m.peer) if outgoing else (m.peer, rank)
                links[link].append((m.layer, m.chunk, m.start, m.end, m.tag))
    return dict(links)


@given(job=jobs())
def test_every_message_has_one_counterpart_and_links_keep_one_order(job: Job) -> None:
    """NCCL matches by order alone, Gloo by tag."""
    outgoing = by_link(job, sent, outgoing=True)
    incoming = by_link(job, TransferSchedule.receives, outgoing=False)
    assert outgoing == incoming
    for messages in outgoing.values():
        assert max(Counter(tag for *_, tag in messages).values()) == 1


@given(job=jobs())
def test_every_rank_gets_the_prefix_that_it_attends_to_once_and_no_more(job: Job) -> None:
    for rank, schedule in job.schedules.items():
        for layer in range(NUM_LAYERS):
            tokens = [token for m in schedule.receives(layer) for token in range(m.start, m.end)]
            assert sorted(tokens) == sorted(job.needs(rank, layer))


@given(job=jobs())
def test_ranks_send_only_what_they_computed_or_received(job: Job) -> None:
    for rank, schedule in job.schedules.items():
        chunk = job.partition.chunk(rank)
        for layer in range(NUM_LAYERS):
            for message in schedule.sends(layer):
                own = chunk if message.chunk > STORED else job.placed(rank)
                assert own.start <= message.start < message.end == own.stop
            for received, onward in schedule.onward(layer):
                there = {token for message in received for token in range(message.start, message.end)}
                assert all(set(range(message.start, message.end)) <= there | {*job.placed(rank)} for message in onward)


@given(job=jobs())
def test_a_joined_prefix_is_one_message(job: Job) -> None:
    for rank, schedule in job.schedules.items():
        for layer in range(NUM_LAYERS if job.joined and job.transfer is Transfer.relay else 0):
            passed_on = [onward for _, onward in schedule.onward(layer)]
            assert len(schedule.receives(layer)) <= 2 or rank == job.partition.chain[0]
            assert [len(onward) for onward in passed_on] in ([], [1])
            assert all(onward.end == job.partition.chunk(rank).start for (onward,) in passed_on)


@given(job=jobs())
def test_messages_go_to_later_ranks_only_but_for_what_is_stored(job: Job) -> None:
    """Hence nobody waits in a circle: what is stored waits for nothing that is computed."""
    chain = job.partition.chain
    for rank, schedule in job.schedules.items():
        for layer in range(NUM_LAYERS):
            fed = schedule.feeds(layer)
            assert all(m.peer > rank for m in sent(schedule, layer) if m not in fed)
            assert all(m.peer < rank or m.chunk <= STORED for m in schedule.receives(layer))
            slots = stored_slots(job.num_stored).get(rank, range(0))
            assert all((m.start, m.end, m.is_fed) == (slots.start, slots.stop, True) for m in fed)
            others = chain[:-1] if job.transfer is Transfer.direct and rank == chain[-1] else chain[:1]
            assert [m.peer for m in fed] == (others if slots and rank != chain[0] else [])


@given(job=jobs())
def test_links_are_the_same_on_all_ranks_and_hold_every_message(job: Job) -> None:
    schedules = list(job.schedules.values())
    links = schedules[0].links()
    assert all(schedule.links() == links for schedule in schedules)
    assert len(set(links)) == len(links)
    assert set(by_link(job, sent, outgoing=True)) <= set(links)


@given(job=jobs())
def test_relay_talks_to_neighbours_only_and_direct_passes_on_nothing_but_what_is_stored(job: Job) -> None:
    chain = job.partition.chain
    for rank, schedule in job.schedules.items():
        position = chain.index(rank)
        for layer in range(NUM_LAYERS):
            if job.transfer is Transfer.relay:  # along the chain, and to its begin
                assert {m.peer for m in sent(schedule, layer)} <= {(chain * 2)[position + 1], chain[0]}
                assert {m.peer for m in schedule.receives(layer) if position} <= {chain[position - 1]}
            else:
                onward = sent(schedule, layer)[len(schedule.feeds(layer) + schedule.sends(layer)) :]
                assert all(m.chunk < STORED and position == 0 for m in onward)


@given(job=jobs())
def test_exactly_the_last_rank_with_tokens_is_last(job: Job) -> None:
    assert [rank for rank, schedule in job.schedules.items() if schedule.is_last] == job.partition.chain[-1:]


@pytest.mark.parametrize("transfer", list(Transfer))
@given(bounds=st.integers(1, 5).flatmap(lambda num_ranks: boundaries(50, num_ranks)))
def test_without_windows_tokens_moved_are_the_inner_boundaries(transfer: Transfer, bounds: tuple[int, ...]) -> None:
    job = Job(ContextPartition(boundaries=bounds), [window(10**9)] * NUM_LAYERS, transfer)
    moved = sum(m.end - m.start for s in job.schedules.values() for m in sent(s, 0))
    assert moved == sum(sorted(set(bounds))[1:-1])
