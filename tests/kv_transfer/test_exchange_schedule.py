"""Every message of an exchange has one sender and one receiver who agree on it, whatever the runs and the exchange."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runahead.config import Exchange
from runahead.context import even
from runahead.kv_transfer.exchange import ExchangeSchedule
from runahead.kv_transfer.schedule import Message
from runahead.prefill.tsp import TSP
from runahead.prefill.zigzag import Zigzag

NUM_LAYERS = 3


def schedules(
    num_tokens: int, num_ranks: int, exchange: Exchange, strategy: TSP | Zigzag, window: int
) -> list[ExchangeSchedule]:
    """Schedules of the ranks with work. In layer 1 tokens see `window` tokens, themselves included."""
    runs = strategy.runs(strategy.split(num_tokens, num_ranks, even))

    def first_needed(layer: int, start: int) -> int:
        return max(0, start - window + 1) if layer == 1 else 0

    return [
        ExchangeSchedule(runs, rank, exchange, num_layers=NUM_LAYERS, first_needed=first_needed)
        for rank in range(num_ranks)
        if runs[rank]
    ]


@pytest.mark.parametrize("strategy", [TSP(), Zigzag()], ids=["contiguous", "zigzag"])
@pytest.mark.parametrize("exchange", list(Exchange))
@given(num_tokens=st.integers(1, 60), num_ranks=st.integers(1, 6), window=st.integers(1, 70))
def test_both_ends_of_every_link_agree_and_all_that_is_needed_arrives(
    exchange: Exchange, strategy: TSP | Zigzag, num_tokens: int, num_ranks: int, window: int
) -> None:
    of_rank = {each.chain[each.position]: each for each in schedules(num_tokens, num_ranks, exchange, strategy, window)}
    for layer in range(NUM_LAYERS):
        sent: dict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)
        received: dict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)

        def key(message: Message) -> tuple[int, ...]:
            return message.chunk, message.start, message.end, message.tag

        for rank, schedule in of_rank.items():
            arrivals = schedule.receives(layer)
            onward = [each for arrival in arrivals for each in schedule.forwards(layer, arrival.chunk)]
            for message in schedule.sends(layer) + onward:
                sent[rank, message.peer].append(key(message))
            for message in arrivals:
                received[message.peer, rank].append(key(message))
            in_batches = schedule.batches(layer)
            assert [each for got, _ in in_batches for each in got] == arrivals
            assert [each for _, given in in_batches for each in given] == schedule.sends(layer) + onward
            there = {token for run in schedule.own for token in run}
            assert not any(there & set(range(message.start, message.end)) for message in arrivals)
            there |= {token for message in arrivals for token in range(message.start, message.end)}
            if exchange is not Exchange.direct:
                assert there == set(range(num_tokens))
            elif layer < NUM_LAYERS - 1 or schedule.is_last:
                first = {run.start: max(0, run.start - window + 1) if layer == 1 else 0 for run in schedule.own}
                assert there >= {token for start in first for token in range(first[start], start)}
        assert sent == received
        assert set(sent) <= set(next(iter(of_rank.values())).links())


@given(num_tokens=st.integers(1, 60), num_ranks=st.integers(1, 6))
def test_zigzag_gives_every_token_to_one_rank_and_the_last_to_the_last(num_tokens: int, num_ranks: int) -> None:
    runs = Zigzag().runs(Zigzag().split(num_tokens, num_ranks, even))
    assert sorted(token for of_rank in runs for run in of_rank for token in run) == list(range(num_tokens))
    assert runs[-1][-1].stop == num_tokens


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_zigzag_balances_what_ranks_attend_to(num_ranks: int) -> None:
    runs = Zigzag().runs(Zigzag().split(num_ranks * 64, num_ranks, even))
    pairs = [sum(token + 1 for run in of_rank for token in run) for of_rank in runs]
    assert max(pairs) == min(pairs)
