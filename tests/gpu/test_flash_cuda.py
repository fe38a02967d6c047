"""A FlashAttention that is installed takes the place of torch's own if its numbers are right, and gives way if not."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import _registry

from runahead.attention import flash
from tests.gpu.models import CUDA
from tests.virtual.cuda import kernels
from tests.virtual.cuda.device import known

NAME = "aten::_flash_attention_forward"
SDPA = "aten::_scaled_dot_product_flash_attention"

pytestmark = pytest.mark.usefixtures("is_virtual")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    flash.use_newest.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", dict(_registry._FLASH_ATTENTION_IMPLS))
    yield
    nn.attention.restore_flash_attention_impl(_raise_warn=False)
    flash.use_newest.cache_clear()


class Installed:
    """A FlashAttention 3 that is called in place of the virtual GPU's; it may change what that returns."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any] = lambda out, lse: (out, lse)
    ) -> None:
        self.calls, self._before = 0, {name: kernels.KERNELS[name] for name in (NAME, SDPA)}
        self._change = change
        monkeypatch.setitem(sys.modules, flash.FA3[1], types.ModuleType(flash.FA3[1]))
        _registry.register_flash_attention_impl("FA3", register_fn=self._activate)

    def _activate(self) -> Installed:
        for name, before in self._before.items():

            def changed(*args: Any, before: Any = before, **options: Any) -> Any:
                self.calls += 1
                out, lse, *rest = before(*args, **options)
                return *self._change(out, lse), *rest

            kernels.KERNELS[name] = changed
        known.cache_clear()
        return self

    def remove(self) -> None:
        kernels.KERNELS.update(self._before)
        known.cache_clear()


def test_without_one_torch_has_its_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert flash.use_newest(CUDA) == flash.in_use() == ""


def test_one_that_is_right_is_used_and_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Installed(monkeypatch)
    assert flash.use_newest(CUDA) == flash.in_use() == "FA3"
    calls = installed.calls
    assert flash.use_newest(CUDA) == "FA3" and installed.calls == calls > 20


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda out, lse: (out * 1.1, lse), "times what rounding allows"),
        (lambda out, lse: (out, lse + 0.1), "times what rounding allows"),
        (lambda out, lse: (out, lse * 1.4426950408889634), "times what rounding allows"),  # of base 2
        (lambda out, lse: (out, lse.flip(-1)), "times what rounding allows"),
        (lambda out, lse: (out * torch.nan, lse), "inf times what rounding allows"),
        (lambda out, lse: 1 / 0, "division by zero"),
    ],
    ids=["out", "lse", "base 2", "turned", "NaN", "raises"],
)
def test_one_that_is_wrong_gives_way_and_is_told(
    monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any], reason: str
) -> None:
    Installed(monkeypatch, change)
    with pytest.warns(UserWarning, match=f"FA3 is installed, but torch's own FlashAttention is used: .*{reason}"):
        assert flash.use_newest(CUDA) == ""
    assert flash.in_use() == "" and max(flash.apart(CUDA)) < 1


def test_a_window_that_is_ignored_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.KERNELS[NAME]

    def without(*args: Any, window_size_left: Any = None, **options: Any) -> Any:
        return right(*args, **options)

    monkeypatch.setitem(kernels.KERNELS, NAME, without)
    known.cache_clear()
    assert max(flash.apart(CUDA)) > 1
    known.cache_clear()
