"""Products of linear layers on a CPU: the same as those of `nn.Linear`, as contiguous tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from runahead import Model
from runahead.model.layers import cpu_linear
from runahead.model.layers.cpu_linear import MOST_ROWS, CPULinear, multiply_fast, takes_onednn
from tests.families import build
from tests.model.test_fusing import logits

FLOAT32 = 1e-5
"""A few hundred roundings of sums near 1."""

BFLOAT16 = 2e-2

DTYPES = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}


def pair(bias: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Linear, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Linear(96, 160, bias=bias, dtype=dtype)
    fast = nn.Sequential(nn.Linear(96, 160, bias=bias, dtype=dtype))
    fast[0].load_state_dict(plain.state_dict())
    multiply_fast(fast)
    return plain, fast[0]


def names_of(fast: nn.Module, x: torch.Tensor) -> set[str]:
    with torch.profiler.profile() as profile:
        fast(x)
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 1), (2, MOST_ROWS // 2), (1, MOST_ROWS + 1), (4,), (0, 3)])
@pytest.mark.usefixtures("onednn")
@torch.inference_mode()
def test_same_product(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    plain, fast = pair(bias, dtype)
    assert type(fast) is CPULinear
    x = (torch.randn(*shape[:-1], shape[-1], 96) if len(shape) > 1 else torch.randn(96)).to(dtype)
    out, expected = fast(x), plain(x)
    assert out.shape == expected.shape and out.dtype == expected.dtype
    assert out.is_contiguous(), "attention kernels read the last dimension without a stride"
    torch.testing.assert_close(out, expected, rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("onednn")
@torch.inference_mode()
def test_rows_of_a_larger_tensor(dtype: torch.dtype) -> None:
    """The hidden states of the last token, as the head of a model gets them, are a strided view."""
    plain, fast = pair(bias=False, dtype=dtype)
    for x in (torch.randn(3, 7, 96)[:, -1:], torch.randn(3, 96, 7).transpose(1, 2)):
        torch.testing.assert_close(fast(x.to(dtype)), plain(x.to(dtype)), rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.usefixtures("onednn")
@torch.inference_mode()
def test_a_float32_row_is_the_same_beside_any_others() -> None:
    fast = pair(bias=True, dtype=torch.float32)[1]
    x = torch.randn(300, 96)
    expected = fast(x)
    for num_rows in (2, 3, 7, 64, 299):
        assert torch.equal(fast(x[:num_rows]), expected[:num_rows]), num_rows
        assert torch.equal(fast(x[-num_rows:]), expected[-num_rows:]), num_rows


def test_other_dtypes_and_kinds_are_left_alone() -> None:
    _, float64 = pair(bias=False, dtype=torch.float64)
    assert type(float64) is nn.Linear

    class Own(nn.Linear):
        pass

    owner = nn.ModuleList([Own(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4, dtype=torch.bfloat16)])
    multiply_fast(owner)
    assert [type(layer) for layer in owner] == [Own, CPULinear]


@pytest.mark.parametrize("rows", [1, 2])
@torch.inference_mode()
def test_the_bfloat16_weight_is_the_left_factor(rows: int) -> None:
    """The operator, not the value: `linear` would bring the weight into another layout."""
    names = names_of(pair(bias=False)[1], torch.randn(rows, 96, dtype=torch.bfloat16))
    assert "aten::linear" not in names
    assert ("aten::mv" if rows == 1 else "aten::mm") in names


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.usefixtures("onednn")
@torch.inference_mode()
def test_float32_is_multiplied_by_onednn(rows: int) -> None:
    names = names_of(pair(bias=False, dtype=torch.float32)[1], torch.randn(rows, 96))
    assert "mkldnn::_linear_pointwise" in names and "aten::linear" not in names


@pytest.mark.usefixtures("onednn")
def test_gradients_go_through_products() -> None:
    plain, fast = pair(bias=True, dtype=torch.float32)
    x = torch.randn(3, 96, requires_grad=True)
    [found] = torch.autograd.grad(fast(x).sum(), x)
    [expected] = torch.autograd.grad(plain(x).sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("cpuinfo", "system", "takes"),
    [
        ("vendor_id\t: AuthenticAMD\nflags\t\t: avx2\n", "Linux", True),
        ("vendor_id\t: HygonGenuine\n", "Linux", True),
        ("vendor_id\t: GenuineIntel\n", "Linux", False),  # MKL is as fast there
        ("CPU implementer\t: 0x41\n", "Linux", False),
        ("vendor_id\t: AuthenticAMD\n", "Darwin", False),
    ],
)
def test_the_maker_of_the_processor_decides(
    cpuinfo: str, system: str, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr(Path, "read_text", lambda _: cpuinfo)
    for library in (torch.backends.mkldnn, torch.backends.mkl):
        monkeypatch.setattr(library, "is_available", lambda: True)
    takes_onednn.cache_clear()
    try:
        assert takes_onednn() == takes
    finally:
        takes_onednn.cache_clear()
    assert cpu_linear.library(torch.float64) == cpu_linear.library(torch.bfloat16) == "torch"


@pytest.mark.usefixtures("onednn")
def test_the_check_at_load_compares_with_products_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that are wrong would be taken for right, if transformers' logits were made of them, too."""
    right = logits(Model(build("llama", dtype=torch.float32)))
    takes_onednn.cache_clear()
    monkeypatch.setattr(cpu_linear, "maker", lambda: "GenuineIntel")
    torch.testing.assert_close(logits(Model(build("llama", dtype=torch.float32))), right, rtol=1e-4, atol=1e-4)
    takes_onednn.cache_clear()
    monkeypatch.setattr(cpu_linear, "maker", lambda: "AuthenticAMD")
    own = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *args: own(*args) * 1.01)
    with pytest.raises(ValueError, match="gives other logits through our attention"):
        Model(build("llama", dtype=torch.float32))
