"""MXFP4 as gpt-oss stores its experts: 4-bit floating point in blocks of 32 with an exponent each.

Of the weights [E, C, R] of experts, which transformers multiplies from the right: `_blocks` uint8 [E, R, C / 32, 16],
the low code of a byte first, and `_scales` uint8 [E, R, C / 32].
"""

# Legend: E experts, R outputs, C inputs of a weight.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runahead.model.loading.quantised.bits import FP4, looked_up, pairs_of
from runahead.model.loading.quantised.packed import At, PackedWeight, Stored
from runahead.model.loading.quantised.parts import bytes_of, exponents, gathered, require, require_shape

PARTS = ("_blocks", "_scales")
SIZE = 32


def weights(stored: Stored, settings: Any) -> dict[str, Any]:
    owners, found = gathered(stored, PARTS)
    for owner, parts in owners.items():
        require(owner, parts, PARTS)
        found[owner] = _weight(owner, *(parts[name] for name in PARTS))
    return found


def _weight(owner: str, packed: Any, scale: Any) -> PackedWeight:
    *lead, num_outputs, num_blocks, _ = packed.get_shape()
    require_shape(f"{owner}_blocks", packed, [*lead, num_outputs, num_blocks, SIZE // 2], "a block of 32 numbers")
    require_shape(f"{owner}_scales", scale, [*lead, num_outputs, num_blocks], f"{owner}_blocks")

    def codes(at: At, inputs: range, outputs: range) -> Any:
        index = (
            *(slice(each, each + 1) for each in at),
            slice(outputs.start, outputs.stop),
            slice(inputs.start // SIZE, inputs.stop // SIZE),
        )
        # Inputs first: as bytes this takes an eighth of the time that it would take as numbers.
        data = packed[index].flatten(-2).flatten(0, -2).T.contiguous()
        scales = exponents(scale[index].flatten(0, -2)).T
        pairs = pairs_of(torch.tensor(FP4))

        def numbers(first: int, last: int) -> Tensor:
            of_bytes = looked_up(pairs, data[first // 2 : last // 2]).unflatten(1, (-1, 2))  # [C / 2, R, 2]
            blocks = of_bytes.transpose(1, 2).reshape(-1, SIZE, len(outputs))
            return (blocks * scales[first // SIZE : last // SIZE, None]).flatten(0, 1)

        return numbers

    return PackedWeight(
        shape=(*lead, num_blocks * SIZE, num_outputs),
        bits=4,
        codes=codes,
        scales=lambda at, inputs: torch.ones(1, 1).expand(len(inputs), 1),
        group_size=num_outputs,
        steps=(SIZE, 1),
        natural=torch.bfloat16,
        stored_bytes=bytes_of(packed, scale),
    )
