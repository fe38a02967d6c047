"""Which weights a file was made for: a fingerprint of a model, so that another model's file is never taken for it."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

SAMPLES = 64
"""Values of each parameter that are looked at, spread evenly over it."""


@torch.inference_mode()
def model_fingerprint(module: nn.Module) -> str:
    """32 hexadecimal digits: of every parameter its name, shape, and some of its values in float32.

    The same weights have the same fingerprint on every device. In another dtype they have another one, since what is
    computed from them differs.
    """
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        flat = parameter.detach().reshape(-1)
        index = torch.linspace(0, max(0, flat.numel() - 1), min(SAMPLES, flat.numel()), dtype=torch.float64)
        values = flat[index.long().to(flat.device)].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:32]
