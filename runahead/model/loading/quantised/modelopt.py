"""ModelOpt: 8-bit and 4-bit floating point (FP8, NVFP4) with `weight_scale`, as NVIDIA's checkpoints have them.

Of a weight [R, C]: `weight` F8_E4M3 with `weight_scale` of the tensor, of rows, or [R / r, 1, C / c, 1]; or `weight`
uint8 [R, C / 2] with `weight_scale` F8_E4M3 [R, C / 16] and `weight_scale_2`, which multiplies these.
"""

# Legend: R rows (outputs) and C columns (inputs) of a weight.

from __future__ import annotations

from typing import Any

from torch import Tensor

from runahead.model.loading.quantised.fp8 import coded, with_scales
from runahead.model.loading.quantised.packed import PackedWeight, Stored
from runahead.model.loading.quantised.parts import FP8, require_scales, within
from runahead.model.loading.quantised.scales import scaled

SECOND = ".weight_scale_2"
TURNED = ".pre_quant_scale"


def weights(stored: Stored, settings: Any) -> dict[str, Any]:
    turned = next((name for name in stored if name.endswith(TURNED)), None)
    if turned is not None:
        raise ValueError(f"{turned} scales activations, which is not done; take one in FP8 or NVFP4")
    second = {name.removesuffix(SECOND): part for name, part in stored.items() if name.endswith(SECOND)}
    first = {name: part for name, part in stored.items() if not name.endswith(SECOND)}
    plain, found = {}, {}
    for name, part in first.items():
        owner = name.removesuffix(".weight")
        if name.endswith(".weight") and part.get_dtype() == "U8":
            found[name] = _nvfp4(owner, part, first, second)
        else:
            plain[name] = part
    for name in found:
        del plain[f"{name}_scale"]
    plain |= {name: _Grid(part) for name, part in plain.items() if name.endswith(".weight_scale")}
    found |= with_scales(plain, (".weight_scale",), ())
    lost = next((owner for owner in second if not isinstance(found.get(f"{owner}.weight"), PackedWeight)), None)
    if lost is not None:
        raise ValueError(f"{lost}{SECOND} is stored without the weight that it belongs to")
    return found


class _Grid:
    """Scales of blocks without their dims of one: [R / r, 1, C / c, 1] -> [R / r, C / c]."""

    def __init__(self, stored: Any) -> None:
        shape = stored.get_shape()
        self._stored, self._shape = stored, [shape[0], shape[2]] if len(shape) == 4 else shape

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        code: str = self._stored.get_dtype()
        return code

    def __getitem__(self, index: Any) -> Tensor:
        return within(self._stored).reshape(self._shape)[index]


def _nvfp4(owner: str, weight: Any, first: Stored, second: Stored) -> PackedWeight:
    scale_name = f"{owner}.weight_scale"
    scale = first.get(scale_name)
    if scale is None or owner not in second or scale.get_dtype() not in FP8:
        raise ValueError(f"{owner}.weight is stored in 4 bits without its scales, {scale_name} and its {SECOND[1:]}")
    of_tensor = second[owner]
    require_scales(f"{owner}{SECOND}", of_tensor)
    codes = coded(f"{owner}.weight", weight)
    packed = scaled(codes, scale_name, scale, (1, 16))
    of_groups = packed.scales
    packed.scales = lambda at, rows: of_groups(at, rows) * within(of_tensor).float().reshape(1, 1)
    return packed
