"""The stored tensors that make one weight, by the endings of their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from runahead.model.loading.quantised.packed import FLOATS, At, Stored

BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
FP8 = ("F8_E4M3", "F8_E5M2")

OF_ACTIVATIONS = (
    *(".input_scale", ".output_scale", ".activation_scale", ".input_zero_point", ".output_zero_point"),
    *(".input_global_scale", ".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".prob_scale"),
)
"""Endings of scales of activations, keys and values, which are computed in the model's dtype here."""


def gathered(stored: Stored, endings: Sequence[str]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Parts of weights by owner and ending, and all other tensors. Scales of activations are left out.

    Args:
        endings: the longest first where one ends in another.
    """
    owners: dict[str, dict[str, Any]] = {}
    others: dict[str, Any] = {}
    for name, part in stored.items():
        ending = next((each for each in endings if name.endswith(each)), None)
        if ending is not None:
            owners.setdefault(name.removesuffix(ending), {})[ending] = part
        elif not name.endswith(OF_ACTIVATIONS):
            others[name] = part
    return owners, others


def require(owner: str, parts: dict[str, Any], needed: Sequence[str]) -> None:
    """Check that a weight has all of its parts. Raises: ValueError."""
    missing = [each for each in needed if each not in parts]
    if missing:
        there = next(iter(parts))
        raise ValueError(f"{owner}{there} is stored without {owner}{missing[0]}")


def require_shape(name: str, part: Any, shape: Sequence[int], of: str) -> None:
    """Check a part's shape. Raises: ValueError."""
    if list(part.get_shape()) != list(shape):
        raise ValueError(f"{name} has shape {list(part.get_shape())}, and {of} needs {list(shape)}")


def require_matrices(owner: str, parts: dict[str, Any], names: Sequence[str], words: Sequence[str]) -> None:
    """Check that a weight has all of these parts, as matrices, and some of words of 32 bits. Raises: ValueError."""
    require(owner, parts, names)
    for name in names:
        require_dims(f"{owner}{name}", parts[name], most=2)
        if name in words:
            require_words(f"{owner}{name}", parts[name])


def require_dims(name: str, part: Any, most: int | None = None) -> None:
    """Check that a part has two dims or more, and at most so many, and that it is not empty. Raises: ValueError."""
    shape = list(part.get_shape())
    if len(shape) < 2 or 0 in shape or (most is not None and len(shape) > most):
        raise ValueError(f"{name} has shape {shape}, which is no weight's")


def require_words(name: str, part: Any) -> None:
    """Check that a part is of words of 32 bits. Raises: ValueError."""
    if part.get_dtype() not in ("I32", "U32"):
        raise ValueError(f"{name} is stored as {part.get_dtype()}, and holds codes in words of 32 bits (I32)")


def require_scales(name: str, part: Any) -> None:
    """Check that a part is of floating-point numbers, or exponents in bytes, and not empty. Raises: ValueError."""
    require_number(name, part)
    if part.get_dtype() not in (*FLOATS, *FP8, "F8_E8M0", "U8"):
        raise ValueError(f"{name} is stored as {part.get_dtype()}, and holds scales, which are floating-point numbers")


def require_number(name: str, part: Any) -> None:
    """Check that a part is not empty. Raises: ValueError."""
    if 0 in part.get_shape():
        raise ValueError(f"{name} has shape {list(part.get_shape())}, and holds no number")


def whole_number(settings: Mapping[str, Any], *names: str) -> int:
    """A number of the settings, under the first of these names that is there. Raises: ValueError: it is none."""
    name = next((each for each in names if each in settings), None)
    if name is None:
        raise ValueError(f"its settings lack {names[0]}")
    try:
        return int(settings[name])
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}={ascii(settings[name])[:40]} of its settings is no whole number") from error


def columns_of_group(settings: Mapping[str, Any], num_cols: int, *names: str) -> int:
    """Columns of a group by the settings, under one of these names: all where they say -1 or nothing.

    Raises:
        ValueError: it is no such number.
    """
    size = whole_number(settings, *names) if any(each in settings for each in names) else -1
    if size != -1 and size < 1:
        raise ValueError(f"a group of {size} columns, as its settings say, is no group; they say -1 for all columns")
    return num_cols if size == -1 else size


def bytes_of(*parts: Any) -> int:
    return sum(prod(part.get_shape()) * BYTES.get(part.get_dtype(), 1) for part in parts)


def is_float(part: Any) -> bool:
    return part.get_dtype() in FLOATS


def dtype_of(part: Any) -> torch.dtype:
    """The dtype of a part in 16 bits or more; float32 for others."""
    return FLOATS.get(part.get_dtype(), torch.float32)


def within(part: Any, index: Any = ...) -> Tensor:
    """A part of a stored tensor, which may be a single number."""
    read: Tensor = part[index]
    return read


def rows_of(part: Any, at: At, rows: range) -> Tensor:
    """Rows of a stored tensor [..., R, anything], as a matrix."""
    index = (*(slice(each, each + 1) for each in at), slice(rows.start, rows.stop))
    read: Tensor = part[index]
    return read.flatten(0, -2) if at else read


def exponents(numbers: Tensor) -> Tensor:
    """Scales in float32: those that are stored as exponents alone (E8M0) are 2^(byte - 127)."""
    if numbers.dtype == torch.uint8 or numbers.dtype == torch.float8_e8m0fnu:
        return (numbers.view(torch.uint8).float() - 127).exp2()
    return numbers.float()
