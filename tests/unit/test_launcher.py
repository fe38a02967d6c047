"""A rank's place where srun started it, and its end when torchrun is gone."""

import os
import signal
import subprocess
import sys
import time

import pytest

from launch.program.launcher import first_host, follow_launcher, slurm_place, tasks_per_node

STEP = {
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[03-05]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


def test_a_task_of_srun_has_the_place_that_torchrun_would_give_it():
    place = slurm_place(STEP)
    assert place is not None
    port = int(place.pop("MASTER_PORT"))
    assert place == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu03",
    }
    assert 1024 < port < 32768


def test_the_last_node_of_a_step_may_have_fewer_tasks():
    place = slurm_place(STEP | {"SLURM_NODEID": "2", "SLURM_PROCID": "4", "SLURM_LOCALID": "0"})
    assert place is not None
    assert place["LOCAL_WORLD_SIZE"] == "1"


def test_steps_of_a_job_meet_at_different_ports():
    ports = {slurm_place(STEP | {"SLURM_STEP_ID": str(step)})["MASTER_PORT"] for step in range(8)}
    assert len(ports) == 8


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},
        STEP | {"RANK": "0"},  # torchrun below srun
    ],
)
def test_others_have_no_place_from_slurm(environment):
    assert slurm_place(environment) is None


def test_a_given_address_and_port_stay():
    place = slurm_place(STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert place is not None
    assert (place["MASTER_ADDR"], place["MASTER_PORT"]) == ("10.0.0.1", "29500")


def test_the_place_is_put_where_everything_looks_for_it():
    environment = dict(STEP)
    follow_launcher(environment)
    assert environment["RANK"] == "3"
    assert environment["LOCAL_WORLD_SIZE"] == "2"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[2,4]", "n2"),
        ("gpu[03-05,9]-ib,login", "gpu03-ib"),
        ("r[1-2]c[07-08]", "r1c07"),
    ],
)
def test_the_first_of_a_list_of_hosts(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1(x2)", [1, 1])])
def test_tasks_are_counted_by_node(text, counts):
    assert tasks_per_node(text) == counts


RANK = """
import sys, time
from launch.program.launcher import follow_launcher
follow_launcher()
print("follows", flush=True)
time.sleep(100)
"""

LAUNCHER = """
import os, subprocess, sys
environment = os.environ | {"TORCHELASTIC_RUN_ID": "none"}
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environment, start_new_session=True)
print(rank.pid, flush=True)
rank.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such signal")
def test_a_rank_does_not_outlive_torchrun():
    command = [sys.executable, "-c", LAUNCHER, RANK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        lines = [launcher.stdout.readline() for _ in range(2)]
        rank = int(next(line for line in lines if line != "follows\n"))
        os.kill(rank, 0)
        launcher.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 30
        while runs(rank) and time.monotonic() < deadline:
            time.sleep(0.05)
        try:
            assert not runs(rank)
        finally:
            if runs(rank):
                os.kill(rank, signal.SIGKILL)


def runs(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
