"""A fault of one rank, and nothing else, ends the others: soon, with the culprit's name and what they waited for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runahead.failures import RunFailure, is_mistake
from runahead.ranks.ranks import Ranks
from tests.beat_clock import give_up_silent
from tests.rank_pool import RankPool, give_up_after, short_lived_pool
from tests.ranks import failing_tasks
from tests.ranks.silence import Silence

TIMEOUT_S = 1.5
"""Timeout of the ranks in tests of a silent one, by a clock of their own. Others have that of `rank_pool`."""
SOON_S = 30.0
"""Less than `rank_pool.TIMEOUT_S`."""

Task = Callable[..., Any]
IN = ["in a layer", "while ranks decode together"]
ENDS = [(failing_tasks.signal_in_layer, (2,)), (failing_tasks.signal_in_sharded_decoding, ())]
"""Tasks that end a rank, by `IN`, with the layer."""


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Two ranks, or as many as the test asks for. They do not outlive the test."""
    with short_lived_pool(getattr(request, "param", 2)) as pool:
        yield pool


def test_waiting_rank_names_silent_peer_and_layer(pool: RankPool, tmp_path: Path) -> None:
    pool.run(give_up_silent, TIMEOUT_S, 0)
    _, message = pool.run(failing_tasks.hang_in_layer, 2, Silence.made(0, 2, tmp_path))
    found = re.match(r"PeerFailure: rank 0 has been silent for (\d+) s", message)
    assert found is not None and round(TIMEOUT_S) <= int(found[1]) < 10
    assert re.search(r"the KV of layer 2 from rank 0 \([\d,]+ bytes, receive posted\)", message)


def test_sender_is_not_hung_by_receiver_that_stands_still(pool: RankPool, tmp_path: Path) -> None:
    pool.run(give_up_silent, TIMEOUT_S, 1)
    message, _ = pool.run(failing_tasks.hang_in_layer, 0, Silence.made(1, 2, tmp_path))
    assert message.startswith("PeerFailure: rank 1 has been silent")


@pytest.mark.parametrize("pool", [3], indirect=True)
def test_only_true_cause_is_named_in_chain_of_waiting_ranks(pool: RankPool, tmp_path: Path) -> None:
    pool.run(give_up_silent, TIMEOUT_S, 0)
    _, middle, last = pool.run(failing_tasks.hang_in_layer, 1, Silence.made(0, 3, tmp_path))
    assert "rank 0 has been silent" in middle
    assert "rank 0 has been silent" in last  # though it waits for rank 1, which waits and is alive
    assert "rank 1 has been silent" not in last


@pytest.mark.parametrize(
    ("fail", "args"), [(failing_tasks.raise_in_layer, (0, 3)), (failing_tasks.raise_in_sharded_decoding, (0,))], ids=IN
)
def test_announced_failure_reaches_other_ranks_at_once(pool: RankPool, fail: Task, args: tuple[int, ...]) -> None:
    (own, _), (message, seconds) = pool.run(fail, *args)
    assert own == "RuntimeError: out of luck"
    assert "rank 0 failed: out of luck" in message
    assert seconds < SOON_S


@pytest.mark.parametrize(("end", "args"), ENDS, ids=IN)
@pytest.mark.parametrize("failing", [0, 1])
def test_killed_rank_is_noticed(pool: RankPool, failing: int, end: Task, args: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match="the process has ended") as caught:
        pool.run(end, failing, *args, failing_tasks.SIGKILL)
    assert f"rank {1 - failing}:" not in str(caught.value)  # that one returned a message of its own
    # what it returned is asserted for whole jobs in test_job_ends.py


@pytest.mark.parametrize(("end", "args"), ENDS, ids=IN)
def test_stopped_rank_is_noticed(pool: RankPool, end: Task, args: tuple[int, ...]) -> None:
    pool.run(give_up_silent, TIMEOUT_S, 0)
    pool.stopped = 0
    with pytest.raises(RuntimeError, match="rank 0:\nno answer") as caught:
        pool.run(end, 0, *args, failing_tasks.SIGSTOP)
    assert "rank 1:" not in str(caught.value)


LONG_S = 4.0
"""Timeout of ranks that work for longer than that, with less than that of silence."""


def test_long_decode_is_not_silence(pool: RankPool) -> None:
    pool.run(give_up_after, LONG_S)
    outcomes = pool.run(failing_tasks.slow_decode, 0.2, 30)
    assert [reason for reason, _ in outcomes] == ["length", "length"]
    assert outcomes[0][1] > 1.2 * LONG_S


def test_long_layer_is_not_silence(pool: RankPool) -> None:
    pool.run(give_up_after, LONG_S)
    outcomes = pool.run(failing_tasks.compute_in_layer, 0, 2, 1.5 * LONG_S)
    assert [message for message, _ in outcomes] == ["ok", "ok"]
    assert outcomes[1][1] > 1.2 * LONG_S


@pytest.mark.parametrize("pool", [3], indirect=True)
def test_ranks_with_different_work_do_not_begin(pool: RankPool) -> None:
    (first, _), *others = pool.run(failing_tasks.different_prompts)
    assert first.startswith("ValueError: rank 1, 2 and rank 0 differ in the prompts")
    for message, _ in others:
        assert message == first.replace("ValueError", "SharedError")


def test_ranks_with_different_weights_do_not_begin(pool: RankPool) -> None:
    (first, _), _ = pool.run(failing_tasks.different_weights)
    assert first.startswith("ValueError: rank 1 and rank 0 differ in its weights; every rank must make the same call")


def test_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("runahead.ranks.ranks.MEETING_S", 0.3)
    store = dist.FileStore(str(tmp_path / "store"), 3)
    with pytest.raises(RunFailure, match=r"^rank 0, 2 of 3 did not start within 0 s"):
        Ranks(1, 3, device=torch.device("cpu"), backend="gloo", timeout_s=0.3).join(store=store)


class _LostStore(dist.FileStore):
    def add(self, key: str, value: int) -> int:
        raise dist.DistNetworkError("Connection reset by peer")


def test_a_rendezvous_that_is_lost_is_no_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(RunFailure, match="^cannot meet the other ranks: Connection reset by peer") as caught:
        Ranks(1, 2, device=torch.device("cpu"), backend="gloo", timeout_s=0.3).join(
            store=_LostStore(str(tmp_path / "store"), 2)
        )
    assert not is_mistake(caught.value)


def test_sender_stops_at_bound_of_layers_in_flight(pool: RankPool, tmp_path: Path) -> None:
    (outcome, opened), _ = pool.run(failing_tasks.stop_receiving, 30, str(tmp_path / "release"))
    assert outcome == "ok"
    # Three layers' receives are posted ahead there, and three more layers wait in the slots here.
    assert 3 <= opened <= 6 < failing_tasks.NUM_LAYERS


@pytest.mark.parametrize("failing", [0, 1])
def test_silent_rank_is_named_while_ranks_decode_together(pool: RankPool, failing: int, tmp_path: Path) -> None:
    pool.run(give_up_silent, TIMEOUT_S, failing)
    outcomes = pool.run(failing_tasks.hang_in_sharded_decoding, Silence.made(failing, 2, tmp_path))
    message = outcomes[1 - failing]
    assert message.startswith(f"PeerFailure: rank {failing} has been silent")
    assert f"the attention of rank {failing}" in message
