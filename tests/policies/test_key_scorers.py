"""Policies that choose by the stored keys and values alone choose as their papers say."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from policies import k_centers
from policies.k_centers import KCenters
from policies.lagkv import LagKV
from tests.policies.test_scorers import kept, view_of
from tests.policies.test_selection import tensors

# Legend: B batch, K kv heads, n stored tokens, H head dim.


def lag_scores(x_nH: Tensor, lag: int) -> list[Tensor]:
    """Scores of each partition but the last, as published; a constant channel would be divided by 0."""
    parts = [x_nH[first : first + lag] for first in range(0, len(x_nH) - lag + 1, lag)]
    found = []
    for part, following in pairwise(parts):
        low_H, high_H = following.min(dim=0).values, following.max(dim=0).values
        found.append(((part - low_H) / (high_H - low_H)).std(dim=-1).softmax(dim=0))
    return found


class TestLagKV:
    LAG, SINKS = 6, 2

    @pytest.mark.parametrize("pad", [0, 5])
    def test_each_partition_keeps_the_tokens_that_stand_out_from_the_next_one(self, pad: int) -> None:
        """Half of each, by keys and values of each head; all of the last whole partition and of what follows it."""
        _, k_BKnH = tensors(pad + self.SINKS + 4 * self.LAG + 3, 1)
        k_BKnH[:, :, :pad] = 1e4
        view = view_of(k_BKnH, pads=[pad])
        budget = self.SINKS + 3 * (self.LAG // 2) + self.LAG + 3
        slots_Km = kept(LagKV(budget=budget, sinks=self.SINKS, lag=self.LAG), view)[0]
        first = pad + self.SINKS
        for head, slots in enumerate(slots_Km):
            expected = [*range(pad, first), *range(first + 3 * self.LAG, view.num_slots)]
            states = (view.k_BKnH[0, head, first:], view.v_BKnV[0, head, first:])
            of_keys, of_values = (lag_scores(x_nH, self.LAG) for x_nH in states)
            for part, (a_L, b_L) in enumerate(zip(of_keys, of_values, strict=True)):
                expected += [first + part * self.LAG + at for at in (a_L + b_L).topk(self.LAG // 2).indices.tolist()]
            assert slots == sorted(expected)

    def test_the_last_partition_is_no_reference_for_all(self) -> None:
        """Each is compared with the one after it: what comes later does not change what an early partition keeps."""
        _, k_BKnH = tensors(40, 1)
        other_BKnH = k_BKnH.clone()
        other_BKnH[:, :, 20:] = tensors(40, 1, seed=1)[1][:, :, 20:] * 5
        ours, theirs = (LagKV(budget=9, sinks=0, lag=10).score(view_of(k))[..., :10] for k in (k_BKnH, other_BKnH))
        assert torch.equal(ours, theirs)
        other_BKnH[:, :, 10:20] *= 3
        assert not torch.equal(ours, LagKV(budget=9, sinks=0, lag=10).score(view_of(other_BKnH))[..., :10])

    def test_a_channel_that_is_constant_in_the_next_partition_is_left_out(self) -> None:
        """The score without it; published code divides by zero there, and keeps whatever NaN sorts first."""
        _, k_BKnH = tensors(24, 1)
        constant_BKnH = torch.cat([k_BKnH, torch.full_like(k_BKnH[..., :2], 3.0)], dim=-1)
        constant_BKnH[:, :, :6, -2:] = 70.0  # the first partition differs, and has no range to be scaled to
        policy = LagKV(budget=9, sinks=0, lag=6)
        with_constant, without = (policy.score(view_of(k)) for k in (constant_BKnH, k_BKnH))
        assert with_constant.isfinite().all()
        assert torch.equal(with_constant, without)
        assert not lag_scores(constant_BKnH[0, 0], 6)[0].isfinite().all()
        assert policy.score(view_of(torch.ones(1, 2, 24, 8))).isfinite().all()

    @pytest.mark.parametrize("num_tokens", [5, 13, 19])
    def test_fewer_than_two_partitions_are_a_window_with_sinks(self, num_tokens: int) -> None:
        """The paper leaves them whole; a budget holds all the same."""
        _, k_BKnH = tensors(num_tokens, 1)
        slots = kept(LagKV(budget=4, sinks=1, lag=10), view_of(k_BKnH))
        assert slots == [[[0, *range(num_tokens - 3, num_tokens)]] * 2]

    def test_bad_options_are_named(self) -> None:
        with pytest.raises(ValueError, match="policy.lag=1 must be at least 2"):
            LagKV(lag=1)


def radius(k_nH: Tensor, slots: list[int]) -> float:
    """Largest distance of any key to the nearest one that stays."""
    return float((k_nH[:, None] - k_nH[slots]).norm(dim=-1).amin(dim=1).max())


class TestKCenters:
    def test_the_farthest_key_from_all_that_stay_stays_next(self) -> None:
        """In plain loops over each row and head, from sinks and recent tokens on."""
        pads, budget, sinks, recent = [0, 7], 13, 2, 4
        k_BKnH = tensors(30, 1, batch=2)[1]
        k_BKnH[1, :, :7] = 1e4
        slots_BKm = kept(KCenters(budget=budget, sinks=sinks, recent_share=0.3), view_of(k_BKnH, pads=pads))
        for row, pad in enumerate(pads):
            for head, slots in enumerate(slots_BKm[row]):
                keys_nH = k_BKnH[row, head]
                centers = [*range(pad, pad + sinks), *range(30 - recent, 30)]
                while len(centers) < budget:
                    distances_n = (keys_nH[:, None] - keys_nH[centers]).norm(dim=-1).amin(dim=1)
                    distances_n[[*range(pad), *centers]] = -1
                    centers.append(int(distances_n.argmax()))
                assert slots == sorted(centers)

    def test_the_covering_radius_falls_with_the_budget(self) -> None:
        """And is at most twice that of any choice, so not above twice that of random ones; a window's is larger."""
        keys_nH, generator = tensors(60, 1)[1][0, 0], torch.Generator().manual_seed(0)
        view, found = view_of(keys_nH[None, None]), list[float]()
        for budget in range(2, 60, 4):
            [[slots]] = kept(KCenters(budget=budget, recent_share=0.0), view)
            found.append(radius(keys_nH, slots))
            drawn = [torch.randperm(60, generator=generator)[:budget].tolist() for _ in range(40)]
            assert found[-1] <= 2 * min(radius(keys_nH, each) for each in drawn)
        assert found == sorted(found, reverse=True) and found[-1] < found[0] / 2
        assert found[6] < radius(keys_nH, [*range(60 - 26, 60)])

    def test_keys_that_are_equal_are_one_centre(self) -> None:
        """Copies stay only where no other key is left, the earliest of them first."""
        keys_nH = tensors(5, 1)[1][0, 0][[0, 1, 1, 2, 0, 3, 1, 4, 2]] * 7.3
        view = view_of(keys_nH[None, None])
        [[slots]] = kept(KCenters(budget=5, recent_share=0.0), view)
        assert sorted([0, 1, 1, 2, 0, 3, 1, 4, 2][slot] for slot in slots) == [0, 1, 2, 3, 4]
        [[slots]] = kept(KCenters(budget=6, recent_share=0.0), view)
        assert len(slots) == 6 and radius(keys_nH, slots) == 0

    @pytest.mark.parametrize("block", [1, 100])
    def test_blocks_do_not_matter(self, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
        view = view_of(tensors(40, 1)[1])
        whole = kept(KCenters(budget=20), view)
        monkeypatch.setattr(k_centers, "BLOCK_DISTANCES", block)
        assert kept(KCenters(budget=20), view) == whole

    def test_bad_options_are_named(self) -> None:
        with pytest.raises(ValueError, match="policy.recent_share=1.5 must be a share"):
            KCenters(recent_share=1.5)
