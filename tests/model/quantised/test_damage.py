"""Damaged checkpoints: any part that is missing or other than it was is named, unless the numbers are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runahead.model.loading.quantised import Form
from runahead.model.loading.quantised.packed import PackedWeight
from tests.model.quantised import checkpoints
from tests.model.quantised.test_formats import read

DAMAGE: dict[str, Callable[[Tensor], Tensor | None]] = {
    "gone": lambda x: None,
    "flat": Tensor.flatten,
    "a number less": lambda x: x.flatten()[:-1],
    "one number": lambda x: x.flatten()[0],
    "a dim more": lambda x: x[None],
    "empty": lambda x: x.flatten()[:0],
    "turned": lambda x: x.T if x.ndim == 2 else x,
    "half of its rows": lambda x: x[: len(x) // 2] if x.ndim else x,
    "twice the columns": lambda x: torch.cat([x, x], -1) if x.ndim == 2 else x,
    "in 64 bits": Tensor.long,
    "in floats": Tensor.float,
}


@pytest.mark.parametrize("form", checkpoints.FORMS)
def test_no_damage_goes_without_a_word(form: str, tmp_path: Path) -> None:
    packer, settings, _ = checkpoints.FORMS[form]
    parts, expected = packer((64, 96), torch.Generator().manual_seed(0))
    about = Form(name=settings["quant_method"], settings=settings)

    def numbers(damaged: dict[str, Tensor]) -> Tensor | None:
        """The weight; None where it is not there, has another shape or is plain, which `load` tells of any weight."""
        parts = {f"w{ending}": part.clone() for ending, part in damaged.items()}
        weight = read(about, parts, tmp_path, torch.float32).get("w.weight")
        is_there = isinstance(weight, PackedWeight) and weight.get_shape() == list(expected.shape)
        return weight[...] if is_there else None

    right, told = numbers(parts), 0
    assert right is not None
    torch.testing.assert_close(right, expected.float(), rtol=1e-6, atol=0)
    for ending, part in parts.items():
        for name, damage in DAMAGE.items():
            damaged = damage(part)
            if damaged is not None and (damaged.shape, damaged.dtype) == (part.shape, part.dtype):
                continue
            others = {each: stored for each, stored in parts.items() if each != ending}
            try:
                found = numbers(others if damaged is None else others | {ending: damaged})
            except ValueError as error:
                told += 1
                assert "w" in str(error).replace(".", " ").split() and "\n" not in str(error), (ending, name)
            else:
                if found is not None:
                    torch.testing.assert_close(found, right, rtol=1e-6, atol=0, msg=f"{ending} {name}")
    assert told > 8
