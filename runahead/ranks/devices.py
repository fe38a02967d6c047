"""Device, communication backend and number of threads of a rank."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from runahead.config import Backend, Device

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# Parameters of mallopt(3).
LARGEST_MMAP_THRESHOLD = 32 << 20
LARGEST_INT = 2**31 - 1

BFLOAT16 = ("amx_bf16", "avx512_bf16")
"""Instructions for products of bfloat16 numbers, by torch's names."""


def choose_device(wanted: Device, local_rank: int, local_size: int) -> torch.device:
    """Choose this rank's device: GPU number `local_rank`, or the CPU.

    A rank that sees a single GPU takes that one: schedulers such as SLURM (--gpus-per-task=1) show each rank a
    different one. `check_own_gpus` verifies this once the ranks have met.

    Args:
        local_rank, local_size: number of this rank on its host, and of ranks on its host.

    Raises:
        ValueError: CUDA is asked for and not available, or several GPUs are visible but fewer than local ranks.
    """
    if wanted is Device.cpu or (wanted is Device.auto and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("ranks.device=cuda, but PyTorch sees no CUDA device; use ranks.device=cpu or check the driver")
    num_visible = torch.cuda.device_count()
    if 1 < num_visible < local_size:
        raise ValueError(
            f"{local_size} ranks on this host but {num_visible} GPUs; use --nproc-per-node {num_visible} or "
            "ranks.device=cpu"
        )
    device = torch.device("cuda", local_rank if num_visible > 1 else 0)
    torch.cuda.set_device(device)
    return device


def gpu_name(device: torch.device) -> str | None:
    """Globally unique id of a GPU, or None for a CPU."""
    if device.type != "cuda":
        return None
    # All instances of a multi-instance GPU (MIG) may report its UUID; the variable tells them apart.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    instance = f" {visible}" if visible.startswith("MIG") else ""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}{instance}"


def check_own_gpus(names: Sequence[str | None]) -> None:
    """Check that every rank has a GPU of its own.

    Args:
        names: `gpu_name` of every rank.

    Raises:
        ValueError: two ranks share a GPU; the message names them.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        if name is not None:
            ranks_of.setdefault(name, []).append(rank)
    for sharing in ranks_of.values():
        if len(sharing) > 1:
            raise ValueError(
                f"ranks {', '.join(map(str, sharing))} see the same GPU and no other; start one rank per GPU, let each "
                "see all GPUs of its host (srun --gpus-per-node=... --gpu-bind=none), or use ranks.device=cpu"
            )


def choose_backend(wanted: Backend, device: torch.device) -> str:
    """Choose the backend that carries KV between ranks: NCCL between GPUs, Gloo otherwise or on request.

    Raises:
        ValueError: NCCL is asked for on CPUs, or this PyTorch was built without it.
    """
    if wanted is Backend.nccl and device.type != "cuda":
        raise ValueError("ranks.backend=nccl sends KV between GPUs only; use ranks.backend=gloo on CPUs")
    if wanted is Backend.gloo or device.type == "cpu":
        return "gloo"
    if not dist.is_nccl_available():
        raise ValueError("ranks.backend=nccl, but this PyTorch was built without NCCL; use ranks.backend=gloo")
    return "nccl"


def default_threads(local_size: int) -> int:
    """Intra-op threads per rank: an even share of the processors that this process may use."""
    return max(1, num_processors() // local_size)


def num_processors() -> int:
    """Processors that this process may use, by its affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


SPINNING = {
    "OMP_WAIT_POLICY": ("active",),
    "GOMP_SPINCOUNT": ("infinite", "infinity"),  # of GNU's OpenMP
    "KMP_BLOCKTIME": ("infinite", str(LARGEST_INT)),  # of Intel's and LLVM's
}
"""Environment variables by which idle threads of OpenMP never sleep, and their values that say so, in lower case."""


@dataclass(frozen=True, kw_only=True)
class RankThreads:
    """Intra-op threads of a rank on a CPU.

    Attributes:
        number: of its threads while all ranks of its host compute.
        processors: on which it may run.
        spins: its idle threads keep their processors busy for ever, so that no other rank has them.
    """

    number: int
    processors: int
    spins: bool = False

    @classmethod
    def here(cls) -> RankThreads:
        """The threads of this process, as they are now."""
        spins = any(os.environ.get(name, "").strip().lower() in values for name, values in SPINNING.items())
        return cls(number=torch.get_num_threads(), processors=num_processors(), spins=spins)


def threads_while(computing: Collection[int], beside: Mapping[int, RankThreads], rank: int) -> int:
    """Threads of a rank while of its host only some ranks compute: these share the threads of the others evenly.

    Together the ranks never have more threads than when all compute, and none has fewer than its own.

    Args:
        computing: ranks, this one among them; those of other hosts do not count.
        beside: threads of all ranks of the host.
    """
    own = beside[rank]
    if any(each.spins for each in beside.values()):
        return own.number
    idle = sum(each.number for peer, each in beside.items() if peer not in computing)
    share = idle // sum(peer in computing for peer in beside)
    return max(own.number, min(own.number + share, own.processors))


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether this is a processor with instructions for products of bfloat16 matrices."""
    return device.type == "cpu" and any(torch.cpu.get_capabilities().get(name, False) for name in BFLOAT16)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next tensors, rather than return it to the system.

    By default activations are returned after every layer, and the kernel clears the same pages again: on a CPU that
    costs several percent of a prefill and makes its time uneven. KV slabs above 32 MiB are still returned.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # a C library other than glibc
        return
    mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    mallopt(M_TRIM_THRESHOLD, LARGEST_INT)
