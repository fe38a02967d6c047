"""Linear layers that are given the same tensor, such as q, k and v or gate and up: one product for all of them.

The first layer that is called computes the product with the weights of all, and the others take their part of it. The
weights lie in memory one after another, and each layer's own is a view of its rows, so that whoever reads or writes a
layer's weight finds it as before. Weights of a mapped file are fused where they lie so already, as gate and up do, and
never copied. A layer that is given a tensor alone computes many rows by a kernel of ours, as these do.
"""

# Legend: C rows, I input features, O output features of all layers.

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import Parameter

from runahead.kernels.operators import KERNELS
from runahead.model.layers.cpu_linear import CPULinear, library, multiply_fused
from runahead.model.layers.fusing import Calls, FusedForward, takes_rounding
from runahead.model.loading.memory import trim
from runahead.model.parts import is_laid_out


class Product:
    """The product of some layers with the tensor that they are given.

    The first layer computes it, and it is kept until the last is called, at most as long as the tensor lives. A layer
    takes its part once. If there is none of its tensor, as another forward came in between or a layer is called alone,
    it computes its own product, which may be rounded otherwise.

    Args:
        layers: in the order in which they are called.

    Attributes:
        weight_OI, bias_O: of all layers, in the order in which they lie in memory.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = list(layers)
        lying = sorted(layers, key=lambda layer: layer.weight.data_ptr())
        self.weight_OI = _spanning([layer.weight for layer in lying])
        biases = [layer.bias for layer in lying if layer.bias is not None]
        self.bias_O = _spanning(biases) if biases else None
        self._sizes = [layer.out_features for layer in lying]
        self._places = [lying.index(layer) for layer in layers]
        self._multiply = multiply_fused if isinstance(layers[0], CPULinear) else F.linear
        known = [(layer, name, each) for layer in layers for name, each in layer.named_parameters()]
        self._known = [(layer._parameters, name, each, each.data_ptr()) for layer, name, each in known]
        self._own = [each.detach() for *_, each in known]  # so that no memory in the span is freed
        self._kept: tuple[weakref.ref[Tensor], list[Tensor | None]] | None = None

    def fuse(self) -> None:
        """Have each layer take its part."""
        for number, layer in enumerate(self.layers):
            layer.forward = fused = FusedForward(self.part, number)  # type: ignore[method-assign]
            fused.multiplied = (layer.in_features,) if _is_onednn(layer) else ()

    def part(self, number: int, x: Tensor) -> Tensor:
        """A layer's own product with a tensor (..., I)."""
        place = self._places[number]
        parts = self._parts(x) if number == 0 else self._kept_of(x)
        part = parts[place] if parts else None
        if part is None:
            layer = self.layers[number]
            return type(layer).forward(layer, x)
        parts[place] = None
        if number == 0:
            self._kept = weakref.ref(x, self._drop), parts
        elif number == len(self.layers) - 1:
            self._kept = None
        return part

    def _parts(self, x: Tensor) -> list[Tensor | None]:
        """Each layer's part, in the order in which they lie; none for a gradient, or of other weights."""
        if torch.is_grad_enabled() or not self._is_current():
            return []
        return list(self._multiply(x, self.weight_OI, self.bias_O).split(self._sizes, dim=-1))

    def _kept_of(self, x: Tensor) -> list[Tensor | None]:
        return self._kept[1] if self._kept is not None and self._kept[0]() is x else []

    def _drop(self, of: weakref.ref[Tensor]) -> None:
        kept = self._kept
        if kept is not None and kept[0] is of:
            self._kept = None

    def _is_current(self) -> bool:
        """Whether each layer has the parameters that it had, in the same memory."""
        return all(own[name] is each and each.data_ptr() == place for own, name, each, place in self._known)


def fuse_products(module: nn.Module, calls: Calls, *, may_move: bool) -> None:
    """Fuse the linear layers of a model that are given the same tensor.

    Args:
        module: the model.
        calls: of a forward of it.
        may_move: weights are in memory of this process. At any time one product's weights are there twice.
    """
    owners = Counter(id(each) for _, each in module.named_parameters(remove_duplicate=False))
    moved = False
    for layers in siblings(module, calls):
        if any(owners[id(each)] > 1 for layer in layers for each in layer.parameters()):
            continue  # tied to another module's
        across = not may_move and layers[0].weight.device.type == "cpu"
        if may_move and [len(layers)] != [len(together) for together in _neighbours(layers, across=False)]:
            _move_together(layers)
            moved = True
            if layers[0].weight.device.type == "cpu":
                trim()  # a product's weights do not fit where the smaller ones of another were
        for together in _neighbours(layers, across=across):
            Product(together).fuse()
    if moved and layers[0].weight.is_cuda:
        torch.cuda.empty_cache()


def fuse_alone(calls: Calls) -> None:
    """Let the linear layers that no others are fused with compute many rows by a kernel of ours, if it is in use."""
    for _, layer in calls.linears if KERNELS.in_use else []:
        if _is_onednn(layer) and "forward" not in vars(layer):
            layer.forward = fused = FusedForward(_alone, layer)  # type: ignore[method-assign]
            fused.multiplied = (layer.in_features,)


def _is_onednn(layer: nn.Linear) -> bool:
    """Whether products of a layer are oneDNN's, of which a kernel of ours computes many rows."""
    return type(layer) is CPULinear and library(layer.weight.dtype) == "onednn"


def _alone(layer: nn.Linear, x: Tensor) -> Tensor:
    if type(layer.weight) is not Parameter:  # sharded weights have another type
        return type(layer).forward(layer, x)
    return multiply_fused(x, layer.weight, layer.bias)


def siblings(module: nn.Module, calls: Calls) -> list[list[nn.Linear]]:
    """Linear layers of one module that are given the same tensor one after another, in that order, once each."""
    parents: dict[nn.Module, set[int]] = {}
    for parent in module.modules():
        for child in parent.children():
            parents.setdefault(child, set()).add(id(parent))
    found = []
    for _, group in groupby(calls.linears, lambda call: (id(call[0]), parents[call[1]])):
        found.append([layer for _, layer in group])
    times = Counter(layer for layers in found for layer in layers)
    once = [layers for layers in found if all(times[each] == 1 for each in layers)]
    return [layers for layers in once if len(layers) > 1 and _are_alike(layers)]


def may_be_siblings(module: nn.Module) -> set[str]:
    """Names of the parameters of linear layers, also without memory, beside which their module has one as wide."""
    found = set()
    for name, parent in module.named_modules():
        layers = {child: layer for child, layer in parent.named_children() if isinstance(layer, nn.Linear)}
        widths = Counter(layer.in_features for layer in layers.values())
        found |= {
            ".".join(filter(None, (name, child, parameter)))
            for child, layer in layers.items()
            if widths[layer.in_features] > 1
            for parameter, _ in layer.named_parameters()
        }
    return found


def _are_alike(layers: Sequence[nn.Linear]) -> bool:
    """Whether layers can be one: plain weights of one dtype on one device, and a bias of each or of none."""
    parameters = [each for layer in layers for _, each in layer.named_parameters()]
    kinds = {(type(layer), layer.in_features, tuple(dict(layer.named_parameters()))) for layer in layers}
    places = {(each.dtype, each.device, each.is_contiguous()) for each in parameters}
    if len(kinds) > 1 or len(places) > 1 or any(is_laid_out(each) for each in parameters):
        return False
    [(dtype, device, is_contiguous)] = places
    return takes_rounding(dtype) and device.type != "meta" and is_contiguous


def _neighbours(layers: Sequence[nn.Linear], *, across: bool) -> list[list[nn.Linear]]:
    """Find the layers whose parameters lie in memory one after another, in the order of their calls.

    Args:
        across: of storages of their own, too, as tensors of a mapped file have.
    """

    def follows(tensor: Tensor, before: Tensor) -> bool:
        within = tensor.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        return (within or across) and tensor.data_ptr() == before.data_ptr() + before.nbytes

    runs: list[list[nn.Linear]] = []
    for layer in sorted(layers, key=lambda layer: layer.weight.data_ptr()):
        if runs and all(follows(getattr(layer, name), each) for name, each in runs[-1][-1].named_parameters()):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return [[layer for layer in layers if layer in run] for run in runs if len(run) > 1]


def _move_together(layers: Sequence[nn.Linear]) -> None:
    """Move the parameters of layers to memory where they lie one after another."""
    for name, _ in list(layers[0].named_parameters()):
        own = [getattr(layer, name) for layer in layers]
        together = torch.cat([each.detach() for each in own])
        for layer, part in zip(layers, together.split([len(each) for each in own]), strict=True):
            setattr(layer, name, Parameter(part, requires_grad=False))


def _spanning(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor over several that lie in memory one after another. They must live as long as it does."""
    first, shape = tensors[0].detach(), (sum(len(each) for each in tensors), *tensors[0].shape[1:])
    if len({each.untyped_storage().data_ptr() for each in tensors}) == 1:
        return first.as_strided(shape, first.stride())
    assert first.device.type == "cpu", f"storages of their own on {first.device}"
    num_bytes = sum(each.nbytes for each in tensors)  # each has a storage of its own in a mapped file
    memory = (ctypes.c_char * num_bytes).from_address(first.data_ptr())
    return torch.frombuffer(memory, dtype=first.dtype).view(shape)
