"""Prediction of a layer's queries from the input of the layer before it (after InfiniGen, Sec. 4.3).

Inputs of consecutive layers are similar, since a layer adds little to its residual stream. So the input of one layer,
passed through the next layer's norm and query projection, approximates that layer's queries. (The paper uses the input
as the layer before normalises it, which loses more, since norms differ from layer to layer.) The projection is the
model's own code, stopped where it passes its queries to attention; if it is a norm and a linear map, checked to give
the same, only these are computed.
"""

# Legend: B batch, N query heads, C new tokens, D model dim, H head dim, V value dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runahead.attention.base import ForwardEndsHere, LayerInput, Recording
from runahead.model.layers.hooks import hook_before
from runahead.model.layers.int8 import Int8Linear, unrounded
from runahead.model.layers.norms import rms_eps
from runahead.model.parts import local_part
from runahead.model.seam import SeamCache
from runahead.rotary import Rotary

PROBED_AT = 11
"""Position of the token with which predictions are compared with the model's own queries."""


@dataclass(frozen=True, kw_only=True)
class _Projection:
    """Queries as rotated(q_norm(linear(norm(x))) * factor), of this rank's heads.

    `eps` is that of an RMS norm, which one kernel computes.
    """

    norm: nn.Module | None
    linear: nn.Linear
    q_norm: nn.Module | None
    rotary: Rotary
    head_dim: int
    factor: float = 1.0
    eps: float | None = None

    @property
    def weight(self) -> Tensor:
        return local_part(self.linear.weight)

    @property
    def bias(self) -> Tensor | None:
        return None if self.linear.bias is None else local_part(self.linear.bias)

    def product(self, x: Tensor) -> Tensor:
        """The linear map; with a weight in 8 bits that of the layer itself, which rounds what it is given."""
        return self.linear.forward(x) if isinstance(self.linear, Int8Linear) else F.linear(x, self.weight, self.bias)

    def normed(self, x: Tensor) -> Tensor:
        if self.norm is None:
            return x
        if self.eps is not None:
            return F.rms_norm(x, x.shape[-1:], local_part(self.norm.weight), self.eps)  # type: ignore[arg-type]
        return self.norm(x)

    def queries(self, given: LayerInput) -> Tensor:
        x_BCD = self.normed(given.x_BCD)
        q_BCNH = self.product(x_BCD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None:
            q_BCNH = self.q_norm(q_BCNH)
        if self.factor != 1:
            q_BCNH = q_BCNH * self.factor
        if q_BCNH.shape[1] == 1:
            return self.rotary.rotated_token(q_BCNH[:, 0], given.start, given.pads).unsqueeze(2)
        return self.rotary.rotated(q_BCNH.transpose(0, 1), given.start, given.pads).permute(1, 2, 0, 3)


class FoldedProjection:
    """A projection with a basis folded into its weights, so that fewer weights are read.

    Args:
        projection: linear(norm(x)), without norms or rotations after it.
        basis_KHr: columns for the query heads of each KV head.
    """

    def __init__(self, projection: _Projection, basis_KHr: Tensor) -> None:
        num_kv_heads, head_dim, self._columns = basis_KHr.shape
        self._projection = projection
        basis_KrH = basis_KHr.mT * projection.factor
        weight_KGHD = projection.weight.unflatten(0, (num_kv_heads, -1, head_dim))
        self._weight_XD = torch.einsum("krh,kghd->kgrd", basis_KrH, weight_KGHD).flatten(0, 2).contiguous()
        self._bias_X = None
        if projection.bias is not None:
            bias_KGH = projection.bias.unflatten(0, (num_kv_heads, -1, head_dim))
            self._bias_X = torch.einsum("krh,kgh->kgr", basis_KrH, bias_KGH).flatten()

    @property
    def num_bytes(self) -> int:
        """Bytes of the folded weights."""
        return self._weight_XD.nbytes + (0 if self._bias_X is None else self._bias_X.nbytes)

    def queries(self, given: LayerInput) -> Tensor:
        """The last token's queries (B, N, r) in the basis."""
        x_BD = self._projection.normed(given.x_BCD[:, -1])
        return F.linear(x_BD, self._weight_XD, self._bias_X).unflatten(-1, (-1, self._columns))


class QueryPrediction:
    """Prediction of queries for one model, by hooks on its decoder layers.

    Args:
        layers: the model's decoder layers.
        record: runs one token at a position, and returns what the layers passed to their attention.
        rotaries: of each layer, if known; otherwise a projection that rotates runs as the model's own code.

    Raises:
        ValueError: layers are called with different arguments.
    """

    def __init__(
        self, layers: Sequence[nn.Module], record: Callable[[int], Recording], rotaries: Sequence[Rotary] | None
    ) -> None:
        self._layers = layers
        for index, module in enumerate(layers):
            hook_before(module, _ShowingInput(index))
        self._projections: list[_Projection | None] = []
        with unrounded(*layers):
            recording = record(PROBED_AT)
            for layer, q_BNCH, *_ in recording.calls:
                given = recording.inputs[layer]
                as_called_before = replace(recording.inputs[max(0, layer - 1)], x_BCD=given.x_BCD)
                if not _same(self._by_module(layer, as_called_before), q_BNCH):
                    raise ValueError(f"calls layer {layer} with other arguments than the layer before it")
                self._projections.append(self._found(layer, given, q_BNCH, rotaries))

    def queries(self, layer: int, given: LayerInput) -> Tensor:
        """Predict the queries (B, N, C, H) that a layer passes to attention from the input of another layer."""
        projection = self._projections[layer]
        return self._by_module(layer, given) if projection is None else projection.queries(given)

    def folded(self, layer: int, basis_KHr: Tensor) -> FoldedProjection | None:
        """Fold a basis per KV head into a layer's query projection.

        Args:
            basis_KHr: columns for the query heads of each KV head.

        Returns:
            None if there are rotations or norms between the weights and the queries.
        """
        projection = self._projections[layer]
        if projection is None or projection.q_norm is not None or len(projection.rotary.inv_freq_F):
            return None
        return FoldedProjection(projection, basis_KHr)

    def _by_module(self, layer: int, given: LayerInput) -> Tensor:
        recording = Recording(start=given.start, pads=list(given.pads), answer=_end)
        forward = SeamCache(recording, given.start)
        keywords = {name: value for name, value in given.keywords.items() if name != "hidden_states"}
        keywords |= {name: forward for name, value in keywords.items() if isinstance(value, SeamCache)}
        rest = [forward if isinstance(value, SeamCache) else value for value in given.rest]
        with suppress(ForwardEndsHere):
            self._layers[layer](given.x_BCD, *rest, **keywords)
        return recording.calls[0][1]

    def _found(
        self, layer: int, given: LayerInput, q_BNCH: Tensor, rotaries: Sequence[Rotary] | None
    ) -> _Projection | None:
        """The layer's projection as norm and linear map, if these give its queries; otherwise None."""
        parts = dict(self._layers[layer].named_modules())
        linears = [part for name, part in parts.items() if name.endswith("q_proj") and isinstance(part, nn.Linear)]
        if len(linears) != 1:
            return None
        rotary = Rotary(torch.empty(0)) if rotaries is None else rotaries[layer]
        model_dim, head_dim = given.x_BCD.shape[-1], q_BNCH.shape[-1]
        norms = [None, *(part for part in parts.values() if _is_norm(part, model_dim))]
        q_norms = [
            None,
            *(part for name, part in parts.items() if name.endswith("q_norm") and _is_norm(part, head_dim)),
        ]
        for norm, q_norm in product(norms, q_norms):
            plain = _Projection(norm=norm, linear=linears[0], q_norm=q_norm, rotary=rotary, head_dim=head_dim)
            ours = plain.queries(given)
            if ours.shape == q_BNCH.shape:
                factor = float((ours * q_BNCH).sum() / (ours * ours).sum())
                projection = replace(plain, factor=1.0 if abs(factor - 1) < 1e-3 else factor)
                if _same(projection.queries(given), q_BNCH):
                    eps = None if norm is None else rms_eps(norm, local_part(norm.weight))
                    return projection if norm is None else replace(projection, eps=eps)
        return None


def _is_norm(module: nn.Module, dim: int) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.shape == (dim,)


@dataclass(frozen=True)
class _ShowingInput:
    """The hook that passes the input of a layer to the attention of the forward."""

    layer: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        forward = SeamCache.among(args, keywords)
        if forward is not None:  # None while transformers' own attention computes
            attention = forward.attention
            x_BCD, rest = (args[0], args[1:]) if args else (keywords["hidden_states"], ())
            given = LayerInput(x_BCD=x_BCD, rest=rest, keywords=keywords, start=attention.start, pads=attention.pads)
            attention.see_input(self.layer, given)


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    rounding = 1e-3 if a.dtype in (torch.float32, torch.float64) else 0.05
    return bool((a - b).abs().max() <= rounding * b.abs().max())


def _end(layer: int, out_BNCV: Tensor) -> Tensor:
    """End the forward of a layer with its attention, to skip the rest of it."""
    raise ForwardEndsHere
