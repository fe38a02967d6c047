"""Operators of the kernels of our own, where they are in use in this process; the C++ files have what they compute."""

# Legend: B batch, N query heads, K kv heads, C queries, S keys, H head dim (key), V head dim (value),
# q blocks of queries, k blocks of keys, O output features, I input features, J inner features of an MLP.

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

SOURCES = tuple(sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h")))
"""Of one library."""

NUMBERS = 16
"""Head dims are multiples of it: the most numbers of a vector."""


class Kernels:
    """The kernels in this process.

    Attributes:
        in_use: attention takes them where it can. As the number of threads it is of the whole process, and set before
            a model runs: a kernel's results differ from PyTorch's by rounding.
        lacking: why they are not in use, in a sentence, or "", as the first load of a model has decided; None before.
            A build that ends later changes nothing, since models would go on otherwise than they were checked.
        compared: whether products of many rows are right, by what was compared: sizes of weights, an activation.
    """

    in_use = False
    lacking: str | None = None

    def __init__(self) -> None:
        self.compared: dict[tuple[object, ...], bool] = {}


KERNELS = Kernels()


def take(dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Whether kernels could attend to such keys and values on a CPU, if they are in use."""
    return dtype in (torch.float32, torch.bfloat16) and not key_dim % NUMBERS and not value_dim % NUMBERS


def load(library: Path) -> None:
    """Load the built library, unless this process has one. Raises: OSError: it cannot be loaded."""
    if not is_loaded():
        torch.ops.load_library(library)
        torch.library.register_fake("runahead::attend", _attend_fake)
        torch.library.register_fake("runahead::attend_sequences", _attend_sequences_fake)
        torch.library.register_fake("runahead::linear_int8", _linear_int8_fake)
        torch.library.register_fake("runahead::rms_norm", lambda x, weight, eps: x.new_empty(x.shape))
        torch.library.register_fake("runahead::rotate", _rotate_fake)
        torch.library.register_fake("runahead::linear", _linear_fake)
        torch.library.register_fake("runahead::gated_mlp", _gated_mlp_fake)


def is_loaded() -> bool:
    return hasattr(torch.ops.runahead, "attend")


def attend(
    q_BNCH: Tensor,
    k_BKSH: Tensor,
    v_BKSV: Tensor,
    causal: bool,
    scaling: float,
    firsts_C: Tensor | None = None,
    k_start: int = 0,
    chosen_BKqk: Tensor | None = None,
    block: int = 0,
    q_first: int = 0,
    k_first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention on a CPU: output (B, N, C, V) in the queries' dtype, log-sum-exp (B, N, C) in float32.

    `causal` aligns the last query with the last key. Numbers of a head lie beside each other; a group's heads read keys
    once.

    Args:
        firsts_C: position of the first key that each query sees (int64), which never decreases; None: each sees all.
        k_start: position of the first key.
        chosen_BKqk: the blocks of keys that a block of queries sees (bool); None: each sees all.
        block: tokens of a block.
        q_first, k_first: number of the first query, and of the first key, within its block.
    """
    of_blocks = chosen_BKqk, block, q_first, k_first
    out, lse = torch.ops.runahead.attend(q_BNCH, k_BKSH, v_BKSV, causal, scaling, firsts_C, k_start, *of_blocks)
    return out, lse


def attend_sequences(
    q_SNH: Tensor, k_1UTH: Tensor, v_1UTV: Tensor, starts: Tensor, used_S: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention as of `runahead.attention.partial.attend_sequences`, on a CPU."""
    out, lse = torch.ops.runahead.attend_sequences(q_SNH, k_1UTH, v_1UTV, starts, used_S, scaling)
    return out, lse


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight of float32 numbers (..., D) on a CPU, contiguous."""
    out: Tensor = torch.ops.runahead.rms_norm(x, weight_D, eps)
    return out


def rotate(q_BNCH: Tensor, k_BKCH: Tensor, cos_BCH: Tensor, sin_BCH: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys x * cos + (-x2, x1) * sin, with x1 and x2 the halves of x, in float32 on a CPU, token-major.

    Numbers of a head lie beside each other. One row of angles may be for all rows.
    """
    q, k = torch.ops.runahead.rotate(q_BNCH, k_BKCH, cos_BCH, sin_BCH)
    return q, k


def rotates(q_BNCH: Tensor, k_BKCH: Tensor, cos_BCH: Tensor, sin_BCH: Tensor) -> bool:
    """Whether `rotate` takes these tensors."""
    batch, _, num_tokens, head_dim = q_BNCH.shape
    angles = cos_BCH.shape
    return (
        all(x.dtype is torch.float32 and x.stride(-1) == 1 and x.is_cpu for x in (q_BNCH, k_BKCH, cos_BCH, sin_BCH))
        and not head_dim % (2 * NUMBERS)
        and k_BKCH.shape[2:] == q_BNCH.shape[2:]
        and len(k_BKCH) == batch
        and angles in ((batch, num_tokens, head_dim), (1, num_tokens, head_dim))
        and sin_BCH.shape == angles
    )


def _rotate_fake(q_BNCH: Tensor, k_BKCH: Tensor, cos_BCH: Tensor, sin_BCH: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(x.transpose(1, 2).new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q_BNCH, k_BKCH))  # type: ignore[return-value]


def _attend_sequences_fake(
    q_SNH: Tensor, k_1UTH: Tensor, v_1UTV: Tensor, starts: Tensor, used_S: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    shape = q_SNH.shape[:2]
    return q_SNH.new_empty(*shape, v_1UTV.shape[-1]), q_SNH.new_empty(shape, dtype=torch.float32)


def linear_int8(x: Tensor, codes: Tensor, sums: Tensor, scales_O: Tensor, bias_O: Tensor | None) -> Tensor:
    """Product (..., O) on a CPU of a tensor (..., I) with weights in 8 bits, in its dtype, float32 or bfloat16.

    Numbers of the tensor are rounded to 8 bits, too, with a scale for each 64; sums of these are exact.

    Args:
        codes, sums, scales_O: of `runahead.model.layers.int8.EncodedWeight`.
        bias_O: in float32.
    """
    out: Tensor = torch.ops.runahead.linear_int8(x, codes, sums, scales_O, bias_O)
    return out


def _linear_int8_fake(x: Tensor, codes: Tensor, sums: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(scales))


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Product (..., O) of float32 numbers (..., I) on a CPU with a weight as it lies, contiguous.

    It is meant for many rows. A row's numbers are the same beside any others, and with any number of threads.
    """
    out: Tensor = torch.ops.runahead.linear(x, weight_OI, bias_O)
    return out


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


ACTIVATIONS = ("swish", "gelu_tanh", "relu")
"""Activations of `gated_mlp`."""


def gated_mlp(
    x: Tensor,
    gate_JI: Tensor,
    gate_bias_J: Tensor | None,
    up_JI: Tensor,
    up_bias_J: Tensor | None,
    down_OJ: Tensor,
    down_bias_O: Tensor | None,
    activation: str,
) -> Tensor:
    """down(act(gate(x)) * up(x)) (..., O) of float32 numbers (..., I), as `linear`.

    Args:
        activation: one of `ACTIVATIONS`.
    """
    layers = gate_JI, gate_bias_J, up_JI, up_bias_J, down_OJ, down_bias_O
    out: Tensor = torch.ops.runahead.gated_mlp(x, *layers, activation)
    return out


def kept_bytes(inputs: int, inner: int = 0) -> int:
    """Most memory in bytes that each thread keeps for `linear` of so many input features, or for `gated_mlp`."""
    num_bytes: int = torch.ops.runahead.kept_bytes(inputs, inner)
    return num_bytes


def _gated_mlp_fake(
    x: Tensor,
    gate: Tensor,
    gate_bias: Tensor | None,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(down))


def _attend_fake(
    q_BNCH: Tensor,
    k_BKSH: Tensor,
    v_BKSV: Tensor,
    causal: bool,
    scaling: float,
    firsts_C: Tensor | None = None,
    k_start: int = 0,
    chosen_BKqk: Tensor | None = None,
    block: int = 0,
    q_first: int = 0,
    k_first: int = 0,
) -> tuple[Tensor, Tensor]:
    batch, num_heads, num_queries, _ = q_BNCH.shape
    out = q_BNCH.new_empty(batch, num_queries, num_heads, v_BKSV.shape[-1]).transpose(1, 2)
    return out, q_BNCH.new_empty(batch, num_heads, num_queries, dtype=torch.float32)
