"""Refusals and counts of the virtual GPU; its values are checked by the other tests of this folder."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from runahead.ranks.accelerator import accelerator_for
from tests.virtual.cuda import GpuTensor, counting
from tests.virtual.cuda.memory import DEVICE

aten = torch.ops.aten
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
pytestmark = pytest.mark.usefixtures("is_virtual")


def half(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(GPU, torch.bfloat16)


def flash(q: Tensor, k: Tensor, v: Tensor) -> object:
    return aten._scaled_dot_product_flash_attention(q, k, v)


def sequences(cum_seq_k: Tensor) -> object:
    queries, starts = half(2, 4, 64), torch.arange(3, dtype=torch.int32, device=GPU)
    return aten._flash_attention_forward(
        queries, half(9, 2, 64), half(9, 2, 64), starts, cum_seq_k, 1, 9, 0.0, False, False
    )


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "two devices": (lambda: torch.ones(2, device=GPU) + torch.ones(2), "same device"),
    "an index of the GPU for the CPU": (
        lambda: torch.ones(2)[torch.zeros(1, dtype=torch.long, device=GPU)],
        "same dev",
    ),
    "weights on the CPU": (lambda: torch.nn.functional.embedding(half(2).long(), torch.ones(3, 2)), "same device"),
    "numpy": (lambda: torch.ones(2, device=GPU).numpy(), "can't convert cuda:0"),
    "pickling": (lambda: pickle.dumps(torch.ones(2, device=GPU)), "pickled"),
    "page-locked memory of the GPU": (lambda: torch.zeros(2, device=GPU, pin_memory=True), "Only dense CPU"),
    "a second GPU": (lambda: torch.cuda.set_device(1), "invalid device ordinal"),
    "a kernel of the CPU": (
        lambda: aten._scaled_dot_product_flash_attention_for_cpu(half(1, 1, 2, 8), half(1, 1, 2, 8), half(1, 1, 2, 8)),
        "'CUDA' backend",
    ),
    "flash in float32": (lambda: flash(*(half(1, 2, 3, 64).float() for _ in range(3))), "float16 and bfloat16"),
    "flash of unaligned rows": (
        lambda: flash(half(1, 2, 3, 64), half(1, 2, 3, 68)[..., :64], half(1, 2, 3, 64)),
        "aligned to 16 bytes",
    ),
    "flash of an unaligned address": (
        lambda: flash(half(1, 2, 3, 64), half(1, 2, 3, 72)[..., 4:68], half(1, 2, 3, 64)),
        "aligned to 16 bytes",
    ),
    "flash of scattered numbers": (
        lambda: flash(half(1, 2, 3, 64), half(1, 2, 64, 3).transpose(2, 3), half(1, 2, 3, 64)),
        "contiguous in its last",
    ),
    "flash of wide heads": (lambda: flash(*(half(1, 2, 3, 264) for _ in range(3))), "multiple of 8 up to 256"),
    "lengths in int64": (lambda: sequences(torch.tensor([0, 3, 9], device=GPU)), "int32"),
    "keys beyond the end": (
        lambda: sequences(torch.tensor([0, 3, 10], dtype=torch.int32, device=GPU)),
        "bound lengths|inside",
    ),
    "an unaligned mask": (
        lambda: aten._scaled_dot_product_efficient_attention(
            *(torch.ones(1, 2, 3, 8, device=GPU) for _ in range(3)), torch.ones(1, 2, 3, 3, device=GPU), True
        ),
        "attn_bias is aligned",
    ),
    "fewer KV heads": (
        lambda: aten._scaled_dot_product_efficient_attention(
            torch.ones(1, 4, 3, 8, device=GPU), *(torch.ones(1, 2, 3, 8, device=GPU) for _ in range(2)), None, True
        ),
        "one KV head per query head",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_does_not_take_is_refused(name: str) -> None:
    refused, words = REFUSED[name]
    with pytest.raises((RuntimeError, TypeError, NotImplementedError), match=words):
        refused()


def test_a_number_of_the_host_is_taken_by_elementwise_kernels() -> None:
    x = torch.ones(2, device=GPU)
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    for found in (x + one, torch.where(x > 0, two, x), x.masked_fill(x > 0, two)):
        assert found.tolist() == [2.0, 2.0]


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "a condition": lambda x: bool((x > 0).any()),
    "tolist": lambda x: x.tolist(),
    "to the host": lambda x: x.cpu(),
    "to the GPU": lambda x: torch.ones(2).to(GPU),
    "a list": lambda x: torch.tensor([1, 2], device=GPU),
    "a number into a tensor": lambda x: x.__setitem__(0, 1.0),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "an index on the host": lambda x: x[torch.tensor([0])],
    "repeated by a tensor": lambda x: x.repeat_interleave(torch.ones(2, dtype=torch.long, device=GPU)),
    "filled by a tensor": lambda x: x.masked_fill(x > 0, x[0]),
    "a stream": lambda x: torch.cuda.current_stream().synchronize(),
}
NO_WAITS: dict[str, Callable[[Tensor], object]] = {
    "page-locked": lambda x: torch.ones(2).pin_memory().to(GPU, non_blocking=True),
    "to page-locked": lambda x: x.to(CPU, non_blocking=True),
    "filled": lambda x: x[0].fill_(1.0),
    "made there": lambda x: torch.arange(3, device=GPU) + torch.full((3,), 2.0, device=GPU),
    "an index": lambda x: x[torch.zeros(1, dtype=torch.long, device=GPU)],
    "repeated to a known size": lambda x: x.repeat_interleave(
        torch.ones(2, dtype=torch.long, device=GPU), output_size=2
    ),
    "drawn": lambda x: x.exponential_(generator=torch.Generator(GPU).manual_seed(3)),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_of_the_host_is_counted_at_its_line_and_told(name: str) -> None:
    x, gpu = torch.ones(2, device=GPU), accelerator_for(GPU)
    assert gpu is not None
    with counting() as counts, gpu.noting_waits() as told:
        WAITS[name](x)
    [(_, place)] = counts.waits
    assert place.startswith("tests/gpu/test_virtual_gpu.py:") and place.rpartition(":")[2].isdecimal()
    assert len(told) == counts.waits.total() == 1
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            WAITS[name](x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", NO_WAITS)
def test_what_does_not_wait_is_not_counted(name: str) -> None:
    x = torch.ones(2, device=GPU)
    with counting() as counts:
        NO_WAITS[name](x)
    assert not counts.waits and not counts.pageable


def test_a_wait_in_the_library_is_counted_at_its_line() -> None:
    gpu = accelerator_for(GPU)
    assert gpu is not None
    with counting() as counts:
        gpu.synchronize()
    [(operation, place)] = counts.waits
    assert operation == "synchronize" and place.startswith("runahead/ranks/accelerator.py:")


def test_a_copy_from_pageable_memory_is_counted() -> None:
    with counting() as counts:
        torch.ones(2).to(GPU, non_blocking=True)
    assert counts.pageable.total() == 1 and not counts.waits


@pytest.mark.parametrize("inference", [False, True])
def test_kernels_are_those_that_torch_launches(inference: bool) -> None:
    x = torch.ones(2, 3, device=GPU)
    with torch.inference_mode(inference), counting() as counts:
        (x.transpose(0, 1).reshape(2, 3)[None, 0] @ x.view(3, 2)).view(-1).softmax(dim=0)
    assert counts.kernels == {"aten::clone": 1, "aten::mm": 1, "aten::_softmax": 1}


MADE: dict[str, Callable[[], Tensor]] = {
    "torch.tensor": lambda: torch.tensor([1.0, 2.0], device=GPU),
    "torch.as_tensor": lambda: torch.as_tensor([1.0, 2.0], device=GPU),
    "arange": lambda: torch.arange(1.0, 3.0, device=GPU),
    "linspace": lambda: torch.linspace(1.0, 2.0, 2, device=GPU),
    "eye": lambda: torch.eye(2, device=GPU).cumsum(0)[1] * torch.arange(1.0, 3.0, device=GPU),
    "indices": lambda: torch.tril_indices(2, 2, device=GPU)[0, ::2] + 1.0,
    "cuda": lambda: torch.arange(1.0, 3.0).cuda(),
    "in a script": lambda: torch.jit.script(_scripted)(torch.zeros(2, device=GPU)),
    "a new one": lambda: torch.ones(1).new_tensor([1.0, 2.0], device=GPU),
}


def _scripted(x: Tensor) -> Tensor:
    return torch.arange(1.0, 3.0, device=x.device) + x


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_a_tensor_is_made_on_the_gpu_wherever_torch_makes_it(name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        made = MADE[name]()
    assert made.device == GPU and isinstance(made, GpuTensor) and made.tolist() == [1.0, 2.0]


def test_views_share_memory_that_is_counted_once() -> None:
    before = DEVICE.allocated_bytes
    x = torch.zeros(100, 4, device=GPU)
    row = x[7]
    row.fill_(1.0)
    assert x.sum().item() == 4.0 and row.data_ptr() == x.data_ptr() + 7 * 16
    assert torch.cuda.memory_allocated() - before == 1600
    del x
    assert torch.cuda.memory_allocated() - before == 1600
    del row
    assert torch.cuda.memory_allocated() == before <= torch.cuda.max_memory_allocated()


def test_a_module_moves_as_on_a_gpu() -> None:
    layer = torch.nn.Linear(2, 2)
    weight = layer.weight
    layer.to(GPU)
    assert layer.weight is weight and isinstance(weight, torch.nn.Parameter) and weight.device == GPU
    assert copy.deepcopy(layer)(torch.ones(1, 2, device=GPU)).device == GPU


@pytest.mark.parametrize("left", [None, 0, 2, 40])
@pytest.mark.parametrize("right", [None, 0, 1])
@pytest.mark.parametrize("has_slopes", [False, True])
def test_a_window_counts_from_the_last_key(left: int | None, right: int | None, has_slopes: bool) -> None:
    """Sequences and a batch, each against scores that are written out."""
    q, k, v = half(1, 5, 4, 64), half(1, 9, 2, 64), half(1, 9, 2, 64)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=GPU) if has_slopes else None
    given = {"window_size_left": left, "window_size_right": right, "alibi_slopes": slopes}
    out, lse, *_ = aten._flash_attention_forward(q, k, v, None, None, 5, 9, 0.0, False, False, **given)
    starts = [torch.tensor([0, end], dtype=torch.int32, device=GPU) for end in (5, 9)]
    out_TNH, lse_NT, *_ = aten._flash_attention_forward(q[0], k[0], v[0], *starts, 5, 9, 0.0, False, False, **given)
    assert torch.equal(out[0], out_TNH) and torch.equal(lse[0], lse_NT)
    distances_CS = torch.arange(5)[:, None] + 4 - torch.arange(9)
    before, behind = (math.inf if limit in (None, 40) else limit for limit in (left, right))
    hidden_CS = (distances_CS > before) | (-distances_CS > behind)
    scores = torch.einsum("cnh,snh->ncs", q[0].cpu().double(), k[0].cpu().double().repeat_interleave(2, 1)) / 8
    if slopes is not None:
        scores = scores - slopes.cpu().double()[:, None, None] * distances_CS.abs()
    scores = scores.masked_fill(hidden_CS, -math.inf)
    expected = torch.einsum("ncs,snh->cnh", scores.softmax(-1), v[0].cpu().double().repeat_interleave(2, 1))
    torch.testing.assert_close(out_TNH.cpu().double(), expected, atol=2e-2, rtol=0)
    expected_lse = scores.logsumexp(-1)
    if slopes is not None and before == math.inf and right == 0:  # a causal kernel adds slope * key
        expected_lse += slopes.cpu().double()[:, None] * (torch.arange(5) + 4)
    torch.testing.assert_close(lse_NT.cpu().double(), expected_lse, atol=1e-3, rtol=0)


def test_an_empty_sequence_has_no_output_to_use() -> None:
    out, lse, *_ = aten._flash_attention_forward(
        half(2, 4, 64),
        half(9, 2, 64),
        half(9, 2, 64),
        *(torch.tensor(each, dtype=torch.int32, device=GPU) for each in ([0, 1, 2], [0, 4, 9])),
        1,
        9,
        0.0,
        False,
        False,
        seqused_k=torch.tensor([3, 0], dtype=torch.int32, device=GPU),
    )
    assert out[0].isfinite().all() and out[1].isnan().all() and (lse[:, 1] == math.inf).all()


def test_the_mode_for_waits_says_what_torch_says() -> None:
    assert torch.cuda.get_sync_debug_mode() == 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        torch.ones(1, device=GPU).item()
        assert torch.cuda.get_sync_debug_mode() == 1
        torch.cuda.set_sync_debug_mode(0)
        torch.ones(1, device=GPU).item()
    assert [str(each.message) for each in told][-1] == "called a synchronizing CUDA operation"
    assert sum("called a" in str(each.message) for each in told) == 1
