"""RMS norms and rotary embeddings by kernels of our own: numbers, what is found, and logits.

The references are float64 computations and transformers' own functions.
"""

# Legend: B batch, N query heads, K kv heads, C tokens, H head dim, D normed dim.

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.cohere import modeling_cohere
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

from runahead import Model
from runahead.config import Fuse
from runahead.files import cache_folder
from runahead.kernels import operators
from runahead.kernels.operators import KERNELS
from runahead.model.layers import norms, rotary_functions
from runahead.model.layers.fusing import FusedForward
from runahead.model.layers.rotary_functions import fuse_rotations
from runahead.model.loading import kernels as loading
from tests.families import build
from tests.model.test_fusing import logits
from tests.needs import TEST_KERNELS, missing

ROUNDING = 2e-6
"""Relative to numbers up to 5: some roundings of each."""


@pytest.fixture(autouse=True)
def in_use(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if loading.unsupported() or loading.compiler() is None:
        missing("a processor with AVX2 and a C++ compiler")
    operators.load(loading.build(cache_folder() / TEST_KERNELS))
    monkeypatch.setattr(KERNELS, "in_use", True)
    yield
    rotary_functions._with.cache_clear()


def calls_of(model: Model) -> dict[str, int]:
    with torch.profiler.profile() as profile:
        logits(model)
    return {event.key: event.count for event in profile.key_averages()}


@pytest.mark.parametrize("dim", [1, 7, 16, 48, 576, 1000])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@torch.inference_mode()
def test_norm_is_that_of_float64(dim: int, size: float) -> None:
    for shape in ((dim,), (1, dim), (2, 90, dim), (0, dim)):
        x, weight = size * torch.randn(shape), torch.randn(dim)
        wide = x.double()
        expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        found = operators.rms_norm(x, weight, 1e-6)
        assert found.shape == x.shape and found.is_contiguous()
        torch.testing.assert_close(found.double(), expected, rtol=ROUNDING, atol=0)
    strided = torch.randn(3, 5, 2 * dim)[..., ::2]
    expected = operators.rms_norm(strided.contiguous(), weight, 1e-6)
    assert torch.equal(operators.rms_norm(strided, weight, 1e-6), expected)


@torch.inference_mode()
def test_rows_are_the_same_beside_any_others_and_with_any_threads() -> None:
    x, weight = torch.randn(300, 576), torch.randn(576)
    q, k = torch.randn(1, 4, 300, 64), torch.randn(1, 2, 300, 64)
    cos, sin = torch.randn(2, 1, 300, 64)
    normed, rotated = operators.rms_norm(x, weight, 1e-6), operators.rotate(q, k, cos, sin)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(operators.rms_norm(x, weight, 1e-6), normed)
        assert all(map(torch.equal, operators.rotate(q, k, cos, sin), rotated))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(operators.rms_norm(x[7:9], weight, 1e-6), normed[7:9])
    part = operators.rotate(q[:, :, 7:9], k[:, :, 7:9], cos[:, 7:9], sin[:, 7:9])
    assert all(torch.equal(ours, whole[:, :, 7:9]) for ours, whole in zip(part, rotated, strict=True))


@pytest.mark.parametrize(("batch", "of_angles"), [(1, 1), (3, 3), (3, 1)])
@pytest.mark.parametrize("head_dim", [32, 64, 96])
@torch.inference_mode()
def test_rotation_is_that_of_transformers(batch: int, of_angles: int, head_dim: int) -> None:
    cos, sin = torch.randn(2, of_angles, 9, head_dim)
    q = torch.randn(batch, 9, 4, head_dim).transpose(1, 2)
    k = torch.randn(batch, 9, 5, head_dim)[:, :, 1:3].transpose(1, 2)  # of one product with others
    found = operators.rotate(q, k, cos, sin)
    expected = modeling_llama.apply_rotary_pos_emb(q.double(), k.double(), cos.double(), sin.double())
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape and ours.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(ours.double(), theirs, rtol=ROUNDING, atol=ROUNDING)


@torch.inference_mode()
def test_what_the_kernel_does_not_take_is_the_familys_own() -> None:
    """Other dtypes, head dims, angles of a part of a head, and a further argument."""
    own = modeling_llama.apply_rotary_pos_emb
    rotated = rotary_functions._rotation(own)
    for dtype, head_dim, keywords in (
        (torch.float64, 64, {}),
        (torch.float32, 48, {}),
        (torch.float32, 64, {"unsqueeze_dim": 2}),
    ):
        shape = (2, 9, 4, head_dim) if keywords else (2, 4, 9, head_dim)
        q, k = torch.randn(2, *shape, dtype=dtype)
        cos, sin = torch.randn(2, 2, 9, head_dim, dtype=dtype)
        assert all(map(torch.equal, rotated(q, k, cos, sin, **keywords), own(q, k, cos, sin, **keywords)))
    q, k = torch.randn(2, 1, 2, 9, 64)
    cos, sin = torch.randn(2, 1, 9, 32)
    own = modeling_gpt_neox.apply_rotary_pos_emb
    assert all(map(torch.equal, rotary_functions._rotation(own)(q, k, cos, sin), own(q, k, cos, sin)))


def test_functions_are_found_by_what_they_compute() -> None:
    def negated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return modeling_llama.apply_rotary_pos_emb(q, k, cos, -sin)

    def of_q(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)[0]

    assert rotary_functions._is_rotation(modeling_llama.apply_rotary_pos_emb)
    for other in (negated, of_q, modeling_cohere.apply_rotary_pos_emb):  # Cohere rotates neighbours
        assert not rotary_functions._is_rotation(other)


@pytest.mark.parametrize(
    ("family", "rotates", "norms"),
    [
        ("llama", True, True),
        ("qwen2", True, True),
        ("qwen3", True, True),
        ("gemma2", True, False),
        ("olmo2", True, True),
        ("mixtral", True, True),
        ("phi3", True, True),
        ("cohere", False, False),
        ("gpt2", False, False),
    ],
)
def test_logits_of_families_stay(family: str, rotates: bool, norms: bool) -> None:
    changes: dict[str, Any] = {} if family in ("gpt2", "phi3", "cohere") else {"head_dim": 32}
    plain = Model(build(family, dtype=torch.float32, **changes))
    expected = logits(plain)
    fused = Model(build(family, dtype=torch.float32, **changes), fuse=Fuse.on)
    found, calls = logits(fused), calls_of(fused)
    assert (found - expected).abs().max() <= 1e-4 * max(1.0, float(expected.std()))
    if changes:
        assert bool(calls.get("runahead::rotate")) == rotates
    assert bool(calls.get("runahead::rms_norm")) == norms
    assert not {"runahead::rotate", "runahead::rms_norm"} & calls_of(plain).keys()


def test_attention_beside_states_is_left_as_it_is() -> None:
    """Modules with states are given their tokens in pieces by a forward of their own."""
    module = build("bailing_hybrid", dtype=torch.float32)
    Model(module, fuse=Fuse.on)
    found = {each: vars(each).get("forward") for each in module.modules()}
    fused = {each: forward for each, forward in found.items() if isinstance(forward, FusedForward)}
    assert fused and not [each for each, forward in fused.items() if getattr(forward.func, "__self__", None) is each]


def test_a_decorated_forward_is_fused_and_stays_decorated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers 5.24, whose decorators rename arguments."""
    own, seen = modeling_llama.LlamaAttention.forward, []

    @functools.wraps(own)
    def decorated(*args: Any, **keywords: Any) -> Any:
        seen.append(len(args))
        return own(*args, **keywords)

    expected = logits(Model(build("llama", dtype=torch.float32, head_dim=32), fuse=Fuse.off))
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", decorated)
    fused = Model(build("llama", dtype=torch.float32, head_dim=32), fuse=Fuse.on)
    seen.clear()
    assert "runahead::rotate" in calls_of(fused) and seen
    torch.testing.assert_close(logits(fused), expected, rtol=0, atol=1e-4)
    forward: Any = fused._layers[0].self_attn.forward  # type: ignore[union-attr]
    names = [list(inspect.signature(each).parameters) for each in (forward.func, MethodType(own, object()))]
    assert names[0] == names[1]


def test_a_wrong_rotation_is_found_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    own = operators.rotate
    monkeypatch.setattr(operators, "rotate", lambda q, k, cos, sin: own(q, k, cos, -sin))
    with pytest.warns(UserWarning, match=r"is computed as with model\.fuse=off"):
        model = Model(build("llama", dtype=torch.float32, head_dim=32), fuse=Fuse.on)
    assert "runahead::rotate" not in calls_of(model)


def test_a_norm_of_another_eps_is_found_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    own = operators.rms_norm
    monkeypatch.setattr(norms.operators, "rms_norm", lambda x, weight, eps: own(x, weight, eps + 1))
    with pytest.warns(UserWarning, match=r"is computed as with model\.fuse=off"):
        Model(build("llama", dtype=torch.float32), fuse=Fuse.on)


def test_without_kernels_nothing_is_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS, "in_use", False)
    module = build("llama", dtype=torch.float32, head_dim=32)
    fuse_rotations(module)
    assert not any("forward" in vars(child) for child in module.modules())


def test_gradients_go_through() -> None:
    found = []
    for fuse in (Fuse.off, Fuse.on):
        model = Model(build("llama", dtype=torch.float32, head_dim=32), fuse=fuse)
        model.module.requires_grad_(False)
        attention: Any = model._layers[0].self_attn
        x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        normed = model._layers[0].input_layernorm(x)  # type: ignore[operator]
        cos, sin = model.module.base_model.rotary_emb(x, torch.arange(5)[None])
        q = attention.q_proj(normed).view(1, 5, -1, 32).transpose(1, 2)
        names = inspect.unwrap(attention.forward.func.__func__).__globals__ if fuse is Fuse.on else vars(modeling_llama)
        rotated, _ = names["apply_rotary_pos_emb"](q, q, cos, sin)
        found.append(torch.autograd.grad(rotated.square().sum(), x)[0])
    torch.testing.assert_close(*found)
