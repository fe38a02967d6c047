"""Linear layers with weights in 8 bits (`model.weights=int8`): codes, a scale per output feature, and their product.

A layer keeps its class' place, name and bias; its weight is read as the numbers that codes and scales stand for. A
product rounds what it is given to 8 bits, too, with a scale for each 64 numbers of a token: with one scale for a whole
token its outliers cost SmolLM2 3 % of perplexity where these cost 0.4 %.
"""

# Legend: I input features, O output features.

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import Parameter

from runahead.kernels import operators
from runahead.model.layers.cpu_linear import CPULinear

GROUP, QUAD, BLOCK = 64, 4, 32
"""As in runahead/kernels/int8.cpp: numbers of a token with one scale, numbers of a weight and output features that lie
together."""

LARGEST = 127
"""Largest code."""

COMPUTED = (torch.float32, torch.bfloat16)
"""Dtypes of what products are given."""

MOST_OUTPUTS = 128 * BLOCK
"""Output features that are encoded at a time."""

ROUNDING = 1e-4
"""Part of a layer's largest number by which products may be off in float32, whose own rounding is 1e-7 of the numbers
that are added, some hundred times larger than their sum at most; in bfloat16 the last bit is 4e-3 of a number."""


@dataclass(frozen=True, kw_only=True)
class EncodedWeight:
    """A weight (O, I) in 8 bits.

    Attributes:
        codes: (blocks, quads, 32, 4) int8: of 32 output features four numbers each, then the next four. At the ends of
            both dims it is filled up with zeros.
        sums: (blocks, groups, 32) int16, of each group's codes.
        scales_O: in float32; a number is its code times the scale of its output feature.
    """

    codes: Tensor
    sums: Tensor
    scales_O: Tensor

    @classmethod
    def of(cls, weight_OI: Tensor) -> EncodedWeight:
        """Round a weight, each number to the nearest code."""
        if len(weight_OI) > MOST_OUTPUTS:
            parts = [cls.of(part) for part in weight_OI.split(MOST_OUTPUTS)]
            names = ("codes", "sums", "scales_O")
            return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})
        num_outputs, num_inputs = weight_OI.shape
        blocks, quads, groups = -(-num_outputs // BLOCK), -(-num_inputs // QUAD), -(-num_inputs // GROUP)
        weight_OI = weight_OI.float()
        scales_O = weight_OI.abs().amax(dim=1) / LARGEST
        codes_OI = weight_OI.div(torch.where(scales_O > 0, scales_O, 1)[:, None]).round_().to(torch.int8)
        codes_OI = F.pad(codes_OI, (0, quads * QUAD - num_inputs, 0, blocks * BLOCK - num_outputs))
        in_quads = codes_OI.view(torch.int32).view(blocks, BLOCK, quads)  # four numbers are moved as one
        codes = in_quads.transpose(1, 2).contiguous().view(torch.int8).view(blocks, quads, BLOCK, QUAD)
        grouped = F.pad(codes_OI, (0, groups * GROUP - quads * QUAD)).view(blocks, BLOCK, groups, GROUP)
        sums = grouped.sum(dim=-1, dtype=torch.int16).transpose(1, 2).contiguous()
        return cls(codes=codes, sums=sums, scales_O=scales_O)

    def decoded(self, num_inputs: int) -> Tensor:
        """The weight (O, I) in float32."""
        in_quads = self.codes.view(torch.int32).squeeze(-1)
        codes_OI = in_quads.transpose(1, 2).contiguous().flatten(0, 1).view(torch.int8)
        return codes_OI[: len(self.scales_O), :num_inputs] * self.scales_O[:, None]

    @staticmethod
    def num_bytes(num_outputs: int, num_inputs: int) -> int:
        """Bytes of a weight of this size."""
        blocks, quads, groups = -(-num_outputs // BLOCK), -(-num_inputs // QUAD), -(-num_inputs // GROUP)
        return blocks * BLOCK * (quads * QUAD + 2 * groups) + 4 * num_outputs


class Int8Linear(nn.Linear):
    """A linear layer with its weight in 8 bits, which `encode_linears` makes of one.

    Attributes:
        codes, sums, scales: parameters, as of `EncodedWeight`.
        weight: (O, I) as it is computed with, made anew for whoever reads it.
    """

    codes: Parameter
    sums: Parameter
    scales: Parameter
    weight_dtype: torch.dtype
    is_exact: bool
    """Whether it multiplies what it is given without rounding it, as `unrounded` has it."""

    @classmethod
    def take(cls, layer: nn.Linear) -> None:
        """Make a linear layer one of these, in place."""
        weight = layer._parameters.pop("weight")
        assert weight is not None
        encoded = EncodedWeight.of(weight.detach())
        layer.__class__ = cls
        assert isinstance(layer, cls)
        layer.weight_dtype, layer.is_exact = weight.dtype, False
        for name, tensor in (("codes", encoded.codes), ("sums", encoded.sums), ("scales", encoded.scales_O)):
            layer.register_parameter(name, Parameter(tensor, requires_grad=False))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        encoded = EncodedWeight(codes=self.codes, sums=self.sums, scales_O=self.scales)
        return encoded.decoded(self.in_features).to(self.weight_dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_exact or (x.requires_grad and torch.is_grad_enabled()):  # rounding has no gradient
            return F.linear(x, self.weight, self.bias)
        bias_O = None if self.bias is None else self.bias.float()
        return operators.linear_int8(x, self.codes, self.sums, self.scales, bias_O)


def encode_linears(module: nn.Module) -> None:
    """Make the linear layers of a model on a CPU layers in 8 bits, one after another."""
    for layer in linears(module):
        Int8Linear.take(layer)


def linears(module: nn.Module) -> list[nn.Linear]:
    """The layers that can be in 8 bits: of PyTorch's own class, but for those that choose experts.

    These are a `router`, or a `gate` beside experts, with all that is in it, and layers that stand beside experts.
    """
    routers = {
        each
        for parent in module.modules()
        for name, child in parent.named_children()
        if name == "router" or ("experts" in parent._modules and (name == "gate" or isinstance(child, nn.Linear)))
        for each in child.modules()
    }
    found = [each for each in module.modules() if isinstance(each, nn.Linear) and each not in routers]
    return [each for each in found if type(each) in (nn.Linear, CPULinear)]


def bytes_of_linears(module: nn.Module) -> tuple[int, int, int]:
    """Bytes of the weights of layers that can be in 8 bits: as they are, then, and of the largest while it is encoded.

    The model may have no memory.
    """
    layers = linears(module)
    then = [EncodedWeight.num_bytes(each.out_features, each.in_features) for each in layers]
    return sum(each.weight.nbytes for each in layers), sum(then), 2 * max(then, default=0)  # in parts and as a whole


def encoded_share(module: nn.Module) -> float:
    """Share of a model's numbers that are in 8 bits, tied ones counted once."""
    layers = encoded_layers(module)
    encoded, scales = sum(each.in_features * each.out_features for each in layers), {each.scales for each in layers}
    others = sum(each.numel() for each in module.parameters() if each.is_floating_point() and each not in scales)
    return encoded / max(1, encoded + others)


def encoded_layers(module: nn.Module) -> list[Int8Linear]:
    """The layers of a model that are in 8 bits."""
    return [child for child in module.modules() if isinstance(child, Int8Linear)]


@contextmanager
def unrounded(module: nn.Module) -> Iterator[None]:
    """Context manager in which layers in 8 bits multiply what they are given as it is, with their weights' numbers.

    So a model's layers can be compared with others that round otherwise: a difference in the last bit of a number may
    be one of 1/127 once it is rounded to 8 bits.
    """
    layers = encoded_layers(module)
    for layer in layers:
        layer.is_exact = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_exact = False


def rounded(x: Tensor) -> Tensor:
    """What the kernel makes of a tensor (..., I), in float64: numbers of 8 bits with a scale for each 64."""
    grouped = F.pad(x.float(), (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    largest = grouped.abs().amax(dim=-1, keepdim=True)
    codes = (grouped.double() * (torch.full_like(largest, LARGEST) / largest).double()).round()
    numbers = torch.where(largest > 0, codes * (largest / LARGEST).double(), 0)
    return numbers.flatten(-2)[..., : x.shape[-1]]


def wrong_product(module: nn.Module, run: Callable[[], object]) -> str:
    """Name of a layer in 8 bits whose product differs from that of the same numbers in float64, with how far; or "".

    Args:
        run: a forward of the model.
    """
    names = {layer: name for name, layer in module.named_modules() if isinstance(layer, Int8Linear)}
    found: list[str] = []
    waiting = set(names)  # for their first product, which tells

    def compare(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, Int8Linear)
        if layer not in waiting:
            return
        waiting.remove(layer)
        encoded = EncodedWeight(codes=layer.codes, sums=layer.sums, scales_O=layer.scales)
        bias_O = None if layer.bias is None else layer.bias.double()
        wanted = F.linear(rounded(args[0]), encoded.decoded(layer.in_features).double(), bias_O)
        most = (ROUNDING if output.dtype is torch.float32 else 1e-2) * wanted.abs().max().item()
        off = (output.double() - wanted).abs().max().item()
        if not off <= most:  # also where it is NaN
            found.append(f"{names[layer]} (off by {off:.2g}, largest {wanted.abs().max().item():.2g})")

    hooks = [layer.register_forward_hook(compare) for layer in names]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else ""
