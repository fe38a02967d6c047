"""The most memory that a rank had in use during one run."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""What Linux takes in clear_refs to set the peak resident set size to the present one."""


class PeakMemory:
    """Peak of this process: allocated by PyTorch on a GPU, resident (weights and what the allocator keeps included) on
    a CPU.

    Attributes:
        of: "run", or "process" where a system cannot forget earlier peaks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.of = "run" if device.type == "cuda" or self._forget() else "process"

    def reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._forget()

    def peak_bytes(self) -> int:
        """Since `reset`, or since the process started."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        if self.of == "run":
            [kib] = [line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
            return int(kib) * 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def _forget(self) -> bool:
        try:
            CLEAR.write_text(RESET_PEAK)
        except OSError:
            return False
        return True
