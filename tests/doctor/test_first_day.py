"""launch/first_day.py: its parts and their choice, deadlines and logs, and parts as a user runs them on a CPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.doctor import crew
from benchmarks.doctor.crew import Crew, Job
from benchmarks.doctor.facts import Facts
from benchmarks.doctor.findings import Verdict
from benchmarks.first_day import chain, gpu_tests, kernels
from benchmarks.first_day.estimates import ESTIMATES, RANGE, GPUFigures
from benchmarks.first_day.figures import Figures, finding_of
from benchmarks.first_day.first_day import FirstDay, spend
from benchmarks.first_day.options import FirstDayOptions, FirstDayRun, without_hydra
from benchmarks.first_day.parts import LIMIT_S, PARTS, FirstDayPart, Where, chosen
from benchmarks.first_day.visit import Visit
from benchmarks.first_day.work import WORK, PartTask
from launch import first_day
from launch.program.compose import Program
from partitioner.cost.known_gpus import known_gpu
from runahead.config import Device, RanksOptions
from runahead.model.memory import activation_bytes
from runahead.model.shares import load_model
from runahead.ranks.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]


def gpu(name: str = "NVIDIA H100 80GB HBM3") -> GPUFigures:
    known = known_gpu(name)
    assert known is not None
    return GPUFigures(gpu=known, is_hopper="H100" in name)


@pytest.fixture(scope="module")
def facts() -> Facts:
    return Facts.here()


def day(
    out: Path, facts: list[Facts], *, gpus: int = 0, minutes: float | None = None, launched: bool = False
) -> FirstDay:
    started = Crew(size=len(facts), own=[0] if launched else list(range(len(facts))), logs=out, facts=facts)
    if launched:
        started.store = object()  # type: ignore[assignment]
    run = FirstDayRun(first_day=FirstDayOptions(minutes=minutes, out=str(out)))
    return FirstDay(run, started, gpus, out, time.monotonic())


def part(name: str) -> FirstDayPart:
    return next(each for each in PARTS if each.name == name)


def test_every_part_has_its_work() -> None:
    assert [each.name for each in PARTS] == list(dict.fromkeys(each.name for each in PARTS))
    assert {each.name for each in PARTS} == set(WORK)


def test_no_part_has_more_than_four_minutes() -> None:
    assert all(each.takes_s <= each.limit_s <= LIMIT_S == 240 for each in PARTS)


def test_what_needs_most_of_a_machine_comes_first_and_then_the_copies() -> None:
    order = [each.where for each in PARTS]
    assert order == sorted(order, key=[Where.hosts, Where.host, Where.gpu].index)
    of_one_gpu = [each.name for each in PARTS if each.where is Where.gpu]
    assert of_one_gpu[0] == "copy_relay_last_2"
    assert len(chosen(["copy", "backend"])) == 16


def test_a_name_chooses_itself_and_names_that_begin_with_it() -> None:
    assert [each.name for each in chosen(["nccl"])] == ["nccl_operations", "nccl_live_graph"]
    assert [each.name for each in chosen(["copies", "chain_direct"])] == ["chain_direct", "copies"]
    assert all(each.name.startswith("copy_") for each in chosen(["copy"]))
    with pytest.raises(ValueError, match=r"first_day\.without=kernel .*kernels"):
        FirstDayOptions(without=["kernel"])


def test_a_cpu_is_a_rehearsal(tmp_path: Path, facts: Facts) -> None:
    here = day(tmp_path, [facts] * 3)
    assert here.why_not(part("kernels")) == "it needs a GPU"
    assert here.why_not(part("chain_relay")) is here.why_not(part("copy_direct_sharded_3")) is None
    assert here.why_not(part("chain_tensor")) == "it needs 4 GPUs on this host"
    assert here.why_not(part("hosts_chain")) == "it needs several hosts; start it there by torchrun or srun"


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 0), (2, 0), (5, 4), (8, 8)])
def test_ranks_that_share_a_model_are_whole_stages(tmp_path: Path, facts: Facts, gpus: int, ranks: int) -> None:
    assert day(tmp_path, [facts] * max(3, gpus), gpus=gpus).num_ranks(part("chain_tensor")) == ranks


def test_a_launcher_of_two_hosts_runs_the_parts_of_hosts_on_all_ranks(tmp_path: Path, facts: Facts) -> None:
    there = replace(facts, place="another host")
    two = day(tmp_path, [facts, facts, there, there], gpus=2, launched=True)
    assert [two.num_ranks(part(name)) for name in ("hosts_chain", "chain_relay", "copy_relay_last_2", "kernels")] == [
        4,
        2,
        2,
        1,
    ]
    assert two.why_not(part("copy_direct_sharded_3")) == (
        "it needs 3 processes on this host; start it there without a launcher"
    )


@pytest.mark.parametrize(("beside", "ranks"), [((2, 2), 4), ((4, 2), 6), ((2, 1), 0), ((4,), 0)])
def test_ranks_that_share_a_model_are_on_one_host(
    tmp_path: Path, facts: Facts, beside: tuple[int, ...], ranks: int
) -> None:
    of_all = [replace(facts, place=f"host {n}") for n, number in enumerate(beside) for _ in range(number)]
    hosts = day(tmp_path, of_all, gpus=2, launched=True)
    assert hosts.num_ranks(part("hosts_tensor")) == ranks
    reason = "it needs several hosts with a multiple of 2 GPUs each; start it there by torchrun or srun"
    assert hosts.why_not(part("hosts_tensor")) == (None if ranks else reason)


def test_a_length_that_does_not_fit_is_left_out_of_a_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is out of memory would fail the part with all its ranks."""
    most = min(chain.SMALL_LENGTHS)
    ranks = Ranks(0, 1, device=torch.device("cpu"), backend="gloo", timeout_s=20)
    visit = Visit(ranks=ranks, figures=Figures("chain_relay", tmp_path / "lines", None), folder=tmp_path, limit_s=9)
    model = load_model(visit.model_to_measure(), ranks)
    per_token = sum(each.bytes_per_token() for each in model.kv_shapes) + activation_bytes(model.config, model.dtype)
    monkeypatch.setattr("benchmarks.first_day.visit.free_bytes", lambda *_: most * per_token)
    monkeypatch.setattr(chain, "load_model", lambda *_: model)
    monkeypatch.setattr(chain, "ROUNDS", 2)
    chain.race(visit)
    found = [finding_of(json.loads(line)) for line in (tmp_path / "lines").read_text().splitlines()]
    [left_out] = [each for each in found if each.verdict is Verdict.skipped]
    assert left_out.name == f"{max(chain.SMALL_LENGTHS):,} tokens" and "GB are free" in left_out.words
    assert any(f"TTFT of {most:,}" in each.name for each in found)


def test_what_does_not_fit_into_the_minutes_is_left_out(tmp_path: Path, facts: Facts) -> None:
    short = day(tmp_path, [facts] * 3, gpus=1, minutes=1)
    reason = short.why_not(part("kernels"))
    assert reason == "it takes about 60 s and would not end within first_day.minutes=1"
    assert short.why_not(part("nccl_operations")) is None


def test_a_part_whose_package_is_missing_says_how_to_get_it(tmp_path: Path, facts: Facts) -> None:
    needy = replace(part("kernels"), modules=["json", "no_such_package"])
    assert day(tmp_path, [facts], gpus=1).why_not(needy) == (
        "it needs no_such_package; install with pip install no_such_package"
    )


def test_a_part_that_hangs_is_ended_and_the_next_one_runs(
    tmp_path: Path, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first hangs after a line, the second fails with a rank's message, the third notes a figure.

    A minute passes at once when the first one has written its line.
    """
    figures = tmp_path / "figures.jsonl"
    figure = "from benchmarks.first_day.figures import Figures as F; from pathlib import Path as P; "
    codes = {
        "chain_relay": "import time; print('layer 7', flush=True); time.sleep(3600)",
        "chain_copy": "import sys; sys.exit('[rank 0/1] the driver refuses')",
        "chain_direct": f"{figure}F('chain_direct', P({str(figures)!r}), None).note('TTFT', 1.5, 'ms')",
    }

    def job(task: PartTask, num_ranks: int) -> Job:
        args = ["-n", "1", "-r", "1", codes[task.part]]
        return Job(name=task.part, module="timeit", args=args, num_ranks=1, limit_s=60, last_words_s=1)

    def now_s() -> float:
        line = tmp_path / "chain_relay" / "0.out"
        return time.monotonic() + (61 if line.exists() and line.read_text() else 0)

    monkeypatch.setattr(PartTask, "job", job)
    monkeypatch.setattr(crew, "time", SimpleNamespace(monotonic=now_s, time=time.time, sleep=time.sleep))
    hanging = day(tmp_path, [facts] * 3)
    hanging.run.first_day.parts = list(codes)
    hanging.run_all()
    ended = {finding.name: finding for finding in hanging.findings if finding.group == "parts"}
    assert [ended[name].verdict for name in codes] == [Verdict.failed, Verdict.failed, Verdict.good]
    assert ended["chain_relay"].words == "it did not end within 60 s and was killed; last: layer 7"
    assert ended["chain_copy"].words.endswith("[rank 0/1] the driver refuses")
    [noted] = [finding for finding in hanging.findings if finding.group == "chain_direct"]
    assert (noted.name, noted.measured) == ("TTFT", "1.5 ms")
    assert (tmp_path / "chain_relay" / "0.out").read_text() == "layer 7\n"
    written = (tmp_path / "first_day.txt").read_text()
    assert "did not end within 60 s" in written and "the driver refuses" in written
    assert json.loads((tmp_path / "first_day.json").read_text())["verdict"] == "failed"


def test_a_part_that_the_minutes_end_has_not_failed(
    tmp_path: Path, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(task: PartTask, num_ranks: int) -> Job:
        args = ["-n", "1", "-r", "1", "import time; time.sleep(60)"]
        return Job(name=task.part, module="timeit", args=args, num_ranks=1, limit_s=1, last_words_s=1)

    monkeypatch.setattr(PartTask, "job", job)
    short = day(tmp_path, [facts] * 3, minutes=2)
    short.run.first_day.parts = ["chain_relay"]
    short.run_all()
    [ended] = [finding for finding in short.findings if finding.group == "parts"]
    assert (ended.verdict, ended.words) == (Verdict.skipped, "ended: first_day.minutes=2 was over")


def test_an_earlier_run_is_kept(tmp_path: Path) -> None:
    (tmp_path / "figures.jsonl").write_text("earlier\n")
    options = FirstDayRun(ranks=RanksOptions(device=Device.cpu), first_day=FirstDayOptions(out=str(tmp_path)))
    with pytest.raises(ValueError, match=r"first_day\.out=.* earlier run; name another folder"):
        spend(options)
    assert [path.name for path in tmp_path.iterdir()] == ["figures.jsonl"]
    assert (tmp_path / "figures.jsonl").read_text() == "earlier\n"


def test_what_is_wrong_between_hosts_leaves_the_parts_of_one_host(tmp_path: Path, facts: Facts) -> None:
    there = replace(facts, place="another host", versions=facts.versions | {"torch": "1.0"})
    two = day(tmp_path, [facts, there], launched=True)
    two.run.first_day.parts = ["hosts_chain", "copy_relay_last_2"]
    two.run_all()
    words = {finding.name: finding.words for finding in two.findings if finding.group == "parts"}
    assert words["hosts_chain"] == "not run: the environment has to be mended first"
    assert words["copy_relay_last_2"].startswith("not run: it needs 2 processes")


@pytest.mark.parametrize("has_timeout", [False, True])
def test_a_hanging_test_ends_alone_where_pytest_timeout_is(has_timeout: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests, "find_spec", lambda module: has_timeout or None)
    command = gpu_tests.command()
    assert command[1:3] == ["-m", "pytest"] and command[command.index("not slow") - 1] == "-m"
    assert {"faulthandler_timeout=45", "faulthandler_exit_on_timeout=false"} <= set(command)
    assert ("timeout=60" in command) is has_timeout
    assert [each.name for each in PARTS if each.sees_all_gpus] == ["tests"]


def test_figures_are_told_beside_their_estimates(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    figures = Figures("kernels", path, gpu())
    rate = ESTIMATES["matrix products"].of(gpu())
    for value in (rate, rate / (RANGE * 1.1), rate * RANGE * 1.1):
        figures.note("products", value, "matrix products")
    figures.note("blockwise", 3.0, "ms")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["verdict"] for line in lines] == ["good", "short", "short", "noted"]
    assert lines[1]["expected"] == pytest.approx(682, rel=0.01)
    assert lines[1]["words"] == "0.61 times the estimate, which assumes: 69% of the stated rate"
    assert finding_of(lines[3]).measured == "3 ms" and lines[3]["expected"] is None


def test_a_kernel_whose_log_sum_exp_is_no_number_is_wrong(tmp_path: Path) -> None:
    """max(0.0, nan) is 0.0 in Python. Seen to fail: such a kernel passed."""
    path = tmp_path / "figures.jsonl"
    visit: Any = SimpleNamespace(figures=Figures("kernels", path, None))
    plain = torch.ones(2), torch.ones(2)
    for lse in (plain[1], torch.tensor([1.0, math.nan])):
        kernels._compare(visit, "flash", (plain[0], lse), plain)
    assert [json.loads(line)["verdict"] for line in path.read_text().splitlines()] == ["good", "failed"]


def test_a_measurement_that_fails_is_a_finding_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    figures = Figures("kernels", path, None)

    def refuse() -> None:
        raise RuntimeError("no kernel image is available\nfor this device")

    figures.attempt("flash", refuse)
    figures.attempt("cudnn", refuse, is_ours=False)

    def too_large() -> None:
        raise ValueError("16 bytes do not fit") from torch.OutOfMemoryError("out of memory")

    figures.attempt("120,000 tokens", too_large)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["verdict"] for line in lines] == ["failed", "noted", "noted"]
    assert lines[0]["words"] == "RuntimeError: no kernel image is available"


@pytest.mark.parametrize(("thousands", "one", "chain"), [(16, 638, 91), (64, 4798, 682), (128, 15588, 2214)])
def test_estimates_of_ttft_are_those_of_docs_gpu(thousands: int, one: float, chain: float) -> None:
    """Llama-3-8B on an H100: 32 layers with 6.98e9 weights in matrices, 32 heads of 128 dims, one token's logits."""
    tokens = 1024 * thousands
    matmul, attention = 2 * 6_979_321_856 * tokens + 2 * 4096 * 128256, 2 * 32 * 256 * 32 * tokens * (tokens + 1) / 2
    sizes = (matmul, attention, 40 * (4096 + 14336) * tokens * 32, 32)
    assert ESTIMATES["TTFT"].of(gpu(), *sizes) == pytest.approx(one, rel=0.01)
    assert ESTIMATES["TTFT of a chain"].of(gpu(), 8, *sizes) == pytest.approx(chain, rel=0.01)
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert f"| {thousands}k | {one / 1e3:.2g} s | {chain / 1e3:.2g} s |" in page


ARGUMENTS = ["first_day.parts=[copy,nccl]", "first_day.minutes=7.5", "ranks.device=cpu", "first_day.out=2026-11-26"]


def test_options_mean_the_same_without_hydra() -> None:
    program = Program(module="launch.first_day", options=FirstDayRun, help="")
    assert without_hydra(ARGUMENTS) == program.compose(ARGUMENTS)
    assert without_hydra([]) == program.compose([])


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("first_day.part=[nccl]", "did you mean first_day.parts?"),
        ("first_day.minutes=soon", "first_day.minutes=soon must be a number"),
        ("first_day.minutes=true", "first_day.minutes=true must be a number"),
        ("ranks.threads=1.5", "ranks.threads=1.5 must be a whole number"),
        ("first_day.parts=nccl", "write 'first_day.parts=[nccl]'"),
        ("first_day.without=[1]", "must be a list of names"),
        ("ranks.fault_report=a", "ranks.fault_report=a has no use"),
        ("first_day.minutes=-1", "must be a number of minutes above 0"),
        ("ranks.device=gpu", "cuda, cpu"),
        ("first_day.parts=[a", "first_day.parts=[a cannot be used"),
    ],
)
def test_wrong_options_have_one_line_without_hydra(argument: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        without_hydra([argument])
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_help_lists_all_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_day.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {each.name} " in printed and each.words in printed for each in PARTS)


def run(tmp_path: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launch.first_day", "ranks.device=cpu", "ranks.threads=1", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more,
    )


def test_a_bare_machine_runs_without_hydra(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "sitecustomize.py").write_text(
        "import sys\nsys.modules |= dict.fromkeys(('hydra', 'omegaconf', 'gguf', 'matplotlib', 'pytest'))\n"
    )
    done = run(tmp_path, "first_day.parts=[kernels]", PYTHONPATH=f"{bare}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stderr
    assert "pip install 'hydra-core>=1.3,<1.4' 'omegaconf>=2.3,<2.4'" in done.stderr.splitlines()[0]
    assert "kernels: not run: it needs a GPU" in done.stdout


def parts_of(tmp_path: Path, parts: str) -> tuple[dict[str, str], list[dict[str, Any]], str]:
    """Verdicts of parts that have run, the lines of what they found, and what was printed."""
    done = run(tmp_path, f"first_day.parts=[{parts}]")
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "first_day"
    page = json.loads((out / "first_day.json").read_text())
    verdicts = {each["name"]: each["verdict"] for each in page["findings"] if each["group"] == "parts"}
    return verdicts, [json.loads(line) for line in (out / "figures.jsonl").read_text().splitlines()], done.stdout


def test_a_part_runs_on_a_cpu(tmp_path: Path) -> None:
    verdicts, lines, printed = parts_of(tmp_path, "copy_relay_last_2,copies")
    assert verdicts == {"copy_relay_last_2": "good", "copies": "skipped"}
    same = [line for line in lines if line["group"] == "copy_relay_last_2"]
    assert len(same) == 5 and {line["verdict"] for line in same} == {"good"}
    log = (tmp_path / "first_day" / "copy_relay_last_2" / "1.out").read_text()
    assert "rank 1: prompts of (90, 50) tokens on 2 ranks" in log
    assert "copies: not run: it needs a GPU" in printed


@pytest.mark.slow
def test_a_race_of_two_ranks_runs_on_a_cpu(tmp_path: Path) -> None:
    """That of one rank is in `test_a_length_that_does_not_fit_is_left_out_of_a_race`."""
    verdicts, lines, _ = parts_of(tmp_path, "chain_relay")
    assert verdicts == {"chain_relay": "good"}
    speed_ups = [line["value"] for line in lines if line["name"].startswith("speed-up at ")]
    assert len(speed_ups) == 2 and min(speed_ups) > 0
