"""Mail between ranks: in order, in both directions, while the main threads do something else."""

from __future__ import annotations

import pytest

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
