"""Mean and covariance of queries, counted block by block, and turned by the mean of many rotations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runahead.attention import query_moments
from runahead.attention.query_moments import QueryMoments
from runahead.rotary import Rotary

# Legend: B batch, N heads, C queries, H head dim.


def rotary(interleaved: bool = False, first: int = 0) -> Rotary:
    return Rotary(torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64), interleaved, first)


def queries(batch: int, num_queries: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Their mean is far longer than they differ, as in real models.
    return 30 + torch.randn(batch, 2, num_queries, 8, generator=generator, dtype=torch.float64)


def rotated(x_BNCH: Tensor, positions_BC: Tensor, by: Rotary) -> Tensor:
    """One by one."""
    out = x_BNCH.clone()
    for row, positions in enumerate(positions_BC.tolist()):
        for place, position in enumerate(positions):
            if position >= 0:
                x_1BNX = x_BNCH[row : row + 1, :, place][None]
                padded = torch.cat([torch.zeros_like(x_1BNX)] * position + [x_1BNX])
                out[row, :, place] = by.rotated(padded, 0, [0])[-1, 0]
    return out


@pytest.mark.parametrize("block", [1, 3, 1024])
@pytest.mark.parametrize("by", [rotary(), rotary(True), rotary(first=2)], ids=["halves", "neighbours", "last dims"])
def test_they_are_those_of_the_queries_before_rope(by: Rotary, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries that count are compared, in each row; other values are of no consequence."""
    monkeypatch.setattr(query_moments, "QUERY_BLOCK", block)
    q_BNCH = queries(3, 11)
    positions_BC = torch.arange(11) - torch.tensor([[0], [4], [10]])
    counts_BC = positions_BC >= 2  # of the last row none
    given = rotated(q_BNCH, positions_BC, by).masked_fill(~counts_BC[:, None, :, None], 1e6)
    moments = QueryMoments.from_queries(given, by, positions_BC=positions_BC, counts_BC=counts_BC)
    assert moments.count_B.tolist() == [9, 5, 0]
    for row in range(2):
        for head in range(2):
            own = q_BNCH[row, head, counts_BC[row]]
            torch.testing.assert_close(moments.mean_BNH[row, head], own.mean(dim=0), atol=1e-9, rtol=0)
            scatter_HH = torch.cov(own.T, correction=0) * len(own)
            torch.testing.assert_close(moments.scatter_BNHH[row, head], scatter_HH, atol=1e-9, rtol=1e-9)
    assert not moments.mean_BNH[2].any() and not moments.scatter_BNHH[2].any()


@pytest.mark.parametrize("split", [1, 5, 10])
def test_sets_of_queries_are_merged_as_if_they_were_one(split: int) -> None:
    q_BNCH, positions_BC = queries(2, 11), torch.zeros(2, 11, dtype=torch.long)
    counts_BC = torch.arange(11) >= torch.tensor([[0], [6]])  # of the second row, the first set may have none
    none = Rotary(torch.empty(0))

    def of(part: slice) -> QueryMoments:
        return QueryMoments.from_queries(
            q_BNCH[:, :, part], none, positions_BC=positions_BC[:, part], counts_BC=counts_BC[:, part]
        )

    whole = of(slice(None))
    merged = of(slice(0, split)).merged(of(slice(split, None)))
    for ours, theirs in zip(vars(merged).values(), vars(whole).values(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


def test_float32_keeps_the_covariance_of_long_queries() -> None:
    """E[q q] - E[q] E[q] would lose it: the squares of the mean are 10,000 times as large."""
    q_BNCH, none = 70 + queries(1, 500), Rotary(torch.empty(0))
    places = {"positions_BC": torch.zeros(1, 500), "counts_BC": torch.ones(1, 500, dtype=torch.bool)}
    ours, exact = (QueryMoments.from_queries(q, none, **places) for q in (q_BNCH.float(), q_BNCH))
    assert ours.scatter_BNHH.dtype == torch.float32
    torch.testing.assert_close(ours.scatter_BNHH.double(), exact.scatter_BNHH, atol=0.05, rtol=1e-3)  # of some 500


@pytest.mark.parametrize("by", [rotary(), rotary(True), rotary(first=2)], ids=["halves", "neighbours", "last dims"])
def test_they_are_turned_by_the_mean_of_the_rotations(by: Rotary) -> None:
    """Expected by matrices that are written out, for each row's next positions."""
    start_B, num_positions = torch.tensor([7, 3]), 5
    moments = QueryMoments.from_queries(
        queries(2, 11),
        by,
        positions_BC=torch.arange(11).expand(2, -1),
        counts_BC=torch.ones(2, 11, dtype=torch.bool),
    )
    mean_BNH, covariance_BNHH = moments.ahead(by, start_B, num_positions)
    unit_HH = torch.eye(8, dtype=torch.float64)
    for row, start in enumerate(start_B.tolist()):
        places = torch.arange(start, start + num_positions).expand(8, -1)
        # Column i of a rotation is where the i-th unit vector goes.
        columns = rotated(unit_HH[:, None, None].expand(-1, -1, num_positions, -1), places, by)
        mean_HH = columns.mean(dim=2)[:, 0].T
        torch.testing.assert_close(mean_BNH[row], moments.mean_BNH[row] @ mean_HH.T, atol=1e-9, rtol=0)
        expected = mean_HH @ (moments.scatter_BNHH[row] / 11) @ mean_HH.T
        torch.testing.assert_close(covariance_BNHH[row], expected, atol=1e-9, rtol=0)


def test_bytes_are_counted() -> None:
    moments = QueryMoments.from_queries(
        queries(3, 4).float(),
        rotary(),
        positions_BC=torch.zeros(3, 4, dtype=torch.long),
        counts_BC=torch.ones(3, 4, dtype=torch.bool),
    )
    assert moments.num_bytes == 4 * 3 * (1 + 2 * 8 + 2 * 8 * 8)
