"""Tasks of the mail's tests on live ranks."""

from __future__ import annotations

from typing import Any

from runahead.ranks.ranks import Ranks
from runahead.serving.mail.mail import Mail


def exchange(ranks: Ranks, number: int) -> list[Any]:
    """Send so many messages each way. Returns what this rank received."""
    received: list[Any] = []
    errors: list[Exception] = []
    mail = Mail(ranks, received.append, errors.append)
    for n in range(number):
        if ranks.rank == 0 and n == number // 2:
            mail.post("to rank 1 alone", [1])
        mail.post((0, n, "x" * (n * 1000)) if ranks.rank == 0 else (ranks.rank, n))
    ranks.barrier("a collective beside the mail")
    mail.close()
    assert not errors, errors
    return received
