"""Lines are added whole or not at all, and what the file has for a key is counted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.harness import lines
from benchmarks.ttft import comparison
from tests.bench.made_lines import line


def test_lines_are_added_behind_those_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    first, second = line("single", 64, [1.0]), line("kvr_s", 64, [2.0])
    lines.append(path, [first])
    lines.append(path, [second])
    assert lines.read(path) == [first, second]
    assert path.read_text().count("\n") == 2


def test_no_line_is_added_if_one_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    lines.append(path, [line("single", 64, [1.0])])
    before = path.read_bytes()
    with pytest.raises(ValueError):
        lines.append(path, [line("single", 64, [2.0]), line("kvr_s", 64, [float("nan")])])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_is_appended_to_the_same_file(tmp_path: Path) -> None:
    """A long file is not written anew for each line."""
    path = tmp_path / "bench.jsonl"
    lines.append(path, [line("single", 64, [1.0])])
    before = path.stat().st_ino
    lines.append(path, [line("single", 64, [2.0])])
    assert path.stat().st_ino == before and len(lines.read(path)) == 2


def test_nothing_stays_of_lines_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bench.jsonl"
    lines.append(path, [line("single", 64, [1.0])])
    before = path.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        lines.append(path, [line("single", 64, [2.0])])
    assert path.read_bytes() == before


@pytest.mark.parametrize("cut_off", ["{", '{"variant": "sing'])
def test_a_line_that_was_cut_off_does_not_count_and_goes(
    tmp_path: Path, cut_off: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, measured = tmp_path / "bench.jsonl", [line("single", 64, [1.0]), line("single", 64, [2.0])]
    lines.append(path, measured[:1])
    path.write_text(path.read_text() + cut_off)
    assert lines.read(path) == measured[:1]
    assert capsys.readouterr().err == (
        f"bench.results={path}: its last line was cut off when a run was ended, and does not count\n"
    )
    lines.append(path, measured[1:])
    assert lines.read(path) == measured
    assert capsys.readouterr().err == ""


def test_a_last_line_without_an_end_is_kept(tmp_path: Path) -> None:
    path, measured = tmp_path / "bench.jsonl", [line("single", 64, [1.0]), line("single", 64, [2.0])]
    lines.append(path, measured[:1])
    path.write_text(path.read_text().rstrip())
    lines.append(path, measured[1:])
    assert lines.read(path) == measured


def test_what_is_only_written_to_has_no_lines() -> None:
    assert lines.read("/dev/null") == []


@pytest.mark.parametrize("broken", ['{"variant": "sing', "[1]", '{"length": 3}'])
def test_a_broken_line_is_named(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "bench.jsonl"
    lines.append(path, [line("single", 64, [1.0])])
    path.write_text(path.read_text() + broken + "\n")
    with pytest.raises(ValueError, match="line 2 is no measurement"):
        lines.read(path)


def test_the_rounds_of_a_key_are_added_up() -> None:
    known = [line("single", 64, [1.0, 2.0]), line("single", 64, [1.0], job="second"), line("single", 128, [1.0])]
    assert lines.rounds_done(known, "single 64") == 3
    assert lines.rounds_done(known, "kvr_s 64") == 0


def test_a_key_depends_on_every_value_and_on_no_order() -> None:
    assert lines.key({"a": 1, "b": [2]}) == lines.key({"b": [2], "a": 1})
    assert lines.key({"a": 1, "b": [2]}) != lines.key({"a": 1, "b": [3]})


@pytest.mark.parametrize("variant", ["\u2028", "single\n", "\x00"])
def test_text_that_breaks_a_line_is_refused(tmp_path: Path, variant: str) -> None:
    path = tmp_path / "bench.jsonl"
    lines.append(path, [line("single", 64, [1.0]), line(variant, 64, [1.0])])
    with pytest.raises(ValueError, match="line 2 is a damaged measurement, see its variant; remove it"):
        lines.read(path, fields=comparison.FIELDS)


def test_a_number_that_no_float_holds_is_refused() -> None:
    assert lines.is_number(10**300) and not lines.is_number(10**400) and not lines.is_number(float("inf"))
