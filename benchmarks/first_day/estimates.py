"""Estimates of what each figure should be. None was measured by us: a first day shows where they are wrong.

A GPU's own figures are those that its maker states, or for one that is not known (`KNOWN`) measured ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.doctor.tasks import memory_Bps
from partitioner.cost.known_gpus import KnownGPU, known_gpu

RANGE = 1.5
"""Factor between a figure and its estimate from which on the page says so."""

GEMM_SHARE = 0.69
"""Share of the stated rate of matrix products that large ones reach: 680 of 989 TFLOP/s on an H100."""

SUM_SHARE = 0.85
"""Share of the stated memory bandwidth that a sum over a large tensor reaches."""

LAUNCH_S = 14e-6
"""Seconds in which the host starts a kernel from Python, with all that lies between two of them."""

REPLAYED_S = 2e-6
"""Seconds from the end of a kernel to the next one's start in a graph."""

CHAIN_SHARE = 0.88
"""Share of a chain's TTFT that is compute."""

STEP_KERNELS = 42
"""Kernels of a layer in a decoding step of one row."""


@dataclass(frozen=True, kw_only=True)
class GPUFigures:
    """One GPU: its figures, and whether it is Hopper or newer (FlashAttention 2 uses less of such a one)."""

    gpu: KnownGPU
    is_hopper: bool

    @property
    def gemm_flops(self) -> float:
        """Operations per second of large matrix products."""
        return GEMM_SHARE * self.gpu.matmul_flops

    @property
    def flash_flops(self) -> float:
        """Operations per second of FlashAttention 2."""
        return (0.38 if self.is_hopper else 0.6) * self.gpu.matmul_flops

    @property
    def host_Bps(self) -> float:  # noqa: N802
        """Bytes per second between page-locked host memory and the GPU."""
        return 55e9 if self.is_hopper else 25e9


def machine_of(device: torch.device) -> GPUFigures | None:
    """A GPU's figures; None for a CPU, for which nothing is estimated."""
    if device.type != "cuda":
        return None
    gpu = known_gpu(torch.cuda.get_device_name(device)) or _measured(device)
    return GPUFigures(gpu=gpu, is_hopper=torch.cuda.get_device_capability(device) >= (9, 0))


def _measured(device: torch.device) -> KnownGPU:
    """Figures of a GPU that is in no table, such that its own products and sums are as fast as estimated."""
    x, began, ended = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16), *_two_events()
    x @ x
    began.record()
    x @ x
    ended.record()
    torch.cuda.synchronize(device)
    return KnownGPU(
        memory_bytes=torch.cuda.get_device_properties(device).total_memory,
        memory_Bps=memory_Bps(device) / SUM_SHARE,
        matmul_flops=2 * 8192**3 / (began.elapsed_time(ended) / 1e3) / GEMM_SHARE,
        peer_Bps=0.0,
    )


def _two_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimate of one kind of figure.

    Attributes:
        unit: of the figure.
        of: from the machine and sizes to the value.
        because: what is assumed.
    """

    unit: str
    of: Callable[..., float]
    because: str


def _ttft_ms(gpu: GPUFigures, matmul: float, attention: float, num_bytes: float, layers: int) -> float:
    """TTFT of one GPU, by operations of matrices and of attention, bytes of all else, and layers."""
    compute_s = matmul / gpu.gemm_flops + attention / gpu.flash_flops + num_bytes / gpu.gpu.memory_Bps
    return 1e3 * max(layers * 50 * LAUNCH_S, compute_s)


ESTIMATES = {
    "matrix products": Estimate(
        unit="TFLOP/s", of=lambda gpu: gpu.gemm_flops / 1e12, because=f"{GEMM_SHARE:.0%} of the stated rate"
    ),
    "one row": Estimate(
        unit="GB/s", of=lambda gpu: SUM_SHARE * gpu.gpu.memory_Bps / 1e9, because="it reads the matrix once"
    ),
    "flash": Estimate(
        unit="TFLOP/s",
        of=lambda gpu: gpu.flash_flops / 1e12,
        because="FlashAttention 2 reaches 38% of the stated rate on Hopper, 60% before it",
    ),
    "cudnn": Estimate(
        unit="TFLOP/s",
        of=lambda gpu: 0.5 * gpu.gpu.matmul_flops / 1e12,
        because="half of the stated rate",
    ),
    "merge": Estimate(  # elements of an output
        unit="ms",
        of=lambda gpu, elements: 22 * elements / (SUM_SHARE * gpu.gpu.memory_Bps) * 1e3,
        because="22 bytes are read and written per element, float32 copies included",
    ),
    "decoding attention": Estimate(
        unit="GB/s", of=lambda gpu: 0.7 * gpu.gpu.memory_Bps / 1e9, because="keys and values are read once"
    ),
    "copy within": Estimate(
        unit="GB/s", of=lambda gpu: 0.42 * gpu.gpu.memory_Bps / 1e9, because="every byte is read and written"
    ),
    "copy to or from the host": Estimate(
        unit="GB/s", of=lambda gpu: gpu.host_Bps / 1e9, because="PCIe 5 from Hopper on, PCIe 4 before, 16 lanes"
    ),
    "page-locking": Estimate(unit="s/GB", of=lambda gpu: 0.3, because="pages of 4 KiB"),
    "product beside a copy": Estimate(
        unit="times as long as alone", of=lambda gpu: 1.0, because="copy engines take no multiprocessor"
    ),
    "a communicator": Estimate(unit="s", of=lambda gpu: 1.0, because="one rank, connected at once"),
    "its end": Estimate(unit="s", of=lambda gpu: 0.5, because="nothing is outstanding"),
    "TTFT": Estimate(  # the sizes of `_ttft_ms`
        unit="ms",
        of=_ttft_ms,
        because="matrices, attention and unfused elementwise work one after the other, or 50 launches a layer",
    ),
    "TTFT of a chain": Estimate(  # ranks, and the sizes of `_ttft_ms`
        unit="ms",
        of=lambda gpu, ranks, matmul, attention, num_bytes, layers: max(
            _ttft_ms(gpu, matmul, attention, num_bytes, layers) / (CHAIN_SHARE * ranks),
            _ttft_ms(gpu, 0, 0, 0, layers),
        ),
        because="12% of the time is not compute, with messages at 250 GB/s and 20 us, or 50 launches a layer",
    ),
    "a link": Estimate(unit="GB/s", of=lambda gpu: 250.0, because="NVLink inside a host, with few multiprocessors"),
    "latency": Estimate(unit="us", of=lambda gpu: 20.0, because="two GPUs of a host over NCCL"),
    "a replayed step": Estimate(  # bytes of weights and keys and values, layers
        unit="ms",
        of=lambda gpu, num_bytes, layers: (
            1e3 * (num_bytes / (0.75 * gpu.gpu.memory_Bps) + layers * STEP_KERNELS * REPLAYED_S)
        ),
        because=f"weights and KV at 75% of the memory's rate, {STEP_KERNELS} kernels a layer in a graph",
    ),
    "speed-up": Estimate(  # ranks
        unit="times one GPU", of=lambda gpu, ranks: CHAIN_SHARE * ranks, because="12% of the time is not compute"
    ),
}
"""Estimates by kind of figure."""
