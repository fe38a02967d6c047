"""Both ends of every link derive the same messages in the same order, and together they bring each rank its prefix."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runahead.config import Transfer
from runahead.context import ContextPartition
from runahead.kv_transfer import Message, TransferSchedule
from runahead.kv_transfer.schedule import STORED
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
        num_stored: tokens before the first that the last stage has stored; then every layer looks back to the first.
    """

    partition: ContextPartition
    reach: list[Callable[[int], int]]
    transfer: Transfer
    joined: bool = False
    num_stored: int = 0

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
        last = self.partition.chunk(self.partition.chain[-1])
        return -self.num_stored if start < last.start else 0

    def needs(self, rank: int, layer: int) -> set[int]:
        """Tokens before its chunk that a rank attends to, and has not stored."""
        start = self.partition.chunk(rank).start
        return set(range(self.first_needed(layer, start), start))


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    num_tokens, num_ranks = draw(st.integers(1, 60)), draw(st.integers(1, 6))
    return Job(
        partition=ContextPartition(boundaries=draw(boundaries(num_tokens, num_ranks))),
        reach=[draw(reaches) for _ in range(NUM_LAYERS)],
        transfer=draw(st.sampled_from(Transfer)),
        joined=draw(st.booleans()),
        num_stored=draw(st.sampled_from([0, 0, 1, 13])),
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
                assert chunk.start <= message.start < message.end == chunk.stop
            for received, onward in schedule.onward(layer):
                there = {token for message in received for token in range(message.start, message.end)}
                assert all(set(range(message.start, message.end)) <= there for message in onward)


@given(job=jobs())
def test_a_joined_prefix_is_one_message(job: Job) -> None:
    for rank, schedule in job.schedules.items():
        for layer in range(NUM_LAYERS if job.joined and job.transfer is Transfer.relay else 0):
            passed_on = [onward for _, onward in schedule.onward(layer)]
            assert len(schedule.receives(layer)) <= 2 and [len(onward) for onward in passed_on] in ([], [1])
            assert all(onward.end == job.partition.chunk(rank).start for (onward,) in passed_on)


@given(job=jobs())
def test_messages_go_to_later_ranks_only_but_for_what_the_last_one_has_stored(job: Job) -> None:
    """Hence nobody waits in a circle: what is stored waits for nothing that is computed."""
    chain = job.partition.chain
    for rank, schedule in job.schedules.items():
        for layer in range(NUM_LAYERS):
            fed = schedule.feeds(layer)
            assert all(m.peer > rank for m in sent(schedule, layer) if m not in fed)
            assert all(m.peer < rank or m.chunk == STORED for m in schedule.receives(layer))
            assert all((m.start, m.end) == (-job.num_stored, 0) for m in fed)
            others = chain[:-1] if job.transfer is Transfer.direct else chain[:-1][:1]
            assert [m.peer for m in fed] == (others if job.num_stored and rank == chain[-1] else [])


@given(job=jobs())
def test_links_are_the_same_on_all_ranks_and_hold_every_message(job: Job) -> None:
    schedules = list(job.schedules.values())
    links = schedules[0].links()
    assert all(schedule.links() == links for schedule in schedules)
    assert len(set(links)) == len(links)
    assert set(by_link(job, sent, outgoing=True)) <= set(links)


@given(job=jobs())
def test_relay_talks_to_neighbours_only_and_direct_never_passes_on(job: Job) -> None:
    chain = job.partition.chain
    for rank, schedule in job.schedules.items():
        position = chain.index(rank)
        for layer in range(NUM_LAYERS):
            if job.transfer is Transfer.relay:  # along the chain, and from its end to its begin
                assert {m.peer for m in sent(schedule, layer)} <= {(chain * 2)[position + 1]}
                assert {m.peer for m in schedule.receives(layer)} <= {chain[position - 1]}
            else:
                assert sent(schedule, layer) == schedule.feeds(layer) + schedule.sends(layer)


@given(job=jobs())
def test_exactly_the_last_rank_with_tokens_is_last(job: Job) -> None:
    assert [rank for rank, schedule in job.schedules.items() if schedule.is_last] == job.partition.chain[-1:]


@pytest.mark.parametrize("transfer", list(Transfer))
@given(bounds=st.integers(1, 5).flatmap(lambda num_ranks: boundaries(50, num_ranks)))
def test_without_windows_tokens_moved_are_the_inner_boundaries(transfer: Transfer, bounds: tuple[int, ...]) -> None:
    job = Job(ContextPartition(boundaries=bounds), [window(10**9)] * NUM_LAYERS, transfer)
    moved = sum(m.end - m.start for s in job.schedules.values() for m in sent(s, 0))
    assert moved == sum(sorted(set(bounds))[1:-1])
