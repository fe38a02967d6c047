"""The harness of a study: measuring, appending, drawing; and every study answers --help and draws its lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from matplotlib.figure import Figure

from benchmarks.harness import declared, machine
from benchmarks.harness.declared import Curves, Panel, Table
from benchmarks.harness.lines import Line
from benchmarks.harness.machine import ROOT
from benchmarks.harness.study import BEGIN, END, Study, Variant, in_turn, last_run, newest, option
from tests.faults import drill, endurance
from tests.fuzz import fuzz

STUDIES = (
    "capacity",
    "commits.__main__",
    "cpu_kernels",
    "endurance",
    "handover",
    "hybrid.__main__",
    "index_recall",
    "offloading",
    "peers.__main__",
    "pipeline",
    "quality.__main__",
    "refused_texts",
    "reused_prefix",
    "serving",
    "sparse_prefill.__main__",
    "speculative_prefill.__main__",
    "start",
    "wire_bits",
)


@contextmanager
def power(options: Namespace) -> Iterator[int]:
    if options.power < 1:
        raise ValueError(f"--power {options.power} must be at least 1")
    yield options.power


SQUARES = Study(
    name="squares",
    text="Squares.",
    has="square",
    options={"numbers": option([1, 2], "to square"), "power": option(2)},
    variants=lambda options: ({"number": number} for number in options.numbers),
    prepare=power,
    measure=lambda options, power, variant: [variant | {"square": variant["number"] ** power}],
    table=lambda found: " ".join(str(line["square"]) for line in found),
    pictures={"squares.png": lambda found: str(len(found)).encode(), "none.png": lambda found: None},
)


def run_squares(folder: Path, *args: str) -> None:
    SQUARES.main(["--lines", str(folder / "squares.jsonl"), "--out", str(folder), *args])


def test_lines_of_all_variants_are_appended_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_squares(tmp_path)
    run_squares(tmp_path, "--numbers", "3")
    assert capsys.readouterr().out.splitlines() == ["1 4", "1 4 9"]
    assert (tmp_path / "squares.png").read_text() == "3" and not (tmp_path / "none.png").exists()
    [first, *_] = [json.loads(text) for text in (tmp_path / "squares.jsonl").read_text().splitlines()]
    assert first.keys() >= {"number", "square", "date", "commit", "code", "hardware", "versions"}


def test_a_mistake_is_one_line_and_measures_nothing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^--power 0 must be at least 1$"):
        run_squares(tmp_path, "--power", "0")
    assert not list(tmp_path.iterdir())


def test_draw_only_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="has no lines yet; leave out --draw-only"):
        run_squares(tmp_path, "--draw-only")
    run_squares(tmp_path, "--numbers", "5")
    run_squares(tmp_path, "--draw-only")
    assert capsys.readouterr().out.splitlines() == ["25", "25"]


def test_lines_are_kept_up_to_an_interruption(tmp_path: Path) -> None:
    def interrupted(options: Namespace, power: int, variant: Variant) -> Iterator[Line]:
        if variant["number"] == 2:
            raise KeyboardInterrupt
        yield {"number": 1, "square": 1}

    study = replace(SQUARES, measure=interrupted)
    with pytest.raises(KeyboardInterrupt):
        study.main(["--lines", str(tmp_path / "squares.jsonl"), "--out", str(tmp_path)])
    assert json.loads((tmp_path / "squares.jsonl").read_text())["square"] == 1


def test_a_broken_line_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "squares.jsonl").write_text('{"square": 1}\n{"squ\n')
    with pytest.raises(SystemExit, match="line 2 is no measurement; remove it"):
        run_squares(tmp_path)
    assert (tmp_path / "squares.jsonl").read_text().endswith('{"squ\n')


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="No space left on device") as ended:
        SQUARES.main(["--lines", "/dev/full", "--out", str(tmp_path)])
    assert "\n" not in str(ended.value)


@pytest.mark.parametrize(
    ("commit", "told"), [("abc-dirty", "is abc-dirty, with uncommitted changes"), (None, "has no")]
)
def test_lines_of_the_repository_are_of_committed_code(
    commit: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may be of any; --dirty says that it is meant."""
    monkeypatch.setattr(machine, "commit", lambda: commit)
    run_squares(tmp_path)
    monkeypatch.setattr("benchmarks.harness.machine.RESULTS", tmp_path)
    before = (tmp_path / "squares.jsonl").read_text()
    with pytest.raises(SystemExit, match=f"the checkout {told}.*commit the changes first, or give --dirty") as ended:
        run_squares(tmp_path, "--numbers", "3")
    assert "\n" not in str(ended.value) and (tmp_path / "squares.jsonl").read_text() == before
    run_squares(tmp_path, "--draw-only")
    run_squares(tmp_path, "--numbers", "3", "--dirty")
    [*_, last] = (tmp_path / "squares.jsonl").read_text().splitlines()
    assert json.loads(last)["commit"] == commit


@pytest.mark.parametrize("program", [drill, fuzz, endurance], ids=lambda program: program.__name__)
def test_what_drills_and_fuzzing_record_is_of_committed_code(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "commit", lambda: "abc-dirty")
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match=r"is abc-dirty, .* or give --dirty or other --results$"):
        program.main(["--count", "0", "--results", str(tmp_path / "x.jsonl")])
    assert not list(tmp_path.iterdir())


def test_results_and_pages_are_no_changes_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(machine, "_git", lambda *args: asked.append(args) or "abc")
    assert machine.commit() == "abc-dirty" and {":!benchmarks/results", ":!docs"} <= set(asked[1])


def test_turns_change_their_order_and_warm_up_rounds_are_dropped() -> None:
    order: list[str] = []

    def turn(name: str, number: int) -> int:
        order.append(name)
        return number

    found = in_turn({"a": lambda n: turn("a", n), "b": lambda n: turn("b", n)}, 2, warmup=1)
    assert order == ["a", "b", "b", "a", "a", "b"] and found == {"a": [1, 2], "b": [1, 2]}


def test_a_declared_table_has_a_row_for_the_newest_line_of_each() -> None:
    found = [{"at": at, "took": took} for at, took in ((1, 5), (2, 6), (1, 7))]
    cells = {"at": lambda line: str(line["at"]), "took": lambda line: f"{line['took']} s"}
    assert Table(columns=cells, lines=newest("at"))(found) == "at  took\n1    7 s\n2    6 s\n"


def test_declared_curves_go_through_the_points_of_their_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(declared, "png", lambda figure: figures.append(figure) or b"")
    points = [(0, "a", 2, 5), (0, "a", 1, 3), (0, "b", 1, 9), (1, "b", 1, 4), (1, "b", 2, None), (1, "b", 3, 6)]
    curves = Curves(
        title="Points",
        subject=lambda drawn: f"{len(drawn)} lines",
        lines=list,
        curve=lambda line: line["name"],
        x_label="x",
        x=lambda line: line["x"],
        panels=lambda drawn: [
            Panel("first", "y", lambda line: line["y"], bound=lambda line: 7, shows=lambda line: line["part"] == 0),
            Panel("second", "y", lambda line: line["y"], shows=lambda line: line["part"] == 1),
        ],
        least=2,
    )
    curves([{"part": part, "name": name, "x": x, "y": y} for part, name, x, y in points])
    [figure] = figures
    drawn = [[line.get_xydata().tolist() for line in axes.lines] for axes in figure.axes]
    assert drawn == [[[[1, 3], [2, 5]], [[1, 7], [2, 7]]], [[[1, 4], [3, 6]]]]
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]


@pytest.mark.parametrize("length", [3, 20, 30, 50, 70])
def test_a_legend_has_all_columns_that_its_figure_has_room_for(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(declared, "png", lambda figure: figures.append(figure) or b"")
    curves = Curves(
        title="Points",
        subject=lambda drawn: "",
        lines=list,
        curve=lambda line: line["name"],
        x_label="x",
        x=lambda line: line["x"],
        panels=lambda drawn: [Panel("first", "y", lambda line: line["x"])],
    )
    curves([{"name": str(number) * length, "x": x} for number in range(5) for x in (1, 2)])
    [figure] = figures
    figure.draw_without_rendering()
    [legend] = figure.legends
    box, whole, columns = legend.get_window_extent(), figure.bbox, legend._ncols
    assert whole.x0 <= box.x0 and box.x1 <= whole.x1
    assert columns == 4 or (columns + 1) * box.width / columns > 0.95 * whole.width  # the last column has no gap


def test_the_last_run_is_that_of_the_last_line() -> None:
    found = [{"date": "1", "at": 0}, {"date": "2", "at": 1}, {"date": "2", "at": 2}]
    assert [line["at"] for line in last_run(found)] == [1, 2]


@pytest.mark.parametrize("module", STUDIES)
@pytest.mark.sampled(6)
def test_a_study_draws_and_tells_its_committed_lines(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study: Study = import_module(f"benchmarks.studies.{module}").STUDY
    assert study.name == module.removesuffix(".__main__")
    with pytest.raises(SystemExit, match="0"):
        study.main(["--help"])
    assert "--draw-only" in capsys.readouterr().out
    if not Path(study.parser().get_default("lines")).exists():
        pytest.skip("no lines yet")
    study.main(["--draw-only", "--out", str(tmp_path)])
    assert capsys.readouterr().out.count("\n") >= 1
    assert {path.name for path in tmp_path.iterdir()} == set(study.pictures)


def test_all_studies_are_tested_and_run_as_modules() -> None:
    folder = ROOT / "benchmarks" / "studies"
    found = [path for path in folder.rglob("*.py") if "\nSTUDY = " in path.read_text(encoding="utf-8")]
    names = {".".join(path.relative_to(folder).with_suffix("").parts) for path in found}
    assert names == set(STUDIES)
    command = [sys.executable, "-m", "benchmarks.studies.serving", "--help"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: python -m benchmarks.studies.serving")


def test_a_study_writes_its_table_between_the_marks_of_its_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    study = replace(SQUARES, pictures={}, page="page.md")
    study.main(["--lines", str(tmp_path / "squares.jsonl"), "--out", str(tmp_path)])
    assert page.read_text(encoding="utf-8") == f"before\n{BEGIN}\n\n1 4\n\n{END}\nafter\n"
