"""Weights that a checkpoint has in 8 bits as `model.weights=int8` has them: their codes and scales stay as they are."""

# Legend: R rows (outputs) and C columns (inputs) of a weight.

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from runahead.model.layers.int8 import MOST_OUTPUTS, DecodedWeight, EncodedWeight
from runahead.model.loading.quantised.packed import PackedWeight, around

MIDDLE = {torch.int8: 0, torch.uint8: 128}
"""Zero point by the type of codes: with another one a code less its zero point may need nine bits."""


@dataclass(kw_only=True)
class CodedWeight(PackedWeight):
    """A weight that is read as a `DecodedWeight`, whose codes and scales are those of the file."""

    @classmethod
    def of(cls, weight: PackedWeight) -> CodedWeight:
        return cls(**{each.name: getattr(weight, each.name) for each in fields(PackedWeight)})

    @property
    def held_bytes(self) -> int:
        """Bytes of the weight in memory."""
        return EncodedWeight.num_bytes(*self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        assert index is ..., index
        num_rows, num_cols = self.shape
        assert self.groups is None  # of one group; raises where the file names others
        scales_R = _scales(self)
        read = self.codes((), range(num_rows), range(num_cols))
        parts = []
        for first in range(0, num_rows, MOST_OUTPUTS):
            wide = around(range(first, min(first + MOST_OUTPUTS, num_rows)), self.steps[0], num_rows)
            codes_RC = read(wide.start, wide.stop)[first - wide.start :][:MOST_OUTPUTS]
            signed_RC = codes_RC if codes_RC.dtype == torch.int8 else (codes_RC ^ 128).view(torch.int8)
            parts.append(EncodedWeight.of_codes(signed_RC, scales_R[first : first + MOST_OUTPUTS]))
        return DecodedWeight.of(parts[0] if len(parts) == 1 else EncodedWeight.joined(parts), num_cols, self.dtype)


def fits(weight: PackedWeight) -> bool:
    """Whether codes are whole numbers of 8 bits around zero, with a scale for each row: only zero points are read."""
    if len(weight.shape) != 2 or weight.bits != 8 or weight.group_size < weight.shape[1] or 0 in weight.shape:
        return False
    (row_step, col_step), rows = weight.steps, range(weight.shape[0])
    middle = MIDDLE.get(weight.codes((), range(row_step), range(col_step))(0, row_step).dtype)
    if middle is None:
        return False
    return middle == 0 if weight.zeros is None else bool((weight.zeros((), rows) == middle).all())


def _scales(weight: PackedWeight) -> Tensor:
    """The scale of each row, in float32."""
    scales_R = weight.scales((), range(weight.shape[0])).float()[:, 0]
    return scales_R.clone() if weight.factor is None else scales_R * weight.factor
