"""Fingerprint of a model's weights, stored in files that are valid for these weights only."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

SAMPLES = 64
"""Number of values of each parameter that the fingerprint covers, spread evenly over the parameter."""


@torch.inference_mode()
def model_fingerprint(module: nn.Module) -> str:
    """Compute the fingerprint: 32 hexadecimal digits from each parameter's name, shape, dtype and some of its values.

    The same weights have the same fingerprint on every device, but another one in another dtype, since what is
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
