"""Ranges of versions: those of pyproject.toml, of which one line tells when a library is outside them."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from launch.infer import main
from runahead.features import versions
from runahead.features.versions import in_words, outside
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


@pytest.mark.parametrize(("rank", "num_lines"), [("0", 1), ("1", 0)])
def test_a_program_tells_it_once(
    rank: str, num_lines: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On rank 0, before the mistake for which this run ends."""
    monkeypatch.setenv("RANK", rank)
    set_version(monkeypatch, "transformers", "99.0")
    assert exit_status(main, ["prompt.text=a", "model=hf", "model.path=no/such/folder/at/all"]) == 2
    assert capfd.readouterr().err.count("warning: transformers 99.0 is not one that") == num_lines


def test_the_ends_of_a_range_are_the_oldest_and_the_newest_in_it() -> None:
    there = ["5.24.0", "5.23.0", "5.22.2", "5.17.1", "5.17.0", "5.16.1", "4.57.6", "5.23.1rc1"]
    assert ends("transformers", there, ">=5.17,<5.24") == ["5.17.0", "5.23.0"]
    assert ends("transformers", there, ">=5.23,<5.24") == ["5.23.0"]
    assert ends("torch", ["2.14.1", "2.13.0+cpu", "2.13.0", "2.12.0"], ">=2.11,<2.14") == ["2.13.0+cpu"]
    assert ends("torch", ["2.14.1", "2.13.0"], ">=2.11,<2.14") == []


def test_the_table_has_a_line_for_each_trial() -> None:
    trials = [Trial(libraries={"torch": "2.13.0", "transformers": "5.17.0"}, outcome="9 passed", minutes=1.25)]
    assert table(trials).splitlines()[-1] == "| 2.13.0 | 5.17.0 | 9 passed | 1.2 |"
