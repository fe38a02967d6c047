"""answers=: a run of several prompts that was ended goes on, and its file is that of a run that was not."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from pathlib import Path

import pytest

from launch.infer import main
from runahead.engine import Engine
from tests.exit_status import exit_status, one_line_error
from tests.families import save_tiny_llama
from tests.ranks.test_infer import INFER, options
from tests.tokenizers_for_tests import byte_level
from tests.waiting import until
from tests.warm_program import WarmProgram

TEXTS = ["the ice", "the letters of the captain", "captain", "his sister, from", "a ship", "north", "why"]
SAMPLED = ["generation.do_sample=true", "generation.seed=3", "prompt.batch=2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), byte_level())


def write_prompts(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(text) + "\n" for text in TEXTS), encoding="utf-8")
    return path


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_prompts(tmp_path)


def run(model: str, *more: str) -> int:
    return exit_status(main, options(model, "prompt.file=prompts.jsonl", "answers=a.jsonl", *SAMPLED, *more))


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a run that answers all prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        write_prompts(Path())
        assert run(model) == 0
        return Path("a.jsonl").read_bytes()


def test_lines_are_those_of_standard_output_with_what_made_them(
    model: str, prompts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(main, options(model, "prompt.file=prompts.jsonl", *SAMPLED)) == 0
    printed = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert run(model) == 0
    assert capfd.readouterr().out == ""
    lines = [json.loads(line) for line in Path("a.jsonl").read_text(encoding="utf-8").splitlines()]
    settings = [line.pop("settings") for line in lines]
    assert len({line.pop("prompt") for line in lines}) == len(TEXTS)
    assert lines == printed
    assert settings[0].pop("weights")
    assert settings[0] == {
        "model.name": "hf",
        "model.path": settings[0]["model.path"],
        "generation.max_new_tokens": "12",
        "generation.do_sample": "True",
        "generation.seed": "3",
    }


def test_from_wherever_a_run_was_cut_off_another_goes_on(
    model: str,
    prompts: Path,
    whole: bytes,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (0, 5, ends[0], ends[2] - 1, ends[3], ends[4] + 9):  # batches end after 2, 4 and 6 lines
        Path("a.jsonl").write_bytes(whole[:cut])
        assert run(model) == 0
        assert Path("a.jsonl").read_bytes() == whole
    capfd.readouterr()
    monkeypatch.setattr(Engine, "__init__", lambda *_, **__: pytest.fail("nothing is left to answer"))
    assert run(model) == 0
    assert capfd.readouterr().err == "nothing to do: a.jsonl answers all prompts; remove it to answer them again\n"
    assert Path("a.jsonl").read_bytes() == whole


def test_a_killed_run_goes_on(model: str, prompts: Path, tmp_path: Path) -> None:
    long = ["generation.max_new_tokens=80", "generation.ignore_eos=true"]
    assert run(model, *long) == 0
    whole = Path("a.jsonl").read_bytes()
    Path("a.jsonl").unlink()
    given = options(model, "prompt.file=prompts.jsonl", "answers=a.jsonl", *SAMPLED, *long)
    (tmp_path / "outputs").mkdir()
    program = WarmProgram(Path(INFER), given, {}, tmp_path / "outputs")
    until(lambda: program.status is not None or bool(Path("a.jsonl").exists() and Path("a.jsonl").read_bytes()))
    os.kill(program.pid, signal.SIGKILL)
    assert program.wait(60) == -signal.SIGKILL, program.errors
    left = Path("a.jsonl").read_bytes()
    assert 0 < len(left) < len(whole) and whole.startswith(left)
    assert run(model, *long) == 0
    assert Path("a.jsonl").read_bytes() == whole


def test_prompts_may_be_added_and_invalid_ones_are_told_once(model: str, prompts: Path) -> None:
    with prompts.open("a") as file:
        file.write('""\n')
    assert run(model, "prompt.skip_invalid=true") == 0
    with prompts.open("a") as file:
        file.write('"added"\n')
    assert run(model, "prompt.skip_invalid=true", "report=rest.json") == 0
    reported = json.loads(Path("rest.json").read_text())
    assert [entry["index"] for part in ("prompts", "skipped") for entry in reported[part]] == [6, 8, 7]
    lines = [json.loads(line) for line in Path("a.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["index"] for line in lines] == [*range(len(TEXTS) + 2)]
    assert [line["index"] for line in lines if "error" in line] == [len(TEXTS)]


def test_a_report_has_the_prompts_of_its_own_run_and_says_so(
    model: str, prompts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(model, "report=whole.json") == 0
    assert "those of this run" not in capfd.readouterr().err
    path = Path("a.jsonl")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:4]))
    assert run(model, "report=rest.json") == 0
    assert "report=rest.json has 3 of 7 prompts: those of this run\n" in capfd.readouterr().err
    assert [entry["index"] for entry in json.loads(Path("rest.json").read_text())["prompts"]] == [4, 5, 6]
    assert run(model, "report=none.json", "timeline=trace.json") == 0
    assert capfd.readouterr().err == (
        "nothing to do: a.jsonl answers all prompts; remove it to answer them again "
        "(report= and timeline= not written)\n"
    )
    assert not Path("none.json").exists()


@pytest.mark.parametrize(
    "by_chunk",
    [
        ["policy=pyramidinfer"],
        ["policy=per_rank", "policy.ranks.others=pyramidinfer"],
        ["policy=sequence", "policy.steps=[pyramidinfer,snapkv]"],
        ["policy=snapkv", "policy.budget=40", "decode=sharded"],
    ],
    ids=" ".join,
)
def test_where_policies_act_on_chunks_a_run_goes_on_under_the_same_split(
    model: str, prompts: Path, by_chunk: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    path = Path("a.jsonl")
    assert run(model, *by_chunk, "partition=even") == 0
    whole = path.read_text()
    path.write_text(whole.replace('"stages (ranks / ranks.tensor)": "1"', '"stages (ranks / ranks.tensor)": "2"'))
    capfd.readouterr()
    assert run(model, *by_chunk, "partition=even") == 2
    *told, error = capfd.readouterr().err.splitlines()
    assert all("no effect" in line for line in told)  # on one rank
    assert "line 1 was made with stages (ranks / ranks.tensor)=2 and not 1; give" in error
    path.write_text(whole)
    assert run(model, *by_chunk) == 2
    assert "line 1 was made with partition.name=even and not its default" in capfd.readouterr().err.splitlines()[-1]


def test_without_such_policies_the_split_may_differ(model: str, prompts: Path) -> None:
    evicting = ["policy=snapkv", "policy.budget=40"]
    assert run(model, *evicting, "partition=even") == 0
    assert "ranks" not in Path("a.jsonl").read_text() and "partition" not in Path("a.jsonl").read_text()
    assert run(model, *evicting) == 0


@pytest.mark.parametrize("lines", [0, len(TEXTS)])
@pytest.mark.parametrize("content", ["notes of my own", '{"name": "settings"}', '["a", "list"]', " ", "\0\1"])
def test_a_file_without_a_line_break_keeps_what_it_holds(
    model: str, prompts: Path, whole: bytes, lines: int, content: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether it holds nothing else, or lines of an earlier run before that."""
    path = Path("a.jsonl")
    kept = b"".join(whole.splitlines(keepends=True)[:lines]) + content.encode()
    path.write_bytes(kept)
    capfd.readouterr()
    assert run(model) == 2
    assert one_line_error(capfd) == (
        f"answers=a.jsonl line {lines + 1} is no answer; remove the line, or name another file"
    )
    assert path.read_bytes() == kept


@pytest.mark.parametrize(
    ("change", "more", "says"),
    [
        ("", ["generation.max_new_tokens=3"], "line 1 was made with generation.max_new_tokens=12 and not 3; give the"),
        ("", ["generation.seed=0"], "line 1 was made with generation.seed=3 and not its default"),
        ("", ["policy=window"], "line 1 was made with policy.name=its default and not window"),
        ("", ["policy=file", "policy.path=mine.py"], "policy.name=its default and not file"),
        ("prompts", [], "line 2 answers another prompt 1 than this run has; name another file"),
        ("fewer", [], "line 2 answers another prompt 1 than this run has; name another file"),
        ("weights", [], "answers=a.jsonl was made by other weights of the model; name another file"),
        ("foreign", [], "line 8 is no answer; remove the line, or name another file"),
        ("locked", [], "is being written by another run"),
        ("", ["report=a.jsonl"], "answers=a.jsonl and report=a.jsonl would overwrite each other"),
        ("", ["prompt.file=a.jsonl"], "answers=a.jsonl would overwrite prompt.file=a.jsonl, which this run reads"),
        ("", ["timeline=t.json", "answers=t.json"], "answers=t.json and timeline=t.json would overwrite each other"),
        (
            "",
            ["ranks.fault_report=f.json", "answers=f.rank0.fault.json"],
            "answers=f.rank0.fault.json and ranks.fault_report=f.rank0.fault.json would overwrite each other",
        ),
        ("", ["answers=no/such/a.jsonl"], "there is no folder"),
        (
            "",
            ["prompt.file=one.txt", "prompt.batch=1"],
            "answers=a.jsonl is for several prompts, as of prompt.file=<.jsonl>; ",
        ),
    ],
)
def test_a_file_that_this_run_did_not_begin_is_refused(
    model: str, prompts: Path, whole: bytes, change: str, more: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = Path("a.jsonl")
    path.write_bytes(whole)
    Path("one.txt").write_text("one", encoding="utf-8")
    Path("mine.py").write_text(
        "from dataclasses import dataclass\nfrom policies.window import Window\n\n\n"
        "@dataclass(kw_only=True)\nclass Mine(Window):\n    pass\n",
        encoding="utf-8",
    )
    if change == "prompts":
        prompts.write_text(prompts.read_text().replace("the letters", "letters"))
    elif change == "fewer":
        prompts.write_text(json.dumps(TEXTS[0]) + "\n")
    elif change == "weights":
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:-1]]
        for line in lines:
            line["settings"]["weights"] = "0" * 32
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    elif change == "foreign":
        path.write_bytes(path.read_bytes() + b"{}\n")
    elif change == "locked":
        path.write_bytes(path.read_bytes()[:-9])  # else there is nothing to do
    before = path.read_bytes()
    capfd.readouterr()
    with path.open("rb") as held:
        if change == "locked":
            fcntl.flock(held, fcntl.LOCK_EX)
        assert run(model, *more) == 2
    assert says in one_line_error(capfd)
    assert path.read_bytes() == before
