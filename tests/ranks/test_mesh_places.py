"""Stages and shares of ranks: places, chains, links and names."""

from __future__ import annotations

import warnings

import pytest

from benchmarks.doctor.options import DoctorRun
from benchmarks.ttft.options import BenchRun
from launch.inputs.options import RunOptions
from runahead.config import PrefillName, PrefillOptions, RanksOptions, Transfer
from runahead.context import ContextPartition
from runahead.kv_transfer import TransferSchedule
from runahead.ranks.groups import ProcessGroups
from runahead.ranks.meeting.presence import Presence
from runahead.ranks.mesh import Mesh


@pytest.mark.parametrize("mesh", [Mesh(1, 1), Mesh(4, 1), Mesh(1, 4), Mesh(2, 2), Mesh(3, 2)])
def test_every_rank_has_one_place(mesh: Mesh) -> None:
    ranks = range(mesh.size)
    assert [mesh.rank(mesh.stage(rank), mesh.share(rank)) for rank in ranks] == list(ranks)
    assert [rank for stage in range(mesh.num_stages) for rank in mesh.members(stage)] == list(ranks)
    assert sorted(rank for share in range(mesh.num_shares) for rank in mesh.chain(share)) == list(ranks)
    assert Mesh.with_shares(mesh.size, mesh.num_shares) == mesh


def test_links_are_between_equal_shares() -> None:
    assert Mesh(3, 2).links([(0, 1), (1, 2)]) == [(0, 2), (1, 3), (2, 4), (3, 5)]


def test_a_rank_is_named_by_its_place_where_it_has_one() -> None:
    assert Mesh(4, 1).names([1, 3]) == "rank 1 and rank 3"
    assert Mesh(2, 2).names([1, 3]) == "rank 1 (stage 0, share 1) and rank 3 (stage 1, share 1)"


@pytest.mark.parametrize(
    ("ranks", "tensor", "fitting"), [(6, 4, "1, 2, 3 or 6"), (1, 2, "1"), (2, 3, "1 or 2"), (7, 2, "1 or 7")]
)
def test_ranks_that_make_no_whole_stages(ranks: int, tensor: int, fitting: str) -> None:
    message = f"ranks.tensor={tensor} makes no whole stages of {ranks} ranks; use a multiple of {tensor} ranks, or "
    with pytest.raises(ValueError, match=f"^{message}{fitting} for ranks.tensor$"):
        Mesh.with_shares(ranks, tensor)


@pytest.mark.parametrize("tensor", [0, -1])
def test_a_stage_has_at_least_one_rank(tensor: int) -> None:
    with pytest.raises(ValueError, match=f"ranks.tensor={tensor} must be from 1"):
        RanksOptions(tensor=tensor)


@pytest.mark.parametrize("transfer", list(Transfer))
@pytest.mark.parametrize("joined", [False, True])
def test_the_chain_of_a_share_is_the_chain_of_stages(transfer: Transfer, joined: bool) -> None:
    partition, mesh = ContextPartition(boundaries=(0, 5, 5, 9, 12)), Mesh(4, 3)
    for stage in partition.chain:
        alone = TransferSchedule(partition, stage, transfer, lambda layer, start: 0, joined=joined)
        for share in range(mesh.num_shares):
            rank = mesh.rank(stage, share)
            ours = TransferSchedule(partition, rank, transfer, lambda layer, start: 0, joined=joined, mesh=mesh)
            assert ours.position == alone.position and ours.is_last == alone.is_last
            assert ours.links() == mesh.links(alone.links())
            for layer in (0, 3):
                pairs = [(ours.receives(layer), alone.receives(layer)), (ours.sends(layer), alone.sends(layer))]
                for mine, theirs in pairs:
                    assert [mesh.rank(each.peer, share) for each in theirs] == [each.peer for each in mine]
                    assert [(each.start, each.end, each.tag) for each in theirs] == [
                        (each.start, each.end, each.tag) for each in mine
                    ]


def test_a_stage_on_two_hosts_is_warned_of() -> None:
    ranks = ProcessGroups(0, 4, timeout_s=1.0)
    ranks.present = [Presence(rank, "ab"[rank // 2], "", 0, 0, {}) for rank in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ranks.arrange(2)
    with pytest.warns(UserWarning, match=r"stage 0 is on hosts a and b, so a network carries its two all-reduces"):
        ranks.arrange(4)
    assert (ranks.num_stages, ranks.num_shares, ranks.stage, ranks.share) == (1, 4, 0, 0)


def test_programs_that_need_whole_models_refuse_shares() -> None:
    for options in (BenchRun, DoctorRun):
        with pytest.raises(ValueError, match=r"^ranks.tensor=2 has no use: .*; leave it out"):
            options(ranks=RanksOptions(tensor=2))
    with pytest.raises(ValueError, match=r"^prefill=tensor makes all ranks one stage, whatever ranks.tensor=2 says"):
        RunOptions(
            policy={"name": "full", "positions": "original"},
            ranks=RanksOptions(tensor=2),
            prefill=PrefillOptions(name=PrefillName.tensor),
        )
