"""Ranges of versions: those of pyproject.toml, of which one line tells when a library is outside them."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from launch.infer import main
from runahead.features import versions
from runahead.features.versions import in_words, outside
from tests import versions as trials_of_versions
from tests.exit_status import exit_status
from tests.versions import Trial, ends, table

PYPROJECT = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("library", versions.LIBRARIES)
def test_the_ranges_are_those_that_are_installed(library: str) -> None:
    least, below = re.findall(r"\d+\.\d+", in_words(library))
    assert f'"{library}>={least},<{below}"' in PYPROJECT
    assert in_words(library) == f"{least} or newer, below {below}"


def set_version(monkeypatch: pytest.MonkeyPatch, library: str, version: str) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == library else real(name))


@pytest.mark.parametrize("library", versions.LIBRARIES)
def test_versions_at_the_ends_are_inside(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    least, below = re.findall(r"\d+\.\d+", in_words(library))
    first, minor = least.split(".")
    for version, is_told in (
        *((least, False), (f"{least}.1", False), (f"{least}.0+cpu", False)),
        *((f"{first}.{int(minor) - 1}.9", True), (below, True), (f"{below}.1", True)),
    ):
        set_version(monkeypatch, library, version)
        told = list(outside())
        assert bool(told) == is_told, (version, told)
        assert all(f"{library} {version} is not one that Runahead was tested with" in each for each in told)


def test_without_a_checkout_the_ranges_are_the_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "__file__", str(tmp_path / "runahead" / "features" / "versions.py"))
    monkeypatch.setattr(metadata, "requires", lambda name: ["torch>=7.1,<7.3", "numpy>=1", "x; extra == 'y'"])
    assert {name: str(found) for name, found in versions.ranges().items()} == {"torch": "<7.3,>=7.1"}
    set_version(monkeypatch, "torch", "7.2.1+cpu")
    assert list(outside()) == []


@pytest.mark.parametrize(
    ("taken", "words"),
    [
        ("==5.23.*", "==5.23.*"),
        ("!=5.22.1,<5.25,>=5.22", "5.22 or newer, below 5.25, !=5.22.1"),
        ("~=5.22,<=5.24", "<=5.24, ~=5.22"),
        ("", "any"),
    ],
)
def test_any_range_of_a_packager_is_told(taken: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "ranges", lambda: {"transformers": SpecifierSet(taken)})
    assert in_words("transformers") == words
    set_version(monkeypatch, "transformers", "99.0")
    assert [f"tested with ({words})" in told for told in outside()] == ([True] if taken else [])


@pytest.mark.parametrize(("rank", "num_lines"), [("0", 1), ("1", 0)])
def test_a_program_tells_it_once(
    rank: str, num_lines: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On rank 0, before the mistake for which this run ends."""
    monkeypatch.setenv("RANK", rank)
    set_version(monkeypatch, "transformers", "99.0")
    assert exit_status(main, ["prompt.text=a", "model=hf", "model.path=no/such/folder/at/all"]) == 2
    assert capfd.readouterr().err.count("warning: transformers 99.0 is not one that") == num_lines


def test_a_sweep_tells_it_before_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Their own lines are in their logs. This one ends before it starts any."""
    monkeypatch.chdir(tmp_path)
    set_version(monkeypatch, "transformers", "99.0")
    assert exit_status(main, ["--multirun", "sweep.dir=s", "prompt.file=-"]) == 2
    assert capfd.readouterr().err.count("warning: transformers 99.0 is not one that") == 1


def test_the_ends_of_a_range_are_the_oldest_and_the_newest_in_it() -> None:
    there = ["5.24.0", "5.23.0", "5.22.2", "5.17.1", "5.17.0", "5.16.1", "4.57.6", "5.23.1rc1"]
    assert ends("transformers", there, ">=5.17,<5.24") == ["5.17.0", "5.23.0"]
    assert ends("transformers", there, ">=5.23,<5.24") == ["5.23.0"]
    assert ends("torch", ["2.14.1", "2.13.0+cpu", "2.13.0", "2.12.0"], ">=2.11,<2.14") == ["2.13.0+cpu"]
    assert ends("torch", ["2.14.1", "2.13.0"], ">=2.11,<2.14") == []


def test_the_table_has_a_line_for_each_trial() -> None:
    libraries = {"torch": "2.13.0", "transformers": "5.17.0"}
    trials = [Trial(libraries=libraries, outcome="9 passed", status=0, minutes=1.25)]
    assert table(trials).splitlines()[-1] == "| 2.13.0 | 5.17.0 | 9 passed | 1.2 |"


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of each environment's Python, which a test writes."""
    program = tmp_path / "python"
    monkeypatch.setattr(trials_of_versions, "environment", lambda libraries: program)
    return program


@pytest.mark.parametrize(
    ("line", "status", "expected"),
    [
        ("9 passed in 5.00s", 0, 0),
        ("900 passed, 3 errors in 5.00s", 1, 1),
        ("1 failed, 8 passed in 5.00s", 1, 1),
        ("9 passed in 5.00s", 3, 1),
    ],
)
def test_trials_end_as_pytest_does(line: str, status: int, expected: int, environments: Path) -> None:
    environments.write_text(f"#!{sys.executable}\nprint({line!r})\nraise SystemExit({status})\n")
    environments.chmod(0o755)
    given = ["--torch", "2.13.0", "--transformers", "5.23.0", "--tests", "x"]
    assert trials_of_versions.main(given) == expected


def test_an_end_that_the_index_lacks_is_told(
    environments: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here builds of torch for CPUs, as on PyPI; the one that is installed is tried in their place."""
    environments.write_text("#!/bin/sh\necho 9 passed in 5.00s\n")
    environments.chmod(0o755)
    there = {"torch": ["2.13.0", "2.12.0"], "transformers": ["5.23.0", "5.22.0"]}
    monkeypatch.setattr(trials_of_versions, "on_the_index", there.__getitem__)
    ranges = {"torch": SpecifierSet(">=2.11,<2.14"), "transformers": SpecifierSet(">=5.22,<5.25")}
    monkeypatch.setattr(trials_of_versions, "ranges", lambda: ranges)
    assert trials_of_versions.main(["--tests", "x"]) == 1
    told = capsys.readouterr().out
    assert "the index has no torch that fits" in told and "no transformers" not in told
    assert f"| {metadata.version('torch')} | 5.22.0 | 9 passed |" in told
    assert trials_of_versions.main(["--torch", "2.13.0", "--tests", "x"]) == 0


def test_an_environment_belongs_to_the_packages_that_it_points_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []
    monkeypatch.setattr(trials_of_versions, "obtain", lambda folder, make, **_: folders.append(folder) or folder)
    for place in ("one", "other", "one"):
        monkeypatch.setattr(trials_of_versions.sysconfig, "get_paths", lambda place=place: {"purelib": place})
        trials_of_versions.environment({"torch": "2.13.0"})
    assert folders[0] == folders[2] != folders[1]
