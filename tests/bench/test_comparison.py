"""Ratios are taken round by round, within one benchmark; what does not compare is kept apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness import lines
from benchmarks.ttft import comparison
from benchmarks.ttft.comparison import NetworkKind, comparisons
from benchmarks.ttft.tables import COLUMNS, document, noise_rows, rows
from tests.bench.made_lines import line


def test_a_speed_up_is_the_median_of_the_ratios_of_each_round() -> None:
    [compared] = comparisons([line("single", 64, [2.0, 3.0, 9.0]), line("kvr_s", 64, [1.0, 3.0, 3.0])])
    points = compared.points[NetworkKind(kind="loopback"), 64]
    spread = points["kvr_s"].faster_than(points["single"])
    assert spread is not None
    assert (spread.median, spread.low, spread.high, spread.number) == (2.0, 1.0, 3.0, 3)


def test_rounds_of_different_benchmarks_are_never_paired() -> None:
    lines = [
        line("single", 64, [2.0], job="first"),
        line("kvr_s", 64, [1.0], job="first"),
        line("single", 64, [100.0], job="second"),
        line("tsp", 64, [50.0], job="third"),
    ]
    [compared] = comparisons(lines)
    points = compared.points[NetworkKind(kind="loopback"), 64]
    spread = points["kvr_s"].faster_than(points["single"])
    assert spread is not None and (spread.median, spread.number) == (2.0, 1)
    assert points["tsp"].faster_than(points["single"]) is None
    assert points["single"].seconds.number == 2


@pytest.mark.parametrize(
    "other", [{"commit": "def5678"}, {"dtype": "bfloat16"}, {"ranks": 4}, {"model": {"name": "another"}}]
)
def test_lines_of_another_commit_model_or_machine_are_kept_apart(other: dict[str, object]) -> None:
    compared = comparisons([line("single", 64, [1.0]), line("single", 64, [2.0], **other)])
    assert [len(each.points) for each in compared] == [1, 1]


def test_a_table_has_a_row_per_variant_with_the_figures_of_its_line() -> None:
    [compared] = comparisons([line("kvr_s", 1024, [0.6, 0.64, 0.62]), line("single", 1024, [1.2, 1.24, 1.2])])
    table = rows(compared.points[NetworkKind(kind="loopback"), 1024], compared.variants())
    assert [row[0] for row in table] == ["single", "kvr_s"]
    ours = dict(zip(COLUMNS, table[1], strict=True))
    assert ours["median TTFT"] == "620 ms"
    assert ours["min to max (n)"] == "600 ms to 640 ms (3)"
    assert ours["over single"] == "1.938 (1.935 to 2.000)"
    assert ours["TTFT(p) / TTFT"] == "83%"  # 0.512 s of 0.620 s
    assert ours["FLOPS"] == "33%"  # 2.07 GFLOP in 0.62 s of 10 GFLOP/s
    assert ours["sent"] == ours["formula"] == "0.25 MiB"


def test_a_document_has_a_table_per_network_and_length_and_what_noise_costs() -> None:
    lines = [
        line("single", 64, [1.0]),
        line("tsp", 64, [2.0], gbps=1.0),
        line("tsp", 64, [2.5], gbps=1.0, noise=True),
        line("tsp", 64, [1.5], gbps=10.0, share=0.1),
    ]
    compared = comparisons(lines)
    text = document(compared)
    headings = [each for each in text.splitlines() if each.startswith("#### 64")]
    assert headings == [
        "#### 64 tokens, loopback",
        "#### 64 tokens, 10 Gbit/s (K,V take 10% of TTFT(p))",
        "#### 64 tokens, 1 Gbit/s",
        "#### 64 tokens, 1 Gbit/s, noise",
    ]
    assert noise_rows(compared[0])[1:] == [("tsp", "64", "1 Gbit/s", "2 s", "2.5 s", "+25.0%")]


def test_lines_of_variants_that_are_gone_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    known = line("single", 64, [1.0])
    lines.append(path, [line("of_long_ago", 64, [1.0]), known])
    assert comparison.read(str(path)) == [known]
