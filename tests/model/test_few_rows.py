"""Products of few rows in bfloat16 on a CPU: the same products as `nn.Linear`, as contiguous tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runahead.model.layers.few_rows import MOST_ROWS, FewRowsLinear, multiply_few_rows_fast


def pair(bias: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Linear, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Linear(96, 160, bias=bias, dtype=dtype)
    fast = nn.Sequential(nn.Linear(96, 160, bias=bias, dtype=dtype))
    fast[0].load_state_dict(plain.state_dict())
    multiply_few_rows_fast(fast)
    return plain, fast[0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 1), (2, MOST_ROWS // 2), (1, MOST_ROWS + 1), (4,), (0, 3)])
@torch.inference_mode()
def test_same_product(shape: tuple[int, ...], bias: bool) -> None:
    plain, fast = pair(bias)
    x = torch.randn(*shape[:-1], shape[-1], 96, dtype=torch.bfloat16) if len(shape) > 1 else torch.randn(96).bfloat16()
    out, expected = fast(x), plain(x)
    assert out.shape == expected.shape and out.dtype == expected.dtype
    assert out.is_contiguous(), "attention kernels read the last dimension without a stride"
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@torch.inference_mode()
def test_rows_of_a_larger_tensor() -> None:
    """The hidden states of the last token, as the head of a model gets them, are a strided view."""
    plain, fast = pair(bias=False)
    x = torch.randn(3, 7, 96, dtype=torch.bfloat16)[:, -1:]
    torch.testing.assert_close(fast(x), plain(x), rtol=2e-2, atol=2e-2)


def test_other_dtypes_and_kinds_are_left_alone() -> None:
    _, float32 = pair(bias=False, dtype=torch.float32)
    assert type(float32) is nn.Linear

    class Own(nn.Linear):
        pass

    owner = nn.ModuleList([Own(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4, dtype=torch.bfloat16)])
    multiply_few_rows_fast(owner)
    assert [type(layer) for layer in owner] == [Own, FewRowsLinear]


@pytest.mark.parametrize("rows", [1, 2])
@torch.inference_mode()
def test_the_weight_is_the_left_factor(rows: int) -> None:
    """The operator, not the value: `linear` would bring the weight into another layout."""
    _, fast = pair(bias=False)
    with torch.profiler.profile() as profile:
        fast(torch.randn(rows, 96, dtype=torch.bfloat16))
    names = {event.key for event in profile.key_averages()}
    assert "aten::linear" not in names
    assert ("aten::mv" if rows == 1 else "aten::mm") in names
