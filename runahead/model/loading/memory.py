"""Memory of a process: whether weights fit before they are loaded, and the peak while they are."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Value that resets the peak resident set size when written to clear_refs (Linux)."""


@dataclass(kw_only=True)
class Footprint:
    """Bytes of a model's weights.

    Attributes:
        copied: in memory of this process.
        mapped: in the page cache of the checkpoint's files, which all processes of a host share.
        whole: of what is in memory beside the weights while they load, at most: a whole tensor of which a share keeps
            a part, tensors as they are stored that are decoded, or what merging adapters takes.
        read: of the mapped files, while copies are made of them; the system may drop these at any time.
    """

    copied: int
    mapped: int = 0
    whole: int = 0
    read: int = field(default=0, compare=False)


class PeakMemory:
    """Peak memory of this process: allocated by PyTorch on a GPU; resident, including weights and memory that the
    allocator keeps, on a CPU.

    Attributes:
        of: "run", or "process" where the system cannot reset earlier peaks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.of = "run" if self.reset() else "process"

    def reset(self) -> bool:
        """Forget earlier peaks; returns whether the system can."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return True
        try:
            CLEAR.write_text(RESET_PEAK)
        except OSError:
            return False
        return True

    def peak_bytes(self) -> int:
        """Peak in bytes since `reset`, or since the process started."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        if self.of == "run":
            [kib] = [line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
            return int(kib) * 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def now_bytes(self) -> int:
        """Memory in use now, counted in the same way."""
        if self._device.type == "cuda":
            return int(torch.cuda.memory_allocated(self._device))
        return int(psutil.Process().memory_info().rss)


def require_room(footprint: Footprint, device: torch.device, *, label: str, ranks_on_host: int = 1) -> None:
    """Check that the weights fit into memory.

    Mapped weights may be dropped and read again, so on a CPU they must fit, beside the copied ones, into the host's
    total memory rather than into what is free. Copies of several processes are compared with the total memory too,
    since what is free changes while the other processes load.

    Raises:
        ValueError: they do not fit; the message has the bytes needed and available.
    """
    cure = "use a smaller model, model.dtype=bfloat16, more ranks that share it, or a device with more memory"
    copied = footprint.copied + footprint.whole
    if device.type == "cuda":
        total, free = copied + footprint.mapped, free_device_bytes(device)
        if total > free:
            need = f"{label} needs {_readable(total)} for its weights"
            raise ValueError(f"{need}, but {device} has {_readable(free)} free; {cure}")
        return
    available, there = available_bytes(), host_bytes()
    if copied > available:
        need = f"{label} needs {_readable(copied)} of memory for its weights"
        raise ValueError(f"{need}, but {_readable(available)} are free; {cure}")
    needed = copied * ranks_on_host + footprint.mapped
    if needed > there:
        need = f"{label} needs {_readable(needed)} of memory for its weights"
        need += f" in {ranks_on_host} processes" if ranks_on_host > 1 and footprint.copied else ""
        raise ValueError(f"{need}, but this host has {_readable(there)}; {cure}")


def free_device_bytes(device: torch.device) -> int:
    """Free bytes of a CUDA device, including those that torch's allocator holds without using them."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def free_bytes(device: torch.device, ranks_on_host: int) -> float:
    """Free memory of the device that computes, for one rank."""
    return free_device_bytes(device) if device.type == "cuda" else available_bytes() / ranks_on_host


def available_bytes() -> int:
    """Bytes of memory that this process can still take, on the host or within a batch system's or container's limit."""
    limits = [*cgroup_limits(), *process_limits()]
    return min([int(psutil.virtual_memory().available), *(limit - used for limit, used in limits)])


def host_bytes() -> int:
    """Bytes of memory of this host, or of the limit that a batch system or container set."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in cgroup_limits())])


def process_limits() -> list[tuple[int, int]]:
    """(limit, used) in bytes of this process's address space and data (ulimit -v and -d), where there is a limit."""
    memory, limits = psutil.Process().memory_info(), []
    for kind, used in (("RLIMIT_AS", memory.vms), ("RLIMIT_DATA", getattr(memory, "data", 0))):
        soft = resource.getrlimit(getattr(resource, kind))[0]
        if soft != resource.RLIM_INFINITY:
            limits.append((soft, int(used)))
    return limits


def give_back(generation: int = 2) -> None:
    """Free garbage, and return freed memory to the system: after unpacking GGUF blocks, as much as the model.

    Args:
        generation: the oldest of Python's objects among which garbage is looked for.
    """
    gc.collect(generation)
    trim()


def trim() -> None:
    """Return freed memory to the system. glibc keeps it: that of all tensors below 32 MiB in a rank."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if malloc_trim is not None:
        malloc_trim(0)


@contextmanager
def giving_back() -> Iterator[None]:
    """Context manager that calls `give_back` at its end, for what was made within it.

    Until then Python looks for no garbage, so all that was made is young. What was there before, a million objects of
    torch and transformers, would take 0.2 s to look through.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        give_back(generation=1)
        if was_enabled:
            gc.enable()


def cgroup_limits(
    root: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")
) -> list[tuple[int, int]]:
    """(limit, used) in bytes of this process's control group (version 2) and its parents, where there is a limit.

    SLURM and container engines set them, and a process that exceeds one is killed. Page cache that can be dropped does
    not count as used.
    """
    try:
        own = next(line[3:].strip("/\n") for line in process.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []  # not Linux, or version 1
    folder = root / own
    limits = []
    for group in [folder, *folder.parents]:
        if not group.is_relative_to(root):
            break
        try:
            limit = (group / "memory.max").read_text().strip()
            if limit == "max":
                continue
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            droppable = int(statistics["active_file"]) + int(statistics["inactive_file"])
            limits.append((int(limit), int((group / "memory.current").read_text()) - droppable))
        except OSError:
            continue  # the root group has no limit, and a container does not see its parents
    return limits


def _readable(num_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
