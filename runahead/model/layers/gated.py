"""Gated MLPs in float32 on a CPU: activation and product with the gate are computed as each product is written.

Many rows are computed by one kernel of ours, if it is in use and has the activation, which keeps what is between.

An MLP is found by what it computes, down(act(gate(x)) * up(x)), where oneDNN knows the activation. Its code is tried
with small weights in place of its own, of which nothing is read.
"""

# Legend: C rows, D model dim, I inner dim.

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runahead.kernels import operators
from runahead.model.layers.cpu_linear import CPULinear, by_kernel, library, takes_kernel
from runahead.model.layers.fusing import Calls, FusedForward

ACTIVATIONS: dict[tuple[str, str], Callable[[Tensor], Tensor]] = {
    ("swish", ""): F.silu,
    ("gelu", "tanh"): lambda x: F.gelu(x, approximate="tanh"),
    ("gelu", "none"): F.gelu,
    ("relu", ""): F.relu,
}
"""oneDNN's names of activations, with its algorithm, and what they are."""

TOKENS, MODEL_DIM, INNER_DIM = 5, 8, 12

ROUNDING = 1e-5
"""Largest difference of the two, relative to the largest number. The two forms of GELU are 1e-4 apart."""

SIZES = (1.0, 10.0, 1000.0)
"""Sizes of the numbers with which an MLP is tried: beside large ones a clamp shows."""


@torch.inference_mode()
def fuse_gated(calls: Calls) -> None:
    """Fuse the gated MLPs among the modules that a forward of a model has called."""
    for mlp in calls.of_three:
        layers = [layer for layer in dict.fromkeys(each for _, each in calls.linears) if layer in set(mlp.children())]
        if len(layers) != 3 or not all(_is_plain(layer) for layer in layers):
            continue
        for gate, up in permutations(layers[:2]):
            activation = _activation(mlp, (gate, up, layers[2]))
            if activation is not None:
                mlp.forward = fused = FusedForward(_computed, mlp, (gate, up, layers[2]), *activation)
                if "_".join(filter(None, activation)) in operators.ACTIVATIONS:
                    fused.multiplied = gate.in_features, gate.out_features
                calls.linears = [(x, each) for x, each in calls.linears if each not in layers]
                break


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer computes its product by oneDNN, and nothing else."""
    return (
        type(layer) is CPULinear
        and type(layer.weight) is nn.Parameter
        and library(layer.weight.dtype) == "onednn"
        and not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))
    )


def _activation(mlp: nn.Module, layers: Sequence[nn.Linear]) -> tuple[str, str] | None:
    """The activation of an MLP whose gate, up and down are these layers; None if its code computes anything else."""
    generator = torch.Generator().manual_seed(0)

    def small(layer: nn.Linear) -> nn.Linear:
        inputs, outputs = (INNER_DIM, MODEL_DIM) if layer is layers[2] else (MODEL_DIM, INNER_DIM)
        found = nn.Linear(inputs, outputs, bias=layer.bias is not None)
        for each in found.parameters():
            each.copy_(torch.randn(each.shape, generator=generator))
        return found

    own: dict[nn.Module | None, nn.Module] = {layer: small(layer) for layer in layers}
    tried = copy.copy(mlp)
    tried._modules = {name: own.get(each, each) for name, each in mlp._modules.items() if each is not None}
    gate, up, down = own.values()
    inputs = [size * torch.randn(1, TOKENS, MODEL_DIM, generator=generator) for size in SIZES]
    try:
        expected = [type(mlp).forward(tried, x) for x in inputs]
    except Exception:  # the family's code may ask for the sizes of its own
        return None
    for name, act in ACTIVATIONS.items():
        found = [down(act(gate(x)) * up(x)) for x in inputs]
        if all(
            isinstance(theirs, Tensor)
            and theirs.shape == ours.shape
            and (ours - theirs).abs().max() <= ROUNDING * ours.abs().max()
            for ours, theirs in zip(found, expected, strict=True)
        ):
            return name
    return None


def _computed(mlp: nn.Module, layers: Sequence[nn.Linear], activation: str, algorithm: str, x_CD: Tensor) -> Tensor:
    """An MLP's output (..., D); by the family's own code where a layer is another one by now, or for a gradient."""
    if torch.is_grad_enabled() or x_CD.dtype is not torch.float32 or not all(_is_plain(layer) for layer in layers):
        out: Tensor = type(mlp).forward(mlp, x_CD)
        return out
    plain = partial(_by_onednn, layers, activation, algorithm)
    parameters = [each for layer in layers for each in (layer.weight, layer.bias)]
    if (
        takes_kernel(x_CD, *parameters)
        and (named := "_".join(filter(None, (activation, algorithm)))) in operators.ACTIVATIONS
    ):
        kind = named, *(size for each in layers for size in (*each.weight.shape, each.bias is not None))
        found = by_kernel(x_CD, partial(_by_kernel, layers, named), plain, kind)
        if found is not None:
            return found
    return plain(x_CD)


def _by_kernel(layers: Sequence[nn.Linear], activation: str, x_CD: Tensor) -> Tensor:
    gate, up, down = layers
    upper = up.weight, up.bias
    return operators.gated_mlp(x_CD, gate.weight, gate.bias, *upper, down.weight, down.bias, activation)


def _by_onednn(layers: Sequence[nn.Linear], activation: str, algorithm: str, x_CD: Tensor) -> Tensor:
    gate, up, down = layers
    multiply = torch.ops.mkldnn._linear_pointwise
    gate_CI = multiply(x_CD, gate.weight, gate.bias, activation, [], algorithm)
    inner_CI = multiply.binary(x_CD, gate_CI, up.weight, up.bias, "mul")
    out: Tensor = multiply(inner_CI, down.weight, down.bias, "none", [], "")
    return out
