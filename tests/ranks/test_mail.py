"""Mail between ranks: in order, in both directions, while the main threads do something else."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from runahead.failures import PeerFailure, RunFailure
from runahead.ranks.meeting.seal import Seal
from runahead.ranks.ranks import Ranks
from runahead.serving.executor import Executor
from runahead.serving.items import Check
from runahead.serving.mail.mail import LostConnection, Mail
from runahead.serving.mail.wire import to_bytes
from tests.conftest import RankPools
from tests.ranks import mail_tasks


@pytest.mark.parametrize("size", [2, 3])
def test_mail_arrives_in_order_while_the_main_thread_does_something_else(rank_pools: RankPools, size: int) -> None:
    for _ in range(2):  # the second time over the same connections
        received = rank_pools.run(size, mail_tasks.exchange, 20)
        assert sorted(received[0]) == [(rank, n) for rank in range(1, size) for n in range(20)]
        assert [[n for sender, n in received[0] if sender == rank] for rank in range(1, size)] == [
            list(range(20)) for _ in range(1, size)
        ]
        for rank in range(1, size):
            to_all = [(0, n, "x" * (n * 1000)) for n in range(20)]
            assert received[rank] == (to_all if rank > 1 else [*to_all[:10], "to rank 1 alone", *to_all[10:]])


def refused(message: object) -> None:
    raise KeyError(f"no place for {message}")


def ended_by(received: bytes | None, on_message: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch) -> Exception:
    """The error with which mail from rank 1 ends, of which one message comes, or none and the connection is lost."""
    parts = [] if received is None else [torch.tensor([len(received)]), torch.tensor(list(received), dtype=torch.uint8)]

    def receive(into: torch.Tensor, *_: object, **__: object) -> None:
        if not parts:
            raise RuntimeError("Connection closed by peer")
        into.copy_(parts.pop(0))

    monkeypatch.setattr(dist, "recv", receive)
    ranks = SimpleNamespace(rank=0, size=2, mail_group=lambda: None, seal=Seal(b"of this job"))
    errors: list[Exception] = []
    mail = Mail(cast(Ranks, ranks), on_message, errors.append)
    for thread in mail._receiving:
        thread.join()
    [error] = errors
    return error


def reported(error: Exception) -> Exception:
    """The error with which a rank's main thread ends."""
    ranks = SimpleNamespace(lost_connection=lambda what: PeerFailure(f"rank 1 is gone (while waiting for {what})"))
    executor = SimpleNamespace(_inbox=SimpleNamespace(error=error), _ranks=ranks)
    with pytest.raises(Exception) as caught:
        Executor._raise_error(cast(Executor, executor))
    return cast(Exception, caught.value)


ABOUT = "mail 1 from 1 to 0"


@pytest.mark.parametrize(
    ("received", "kind", "message"),
    [
        (Seal(b"a stranger's").close(to_bytes(Check()), ABOUT), RunFailure, "no rank of this job has sent"),
        (Seal(b"of this job").close(b"{", ABOUT), RunFailure, "a message of another rank cannot be read"),
        (Seal(b"of this job").close(to_bytes(Check()), ABOUT), KeyError, "no place for Check"),
        (None, PeerFailure, "rank 1 is gone"),
    ],
)
def test_only_a_lost_connection_is_reported_as_one(
    received: bytes | None, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ended_by(received, refused, monkeypatch)
    assert isinstance(error, LostConnection) == (received is None)
    assert type(reported(error)) is kind and message in str(reported(error))
