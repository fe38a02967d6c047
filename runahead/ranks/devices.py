"""Where a rank computes, what carries its K,V, and on how many threads."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from runahead.config import Backend, Device

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_MMAP_THRESHOLD = 32 << 20
LARGEST_INT = 2**31 - 1


def choose_device(wanted: Device, local_rank: int, local_size: int) -> torch.device:
    """A GPU for each local rank, or the CPU.

    A rank that sees one GPU takes that: schedulers such as SLURM (--gpus-per-task=1) show every rank another one.
    Whether they did is found out by `check_own_gpus` once the ranks have met.

    Raises:
        ValueError: CUDA is asked for and not there, or there are several GPUs but fewer than local ranks.
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
    """What tells a GPU from all others, on whatever host; None for a CPU."""
    if device.type != "cuda":
        return None
    # Instances of one multi-instance GPU may all have its UUID, and are named by the variable.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    instance = f" {visible}" if visible.startswith("MIG") else ""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}{instance}"


def check_own_gpus(names: Sequence[str | None]) -> None:
    """Has every rank a GPU of its own?

    Args:
        names: `gpu_name` of every rank.

    Raises:
        ValueError: names the first ranks that share one.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        if name is not None:
            ranks_of.setdefault(name, []).append(rank)
    for sharing in ranks_of.values():
        if len(sharing) > 1:
            raise ValueError(
                f"ranks {', '.join(map(str, sharing))} see the same GPU and no other; start one rank per GPU, let each "
                "see its own (srun --gpus-per-task=1), or use ranks.device=cpu"
            )


def choose_backend(wanted: Backend, device: torch.device) -> str:
    """NCCL between GPUs, Gloo otherwise or where it is asked for.

    Raises:
        ValueError: NCCL is asked for on CPUs, or this PyTorch has none.
    """
    if wanted is Backend.nccl and device.type != "cuda":
        raise ValueError("ranks.backend=nccl moves K,V between GPUs only; use ranks.backend=gloo on CPUs")
    if wanted is Backend.gloo or device.type == "cpu":
        return "gloo"
    if not dist.is_nccl_available():
        raise ValueError("ranks.backend=nccl, but this PyTorch was built without NCCL; use ranks.backend=gloo")
    return "nccl"


def default_threads(local_size: int) -> int:
    """An even share of the processors that this process may use."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, processors // local_size)


def keep_freed_memory() -> None:
    """Let glibc keep what this process frees, for its next tensors of the same size.

    By default it hands activations back to the system after every layer, which then clears the same pages anew: on a
    CPU that is several percent of a prefill, and makes its time uneven. K,V slabs above 32 MiB are still given back.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return
    mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    mallopt(M_TRIM_THRESHOLD, LARGEST_INT)
