"""A rank's place where srun started it, and its end when torchrun is gone."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from launch.infer import main
from launch.program.launcher import follow_launcher
from runahead.failures import SharedError
from runahead.place import check_meeting_point, first_host, slurm_place, tasks_per_node

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


@pytest.mark.parametrize("name", sorted(STEP.keys() - {"SLURM_STEP_NUM_TASKS"}))
def test_a_part_of_slurms_variables_is_told_by_the_first_task(name):
    with pytest.raises(ValueError, match=f"one of several tasks of srun, but {name} is not set; pass all"):
        slurm_place({other: value for other, value in (STEP | {"SLURM_PROCID": "0"}).items() if other != name})


def test_other_tasks_leave_it_to_the_first_to_tell():
    with pytest.raises(SharedError, match="SLURM_NODEID, SLURM_STEP_ID are not set"):
        slurm_place({name: STEP[name] for name in STEP if name not in ("SLURM_NODEID", "SLURM_STEP_ID")})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"SLURM_JOB_ID": "4711_2"}, "SLURM_JOB_ID=4711_2 is not a whole number"),
        ({"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS=many is not a whole number"),
        ({"SLURM_NODEID": "3"}, r"SLURM_NODEID=3 but SLURM_STEP_TASKS_PER_NODE=2\(x2\),1 has 3 nodes"),
        ({"SLURM_PROCID": "5"}, "^SLURM_PROCID=5 is not below SLURM_STEP_NUM_TASKS=5; tasks are numbered from 0"),
        ({"SLURM_LOCALID": "2"}, r"^SLURM_LOCALID=2 but SLURM_STEP_TASKS_PER_NODE=2\(x2\),1 has 2 tasks on node 1"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "SLURM_STEP_TASKS_PER_NODE=2.* is no list of tasks"),
    ],
)
def test_a_variable_of_slurm_that_makes_no_sense_is_named(more, message):
    with pytest.raises(ValueError, match=message):
        slurm_place(STEP | more)


TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"RANK": "one"}, "RANK=one is not a whole number"),
        ({"RANK": "-1"}, "RANK=-1 is not a whole number"),
        ({"RANK": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
        ({"RANK": ""}, "RANK= is not a whole number"),
        ({"RANK": None}, "WORLD_SIZE=2 is set but RANK is not"),
        ({"WORLD_SIZE": "2.0"}, "WORLD_SIZE=2.0 is not a whole number"),
        ({"WORLD_SIZE": None}, "RANK=1 is not below WORLD_SIZE=1"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "RANK=0 is not below WORLD_SIZE=0"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": "1"}, "LOCAL_WORLD_SIZE=1 is set but LOCAL_RANK is not; start the"),
        ({"LOCAL_WORLD_SIZE": "all"}, "LOCAL_WORLD_SIZE=all is not a whole number"),
        ({"MASTER_ADDR": None}, "WORLD_SIZE=2 but MASTER_ADDR is not set"),
        ({"MASTER_PORT": ""}, "WORLD_SIZE=2 but MASTER_PORT is not set"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT=x is not a whole number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is no port"),
        ({"MASTER_ADDR": "a..b", "LOCAL_RANK": "0"}, "MASTER_ADDR=a..b does not resolve"),
    ],
)
def test_a_variable_of_a_job_that_makes_no_sense_is_named(more, message):
    environment = {name: value for name, value in (TWO | more).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        follow_launcher(environment)


def test_a_program_says_it_in_one_line_whatever_its_rank(monkeypatch, capsys):
    for name, value in (TWO | {"RANK": "2"}).items():
        monkeypatch.setenv(name, value)
    assert main(["--help"]) == 2
    assert capsys.readouterr() == ("", "RANK=2 is not below WORLD_SIZE=2; ranks are numbered from 0\n")


@pytest.mark.parametrize(("local_rank", "error"), [("0", ValueError), ("1", SharedError)])
def test_an_address_that_does_not_resolve_is_told_once_on_every_host(monkeypatch, local_rank, error):
    def unknown(*_):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(error, match=r"MASTER_ADDR=node7 does not resolve on .* \(Name or service not known\); give"):
        check_meeting_point(TWO | {"MASTER_ADDR": "node7", "LOCAL_RANK": local_rank})


def test_a_rank_alone_needs_no_address():
    check_meeting_point({"RANK": "0", "WORLD_SIZE": "1"})


def test_a_given_address_and_port_stay():
    place = slurm_place(STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert place is not None
    assert (place["MASTER_ADDR"], place["MASTER_PORT"]) == ("10.0.0.1", "29500")


def test_the_place_is_put_where_everything_looks_for_it(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [host, port])
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
