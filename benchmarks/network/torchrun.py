"""Launcher of a distributed program on the hosts of a network: one torchrun per host, ended together."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from benchmarks.network import namespaces
from benchmarks.network.interruptions import signals_deferred, signals_raise
from benchmarks.network.shaped_network import INTERFACE, ShapedNetwork

PORT = 29500  # always free: every network namespace has its own ports
# Namespaces have no name resolution for addresses, of which PyTorch warns.
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
# Seconds after the first failure in which the other hosts may still report why they end.
LAST_WORDS_S = 5.0


def run_in(
    network: ShapedNetwork, args: Sequence[str], *, nproc_per_host: int = 1, env: Mapping[str, str] | None = None
) -> int:
    """Run `torchrun --nnodes=<hosts> --nproc-per-node=<nproc_per_host> <args>` in `network`; wait for all.

    Each host has its own cores if there are enough. Output of host 0 is shown, that of the others if one fails;
    standard input is empty. `env` is added to this process's environment. No process is left, however this call ends.

    Returns: 0, or the exit status of the host that failed first (128 + number where a signal ended it).
    """
    hosts: list[subprocess.Popen[bytes]] = []
    interface = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
    environment = QUIET | os.environ | interface | {"RUNAHEAD_SECRET": secrets.token_hex(32)} | dict(env or {})
    with signals_raise(), ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile()) for _ in network.hosts[1:]]
        with signals_deferred() as interrupted:
            try:
                for host, output in enumerate([None, *outputs]):
                    # In a session of its own: Ctrl-C reaches only this process, which ends all of them.
                    process = subprocess.Popen(
                        [*_command(network, host, nproc_per_host), *args],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        env=environment,
                        start_new_session=True,
                    )
                    hosts.append(process)
                status = _wait(hosts, interrupted)
            finally:
                _end(network, hosts)
        for host, output in enumerate(outputs, start=1):
            output.seek(0)
            text = output.read().decode(errors="replace")
            if status and text:
                print(f"output of host {host}:\n{text}", file=sys.stderr, end="", flush=True)
        return status


def _command(network: ShapedNetwork, host: int, nproc_per_host: int) -> list[str]:
    """Command of torchrun on a host and its cores, which ends if this process is killed."""
    command = [*network.inside(host), "setpriv", "--pdeathsig", "TERM"]
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // len(network.hosts)
    if each:
        own = cores[host * each : (host + 1) * each]
        command += ["taskset", "--cpu-list", ",".join(map(str, own))]
    return [
        *command,
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={len(network.hosts)}",
        f"--nproc-per-node={nproc_per_host}",
        f"--node-rank={host}",
        f"--master-addr={network.addresses[0]}",
        f"--master-port={PORT}",
    ]


def _wait(hosts: list[subprocess.Popen[bytes]], interrupted: Sequence[int]) -> int:
    """Wait until all have ended, or `LAST_WORDS_S` after one failed, or `interrupted` has a signal.

    Returns the first failure's exit status.
    """
    status = 0
    deadline = float("inf")
    while not interrupted and any(host.poll() is None for host in hosts) and time.monotonic() < deadline:
        failed = [code for host in hosts if (code := host.poll())]
        if failed and not status:
            status = failed[0]
            deadline = time.monotonic() + LAST_WORDS_S
        time.sleep(0.02)
    status = status or next((code for host in hosts if (code := host.poll())), 0)
    return 128 - status if status < 0 else status


def _end(network: ShapedNetwork, hosts: list[subprocess.Popen[bytes]]) -> None:
    """End all processes. torchrun itself is killed: it only watches the ranks, and would print a long traceback."""
    for host in hosts:
        host.kill()
        host.wait()
    namespaces.end_processes(network.hosts)
