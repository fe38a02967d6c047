"""Networks are made for real where the tests run as root and the kernel can."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.needs import missing


@pytest.fixture(scope="session")
def netns() -> None:
    """Asks the system directly, so that an error in what is tested is not taken for a machine that cannot."""
    if os.geteuid() != 0:
        missing("network namespaces need root")
    absent = [tool for tool in ("ip", "tc", "setpriv", "taskset") if shutil.which(tool) is None]
    if absent:
        missing(f"no command {absent[0]}")
    name = f"runahead-probe-{os.getpid()}"
    commands = (
        f"ip netns add {name}",
        f"ip -n {name} link add name bridge type bridge",
        f"ip -n {name} link add name a type veth peer name b",
        f"tc -n {name} qdisc add dev a root tbf rate 1gbit burst 128k limit 1m",
    )
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True)
            if done.returncode != 0:
                missing(f"{command}: {done.stderr.strip()}")
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
