"""Pictures for which there are lines, and what they show."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks.harness import lines
from benchmarks.ttft import pictures
from benchmarks.ttft.comparison import comparisons
from benchmarks.ttft.plot import main
from tests.bench.made_lines import line

SHAPED = [
    line(name, 1024, [seconds * slower], gbps=gbps, noise=noise, wire_bytes=300 * 1024)
    for gbps in (0.1, 1.0)
    for noise, slower in ((False, 1.0), (True, 1.1))
    for name, seconds in (("single", 1.0), ("kvr_s", 0.6))
]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn, instead of PNGs."""
    figures: list[Figure] = []

    def keep(figure: Figure) -> bytes:
        figures.append(figure)
        return b""

    monkeypatch.setattr(pictures, "png", keep)
    return figures


def test_a_line_goes_through_the_medians_of_each_length(drawn: list[Figure]) -> None:
    [compared] = comparisons([line("single", 1024, [1.0, 3.0, 1.2]), line("single", 2048, [4.0])])
    pictures.ttft_png(compared)
    axes = drawn[0].axes[0]
    [single] = [each for each in axes.lines if each.get_marker() == "o"]
    assert single.get_xydata().tolist() == [[1024, 1.2], [2048, 4.0]]
    free = [each.get_ydata().tolist() for each in axes.lines if each.get_marker() == "None"]
    assert [0.512, 1.024] in free


def test_a_speed_up_is_drawn_where_both_ran_in_the_same_round(drawn: list[Figure]) -> None:
    known = [line("single", 1024, [2.0]), line("kvr_s", 1024, [1.0]), line("kvr_s", 2048, [1.0])]
    [compared] = comparisons(known)
    pictures.speedup_png(compared)
    [ours] = [each for each in drawn[0].axes[0].lines if each.get_marker() == "D"]
    assert ours.get_xydata().tolist() == [[1024, 2.0]]


def test_noise_is_drawn_in_percent_of_the_quiet_median(drawn: list[Figure]) -> None:
    [compared] = comparisons(SHAPED)
    pictures.noise_png(compared)
    heights = [bar.get_height() for bar in drawn[0].axes[0].patches]
    assert heights == pytest.approx([10.0] * 4)


def test_bytes_are_drawn_in_prompts_with_their_formula_and_what_the_card_sent(drawn: list[Figure]) -> None:
    [compared] = comparisons(SHAPED)
    pictures.bytes_png(compared)
    axes = drawn[0].axes[0]
    assert [bar.get_height() for bar in axes.patches] == [0.5]  # 256 of 512 bytes per token; single sends none
    assert sorted(each.get_ydata()[0] for each in axes.lines) == pytest.approx([0.5, 300 / 512])


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ([line("single", 1024, [1.0])], {"bench_ttft.png", "bench_speedup.png"}),
        ([line("tsp", 1024, [1.0])], {"bench_ttft.png", "bench_bytes.png"}),
        (SHAPED, {"bench_links.png", "bench_bytes.png", "bench_noise.png"}),
        ([line("kvr_s", 1024, [1.0], gbps=2.0, share=0.5)], {"bench_links.png", "bench_bytes.png"}),
    ],
)
def test_only_what_there_are_lines_for_is_drawn(
    known: list[dict[str, object]], expected: set[str], tmp_path: Path
) -> None:
    lines.append(tmp_path / "bench.jsonl", known)
    assert main(["--results", str(tmp_path / "bench.jsonl"), "--out", str(tmp_path / "docs")]) == 0
    assert {path.name for path in (tmp_path / "docs").iterdir()} == expected


def test_the_largest_set_of_lines_is_drawn_and_the_choice_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "bench.jsonl")
    lines.append(path, [line("single", 64, [1.0]), line("single", 64, [1.0], commit="old"), line("tsp", 64, [1.0])])
    assert main(["--results", path, "--out", str(tmp_path)]) == 0
    assert "2 sets of lines that do not compare; drawn: a model, float32, 2 ranks" in capsys.readouterr().err
    assert main(["--results", path, "--out", str(tmp_path), "--commit", "old"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("more", [[], ["--commit", "none"]])
def test_no_lines_is_one_sentence(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.jsonl"
    if more:
        lines.append(path, [line("single", 64, [1.0])])
    assert main(["--results", str(path), *more]) == 2
    assert capsys.readouterr().err.count("\n") == 1
