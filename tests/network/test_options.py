"""Refused options, and names of networks: needs no root."""

import os
import shutil
import subprocess
import sys

import pytest

from benchmarks.network import Noise, ShapedNetwork, namespaces
from benchmarks.network.__main__ import main
from benchmarks.network.shaped_network import MTU, token_bucket
from tests.needs import missing


def bucket(gbps: float) -> dict[str, str]:
    words = token_bucket(gbps)
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize("gbps", [0.001, 0.01, 1, 40])
def test_a_full_bucket_holds_a_frame_and_lasts_a_millisecond_beyond_that(gbps):
    burst = int(bucket(gbps)["burst"])
    assert burst >= MTU
    assert burst <= max(2 * MTU, 1e-3 * gbps * 1e9 / 8)
    assert int(bucket(gbps)["limit"]) > burst


@pytest.mark.parametrize("gbps", [0, -1, float("nan"), float("inf"), 1e-4, 1e4])
def test_an_impossible_rate_is_refused(gbps):
    with pytest.raises(ValueError, match=r"Gbit/s is not possible; use 0\.001 to 1000"):
        ShapedNetwork(gbps=gbps)


@pytest.mark.parametrize("num_hosts", [0, 1, 255])
def test_an_impossible_number_of_hosts_is_refused(num_hosts):
    with pytest.raises(ValueError, match=f"a network of {num_hosts} hosts"):
        ShapedNetwork(num_hosts, gbps=1)


@pytest.mark.parametrize("options", [{"low": 0}, {"low": 2}, {"period_s": 0}])
def test_impossible_noise_is_refused(options):
    with pytest.raises(ValueError, match="is not possible; use"):
        Noise(ShapedNetwork(gbps=1), seed=0, **options)


def test_who_is_not_root_is_told_so_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(subprocess, "run", lambda *args, **how: pytest.fail(f"ran {args}"))
    with pytest.raises(ValueError, match="needs root.*sudo"), ShapedNetwork(gbps=1):
        pass


def test_another_user_gets_one_line_and_status_2():
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        missing("only root can become another user, with setpriv")
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", sys.executable, "-c", AS_ANOTHER_USER],
        capture_output=True,
        text=True,
    )
    if "Permission denied" in done.stderr:
        pytest.skip("another user may not read this Python")
    assert done.returncode == 2
    assert done.stderr == "a shaped network needs root to make network namespaces; run it with sudo\n"


AS_ANOTHER_USER = """
import sys
from benchmarks.network.__main__ import main
sys.exit(main(["gbps=1", "--", "x.py"]))
"""


def test_a_missing_command_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(ValueError, match="command tc; install iproute2"), ShapedNetwork(gbps=1):
        pass


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["gbps=1", "x.py"], "no program"),
        (["--", "x.py"], "the rate of the link is missing"),
        (["gbps=fast", "--", "x.py"], "gbps=fast is not a number"),
        (["gbps=1", "gbit=1", "--", "x.py"], "unknown option gbit; known: gbps, hosts, nproc"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(args, message, capsys):
    assert main(args) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_leftover_is_a_name_of_ours_whose_process_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(namespaces, "FOLDER", tmp_path)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    ours = namespaces.owned_name("0-1")
    another_start = f"runahead-{namespaces.CHECKOUT}-{os.getpid()}-1-0-0"  # the id was used again
    gone = f"runahead-{namespaces.CHECKOUT}-{ended.pid}-123-0-switch"
    other_checkout = gone.replace(namespaces.CHECKOUT, "00c0ffee")
    for name in (ours, another_start, gone, other_checkout, "runahead-x", "blue", f"my-{gone}"):
        (tmp_path / name).touch()
    assert namespaces.leftovers() == sorted([another_start, gone])


def test_without_any_namespace_there_is_no_leftover(tmp_path, monkeypatch):
    monkeypatch.setattr(namespaces, "FOLDER", tmp_path / "netns")
    assert namespaces.leftovers() == []
