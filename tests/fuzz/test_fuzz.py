"""A small selection of tests/fuzz/fuzz.py, what it found before, and that it would notice what it looks for."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from policies.prompt_cache import model_text
from tests.fuzz import models
from tests.fuzz.findings import FINDINGS, Finding
from tests.fuzz.fuzz import planned
from tests.fuzz.fuzzing import checked, run_batch
from tests.fuzz.harness import judged, run_main
from tests.fuzz.table import BEGIN, END, with_table
from tests.fuzz.targets import TARGETS

SMALL = 4000
"""Inputs of a run that the selection is a hundredth of."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_text, "LIMIT_S", 5.0)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.sampled(5)
def test_inputs_are_taken_and_usable_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    count = max(8, sum(count for target, _, count in planned(SMALL) if target.name == name) // 10)
    batch = run_batch(TARGETS[name], seed_number=0, number=0, count=count, folder=tmp_path / "input")
    assert batch.problems == []
    assert batch.inputs == batch.accepted + batch.refused >= min(count, 8)


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: f"{finding.target}: {finding.what}"[:80])
def test_what_was_found_stays_put_right(finding: Finding, tmp_path: Path) -> None:
    outcome = checked(TARGETS[finding.target], finding.make(), tmp_path / "input")
    assert outcome.problems == []
    assert outcome.accepted == finding.accepted, outcome.line


def test_the_same_seed_makes_the_same_inputs(tmp_path: Path) -> None:
    target = TARGETS["lookup tables"]
    batches = [run_batch(target, seed_number=seed, number=0, count=30, folder=tmp_path / "input") for seed in (1, 1, 2)]
    assert batches[0].lines == batches[1].lines != batches[2].lines


# Nothing from a file is executed.


def test_pickled_weights_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = models.whole().changed(models.WEIGHTS, None).changed("pytorch_model.bin", models.PICKLE)
    outcome = models.check_folder(files, fresh(tmp_path / "a"))
    assert (outcome.problems, outcome.accepted) == ([], False)
    assert "pickled weights" in outcome.line
    index = json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}}).encode()
    outcome = models.check_folder(files.changed(models.INDEX, index), fresh(tmp_path / "b"))
    assert (outcome.problems, outcome.accepted) == ([], False)
    assert "weights are read from .safetensors alone" in outcome.line
    assert not Path(models.CANARY).exists()
    pickle.loads(models.PICKLE)
    assert Path(models.CANARY).exists(), "and it would have been seen"


def test_code_that_comes_with_a_model_is_not_executed_unasked(tmp_path: Path) -> None:
    config = json.loads(models.content_of(models.whole(), "config.json"))
    config |= {"model_type": "unheard-of", "auto_map": {"AutoConfig": "x.X", "AutoModelForCausalLM": "x.Y"}}
    files = models.whole().changed("config.json", json.dumps(config).encode()).changed("x.py", models.CODE.encode())
    outcome = models.check_folder(files, fresh(tmp_path / "a"))
    assert (outcome.problems, outcome.accepted) == ([], False)
    assert "model.trust_remote_code=true" in outcome.line


def fresh(folder: Path) -> Path:
    folder.mkdir()
    return folder


# What would be noticed.


def refuse(message: str, kind: type[BaseException] = ValueError) -> None:
    raise kind(message)


def test_a_refusal_in_one_line_that_names_the_file_is_as_it_should_be() -> None:
    outcome = judged(lambda: refuse("x.json is empty; give a text"), names=["x.json"])
    assert (outcome.problems, outcome.accepted, outcome.line) == ([], False, "x.json is empty; give a text")


@pytest.mark.parametrize(
    ("kind", "message", "problem"),
    [
        (KeyError, "x.json", "raised KeyError"),
        (RecursionError, "x.json", "raised RecursionError"),
        (UnicodeError, "x.json", "raised UnicodeError"),
        (ValueError, "something is wrong", "does not name x.json"),
    ],
)
def test_another_refusal_is_noticed(kind: type[Exception], message: str, problem: str) -> None:
    outcome = judged(lambda: refuse(message, kind), names=["x.json"])
    assert outcome.problems[0].startswith(problem)


def test_a_long_refusal_is_cut_and_one_that_is_not_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "x.json " + "x" * 9000
    assert judged(lambda: refuse(message), names=["x.json"]).problems == []
    monkeypatch.setattr("runahead.failures.cut_short", lambda text: text)
    [problem] = judged(lambda: refuse(message), names=["x.json"]).problems
    assert problem.startswith("told in ")


def test_what_is_taken_and_of_no_use_is_noticed() -> None:
    outcome = judged(lambda: [], lambda found: found[0])
    assert outcome.accepted and "taken, but not usable: IndexError" in outcome.problems[0]


def test_an_endless_reader_is_noticed() -> None:
    [problem] = judged(lambda: time.sleep(60), limit_s=0.2).problems
    assert problem.startswith("did not end: TookTooLong")


def test_a_reader_that_waits_for_a_pipe_is_noticed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    [problem] = judged(lambda: (tmp_path / "pipe").read_bytes(), limit_s=0.2).problems
    assert problem.startswith("did not end")


def test_memory_is_noticed() -> None:
    [problem] = judged(lambda: len(b"x" * 2**30)).problems
    assert problem.startswith("took ")


def test_what_is_executed_is_noticed() -> None:
    data = pickle.dumps(Path)
    assert "pickle.find_class" in judged(lambda: pickle.loads(data)).problems[0]
    assert "subprocess.Popen" in judged(lambda: subprocess.run(["true"], check=True)).problems[0]


def test_what_is_printed_is_noticed() -> None:
    [problem] = judged(lambda: print("a warning", file=sys.stderr)).problems
    assert problem == "printed 'a warning\\n'"
    assert "a note" in judged(lambda: (os.write(2, b"a note\n"), refuse("x.json"))[0]).problems[0]


def test_files_that_are_left_are_noticed(tmp_path: Path) -> None:
    outcome = judged(lambda: ((tmp_path / ".part").touch(), refuse("x.json"))[0], folder=tmp_path)
    assert outcome.problems == ["files changed"]


def test_a_program_that_ends_in_a_traceback_is_noticed(tmp_path: Path) -> None:
    def main(args: list[str]) -> int:
        print("Traceback (most recent call last):\n  File x\nKeyError: 1", file=sys.stderr)
        return 1

    assert "3 lines" in run_main(main, [], folder=tmp_path).problems[0]


# The tool.


def test_every_target_has_its_share_of_the_inputs() -> None:
    plan = planned(12_000)
    assert {target.name for target, _, _ in plan} == TARGETS.keys()
    assert 12_000 <= sum(count for _, _, count in plan) < 12_000 + len(TARGETS)


def test_the_table_has_a_row_for_every_target() -> None:
    line = {"target": "lookup tables", "inputs": 1000, "accepted": 300, "refused": 700, "wrong": 0, "slowest_s": 0.5}
    page = with_table(f"before\n{BEGIN}\nstale\n{END}\nafter", [line])
    assert "| lookup tables | 1,000 | 300 | 700 | 0 | 0.50 |" in page
    assert "| all | 1,000 | 300 | 700 | 0 | 0.50 |" in page
    assert page.startswith("before\n") and page.endswith("\nafter") and "stale" not in page
    assert all(f"| {name} |" in page for name in TARGETS)
    assert with_table("no marks", [line]) == "no marks"
