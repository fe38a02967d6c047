"""Comparison of a model's logits through our attention with those of transformers' own, on a short text."""

# Legend: B batch, S tokens, V vocabulary.

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runahead.model.adapters import ADAPTERS
from runahead.model.loading.sharing import local_part
from runahead.model.seam import ATTENTION_NAME, set_attention

CHECK_TOKENS = (5, 2)
"""Lengths of the two chunks with which a model is compared with transformers' own attention when it is loaded."""


def check_text(vocab_size: int, device: torch.device) -> Tensor:
    """Token ids (1, S) of the short text."""
    return (torch.arange(sum(CHECK_TOKENS), device=device) * 7 + 3)[None] % vocab_size


@torch.inference_mode()
def transformers_logits(
    module: PreTrainedModel, ids_1S: Tensor, in_step: Callable[[Callable[[], Tensor]], Tensor]
) -> Tensor:
    """Logits (B, V) of the last token, computed with transformers' own attention.

    Args:
        in_step: runs a forward, in which the ranks that share the model wait for each other.
    """
    model_type = module.config.get_text_config(decoder=True).model_type
    modules = module.modules() if model_type in ADAPTERS else []
    adapted = {child: vars(child).pop("forward") for child in modules if "forward" in vars(child)}
    # Eager attention supports all terms, but Falcon's adds its ALiBi twice (as of transformers 5.23).
    set_attention(module, "sdpa" if model_type == "falcon" else "eager")
    try:
        return in_step(torch.inference_mode()(lambda: module(input_ids=ids_1S, use_cache=False).logits[:, -1]))
    finally:
        set_attention(module, ATTENTION_NAME)
        for child, forward in adapted.items():
            child.forward = forward


def require_equal_logits(ours_BV: Tensor, theirs_BV: Tensor, *, dtype: torch.dtype, name: str, whose: str) -> None:
    """Check that logits differ by rounding alone.

    Args:
        ours_BV, theirs_BV: of the last token, through our attention and expected.
        dtype: of the weights.
        name: of the model, for the message.
        whose: where the expected ones come from, for the message.

    Raises:
        ValueError: they differ by more.
    """
    theirs_BV = theirs_BV.double()
    scale, off = theirs_BV.std().item(), (ours_BV.double() - theirs_BV).abs().max().item()
    # Rounding in the weights' dtype, relative to the spread of the logits; the error of a wrong mask, position or
    # scale is far larger. transformers' eager attention computes softmax in float32 even for float64.
    bound = {torch.float64: 1e-4, torch.float32: 1e-3}.get(dtype, 0.2)
    if not off <= bound * max(scale, 1e-6):
        raise ValueError(
            f"model {name} gives other logits through our attention than through {whose} (off by {off:.2g}, spread "
            f"{scale:.2g}); this family is not supported"
        )


def require_numbers(logits: Tensor, module: nn.Module, name: str) -> None:
    """Check that no logit is NaN or plus infinity, as damaged weights give; minus infinity is allowed.

    Args:
        logits: of any shape.
        module: the model that computed them.
        name: of the model, for the message.

    Raises:
        ValueError: a logit is NaN or infinite; the message names a weight that is, if there is one.
    """
    if logits.isnan().any() or logits.isposinf().any():
        named = ((weight, local_part(values)) for weight, values in module.named_parameters())
        found = next((weight for weight, values in named if not values.isfinite().all()), None)
        cause = "its weights are finite, so a layer overflows; use model.dtype=float32 or bfloat16"
        if found is not None:
            cause = f"its weight {found} holds NaN or infinity; restore or download the checkpoint again"
        raise ValueError(f"model {name} gives logits that are not numbers: {cause}")
