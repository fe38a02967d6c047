"""launch/doctor.py as a user runs it, on a tiny model: on a sound machine, and with three faults set by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.network import ShapedNetwork, run_in
from tests.families import save_tiny_config
from tests.network.conftest import netns
from tests.warm_program import free_port

__all__ = ["netns"]

ROOT = Path(__file__).resolve().parents[2]
DOCTOR = "launch.doctor"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4}
    return save_tiny_config(tmp_path_factory.mktemp("model"), **sizes)


def options(model: Path, out: Path, *more: str) -> list[str]:
    about = ["model=random", f"model.config={model}", "ranks.device=cpu", "ranks.threads=1"]
    return [*about, "doctor.lengths=[96]", "doctor.rounds=1", f"doctor.out={out}", *more]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"} | dict(more or {})


def run(arguments: list[str], more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", DOCTOR, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment(more), cwd=ROOT, encoding="utf-8"
    )


def page_in(out: Path) -> dict[str, Any]:
    page: dict[str, Any] = json.loads((out / "doctor.json").read_text(encoding="utf-8"))
    return page


def finding(page: dict[str, Any], group: str, name: str = "") -> dict[str, Any]:
    [found] = [each for each in page["findings"] if each["group"] == group and each["name"].startswith(name)]
    return dict(found)


@pytest.fixture(scope="module")
def examined(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of an examination of this machine, and what was printed."""
    out = tmp_path_factory.mktemp("doctor")
    done = run(options(model, out, "doctor.timeout_s=3"))
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


@pytest.mark.slow
def test_every_check_of_two_ranks_has_its_finding(examined: tuple[Path, str]) -> None:
    page = page_in(examined[0])
    groups = list(dict.fromkeys(each["group"] for each in page["findings"]))
    assert groups == ["environment", "links", "devices", "exactness", "decoding", "faults", "speed"]
    assert finding(page, "environment", "versions")["verdict"] == "good"
    assert finding(page, "exactness")["verdict"] == "good"
    assert finding(page, "exactness")["measured"] == "48 of 48 tokens equal"
    for what in ("killed", "stopped"):
        fault = finding(page, "faults", f"rank 1 {what}")
        assert fault["verdict"] == "good", fault
        assert "1 fault report" in fault["words"] and "rank 1" in fault["words"]
        assert (examined[0] / f"{what}.drill.rank0.fault.json").is_file()


@pytest.mark.slow
def test_all_methods_and_bounds_are_measured(examined: tuple[Path, str]) -> None:
    [race] = page_in(examined[0])["races"]
    assert (race["ranks"], race["length"]) == (2, 96)
    assert set(race["ttft_s"]) == {"single", "kvr_s", "zigzag", "tensor", "compute_only"}
    assert race["star_s"] > 0
    assert len({token for token in race["tokens"].values() if token is not None}) == 1


@pytest.mark.slow
def test_text_picture_and_json_are_written(examined: tuple[Path, str]) -> None:
    out, printed = examined
    assert (out / "doctor.txt").read_text(encoding="utf-8") == printed
    assert (out / "doctor.png").read_bytes().startswith(b"\x89PNG")
    assert "TTFT(p)" in printed and "2 ranks on " in printed


@pytest.mark.slow
def test_one_rank_is_examined_alone(model: Path, tmp_path: Path) -> None:
    done = run(options(model, tmp_path, "doctor.ranks=1"))
    assert done.returncode == 0, done.stdout + done.stderr
    page = page_in(tmp_path)
    assert {each["group"] for each in page["findings"]} == {"environment", "devices", "decoding", "speed"}
    assert list(page["races"][0]["ttft_s"]) == ["single"]


def test_an_environment_trap_is_named_with_its_remedy(model: Path, tmp_path: Path) -> None:
    traps = {"GLOO_SOCKET_IFNAME": "wrong0", "OMP_NUM_THREADS": "4096", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    done = run(options(model, tmp_path), traps)
    assert done.returncode == 1, done.stderr
    page = page_in(tmp_path)
    assert finding(page, "environment", "GLOO_SOCKET_IFNAME")["verdict"] == "failed"
    assert finding(page, "jobs")["verdict"] == "skipped"
    said = " ".join(done.stdout.split())
    assert "there is no interface wrong0 on this host, so ranks cannot connect; it has lo" in said
    assert "2 ranks of 4096 threads on" in said
    assert "NCCL_LAUNCH_ORDER_IMPLICIT=1 on all ranks" in said


@pytest.mark.slow
def test_a_rank_with_another_version_is_named(model: Path, tmp_path: Path) -> None:
    """Two processes as a launcher starts them, in one of which transformers says that it is another version."""
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "sitecustomize.py").write_text(
        "from importlib import metadata\n"
        "true = metadata.version\n"
        "metadata.version = lambda name: '1.2.3' if name == 'transformers' else true(name)\n"
    )
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    out = tmp_path / "page"
    started = [
        subprocess.Popen(
            [sys.executable, "-m", DOCTOR, *options(model, out)],
            env=environment(place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | more),
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank, more in enumerate([{}, {"PYTHONPATH": str(fake)}])
    ]
    printed = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [1, 0]
    assert printed[1] == ""
    told = finding(page_in(out), "environment", "versions")
    assert told["verdict"] == "failed"
    assert told["words"].startswith("rank 1 and rank 0 differ in transformers (")
    assert "1.2.3 on rank 1). Such ranks refuse to work together; install the same" in told["words"]


@pytest.mark.usefixtures("netns")
@pytest.mark.slow
def test_a_slow_link_is_named(model: Path, tmp_path: Path) -> None:
    """Two hosts under torchrun whose card says 10 Gbit/s and whose link carries 0.02."""
    with ShapedNetwork(gbps=0.02) as network:
        arguments = options(model, tmp_path, "doctor.faults=false")
        assert run_in(network, ["-m", DOCTOR, *arguments], env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}) == 0
    link = finding(page_in(tmp_path), "links", "ranks 0-1")
    assert link["verdict"] == "short"
    assert link["words"].startswith("a slow link: it has 0% of the rate of link0")
    assert "sending the keys and values of a prompt takes" in link["words"]
    assert float(link["measured"].split()[0]) < 0.025  # shaped to 0.02; timed on a machine that may be busy
