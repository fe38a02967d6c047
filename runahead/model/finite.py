"""Weights with a NaN in them give answers that look like answers: refused instead."""

from __future__ import annotations

from torch import Tensor, nn


def require_numbers(logits: Tensor, module: nn.Module, name: str) -> None:
    """Raise a ValueError if logits are NaN or infinite, minus infinity excepted; it names a weight that is."""
    if logits.isnan().any() or logits.isposinf().any():
        found = next((weight for weight, values in module.named_parameters() if not values.isfinite().all()), None)
        cause = "its weights are finite, so it overflows; use model.dtype=float32 or bfloat16"
        if found is not None:
            cause = f"its weight {found} holds values that are none; restore or download the checkpoint again"
        raise ValueError(f"model {name} gives logits that are not numbers: {cause}")
