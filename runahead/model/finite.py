"""Check of a model's logits for NaN and infinity, which damaged weights give without any other error."""

from __future__ import annotations

from torch import Tensor, nn


def require_numbers(logits: Tensor, module: nn.Module, name: str) -> None:
    """Check that no logit is NaN or plus infinity; minus infinity is allowed.

    Args:
        logits: of any shape.
        module: the model that computed them.
        name: of the model, for the message.

    Raises:
        ValueError: a logit is NaN or infinite; the message names a weight that is, if there is one.
    """
    if logits.isnan().any() or logits.isposinf().any():
        found = next((weight for weight, values in module.named_parameters() if not values.isfinite().all()), None)
        cause = "its weights are finite, so a layer overflows; use model.dtype=float32 or bfloat16"
        if found is not None:
            cause = f"its weight {found} holds NaN or infinity; restore or download the checkpoint again"
        raise ValueError(f"model {name} gives logits that are not numbers: {cause}")
