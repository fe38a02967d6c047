"""A fault of one rank, and nothing else, ends the others: soon, with the culprit's name and what they waited for."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from runahead.ranks.ranks import Ranks
from tests.rank_pool import RankPool
from tests.ranks import failing_tasks

TIMEOUT_S = 1.5
MARGIN_S = 5.0


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Two ranks, or as many as the test asks for, that give a silent peer up soon. They do not outlive the test."""
    pool = RankPool(getattr(request, "param", 2), timeout_s=TIMEOUT_S)
    yield pool
    for process in pool.processes:
        if process.pid is not None and process.is_alive():
            with suppress(ProcessLookupError):  # it may end by itself just now
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
    pool.close()


def test_waiting_rank_names_silent_peer_and_layer(pool: RankPool) -> None:
    _, (message, seconds) = pool.run(failing_tasks.hang_in_layer, 0, 2, TIMEOUT_S + 3.0)
    assert message.startswith("PeerFailure: rank 0 has been silent")
    assert re.search(r"the KV of layer 2 from rank 0 \([\d,]+ bytes, receive posted\)", message)
    assert TIMEOUT_S <= seconds < TIMEOUT_S + MARGIN_S


def test_sender_is_not_hung_by_receiver_that_stands_still(pool: RankPool) -> None:
    (message, seconds), _ = pool.run(failing_tasks.hang_in_layer, 1, 0, TIMEOUT_S + 3.0)
    assert message.startswith("PeerFailure: rank 1 has been silent")
    assert seconds < TIMEOUT_S + MARGIN_S


@pytest.mark.parametrize("pool", [3], indirect=True)
def test_only_true_cause_is_named_in_chain_of_waiting_ranks(pool: RankPool) -> None:
    _, (middle, _), (last, _) = pool.run(failing_tasks.hang_in_layer, 0, 1, TIMEOUT_S + 3.0)
    assert "rank 0 has been silent" in middle
    assert "rank 0 has been silent" in last  # though it waits for rank 1, which waits and is alive
    assert "rank 1 has been silent" not in last


def test_announced_failure_reaches_other_ranks_at_once(pool: RankPool) -> None:
    (own, _), (message, seconds) = pool.run(failing_tasks.raise_in_layer, 0, 3)
    assert own == "RuntimeError: out of luck"
    assert "rank 0 failed: out of luck" in message
    assert seconds < TIMEOUT_S + MARGIN_S


@pytest.mark.parametrize("failing", [0, 1])
def test_killed_rank_is_noticed(pool: RankPool, failing: int) -> None:
    with pytest.raises(RuntimeError, match="the process has ended") as caught:
        pool.run(failing_tasks.signal_in_layer, failing, 2, failing_tasks.SIGKILL)
    assert f"rank {1 - failing}:" not in str(caught.value)  # that one returned a message of its own
    # what it returned is asserted for whole jobs in test_job_ends.py


def test_stopped_rank_is_noticed(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.rank_pool.TASK_LIMIT_S", TIMEOUT_S + MARGIN_S)
    with pytest.raises(RuntimeError, match="rank 0:\nno answer"):
        pool.run(failing_tasks.signal_in_layer, 0, 2, failing_tasks.SIGSTOP)


def test_long_decode_is_not_silence(pool: RankPool) -> None:
    outcomes = pool.run(failing_tasks.slow_decode, TIMEOUT_S / 3, 9)
    assert [reason for reason, _ in outcomes] == ["length", "length"]
    assert outcomes[0][1] > 2 * TIMEOUT_S


def test_long_layer_is_not_silence(pool: RankPool) -> None:
    outcomes = pool.run(failing_tasks.compute_in_layer, 0, 2, 2.5 * TIMEOUT_S)
    assert [message for message, _ in outcomes] == ["ok", "ok"]
    assert outcomes[1][1] > 2 * TIMEOUT_S


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
    with pytest.raises(ValueError, match=r"rank 0, 2 of 3 did not start within 0 s"):
        Ranks(1, 3, device=torch.device("cpu"), backend="gloo", timeout_s=0.3, store=store)


def test_sender_stops_at_bound_of_layers_in_flight(pool: RankPool, tmp_path: Path) -> None:
    (outcome, opened), _ = pool.run(failing_tasks.stop_receiving, 30, str(tmp_path / "release"))
    assert outcome == "ok"
    # Three layers' receives are posted ahead there, and three more layers wait in the slots here.
    assert 3 <= opened <= 6 < failing_tasks.NUM_LAYERS


@pytest.mark.parametrize("failing", [0, 1])
def test_silent_rank_is_named_while_ranks_decode_together(pool: RankPool, failing: int) -> None:
    outcomes = pool.run(failing_tasks.hang_in_sharded_decoding, failing, TIMEOUT_S + 3.0)
    message, seconds = outcomes[1 - failing]
    assert message.startswith(f"PeerFailure: rank {failing} has been silent")
    assert f"the attention of rank {failing}" in message
    assert TIMEOUT_S <= seconds < TIMEOUT_S + MARGIN_S


def test_announced_failure_reaches_ranks_that_decode_together(pool: RankPool) -> None:
    (own, _), (message, seconds) = pool.run(failing_tasks.raise_in_sharded_decoding, 0)
    assert own == "RuntimeError: out of luck"
    assert "rank 0 failed: out of luck" in message
    assert seconds < TIMEOUT_S + MARGIN_S


@pytest.mark.parametrize("failing", [0, 1])
def test_killed_rank_is_noticed_while_ranks_decode_together(pool: RankPool, failing: int) -> None:
    with pytest.raises(RuntimeError, match="the process has ended") as caught:
        pool.run(failing_tasks.signal_in_sharded_decoding, failing, failing_tasks.SIGKILL)
    assert f"rank {1 - failing}:" not in str(caught.value)


def test_stopped_rank_is_noticed_while_ranks_decode_together(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.rank_pool.TASK_LIMIT_S", TIMEOUT_S + MARGIN_S)
    with pytest.raises(RuntimeError, match="rank 0:\nno answer") as caught:
        pool.run(failing_tasks.signal_in_sharded_decoding, 0, failing_tasks.SIGSTOP)
    assert "rank 1:" not in str(caught.value)
