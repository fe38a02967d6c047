"""Gated MLPs by fewer operations on a CPU, in float32: what is found, and that it is computed as before.

The reference is the family's own code.
"""

# Legend: C rows, D model dim.

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runahead import Model
from runahead.config import Fuse
from runahead.model.layers import gated
from runahead.model.layers.cpu_linear import multiply_fast
from runahead.model.layers.fusing import FusedForward, apart, unfuse, watching
from runahead.model.layers.gated import fuse_gated
from tests.families import build
from tests.model.test_cpu_linear import names_of
from tests.model.test_fusing import logits

pytestmark = pytest.mark.usefixtures("onednn")


class MLP(nn.Module):
    """gate, up, down; which of the first two is the gate, the activation and a change of it are given."""

    def __init__(self, act: Callable[[Tensor], Tensor] = F.silu, *, is_second: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 48, bias=bias), nn.Linear(32, 48, bias=bias)
        self.three = nn.Linear(48, 32, bias=bias)
        self.act, self.is_second = act, is_second
        self.requires_grad_(False)

    def forward(self, x_CD: Tensor) -> Tensor:
        one, two = self.one(x_CD), self.two(x_CD)
        inner = one * self.act(two) if self.is_second else self.act(one) * two
        out: Tensor = self.three(inner)
        return out


class Clamped(MLP):
    def forward(self, x_CD: Tensor) -> Tensor:
        return super().forward(x_CD).clamp(-2000, 2000)


class Scaled(MLP):
    def forward(self, x_CD: Tensor) -> Tensor:
        return super().forward(x_CD) * 1.001


class Sized(MLP):
    """Asks for sizes of its own, so that it cannot be tried."""

    def forward(self, x_CD: Tensor) -> Tensor:
        return super().forward(x_CD.view(-1, 32))


@torch.inference_mode()
def fused(mlp: MLP) -> MLP:
    torch.manual_seed(0)
    for each in mlp.parameters():
        each.copy_(torch.randn(each.shape) / 4)
    multiply_fast(mlp)
    with watching(mlp) as calls:
        mlp(torch.randn(3, 32))
    fuse_gated(calls)
    return mlp


def is_fused(mlp: nn.Module) -> bool:
    return isinstance(vars(mlp).get("forward"), FusedForward)


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", [F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.relu])
@torch.inference_mode()
def test_same_output(act: Callable[[Tensor], Tensor], bias: bool, is_second: bool) -> None:
    mlp = fused(MLP(act, bias=bias, is_second=is_second))
    assert is_fused(mlp)
    for shape in ((1, 32), (7, 32), (2, 40, 32), (0, 32)):
        x = torch.randn(shape)
        with apart(mlp):
            expected = mlp(x)
        torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-5)
    assert {"aten::mul", "aten::silu", "aten::gelu"} & names_of(mlp, torch.randn(3, 32)) == set()


@pytest.mark.parametrize(
    "mlp",
    [MLP(F.tanh), MLP(F.mish), Clamped(), Scaled(), Sized(), MLP(lambda x: F.silu(x.clamp(max=7)))],
    ids=["tanh", "mish", "clamped", "scaled", "sized", "clamped gate"],
)
def test_others_stay(mlp: MLP) -> None:
    assert not is_fused(fused(mlp))


def test_a_forward_of_the_instance_stays() -> None:
    """Code of a checkpoint or a hook of another library has put it there."""
    mlp = MLP()
    mlp.forward = own = partial(MLP.forward, mlp)  # type: ignore[method-assign, assignment]
    assert fused(mlp).forward is own
    with apart(mlp):
        assert mlp.forward is own


@torch.inference_mode()
def test_what_is_changed_later_is_computed_by_the_own_code() -> None:
    """Another weight, a hook and another layer, as adapters make them."""
    mlp, x = fused(MLP()), torch.randn(3, 32)
    before = mlp(x)
    mlp.two.weight = nn.Parameter(mlp.two.weight * 2, requires_grad=False)
    assert is_fused(mlp) and not torch.allclose(mlp(x), before)
    called = []
    hook = mlp.one.register_forward_hook(lambda *_: called.append(1))
    mlp(x)
    assert called
    hook.remove()
    mlp.three.forward = lambda x: torch.zeros(3, 32)  # type: ignore[method-assign, assignment]
    assert not mlp(x).any()


def test_gradients_go_through() -> None:
    mlp, x = fused(MLP()), torch.randn(3, 32, requires_grad=True)
    [found] = torch.autograd.grad(mlp(x).sum(), x)
    unfuse(mlp)
    [expected] = torch.autograd.grad(mlp(x).sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("family", "count"), [("llama", 3), ("gemma", 3), ("deepseek_v3", 1), ("phi", 0), ("gpt2", 0)])
def test_of_a_model(family: str, count: int) -> None:
    model = Model(build(family, dtype=torch.float32), fuse=Fuse.on)
    found = [name for name, each in model.module.named_modules() if name.endswith("mlp") and is_fused(each)]
    assert len(found) >= count and bool(found) == bool(count)


def test_a_wrong_activation_is_found_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated, "_activation", lambda *_: ("relu", ""))
    with pytest.warns(UserWarning, match=r"is computed as with model\.fuse=off"):
        model = Model(build("llama", dtype=torch.float32), fuse=Fuse.on)
    monkeypatch.undo()
    expected = logits(Model(build("llama", dtype=torch.float32)))
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
