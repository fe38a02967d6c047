"""Figures of known GPUs, as their makers state them."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KnownGPU:
    """Stated figures of a GPU.

    Attributes:
        memory_bytes: size of its memory.
        memory_Bps: memory bandwidth in bytes per second.
        matmul_flops: dense 16-bit matrix products in operations per second.
        peer_Bps: bytes per second in one direction to the other GPUs of its host, over all of its NVLinks or PCIe.
    """

    memory_bytes: int
    memory_Bps: float
    matmul_flops: float
    peer_Bps: float


NVLINK_BPS = 25e9
"""Bytes per second of one NVLink in one direction, third and fourth generation."""

PCIE4_BPS, PCIE5_BPS = 32e9, 64e9
"""Bytes per second of 16 lanes in one direction."""


def _gpu(memory_gib: int, memory_GBps: float, tflops: float, peer_Bps: float) -> KnownGPU:
    return KnownGPU(
        memory_bytes=memory_gib * 2**30, memory_Bps=memory_GBps * 1e9, matmul_flops=tflops * 1e12, peer_Bps=peer_Bps
    )


KNOWN = {
    r"B200": _gpu(180, 8000, 2250, 36 * NVLINK_BPS),
    r"H200": _gpu(141, 4800, 989, 18 * NVLINK_BPS),
    r"H100 NVL": _gpu(94, 3900, 835, PCIE5_BPS),
    r"H100 PCIe": _gpu(80, 2000, 756, PCIE5_BPS),
    r"H100": _gpu(80, 3350, 989, 18 * NVLINK_BPS),
    r"A100.*80GB PCIe": _gpu(80, 1935, 312, PCIE4_BPS),
    r"A100.*80GB": _gpu(80, 2039, 312, 12 * NVLINK_BPS),
    r"A100": _gpu(40, 1555, 312, 12 * NVLINK_BPS),
    r"L40S": _gpu(48, 864, 362, PCIE4_BPS),
    r"L4": _gpu(24, 300, 121, PCIE4_BPS),
    r"A10": _gpu(24, 600, 125, PCIE4_BPS),
    r"RTX 4090": _gpu(24, 1008, 165, PCIE4_BPS),
    r"RTX 3090": _gpu(24, 936, 71, PCIE4_BPS),
}
"""Figures by a pattern of words of the name that CUDA gives; the first pattern that fits counts."""

NAMES = [pattern.replace(".*", " ") for pattern in KNOWN]
"""A name that each pattern finds, for messages."""

OTHERS = re.compile(r"\b(?:D|Ti|Max-Q|Laptop|MIG)\b", re.IGNORECASE)
"""Words that make a name that of another GPU, or of a part of one, with other figures."""


def known_gpu(name: str) -> KnownGPU | None:
    """Figures of the GPU of that name, in any case; None for one that is not in the table, and for CPUs.

    Whole words count: an RTX A1000 is no A100, and a GH200 no H200.
    """
    if OTHERS.search(name):
        return None
    return next((gpu for pattern, gpu in KNOWN.items() if re.search(rf"\b{pattern}\b", name, re.IGNORECASE)), None)
