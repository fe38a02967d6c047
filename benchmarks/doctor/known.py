"""Figures of known GPUs, as their makers state them."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KnownGPU:
    """Stated memory bandwidth in bytes per second, and dense 16-bit matrix products in operations per second."""

    memory_Bps: float
    matmul_flops: float


def _gpu(memory_GBps: float, tflops: float) -> KnownGPU:
    return KnownGPU(memory_Bps=memory_GBps * 1e9, matmul_flops=tflops * 1e12)


KNOWN = {
    r"B200": _gpu(8000, 2250),
    r"H200": _gpu(4800, 989),
    r"H100 NVL": _gpu(3900, 835),
    r"H100 PCIe": _gpu(2000, 756),
    r"H100": _gpu(3350, 989),
    r"A100.*80GB PCIe": _gpu(1935, 312),
    r"A100.*80GB": _gpu(2039, 312),
    r"A100": _gpu(1555, 312),
    r"L40S": _gpu(864, 362),
    r"L4\b": _gpu(300, 121),
    r"A10\b": _gpu(600, 125),
    r"RTX 4090": _gpu(1008, 165),
    r"RTX 3090": _gpu(936, 71),
}
"""By a pattern of the name that CUDA gives; the first that fits counts."""

NVLINK_BPS = 25e9
"""Bytes per second of one NVLink in one direction, third and fourth generation."""


def known_gpu(name: str) -> KnownGPU | None:
    """Figures of the GPU of that name; None for one that is not in the table, and for CPUs."""
    return next((gpu for pattern, gpu in KNOWN.items() if re.search(pattern, name)), None)
