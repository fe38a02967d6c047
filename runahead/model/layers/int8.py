"""Linear layers with weights in 8 bits (`model.weights=int8`): codes, a scale per output feature, and their product.

A layer keeps its class' place, name and bias; its weight is read as the numbers that codes and scales stand for. A
product rounds what it is given to 8 bits, too, with a scale for each 64 numbers of a token: with one scale for a whole
token its outliers cost SmolLM2 3 % of perplexity where these cost 0.4 %.
"""

# Legend: I input features, O output features.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import Parameter
from torch.utils._pytree import tree_map

from runahead.kernels import operators
from runahead.model.layers.cpu_linear import CPULinear

GROUP, QUAD, BLOCK = 64, 4, 32
"""As in runahead/kernels/int8.cpp: numbers of a token with one scale, numbers of a weight and output features that lie
together."""

LARGEST = 127
"""Largest code."""

COMPUTED = (torch.float32, torch.bfloat16)
"""Dtypes of what products are given."""

MOST_OUTPUTS = 16 * BLOCK
"""Output features that are encoded or decoded at a time: a head may have more than 100,000."""

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
            return cls.joined([cls.of(part) for part in weight_OI.split(MOST_OUTPUTS)])
        weight_OI = weight_OI.float()
        scales_O = weight_OI.abs().amax(dim=1) / LARGEST
        codes_OI = weight_OI.div(torch.where(scales_O > 0, scales_O, 1)[:, None]).round_().to(torch.int8)
        return cls.of_codes(codes_OI, scales_O)

    @classmethod
    def of_codes(cls, codes_OI: Tensor, scales_O: Tensor) -> EncodedWeight:
        """Lay out codes (O, I) in int8, with their scales in float32."""
        num_outputs, num_inputs = codes_OI.shape
        blocks, quads, groups = -(-num_outputs // BLOCK), -(-num_inputs // QUAD), -(-num_inputs // GROUP)
        codes_OI = F.pad(codes_OI, (0, quads * QUAD - num_inputs, 0, blocks * BLOCK - num_outputs))
        in_quads = codes_OI.view(torch.int32).view(blocks, BLOCK, quads)  # four numbers are moved as one
        codes = in_quads.transpose(1, 2).contiguous().view(torch.int8).view(blocks, quads, BLOCK, QUAD)
        grouped = F.pad(codes_OI, (0, groups * GROUP - quads * QUAD)).view(blocks, BLOCK, groups, GROUP)
        sums = grouped.sum(dim=-1, dtype=torch.int16).transpose(1, 2).contiguous()
        return cls(codes=codes, sums=sums, scales_O=scales_O)

    @classmethod
    def joined(cls, parts: Sequence[EncodedWeight]) -> EncodedWeight:
        """One weight of the output features of several, all but the last of which have multiples of `BLOCK`."""
        names = ("codes", "sums", "scales_O")
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})

    def decoded(self, num_inputs: int) -> Tensor:
        """The weight (O, I) in float32."""
        in_quads = self.codes.view(torch.int32).squeeze(-1)
        codes_OI = in_quads.transpose(1, 2).contiguous().flatten(0, 1).view(torch.int8)
        return codes_OI[: len(self.scales_O), :num_inputs] * self.scales_O[:, None]

    def parts(self) -> Iterator[EncodedWeight]:
        """The weight by `MOST_OUTPUTS` output features at a time."""
        blocks = MOST_OUTPUTS // BLOCK
        split = self.codes.split(blocks), self.sums.split(blocks), self.scales_O.split(MOST_OUTPUTS)
        for codes, sums, scales_O in zip(*split, strict=True):
            yield EncodedWeight(codes=codes, sums=sums, scales_O=scales_O)

    @staticmethod
    def num_bytes(num_outputs: int, num_inputs: int) -> int:
        """Bytes of a weight of this size."""
        blocks, quads, groups = -(-num_outputs // BLOCK), -(-num_inputs // QUAD), -(-num_inputs // GROUP)
        return blocks * BLOCK * (quads * QUAD + 2 * groups) + 4 * num_outputs


class DecodedWeight(Tensor):
    """The numbers (O, I) of a weight in 8 bits, decoded for each operation on them; its shape and dtype cost nothing.

    So a family's code may ask a layer for its weight's dtype in each forward, and a weight that is stored in 8 bits may
    be loaded as if it were numbers.
    """

    encoded: EncodedWeight

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, encoded: EncodedWeight, num_inputs: int, dtype: torch.dtype) -> DecodedWeight:
        size = len(encoded.scales_O), num_inputs
        found: DecodedWeight = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=encoded.codes.device)
        found.encoded = encoded
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls.of(args[0].encoded, args[0].shape[1], args[0].dtype)

        def decoded(x: Any) -> Any:
            return x.encoded.decoded(x.shape[1]).to(x.dtype) if isinstance(x, cls) else x

        return func(*tree_map(decoded, args), **tree_map(decoded, kwargs or {}))


class Int8Linear(nn.Linear):
    """A linear layer with its weight in 8 bits, which `encode_linears` makes of one.

    Attributes:
        codes, sums, scales: parameters, as of `EncodedWeight`.
        weight: a `DecodedWeight` (O, I), as it is computed with.
    """

    codes: Parameter
    sums: Parameter
    scales: Parameter
    weight_dtype: torch.dtype
    is_exact: bool
    """Whether it multiplies what it is given without rounding it, as `unrounded` has it."""

    @classmethod
    def take(cls, layer: nn.Linear) -> None:
        """Make a linear layer one of these, in place; a weight that is in 8 bits stays as it is."""
        weight = layer._parameters.pop("weight")
        assert weight is not None
        encoded = weight.encoded if isinstance(weight, DecodedWeight) else EncodedWeight.of(weight.detach())
        layer.__class__ = cls
        assert isinstance(layer, cls)
        layer.weight_dtype, layer.is_exact = weight.dtype, False
        for name, tensor in (("codes", encoded.codes), ("sums", encoded.sums), ("scales", encoded.scales_O)):
            layer.register_parameter(name, Parameter(tensor, requires_grad=False))

    @property
    def encoded(self) -> EncodedWeight:
        return EncodedWeight(codes=self.codes, sums=self.sums, scales_O=self.scales)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return DecodedWeight.of(self.encoded, self.in_features, self.weight_dtype)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():  # rounding has no gradient
            return F.linear(x, self.weight, self.bias)
        if self.is_exact:
            return torch.cat([*self.products(x, self.weight_dtype)], dim=-1)
        bias_O = None if self.bias is None else self.bias.float()
        return operators.linear_int8(x, self.codes, self.sums, self.scales, bias_O)

    def products(self, x: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """The product with the decoded weight in a dtype, by `MOST_OUTPUTS` of its output features at a time."""
        for part, first in zip(self.encoded.parts(), range(0, self.out_features, MOST_OUTPUTS), strict=True):
            bias_O = None if self.bias is None else self.bias[first : first + MOST_OUTPUTS].to(dtype)
            yield F.linear(x, part.decoded(self.in_features).to(dtype), bias_O)


def encode_linears(module: nn.Module) -> None:
    """Make the linear layers of a model on a CPU layers in 8 bits, one after another."""
    for layer in linears(module):
        Int8Linear.take(layer)


def linears(module: nn.Module) -> list[nn.Linear]:
    """The layers that can be in 8 bits: of PyTorch's own class, but for those that choose experts.

    These are a router by its name, or a `gate` beside experts, with all that is in it, and layers that stand beside
    experts.
    """
    routers = {
        each
        for parent in module.modules()
        for name, child in parent.named_children()
        if "router" in name.split("_")  # also Doge's router_gate
        or ("experts" in parent._modules and (name == "gate" or isinstance(child, nn.Linear)))
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
def unrounded(*modules: nn.Module) -> Iterator[None]:
    """Context manager in which layers in 8 bits multiply what they are given as it is, with their weights' numbers.

    So a model's layers can be compared with others that round otherwise: a difference in the last bit of a number may
    be one of 1/127 once it is rounded to 8 bits.
    """
    layers = [layer for module in modules for layer in encoded_layers(module)]
    for layer in layers:
        layer.is_exact = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_exact = False


def rounded(x: Tensor) -> Tensor:
    """The kernel's rounding of a tensor (..., I), in float64: numbers of 8 bits with a scale for each 64."""
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
        offs, sizes = list[Tensor](), list[Tensor]()
        products = layer.products(rounded(args[0]), torch.float64)
        for ours, wanted in zip(output.split(MOST_OUTPUTS, dim=-1), products, strict=True):
            offs.append((ours.double() - wanted).abs().max())
            sizes.append(wanted.abs().max())
        off, largest = (torch.stack(each).max().item() for each in (offs, sizes))
        if not off <= (ROUNDING if output.dtype is torch.float32 else 1e-2) * largest:  # also where it is NaN
            found.append(f"{names[layer]} (off by {off:.2g}, largest {largest:.2g})")

    hooks = [layer.register_forward_hook(compare) for layer in names]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else ""
