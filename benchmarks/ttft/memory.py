"""Peak memory of a rank during one run."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Value that resets the peak resident set size when written to clear_refs (Linux)."""


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
