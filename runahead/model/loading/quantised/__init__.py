"""Quantised checkpoints: the weights of each format, decoded as they are read (`FORMATS`).

To add a format: a file with a function that finds the parts of each weight among the stored tensors, and a line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from runahead.config import Table
from runahead.model.loading.quantised.in_8_bits import CodedWeight
from runahead.model.loading.quantised.packed import PackedWeight, Stored

Settings = Mapping[str, Any]
"""Description of a quantisation in a checkpoint's config."""

FORMATS: Table[str, Callable[[Stored, Settings], dict[str, Any]]] = Table(
    {
        "fp8": "runahead.model.loading.quantised.fp8:weights",
        "mxfp8": "runahead.model.loading.quantised.fp8:weights",
        "modelopt": "runahead.model.loading.quantised.modelopt:weights",
        "compressed-tensors": "runahead.model.loading.quantised.compressed_tensors:weights",
        "gptq": "runahead.model.loading.quantised.gptq:weights",
        "awq": "runahead.model.loading.quantised.awq:weights",
        "bitsandbytes": "runahead.model.loading.quantised.bitsandbytes:weights",
        "mxfp4": "runahead.model.loading.quantised.mxfp4:weights",
    }
)
"""Function of each format (`quant_method`): stored tensors by name -> plain ones and `PackedWeight` by name.

Raises a ValueError that says which weight lacks a part, has one of another size, or is in a variant that is not read.
"""


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a checkpoint's weights are quantised.

    Attributes:
        name: of the format, in `FORMATS`.
        settings: of the checkpoint's config.
        left_out: names of tensors that are not loaded.
        coded: names of weights that are not decoded, but handed on in 8 bits (`CodedWeight`).
    """

    name: str
    settings: Settings
    left_out: frozenset[str] = frozenset()
    coded: frozenset[str] = frozenset()

    def found(self, stored: Stored) -> dict[str, Any]:
        """The checkpoint's tensors by the names that they have without quantisation. Raises: ValueError: of `FORMATS`.

        Args:
            stored: as in the files.
        """
        return FORMATS[self.name](stored, self.settings)

    def weights(self, found: Mapping[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Those of `found` that are loaded, decoded as they are read.

        Args:
            dtype: of decoded weights; None for that of the format's library.
        """
        weights = {name: part for name, part in found.items() if name not in self.left_out}
        weights |= {name: CodedWeight.of(found[name]) for name in self.coded}
        for name, each in weights.items():
            if isinstance(each, PackedWeight):
                weights[name] = replace(each, dtype=dtype or each.natural, name=name)
        return weights

    def about(self, weights: Mapping[str, Any]) -> str:
        """The format's name and its bits per weight, for reports."""
        bits = sorted({each.bits for each in weights.values() if isinstance(each, PackedWeight)})
        return f"{self.name}, {' and '.join(map(str, bits)) or 'no'} bits"
