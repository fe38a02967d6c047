"""Numbers of the host as tensors of a device, for which the host does not wait.

`torch.tensor(values, device=...)` would wait for all work that is queued on a GPU.
"""

# Legend: B batch.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def row_values(values: Sequence[int], device: torch.device) -> Tensor:
    """One integer per row as a tensor (B) of `device`."""
    if len(set(values)) == 1:
        return torch.full((len(values),), values[0], device=device)
    return sent(torch.tensor(values), device)


def sent(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`, by a copy from page-locked memory that is only queued."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
