"""Distributed programs on the hosts of a network."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.network import ShapedNetwork, namespaces, run_in
from tests.families import save_tiny_config
from tests.network.test_shaped_network import runs
from tests.network.traffic import traffic

pytestmark = pytest.mark.usefixtures("netns")

ROOT = Path(__file__).resolve().parents[2]
INFER = str(ROOT / "launch" / "infer.py")

PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist

what, folder = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
with open(f"{folder}/{rank}", "w") as file:
    print(os.getpid(), *sorted(os.sched_getaffinity(0)), file=file)
data = torch.full((250_000,), float(rank))
if rank == 0:
    dist.send(data, 1)
else:
    dist.recv(data, 0)
    assert data.eq(0).all()
print(f"rank {rank} is done", flush=True)
if what == "fail" and rank == 1:
    sys.exit("rank 1 fails")
if what in ("wait", "fail"):
    time.sleep(100)
"""


@pytest.fixture
def program(tmp_path) -> list[str]:
    """A script and its arguments but the first."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return [str(path), str(tmp_path)]


def pids(folder: Path) -> list[int]:
    return [int((folder / str(rank)).read_text().split()[0]) for rank in range(2)]


@pytest.mark.slow
def test_ranks_talk_over_the_link_each_on_its_own_cores(program, tmp_path, capfd):
    with ShapedNetwork(gbps=1) as network:
        assert run_in(network, [program[0], "work", program[1]]) == 0
        sent, _ = traffic(network)
        assert 1_000_000 <= sent <= 1_100_000  # what the ranks need to find each other is some kilobytes
        assert not any(map(namespaces.processes, network.hosts))
    out = capfd.readouterr().out
    assert "rank 0 is done" in out
    assert "rank 1" not in out
    cores = [set((tmp_path / str(rank)).read_text().split()[1:]) for rank in range(2)]
    if len(os.sched_getaffinity(0)) > 1:
        assert not cores[0] & cores[1]


def test_a_failing_host_ends_all_and_shows_its_output(program, tmp_path, capfd):
    with ShapedNetwork(gbps=1) as network:
        assert run_in(network, [program[0], "fail", program[1]]) == 1
        assert not any(map(namespaces.processes, network.hosts))
    said = capfd.readouterr().err
    assert "output of host 1:\nrank 1 is done\nrank 1 fails" in said
    assert not any(map(runs, pids(tmp_path)))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.sampled(2)
def test_an_interrupted_run_leaves_no_process_and_no_network(program, tmp_path, number, status):
    command = [sys.executable, "-X", "faulthandler", "-m", "benchmarks.network", "gbps=1", "--"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (tmp_path / "stderr").open("w") as stderr:
            running = subprocess.Popen(
                [*command, program[0], "wait", program[1]], stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT
            )
    finally:
        signal.signal(signal.SIGINT, before)
    with running:
        assert running.stdout.readline() == "rank 0 is done\n"
        ours = f"runahead-{namespaces.CHECKOUT}-{running.pid}-*"
        assert len(list(namespaces.FOLDER.glob(ours))) == 2
        running.send_signal(number)
        try:
            running.wait(timeout=150)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGABRT)  # so that it says where it waits
            running.wait()
    said = (tmp_path / "stderr").read_text()
    assert running.returncode == status, said
    assert said == ("interrupted\n" if number == signal.SIGINT else "")
    assert not list(namespaces.FOLDER.glob(ours))
    assert not any(map(runs, pids(tmp_path)))


@pytest.mark.slow
def test_the_ranks_of_a_killed_run_end(program, tmp_path):
    command = [sys.executable, "-m", "benchmarks.network", "gbps=1", "--", program[0], "wait", program[1]]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert running.stdout.readline() == "rank 0 is done\n"
    running.kill()
    running.wait()
    deadline = time.monotonic() + 30
    while any(map(runs, pids(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(runs, pids(tmp_path)))
    running.communicate()
    with ShapedNetwork(gbps=1):
        assert not list(namespaces.FOLDER.glob(f"runahead-{namespaces.CHECKOUT}-{running.pid}-*"))


@pytest.mark.slow
def test_infer_on_two_hosts_gives_the_tokens_of_one(tmp_path):
    save_tiny_config(tmp_path)
    options = [
        *("model=random", f"model.config={tmp_path}", "prompt.random_tokens=200", "generation.max_new_tokens=12"),
        *("ranks.device=cpu", "ranks.threads=1", "generation.ignore_eos=true"),
    ]
    one_rank = [sys.executable, INFER, *options, f"report={tmp_path}/one.json"]
    subprocess.run(one_rank, check=True, capture_output=True, timeout=120)
    with ShapedNetwork(gbps=0.5) as network:
        assert run_in(network, [INFER, *options, f"report={tmp_path}/two.json"]) == 0
        sent = traffic(network)
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert two["world_size"] == 2
    assert len(two["ranks"]) == 2
    assert two["new_token_ids"] == one["new_token_ids"]
    # Of 100 tokens the K and V of 4 layers, 2 heads of 8 numbers of 4 bytes.
    assert sent[0] > 100 * 4 * 2 * 2 * 8 * 4
