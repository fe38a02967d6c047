"""benchmarks/studies/commits: the ratio of two commits' times, and what is said where they cannot be measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import lines
from benchmarks.studies.commits.__main__ import STUDY, mean, measure, ratios, table
from benchmarks.studies.commits.job import built_kernels, job_of, require_like_kernels


def line(cell: str, before: list[float], after: list[float]) -> dict[str, object]:
    times = {"before": before, "after": after}
    about = {"date": "2026-11-26", "commit": "def", "before": "abc", "after": None, "what": "TTFT", "length": 1024}
    return {**about, "cell": cell, "seconds": times}


class FakeJob:
    """The ranks of a commit: every answer takes one second more than the one before."""

    def __init__(self, name: str, asked: list[tuple[str, int, dict[str, Any]]]) -> None:
        self.name, self.asked, self.seconds, self.kernels = name, asked, 0.0, name == "after"

    def ask(self, request: dict[str, Any], *, ranks: int) -> float | None:
        self.asked.append((self.name, ranks, request))
        if "open" in request:
            return None
        self.seconds += 1.0
        return self.seconds


def test_a_cell_is_measured_on_both_commits_in_turn_after_a_round_that_does_not_count() -> None:
    given = [
        "--before",
        "abc",
        "--prefills",
        "single",
        "--lengths",
        "64",
        "--decoded",
        "full",
        "--decoded-lengths",
        "512",
    ]
    options = STUDY.parser().parse_args([*given, "--rounds", "2", "--tokens", "3"])
    asked: list[tuple[str, int, dict[str, Any]]] = []
    jobs: Any = {name: FakeJob(name, asked) for name in ("before", "after")}
    prefilled, decoded = STUDY.variants(options)
    [line] = measure(options, jobs, prefilled)
    assert line == {
        "before": "abc",
        "after": None,
        "cell": "single",
        "what": "TTFT",
        "length": 64,
        "seconds": {"before": [2.0, 3.0], "after": [2.0, 3.0]},
        "kernels": {"before": False, "after": True},
    }
    in_turn = [(name, 2, {"prefill": "single", "tokens": 64}) for name in ("before", "after", "after", "before")]
    assert asked == [*in_turn, *in_turn[:2]]
    asked.clear()
    [line] = measure(options, jobs, decoded)
    assert line["what"] == "a token" and line["seconds"]["after"] == [5.0, 6.0]
    opened = {"open": "full", "tokens": 512, "room": 9}
    assert asked[:3] == [("before", 1, opened), ("after", 1, opened), ("before", 1, {"decode": 3})] and len(asked) == 8


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


@pytest.mark.parametrize(("program", "has"), [(None, None), ("", True), ("import sys\nsys.exit(2)", False)])
def test_kernels_are_built_by_the_commits_own_program(program: str | None, has: bool | None, tmp_path: Path) -> None:
    """Which imports the commit's modules."""
    (tmp_path / "launch").mkdir()
    for name in ("__init__", "of_this_commit"):
        (tmp_path / "launch" / f"{name}.py").touch()
    if program is not None:
        (tmp_path / "launch" / "kernels.py").write_text(f"import launch.of_this_commit\n{program}\n")
    assert built_kernels(tmp_path) is has


def test_a_commit_without_its_kernels_is_not_compared_with_one_that_has_them() -> None:
    for kernels in ((True, True), (False, False), (None, True), (None, False)):
        require_like_kernels(dict(zip(("before", "after"), kernels, strict=True)))
    with pytest.raises(ValueError, match="in the checkout that is called before, and the other has them"):
        require_like_kernels({"before": False, "after": True})


def test_a_commit_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="there is no commit no-such-commit"), job_of("no-such-commit"):
        pass
