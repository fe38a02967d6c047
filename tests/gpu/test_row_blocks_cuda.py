"""Layers that compute their tokens in blocks of rows on a GPU give the logits of a whole layer in float64 on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from runahead.cache.attention import CausalAttention
from runahead.model.model import Model
from tests.families import VOCAB_SIZE, build, throughout
from tests.gpu.models import CPU, CUDA

NUM_TOKENS, PADS, WINDOW = 70, [0, 9, 40], 16
SIZES: dict[str, Any] = {"hidden_size": 256, "head_dim": 64}
"""With heads that fused kernels take."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Part of the largest logit: some roundings in each layer."""


def model_on(device: torch.device, family: str, dtype: torch.dtype, holds: torch.dtype) -> Model:
    """The same weights, those of `dtype`, whatever type holds them; small enough that few roundings stay few."""
    sizes = SIZES | ({"sliding_window": WINDOW} if "gemma3" in family else {})
    module = build(family, dtype=torch.float32, **sizes)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.25 if parameter.ndim > 1 else 1)
    return Model(module.to(dtype).to(holds).to(device))


def logits(model: Model, device: torch.device, row_tokens: int | None, **how: Any) -> Tensor:
    """Logits (B, V), or (B, C, V), of a padded batch."""
    ids_BC = torch.randint(3, VOCAB_SIZE, (len(PADS), NUM_TOKENS), generator=torch.Generator().manual_seed(5))
    attention = CausalAttention(model.empty_cache(NUM_TOKENS, batch=len(PADS)), start=0, pads=PADS)
    found = model.forward(ids_BC.to(device), attention, start=0, pads=PADS, row_tokens=row_tokens, **how)
    return found.cpu().double()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("row_tokens", [7, 32])
def test_logits_are_those_of_whole_layers_on_a_cpu(family: str, dtype: torch.dtype, row_tokens: int) -> None:
    """Blocks that are padding of a row, blocks in which a row begins, and blocks whose windows reach others."""
    with torch.inference_mode():
        with throughout(torch.float64):
            known_BCV = logits(model_on(CPU, family, dtype, torch.float64), CPU, None, all_logits=True)
        model, most = model_on(CUDA, family, dtype, dtype), TOLERANCE[dtype] * known_BCV.abs().max()
        for stores_first in (False, True):
            found_BCV = logits(model, CUDA, row_tokens, all_logits=True, stores_first=stores_first)
            last_BV = logits(model, CUDA, row_tokens, stores_first=stores_first)
            for row, pad in enumerate(PADS):
                assert (found_BCV[row, pad:] - known_BCV[row, pad:]).abs().max() <= most
                assert (last_BV[row] - known_BCV[row, -1]).abs().max() <= most
