"""benchmarks/studies/commits: the ratio of two commits' times, and what is said where they cannot be measured."""

from __future__ import annotations

import pytest

from benchmarks.studies.commits.__main__ import interval, ratios, table
from benchmarks.studies.commits.job import job_of


def line(cell: str, before: list[float], after: list[float]) -> dict[str, object]:
    times = {"before": before, "after": after}
    about = {"date": "2026-11-26", "commit": "def", "before": "abc", "after": None, "what": "TTFT", "length": 1024}
    return {**about, "cell": cell, "seconds": times}


def test_the_ratio_is_that_of_the_same_round() -> None:
    """The machine is twice as slow in the second round; the medians of the times alone would say 1.0."""
    found = line("single", [1.0, 2.0, 1.0], [1.1, 2.2, 1.1])
    assert ratios(found) == pytest.approx([1.1, 1.1, 1.1])
    assert interval(ratios(found)) == pytest.approx((1.1, 1.1))


def test_the_table_has_the_geometric_mean_of_all_cells() -> None:
    text = table([line("single", [1.0] * 3, [2.0] * 3), line("zigzag", [1.0] * 3, [0.5] * 3)])
    assert "def over abc, 3 rounds: geometric mean of the ratios 1.000, largest 2.000" in text


def test_a_commit_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="there is no commit no-such-commit"), job_of("no-such-commit"):
        pass
