"""NCCL on one GPU: its options, an exchange with itself, operations in a graph, the end of a group.

NCCL waits until no graph holds its operations before it destroys or aborts a communicator.
"""

from __future__ import annotations

import pytest

from tests.conftest import RankPools
from tests.gpu import rank_tasks


def test_a_rank_exchanges_with_itself_and_adds_up(nccl_ranks: RankPools) -> None:
    assert nccl_ranks.run(1, rank_tasks.exchanges) == [(True, True)]


def test_a_graph_repeats_an_exchange_also_between_others(nccl_ranks: RankPools) -> None:
    assert nccl_ranks.run(1, rank_tasks.replayed_exchanges) == [[True, True, True]]


@pytest.mark.parametrize("end", ["destroy", "abort"])
def test_a_group_ends_while_a_graph_with_its_operations_is_held(nccl_ranks: RankPools, end: str) -> None:
    """After an error the traceback holds the step of which the graph is."""
    assert nccl_ranks.run(1, rank_tasks.ends_with_a_graph, end) == [True]
    nccl_ranks.close()  # the rank has left its group


def test_ranks_leave_after_an_error_whose_traceback_holds_a_graph_of_exchanges(nccl_ranks: RankPools) -> None:
    """Sharded decoding in bfloat16, whose steps are graphs."""
    assert nccl_ranks.run(2, rank_tasks.fails_in_a_replayed_step) == [(True, True)] * 2
    nccl_ranks.close()


def test_hosts_of_a_stage_tell_each_other_numbers_without_their_gpus(nccl_ranks: RankPools) -> None:
    """What a server's shares decide in each layer waits for no GPU; models add up over NCCL."""
    assert nccl_ranks.run(4, rank_tasks.told_by_hosts, 2) == [("gloo", True, [first, 7]) for first in (0, 0, 2, 2)]
