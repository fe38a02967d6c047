"""Tests in float64 have no rounding to float32 in between, and leave torch and other threads as they are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.families import CASTS, Float64, rounded

X = torch.ones(2, 2, dtype=torch.float64)


def casts(x: Tensor) -> list[Tensor]:
    """Casts that transformers writes for float32."""
    return [
        x.float(),
        x.to(torch.float32),
        x.to("cpu", torch.float32),
        x.to(dtype=torch.float32),
        x.type(torch.float32),
        x.softmax(-1, dtype=torch.float32),
        torch.softmax(x, -1, dtype=torch.float32),
        torch.nn.Softmax(-1)(x.float()),
        F.softmax(x, dim=-1, dtype=torch.float32),
        torch.nn.Parameter(x).float(),
    ]


def test_what_asks_for_float32_gets_float64_in_this_thread_alone() -> None:
    with ThreadPoolExecutor(1) as another, Float64():
        assert {each.dtype for each in casts(X)} == {torch.float64}
        assert {each.dtype for each in another.submit(casts, X).result()} == {torch.float32}
    assert {each.dtype for each in casts(X)} == {torch.float32}


def test_torch_is_as_it_was_once_the_last_one_is_closed() -> None:
    before = [getattr(place, name) for place, name in CASTS]
    with Float64():
        with Float64():
            pass
        assert X.float().dtype == torch.float64
        assert X.to(torch.float16).dtype == torch.float16
    assert [getattr(place, name) for place, name in CASTS] == before
    assert not {name for place, name in CASTS if place is torch.Tensor} & vars(torch.Tensor).keys()


def test_a_model_is_the_same_wherever_it_is_built() -> None:
    """Its rotary frequencies, of which transformers rounds some to float32."""
    outside = rounded("phi3_longrope")
    with Float64():
        inside = rounded("phi3_longrope")
        assert X.float().dtype == torch.float64
    for (name, ours), (_, theirs) in zip(inside.named_buffers(), outside.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name
