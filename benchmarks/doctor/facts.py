"""Facts that one process finds about its host: versions, processors, GPUs, network interfaces and variables."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.harness import machine
from runahead.ranks.agreement import library_facts
from runahead.ranks.meeting.signed_store import job_secret

PREFIXES = ("NCCL_", "GLOO_", "CUDA_", "OMP_", "MKL_", "OPENBLAS_", "TORCH_NCCL_", "PYTORCH_")
"""Beginnings of the names of environment variables that are looked at."""

LOOK_S = 1.0
"""Seconds in which processors are watched."""

INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface; `mbps` is its nominal rate in 1e6 bits per second, 0 if it has none."""

    name: str
    is_up: bool
    mbps: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts that one process finds about its host.

    Attributes:
        host: name of its host.
        place: identifies host and network namespace: processes with the same one reach each other by loopback.
        versions: of libraries and of this code, which must be the same on all ranks.
        cores: processors that this process may use.
        resolves_to: address of the host's own name; "" if it has none.
        gpus: name, total and used MiB of each GPU that nvidia-smi lists.
        topology: kind of connection between each two GPUs, by "<index>-<index>", as in nvidia-smi topo -m.
        infiniband_gbps: rate of the fastest InfiniBand or RoCE port in 1e9 bits per second; 0 without one.
        has_secret: the ranks of the job have one, by which they know each other.
        busy_cores: processors of the host that other processes used for a second, before any rank was started.
    """

    host: str
    place: str
    versions: dict[str, str]
    cores: int
    hardware: dict[str, Any]
    resolves_to: str
    num_gpus: int
    gpus: list[dict[str, Any]]
    topology: dict[str, str]
    interfaces: list[Interface]
    infiniband_gbps: float
    environment: dict[str, str]
    has_secret: bool = False
    busy_cores: float = 0.0

    def with_load(self) -> Facts:
        """These facts with the load of this host, which is watched for a second. No process of ours should work now."""
        busy = psutil.cpu_percent(interval=LOOK_S) / 100 * (psutil.cpu_count() or 1)
        return replace(self, busy_cores=round(busy, 2))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Facts:
        return cls(**fields | {"interfaces": [Interface(**each) for each in fields["interfaces"]]})

    @classmethod
    def here(cls) -> Facts:
        """Describe this process's host, all but its load."""
        place = socket.gethostname()
        with suppress(OSError):  # no /proc
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            place = f"{place} {boot} {os.readlink('/proc/self/ns/net')}"
        address = ""
        with suppress(OSError):
            address = socket.gethostbyname(socket.gethostname())
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(
            host=socket.gethostname(),
            place=place,
            versions=library_facts(),
            cores=cores,
            hardware=machine.hardware(),
            resolves_to=address,
            num_gpus=torch.cuda.device_count(),
            gpus=gpus_of(_nvidia_smi("--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits")),
            topology=topology_of(_nvidia_smi("topo", "-m")),
            interfaces=[
                Interface(name=name, is_up=each.isup, mbps=each.speed) for name, each in psutil.net_if_stats().items()
            ],
            infiniband_gbps=infiniband_gbps(INFINIBAND),
            environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
            has_secret=job_secret(os.environ) is not None,
        )


def gpus_of(text: str) -> list[dict[str, Any]]:
    """GPUs from nvidia-smi's lines "name, total MiB, used MiB"."""
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal():
            found.append({"name": parts[0], "total_mib": int(parts[1]), "used_mib": int(parts[2])})
    return found


def topology_of(text: str) -> dict[str, str]:
    """Connections from the matrix of nvidia-smi topo -m: {"0-1": "NV18"}."""
    found = {}
    for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines():
        cells = line.split()
        if cells and (row := re.fullmatch(r"GPU(\d+)", cells[0])) and "X" in cells:
            for column, kind in enumerate(cells[1:]):
                if not re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS|X", kind):
                    break
                if kind != "X":
                    found[f"{row[1]}-{column}"] = kind
    return found


def infiniband_gbps(folder: Path) -> float:
    """Rate of the fastest active port below `folder`, from lines such as "200 Gb/sec (4X HDR)"."""
    rates = [0.0]
    for rate in folder.glob("*/ports/*/rate"):
        with suppress(OSError, ValueError):
            if "ACTIVE" in (rate.parent / "state").read_text(encoding="ascii"):
                rates.append(float(rate.read_text(encoding="ascii").split()[0]))
    return max(rates)


def _nvidia_smi(*args: str) -> str:
    """Output of nvidia-smi; "" where there is none or it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["nvidia-smi", *args], capture_output=True, text=True, timeout=20)
        return done.stdout if done.returncode == 0 else ""
    return ""
