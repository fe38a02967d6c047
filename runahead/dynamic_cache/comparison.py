"""Comparison of keys and values that two implementations of a model compute of the same tokens."""

# Legend: K kv heads, H key dim, X = H + V.

from __future__ import annotations

import torch
from torch import Tensor

from runahead.config import Weights
from runahead.model.checks.logits_check import bound_of, differ
from runahead.model.model import Model

LEAST_HEAD = 0.1
"""Part of the layer's norm of a head below which a head's difference is seen in the layer's, not in its own: such a
head may be nothing but rounding."""


def is_in_few_bits(model: Model) -> bool:
    """Whether a model computes in 16 bits, or rounds what its layers are given to 8, where the last bit of a number may
    become one of 1/127."""
    return model.dtype not in (torch.float32, torch.float64) or model.weights is Weights.int8


def kv_differ(given: Tensor, computed: Tensor, key_dim: int, *, in_few_bits: bool) -> str:
    """How far keys and values (..., K, X) are off if they differ by more than rounding; empty if they do not.

    In few bits deep layers have rounded much, and a few channels may be far larger than all others, so that rounding
    one of their numbers is a good part of the spread. So each token's heads are compared by their norms, and the root
    of the mean square over the heads counts. SmolLM2's were off by at most 0.03 at a text's last token in bfloat16
    (0.08 at any of 600) between eager attention and ours, by 0.008 in float16; another last token's by 0.36 and more.

    Args:
        given, computed: (..., K, H) or (..., K, X); of the same shape and dtype.
        key_dim: H. Keys and values are compared apart, as one may be far larger than the other.
    """
    for name, numbers in (("keys", slice(None, key_dim)), ("values", slice(key_dim, None))):
        theirs, mine = given[..., numbers], computed[..., numbers]
        if not mine.numel():
            continue
        if in_few_bits:
            off = _off_by_heads(theirs.double(), mine.double())
            found = "" if off <= bound_of(torch.bfloat16) else f"off by {off:.2g} of a head's norm"
        else:
            found = differ(theirs, mine, mine.dtype)
        if found:
            return f"{name} are {found}"
    return ""


def _off_by_heads(given: Tensor, computed: Tensor) -> float:
    """The largest relative difference of a token, over its heads (..., K, n)."""
    sizes = computed.norm(dim=-1)
    least = LEAST_HEAD * sizes.square().mean(dim=-1, keepdim=True).sqrt()
    off = (given - computed).norm(dim=-1) / torch.maximum(sizes, least).clamp(min=1e-6)
    return off.square().mean(dim=-1).sqrt().max().item()
