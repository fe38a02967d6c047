"""Floating-point operations of a prompt's prefill, by formula, and the measured rate of matrix products.

A product of (m, k) with (k, n) matrices is 2 m k n operations. With C tokens, L layers, N query heads of H dims (values
of V dims), W weights in the matrices of all layers, model dim D and a vocabulary of size Y:

    matmul     2 C W + 2 D Y         every token through every matrix, the last one through the head
    attention  2 N (H + V) sum over layers and tokens of the keys that the token sees: C (C + 1) / 2 in a causal layer,
               less where a layer has a sliding window

For Llama W is L (2 D N H + 2 D K H + 3 D F), with K KV heads and an MLP of width F. Norms, rotary embeddings, softmax
and activations are left out.
"""

# Legend: C tokens, I inputs of a matrix, O its outputs.

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from partitioner.meshes.experts import num_experts
from runahead.model.model import Model

PEAK_TOKENS = 1024
"""Rows of the matrix products whose rate is measured: about the length of a chunk."""


@dataclass(frozen=True, kw_only=True)
class PromptFlops:
    """Operations of one prompt's prefill, on all ranks together."""

    matmul: int
    attention: int


def prompt_flops(model: Model, num_tokens: int) -> PromptFlops | None:
    """Count operations by the formula of this file; None for mixtures of experts, whose active weights vary, and for
    layers with states, whose rules the formula does not have."""
    if model.held is not None or num_experts(model.config):
        return None
    head = model.module.get_output_embeddings()
    in_layers = sum(inputs * outputs for inputs, outputs in layer_matrices(model))
    keeps_last = "logits_to_keep" in inspect.signature(model.module.forward).parameters
    heads = int(model.config.num_attention_heads)
    attention = 0
    for layer, shape in enumerate(model.kv_shapes):
        attention += 2 * heads * (shape.key_dim + shape.value_dim) * _keys_seen(model, layer, num_tokens)
    return PromptFlops(
        matmul=2 * num_tokens * in_layers + 2 * (1 if keeps_last else num_tokens) * head.weight.numel(),
        attention=attention,
    )


def layer_matrices(model: Model) -> list[tuple[int, int]]:
    """(inputs, outputs) of every weight matrix except the head's."""
    head = model.module.get_output_embeddings()
    shapes = []
    for module in model.module.modules():
        if module is head:
            continue
        if isinstance(module, nn.Linear):
            shapes.append((module.in_features, module.out_features))
        elif isinstance(module, Conv1D):  # in GPT-2
            shapes.append((module.weight.shape[0], module.weight.shape[1]))
    return shapes


def _keys_seen(model: Model, layer: int, num_tokens: int) -> int:
    """Number of pairs of a token and a key that it attends to."""
    causal = num_tokens * (num_tokens + 1) // 2
    if model.first_needed(layer, num_tokens, [0]) == 0:
        return causal
    return causal - sum(model.first_needed(layer, token, [0]) for token in range(num_tokens))


def matmul_rate(model: Model, seconds: float = 1.0) -> float:
    """Operations per second of the fastest of the layers' matrix products, on this rank."""
    shapes = sorted(set(layer_matrices(model)))
    return max(_rate(model, shape, seconds / len(shapes)) for shape in shapes)


@torch.inference_mode()
def _rate(model: Model, shape: tuple[int, int], seconds: float) -> float:
    inputs, outputs = shape
    x_CI = torch.randn(PEAK_TOKENS, inputs, device=model.device).to(model.dtype)
    w_OI = torch.randn(outputs, inputs, device=model.device).to(model.dtype)

    def product_s() -> float:
        began_s = time.perf_counter()
        nn.functional.linear(x_CI, w_OI)
        if x_CI.is_cuda:
            torch.cuda.synchronize(x_CI.device)
        return time.perf_counter() - began_s

    product_s()  # the first call chooses kernels
    each_s: list[float] = []
    while sum(each_s) < seconds:
        each_s.append(product_s())
    return 2 * PEAK_TOKENS * inputs * outputs * len(each_s) / sum(each_s)
