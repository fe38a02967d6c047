"""No program writes a file that it reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ttft.benchmark import _check
from launch.bench import BENCH
from launch.fit_kvzap import FIT
from launch.fit_kvzap import _prepare as prepare_fit
from launch.infer import INFER
from launch.program.written_files import ensure_outputs
from partitioner.plan import main as plan
from partitioner.search import SEARCH, _prepare
from runahead.context import even
from runahead.ranks.mesh import Mesh
from tests.exit_status import one_line_error


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Files in the current folder that must stay as they are."""
    monkeypatch.chdir(tmp_path)
    content = {name: f"of {name}" for name in ("in.json", "book.txt", "mine.py", "schema.xml")}
    for name, text in content.items():
        Path(name).write_text(text)
    return content


def refusal(options: list[str], **written: list[str | None]) -> str:
    with pytest.raises(ValueError) as caught:
        ensure_outputs(INFER.compose(options), written)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "read"),
    [
        (["prompt.file=book.txt"], "prompt.file=book.txt"),
        (["prompt.ids_file=./in.json"], "prompt.ids_file=./in.json"),
        (["prompt.text=a", "policy=file", "policy.path=mine.py"], "policy.path=mine.py"),
        (["prompt.text=a", "policy=prompt_cache", "policy.schema=schema.xml"], "policy.schema=schema.xml"),
        (
            ["prompt.text=a", "policy=sequence", "policy.steps=[pyramidinfer,{name:file,path:mine.py}]"],
            "policy.steps.path=mine.py",
        ),
        (["prompt.text=a", "model=random", "model.config=in.json"], "model.config=in.json"),
        (["prompt.text=a", "partition=table", "partition.table=in.json"], "partition.table=in.json"),
    ],
)
def test_every_kind_of_input_is_known(options: list[str], read: str, files: dict[str, str]) -> None:
    """A file is known by its own name, by a link, and before it exists."""
    path = read.partition("=")[2]
    os.symlink(path, "link")
    for output in (path, "link"):
        assert refusal(options, report=["r.json"], answers=[output]) == (
            f"answers={output} would overwrite {read}, which this run reads; give another file with answers="
        )
    Path(path).unlink()
    assert "would overwrite" in refusal(options, timeline=["t.json", path])


def test_a_text_that_is_spelt_like_a_file_is_no_file_that_is_read() -> None:
    run = INFER.compose(["prompt.text=in.json", "prompt.question=in.json", "report=in.json"])
    ensure_outputs(run, {"report": [run.report], "answers": [None]})


def test_several_outputs_may_go_to_a_device() -> None:
    ensure_outputs(INFER.compose(["prompt.file=/dev/null"]), {"report": ["/dev/null"], "answers": ["/dev/null"]})


def of_search() -> None:
    run = SEARCH.compose(["table=in.json", "model=random", "model.config=in.json", "link.gbps=1"])
    _prepare(run, [2], Mesh())


def of_a_searchs_record() -> None:
    run = SEARCH.compose(["table=t.json", "model=random", "model.config=t.json.search.json", "link.gbps=1"])
    _prepare(run, [2], Mesh())


def of_bench() -> None:
    more = ["partition=table", "partition.table=in.json", "bench.compute=in.json", "bench.results=new.jsonl"]
    _check(BENCH.compose(more), even, 2)


def of_fit() -> None:
    class Ranks:
        size = 1

    ranks: Any = Ranks()
    prepare_fit(FIT.compose(["samples=[mine.py,book.txt]", "out=book.txt"]), ranks)


@pytest.mark.parametrize(
    ("check", "says"),
    [
        (of_search, "table=in.json would overwrite model.config=in.json"),
        (of_a_searchs_record, "t.json.search.json, which table=t.json writes beside it, would overwrite model.config="),
        (of_bench, "bench.compute=in.json would overwrite partition.table=in.json"),
        (of_fit, "out=book.txt would overwrite samples=book.txt"),
    ],
)
def test_other_programs_refuse_it_before_any_work(check: Any, says: str, files: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=says):
        check()
    assert {path.name: path.read_text() for path in Path().iterdir()} == files


def test_a_plan_refuses_it(files: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    options = ["model=random", "model.config=in.json", "gpus=2", "device=h100", "tokens=1000"]
    assert plan([*options, "report=in.json"]) == 2
    assert one_line_error(capfd).startswith("report=in.json would overwrite model.config=in.json")
    assert plan([*options, "report=p.json", "picture=p.json"]) == 2
    assert "report=p.json and picture=p.json would overwrite each other" in one_line_error(capfd)
    assert {path.name: path.read_text() for path in Path().iterdir()} == files
