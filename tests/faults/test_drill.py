"""A few of the drills of tests/faults/drill.py, and whether a drill would notice what it is to find."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.faults import models
from tests.faults.drilling import ROOT, Drilling, is_ours, said_wrong
from tests.faults.drills import FIRST_LATER, KINDS, NETWORK_KINDS, PIPELINE, SHARDED, Drill, drill
from tests.faults.table import BEGIN, END, with_table
from tests.needs import missing


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.obtain(tmp_path_factory.mktemp("drills") / "model")


@pytest.fixture
def drilling(model: Path, tmp_path: Path) -> Drilling:
    return Drilling(model, tmp_path, allowed_s=60.0, patience_s=10.0)  # no test is to fail where the machine is busy


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(
            Drill(kind="kill -9 of a rank", rank=1, moment="prefill", layer=2, prefill="kv_runahead direct"),
            marks=pytest.mark.slow,
        ),
        Drill(kind="kill -9 of a rank", size=3, rank=1, moment="copy", prefill="kv_runahead copy", layer=2),
        pytest.param(  # of a stage that is alone
            Drill(kind="kill -9 of a rank", rank=1, moment="prefill", layer=2, prefill="single"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Drill(kind="stop of a rank", rank=0, moment="copy", prefill="kv_runahead copy", layer=1),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Drill(kind="delay of a rank", rank=0, moment="copy", prefill="kv_runahead copy", layer=3, seconds=3.0),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Drill(
                kind="delay of a rank", size=4, rank=1, moment="send", prefill="kv_runahead copy", layer=3, seconds=3.0
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Drill(kind="kill -9 of a rank", size=4, rank=2, moment="prefill", prefill="kv_runahead copy", layer=1),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Drill(kind="kill -9 of a rank", size=4, tensor=2, rank=3, moment="prefill", layer=3), marks=pytest.mark.slow
        ),
        pytest.param(
            Drill(kind="stop of a rank", size=4, tensor=2, rank=1, moment="send", prefill="kv_runahead copy", layer=2),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Drill(kind="delay of a rank", size=6, tensor=2, rank=2, moment="decode", seconds=3.0),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Drill(kind="kill -9 of a rank", rank=0, moment="decode", prefill=SHARDED),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Drill(kind="stop of a rank", size=3, rank=1, moment="decode", prefill=SHARDED), marks=pytest.mark.slow
        ),
        pytest.param(Drill(kind="link cut", rank=1, moment="decode", prefill=SHARDED), marks=pytest.mark.slow),
        Drill(kind="kill -9 of a rank", size=3, rank=1, moment="send", layer=2, prefill=PIPELINE),
        *(
            pytest.param(chosen, marks=pytest.mark.slow)
            for chosen in (
                Drill(kind="stop of a rank", rank=0, moment="send", layer=1, prefill=PIPELINE),
                Drill(kind="stop of a rank", rank=1, moment="decode", prefill=PIPELINE),
                Drill(kind="kill -9 of a rank", rank=0, moment="decode", prefill=PIPELINE),
                Drill(kind="error in a rank", rank=1, moment="decode", prefill=PIPELINE),
                Drill(kind="delay of a rank", size=3, rank=1, moment="send", layer=1, seconds=3.0, prefill=PIPELINE),
                Drill(kind="NaN in weights", prefill=PIPELINE),
                Drill(kind="link cut", rank=0, moment="send", layer=1, prefill=PIPELINE),
            )
        ),
        Drill(kind="SIGTERM to the launcher", rank=0, moment="decode"),
        pytest.param(
            Drill(kind="link cut", rank=0, moment="send", layer=1, prefill="zigzag ring"), marks=pytest.mark.slow
        ),
        Drill(kind="full disk", file="report"),
    ],
    ids=lambda chosen: f"{chosen.kind}, {chosen.moment}, {chosen.hosts} hosts",
)
@pytest.mark.sampled(4)
def test_a_fault_ends_the_job_as_it_should(drilling: Drilling, chosen: Drill) -> None:
    outcome = drilling.run(chosen, "drill")
    if outcome.skipped is not None:
        missing(outcome.skipped)
    assert not outcome.problems, outcome.errors


@pytest.mark.parametrize("moment", ["import", "connect"])
def test_a_rank_that_is_stopped_before_all_have_met_is_given_up(
    drilling: Drilling, tmp_path: Path, moment: str
) -> None:
    """torchrun alone would wait for half a minute until it kills the rank."""
    outcome = drilling.run(Drill(kind="stop of a rank", rank=1, moment=moment), "drill")
    assert not outcome.problems, outcome.errors
    report = json.loads((tmp_path / "drill" / "run.rank0.fault.json").read_text())
    assert "rank 1 " in report["reason"] and "(ranks.timeout_s=3)" in report["reason"]


def test_drills_follow_from_seed_and_number() -> None:
    assert [drill(3, number) for number in range(50)] == [drill(3, number) for number in range(50)]
    assert [drill(3, number) for number in range(50)] != [drill(4, number) for number in range(50)]


def test_meshes_are_drilled_after_the_others() -> None:
    assert all(drill(1, number).tensor == 1 for number in range(FIRST_LATER))
    meshes = [drill(1, number) for number in range(FIRST_LATER, FIRST_LATER + 60)]
    shared = [each for each in meshes if each.tensor == 2]
    assert len(shared) > 30 and {each.size for each in shared} == {4, 6}
    assert {each.rank % 2 for each in shared} == {0, 1}
    assert {"kill -9 of a rank", "stop of a rank", "delay of a rank"} < {each.kind for each in shared}


def test_every_kind_is_drilled() -> None:
    counts = Counter(drill(1, number).kind for number in range(200))
    assert counts.keys() == KINDS.keys()
    assert sum(counts[kind] for kind in NETWORK_KINDS) > 10


LINK_CUT = "[rank 0/2] waited 3 s for the KV of layer 1 to leave for rank 1 (8,192 bytes, send posted)"


def test_a_wait_for_what_leaves_is_understood() -> None:
    other = LINK_CUT.replace("[rank 0", "[rank 1").replace("to leave for rank 1", "from rank 0")
    assert said_wrong(Drill(kind="link cut", rank=1), [LINK_CUT, other]) == []


def test_a_rank_that_decodes_waits_for_no_earlier_one() -> None:
    killed = Drill(kind="kill -9 of a rank", rank=0, moment="decode")
    assert said_wrong(killed, ["[rank 1/2] rank 0 has ended without an error message"]) == []
    for moment in ("prefill", "send"):
        assert said_wrong(replace(killed, moment=moment), ["[rank 1/2] rank 0 has ended without an error message"])
    assert said_wrong(replace(killed, rank=1), ["[rank 0/2] rank 1 has ended without an error message"])


@pytest.mark.parametrize(
    ("kind", "lines", "problem"),
    [
        ("kill -9 of a rank", [], "no rank said anything"),
        ("kill -9 of a rank", ["[rank 0/2] out of luck"], "no line names rank 1"),
        ("stop of a rank", ["[rank 0/2] rank 1 is silent"], "no line says what was waited for"),
        ("error in a rank", ["[rank 0/2] rank 1 failed: sorry"], "no line says a fault was injected"),
        ("link cut", ["[rank 0/2] waited 3 s for the KV of layer 1 from rank 1"], "a rank does not say"),
        ("link cut", [LINK_CUT, "[rank 1/2] rank 0 has been silent for 3 s"], "a rank does not say"),
        ("Ctrl-C", ["interrupted", "interrupted"], "a rank said more than one line"),
    ],
)
def test_what_is_not_said_is_noticed(kind: str, lines: list[str], problem: str) -> None:
    assert any(problem in each for each in said_wrong(Drill(kind=kind, rank=1), lines))


def test_only_files_of_the_packages_are_ours() -> None:
    """A checkout may be in a folder that has the name of a package, and have its environment inside."""
    assert is_ours(str(ROOT / "launch" / "infer.py"))
    assert is_ours(str(ROOT / "tests" / ".." / "runahead" / "engine.py"))
    assert not is_ours(str(ROOT / ".venv" / "lib" / "runahead" / "launch" / "run.py"))
    assert not is_ours(str(ROOT.parent / "runahead.py"))
    assert not is_ours("<frozen runpy>")


def test_the_table_counts_outcomes_and_lists_what_was_wrong() -> None:
    def line(number: int, kind: str, *problems: str, gone_s: float = 1.0) -> dict[str, Any]:
        outcome = {"as_expected": not problems, "problems": list(problems), "skipped": None, "gone_s": gone_s}
        return {"number": number, "drill": {"kind": kind}} | outcome

    lines = [line(0, "Ctrl-C"), line(1, "Ctrl-C", gone_s=3.0), line(2, "link cut", "a process is left")]
    page = with_table(f"before\n{BEGIN}\nold\n{END}\nbehind", lines)
    assert page.startswith(f"before\n{BEGIN}\n| fault ")
    assert page.endswith(f"- drill 2 (link cut): a process is left\n{END}\nbehind")
    assert "| Ctrl-C | 2 | 2 | 2.0, 3.0 |" in page
    assert "| link cut | 1 | 0 | 1.0, 1.0 |" in page
    assert "| all | 3 | 2 | 1.0, 3.0 |" in page
    assert with_table("no marks", lines) == "no marks"


def test_a_spoilt_model_has_nan_in_one_tensor(model: Path, tmp_path: Path) -> None:
    for number, choice in enumerate((0.0, 0.5, 0.99)):
        name = models.spoil(model, tmp_path / str(number), choice)
        tensors = load_file(tmp_path / str(number) / "model.safetensors")
        assert [key for key, values in tensors.items() if np.isnan(values).any()] == [name]
