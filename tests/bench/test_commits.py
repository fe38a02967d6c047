"""benchmarks/studies/commits: the ratio of two commits' times, and what is said where they cannot be measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness import lines
from benchmarks.studies.commits.__main__ import STUDY, mean, ratios, table
from benchmarks.studies.commits.job import job_of


def line(cell: str, before: list[float], after: list[float]) -> dict[str, object]:
    times = {"before": before, "after": after}
    about = {"date": "2026-11-26", "commit": "def", "before": "abc", "after": None, "what": "TTFT", "length": 1024}
    return {**about, "cell": cell, "seconds": times}


def test_the_ratio_is_that_of_the_same_round() -> None:
    """The machine is twice as slow in the second round; the medians of the times alone would say 1.0."""
    found = line("single", [1.0, 2.0, 1.0], [1.1, 2.2, 1.1])
    assert ratios(found) == pytest.approx([1.1, 1.1, 1.1])
    assert mean([ratios(found)]) == pytest.approx((1.1, 1.1, 1.1))


def test_the_table_has_the_geometric_mean_of_all_cells() -> None:
    text = table([line("single", [1.0] * 3, [2.0] * 3), line("zigzag", [1.0] * 3, [0.5] * 3)])
    assert "def over abc, 3 rounds: geometric mean of the ratios 1.000 (1.000 to 1.000), largest 2.000" in text


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ([], None),
        (["--most-mean", "1.2", "--most-cell", "1.3"], None),
        (["--most-mean", "1.1"], "the mean ratio 1.140 is above --most-mean 1.1"),
        (["--most-cell", "1.05"], "the ratio 1.300 of TTFT, zigzag, 1,024 tokens is above --most-cell 1.05"),
    ],
)
def test_it_fails_beyond_the_limits_that_are_given(
    limits: list[str], expected: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last run counts; an earlier one was slower."""
    file, earlier = tmp_path / "lines.jsonl", line("single", [1.0] * 3, [9.0] * 3) | {"date": "2026-11-25"}
    lines.append(file, [earlier, line("single", [1.0] * 3, [1.0] * 3), line("zigzag", [1.0] * 3, [1.3] * 3)])
    command = ["--draw-only", "--lines", str(file), "--out", str(tmp_path), *limits]
    if expected is None:
        STUDY.main(command)
    else:
        with pytest.raises(SystemExit, match=expected):
            STUDY.main(command)
    assert "largest 1.300" in capsys.readouterr().out


def test_a_commit_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="there is no commit no-such-commit"), job_of("no-such-commit"):
        pass
