"""Products of many rows by kernels of our own: numbers, bits, what takes them, and logits.

The references are computations in float64, oneDNN's products and models that are not fused.
"""

# Legend: M rows, K input features, N output features, I inner features of an MLP.

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from launch.server import serving
from runahead import Model
from runahead.config import Fuse
from runahead.files import cache_folder
from runahead.kernels import operators
from runahead.kernels.operators import KERNELS
from runahead.model.layers.cpu_linear import MANY_ROWS, multiply_fast, multiply_fused
from runahead.model.layers.fusing import apart, watching
from runahead.model.layers.products import fuse_alone
from runahead.model.loading import kernels as loading
from runahead.model.loading.memory import PeakMemory
from runahead.model.memory import token_bytes
from runahead.report import MemoryReport
from tests.examples import examples
from tests.families import PRODUCTS, build
from tests.model.test_fusing import logits
from tests.model.test_gated import MLP, fused
from tests.needs import TEST_KERNELS, missing

ROOT = Path(__file__).resolve().parents[2]

ROUNDING = 2e-6
"""Relative to the largest number: float32's, of sums of some hundred products."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swish": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if loading.unsupported() or loading.compiler() is None:
        missing("a processor with AVX2 and a C++ compiler")
    operators.load(loading.build(cache_folder() / TEST_KERNELS))


@pytest.fixture
def in_use(onednn: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(KERNELS, "in_use", True)
    monkeypatch.setattr(KERNELS, "compared", {})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is off by")
        yield


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def of_mlp(inputs: int, inner: int, outputs: int, bias: bool) -> list[Tensor | None]:
    """Weights and biases of gate, up and down."""
    shapes = (inner, inputs), (inner, inputs), (outputs, inner)
    found: list[Tensor | None] = []
    for seed, (rows, columns) in enumerate(shapes):
        found += [numbers(rows, columns, seed=seed) / columns**0.5, numbers(rows, seed=seed) if bias else None]
    return found


def mlp_in_float64(x: Tensor, parts: list[Tensor | None], activation: str) -> Tensor:
    gate, gate_bias, up, up_bias, down, down_bias = (None if each is None else each.double() for each in parts)
    assert gate is not None and up is not None and down is not None
    wide = x.double()
    inner = ACTIVATIONS[activation](F.linear(wide, gate, gate_bias)) * F.linear(wide, up, up_bias)
    return F.linear(inner, down, down_bias)


def off(found: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest number."""
    assert found.shape == expected.shape and found.is_contiguous()
    return float((found - expected).abs().max() / expected.abs().max()) if found.numel() else 0.0


SIZES = st.one_of(st.integers(1, 40), st.sampled_from([47, 48, 49, 96, 385, 400, 500, 900]))


@examples(60)
@given(rows=st.integers(1, 300), inputs=SIZES, outputs=SIZES, bias=st.booleans(), threads=st.sampled_from([1, 2, 7]))
@torch.inference_mode()
def test_product_is_that_of_float64(rows: int, inputs: int, outputs: int, bias: bool, threads: int) -> None:
    before = torch.get_num_threads()
    x, weight = numbers(rows, inputs), numbers(outputs, inputs, seed=1)
    bias_O = numbers(outputs, seed=2) if bias else None
    expected = F.linear(x.double(), weight.double(), None if bias_O is None else bias_O.double())
    try:
        torch.set_num_threads(threads)
        assert off(operators.linear(x, weight, bias_O), expected) < ROUNDING
    finally:
        torch.set_num_threads(before)


@examples(40)
@given(
    rows=st.integers(1, 300),
    sizes=st.tuples(SIZES, SIZES, SIZES),
    bias=st.booleans(),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    threads=st.sampled_from([1, 2, 7]),
)
@torch.inference_mode()
def test_mlp_is_that_of_float64(
    rows: int, sizes: tuple[int, int, int], bias: bool, activation: str, threads: int
) -> None:
    before = torch.get_num_threads()
    x, parts = numbers(rows, sizes[0]), of_mlp(*sizes, bias)
    try:
        torch.set_num_threads(threads)
        found = operators.gated_mlp(x, *parts, activation)  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(before)
    expected = mlp_in_float64(x, parts, activation)
    # sums of few products may cancel to small ones, of which roundings are those of their terms
    assert float((found - expected).abs().max()) < 2 * ROUNDING * max(1.0, float(expected.abs().max()))


@torch.inference_mode()
def test_activations_of_large_numbers() -> None:
    for activation, act in ACTIVATIONS.items():
        x = torch.tensor([-1e4, -100.0, -20.0, -1.0, 0.0, 1.0, 20.0, 100.0, 1e4])[:, None].repeat(9, 1)
        one = torch.ones(1, 1)
        found = operators.gated_mlp(x, one, None, torch.zeros(1, 1), torch.ones(1), one, None, activation)
        torch.testing.assert_close(found.double(), act(x.double()), rtol=1e-6, atol=1e-6)
        x[3] = torch.nan
        found = operators.gated_mlp(x, one, None, torch.zeros(1, 1), torch.ones(1), one, None, activation)
        assert torch.equal(found.isnan(), x.isnan())


@torch.inference_mode()
def test_a_row_has_the_same_bits_beside_any_others_and_with_any_threads(threads: Callable[[int], None]) -> None:
    x, weight, parts = numbers(700, 577), numbers(500, 577), of_mlp(577, 800, 130, bias=True)
    threads(1)
    product, mlp = operators.linear(x, weight, None), operators.gated_mlp(x, *parts, "swish")  # type: ignore[arg-type]
    for count in (1, 2, 3, 40):
        threads(count)
        for first, end in ((0, 700), (0, 1), (5, 69), (300, 700), (699, 700)):
            rows = x[first:end]
            assert torch.equal(operators.linear(rows, weight, None), product[first:end]), (count, first)
            found = operators.gated_mlp(rows, *parts, "swish")  # type: ignore[arg-type]
            assert torch.equal(found, mlp[first:end]), (count, first)
    # the bits of an output are those of its weights alone, too
    assert torch.equal(operators.linear(x, weight[37:200], None), product[:, 37:200])


@torch.inference_mode()
def test_layouts() -> None:
    """Rows of a larger tensor, weights that are part of a wider one, several dims, no rows."""
    wide, weight = numbers(3, 50, 80), numbers(90, 40)
    x = wide[:, 10:, 20:60]
    assert torch.equal(operators.linear(x, weight, None), operators.linear(x.contiguous(), weight, None))
    part = numbers(90, 70)[:, 5:45]
    assert torch.equal(operators.linear(x, part, None), operators.linear(x, part.contiguous(), None))
    assert operators.linear(x, weight, None).shape == (3, 40, 90)
    assert operators.linear(x[:, :0], weight, None).shape == (3, 0, 90)
    for wrong in ((x.double(), weight, None), (x[..., 1:], weight, None), (x, weight.T, None), (x, weight, weight[0])):
        with pytest.raises(RuntimeError):
            operators.linear(*wrong)
    with pytest.raises(RuntimeError, match="do not belong together"):
        operators.gated_mlp(x, weight, None, weight[1:], None, numbers(40, 90), None, "swish")
    with pytest.raises(RuntimeError, match="unknown activation"):
        operators.gated_mlp(x, weight, None, weight, None, numbers(40, 90), None, "tanh")


@pytest.mark.usefixtures("in_use")
@torch.inference_mode()
def test_weights_that_lie_otherwise_are_left_to_onednn() -> None:
    """Tied, transposed matrices: before, an error of the kernel ended the forward."""
    mlp, x = fused(MLP()), numbers(1, 100, 32)
    expected, product = MLP.forward(mlp, x), mlp.one(x)
    for layer in (mlp.one, mlp.two, mlp.three):
        layer.weight = nn.Parameter(layer.weight.T.contiguous().T, requires_grad=False)
    torch.testing.assert_close(mlp(x), expected)
    torch.testing.assert_close(multiply_fused(x, mlp.one.weight, mlp.one.bias), product)


def names_of(run: Callable[[], object]) -> set[str]:
    with torch.profiler.profile() as profile:
        run()
    return {event.key for event in profile.key_averages()}


@pytest.mark.usefixtures("in_use")
@torch.inference_mode()
def test_many_rows_of_fused_layers_take_the_kernels() -> None:
    for act, name in ((F.silu, "runahead::gated_mlp"), (F.gelu, "mkldnn::_linear_pointwise")):
        mlp = fused(MLP(act))
        x = numbers(2, MANY_ROWS // 2, 32)
        expected = MLP.forward(mlp, x)  # type: ignore[arg-type]
        torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-5)  # compares, the first time
        names = names_of(lambda mlp=mlp, x=x: mlp(x))
        assert name in names and ("runahead::gated_mlp" in names) == (name == "runahead::gated_mlp")
        assert "runahead::gated_mlp" not in names_of(lambda mlp=mlp, x=x: mlp(x[:, 1:]))
    weight, x = numbers(48, 32), numbers(MANY_ROWS, 32)
    multiply_fused(x, weight, None)
    assert "runahead::linear" in names_of(lambda: multiply_fused(x, weight, None))
    assert "runahead::linear" not in names_of(lambda: multiply_fused(x[1:], weight, None))
    assert "runahead::linear" not in names_of(lambda: multiply_fused(x.bfloat16(), weight.bfloat16(), None))


@torch.inference_mode()
def test_without_kernels_onednn_computes(in_use: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS, "in_use", False)
    mlp, x = fused(MLP()), numbers(MANY_ROWS, 32)
    assert not {"runahead::linear", "runahead::gated_mlp"} & names_of(lambda: mlp(x))


def test_gradients_go_through(in_use: None) -> None:
    mlp, x = fused(MLP()), numbers(MANY_ROWS, 32).requires_grad_()
    [found] = torch.autograd.grad(mlp(x).sum(), x)
    [expected] = torch.autograd.grad(MLP.forward(mlp, x).sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("wrong", [lambda x: x * 1.01, lambda x: x.roll(1, 0), lambda x: x * torch.nan])
def test_a_wrong_kernel_gives_way(
    wrong: Callable[[Tensor], Tensor], in_use: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told once for each kind of weights."""
    own, of_mlps = operators.linear, operators.gated_mlp
    monkeypatch.setattr(operators, "linear", lambda *args: wrong(own(*args)))
    monkeypatch.setattr(operators, "gated_mlp", lambda *args: wrong(of_mlps(*args)))
    with torch.inference_mode():
        weight, x, mlp = numbers(48, 32), numbers(MANY_ROWS, 32), fused(MLP())
        for run, expected in (
            (lambda: multiply_fused(x, weight, None), F.linear(x, weight)),
            (lambda: mlp(x), MLP.forward(mlp, x)),
        ):
            with pytest.warns(UserWarning, match="is off by"):
                found = run()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_numbers_that_are_not_finite_are_no_error_of_a_kernel(in_use: None) -> None:
    weight, x = numbers(48, 32), numbers(MANY_ROWS, 32)
    x[3, 5], x[9, 9] = torch.nan, torch.inf
    found, expected = multiply_fused(x, weight, None), F.linear(x, weight)
    assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.isinf(), expected.isinf())
    assert KERNELS.compared == {(48, 32, False): True}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma", "gemma2", "olmo2", "phi3"])
def test_logits_of_families_stay(family: str, in_use: None) -> None:
    """A prompt of many tokens, then single ones; without fused layers no kernel computes products."""
    count = 2 * MANY_ROWS + 9
    plain = Model(build(family, dtype=torch.float32), fuse=Fuse.off)
    fused = Model(build(family, dtype=torch.float32), fuse=Fuse.on)
    expected = logits(plain, num_tokens=count)
    found = logits(fused, num_tokens=count)
    assert (found - expected).abs().max() <= 1e-4 * max(1.0, float(expected.std()))
    own = {"runahead::linear", "runahead::gated_mlp"}
    assert own & names_of(lambda: logits(fused, num_tokens=count)) and not own & names_of(
        lambda: logits(plain, num_tokens=count)
    )


@pytest.mark.parametrize("family", ["llama", "phi3", "starcoder2"])
def test_all_products_of_layers_take_the_kernels(family: str, in_use: None) -> None:
    """Also those of layers that no others are fused with."""
    model = Model(build(family, dtype=torch.float32), fuse=Fuse.on)
    count = 2 * MANY_ROWS
    logits(model, num_tokens=count)  # compares, the first time
    with torch.profiler.profile(record_shapes=True) as profile:
        logits(model, num_tokens=count)
    rows = [
        (each.name, math.prod(each.input_shapes[0][:-1]))
        for each in profile.events()
        if each.name in {"runahead::linear", "runahead::gated_mlp", *PRODUCTS}
    ]
    assert {name for name, num_rows in rows if num_rows >= MANY_ROWS} <= {"runahead::linear", "runahead::gated_mlp"}
    assert sum(num_rows >= MANY_ROWS for _, num_rows in rows) >= 2 * len(model._layers)


@torch.inference_mode()
def test_a_layer_alone_follows_what_is_changed_later(in_use: None) -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(32, 48)
            self.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.own(x)
            return out

    owner, x = Alone(), numbers(MANY_ROWS, 32)
    multiply_fast(owner)
    with watching(owner) as calls:
        owner(x[:1])
    fuse_alone(calls)
    assert "runahead::linear" in names_of(lambda: owner(x))
    owner.own.weight = nn.Parameter(numbers(48, 32, seed=5), requires_grad=False)
    expected = F.linear(x, owner.own.weight, owner.own.bias)
    torch.testing.assert_close(owner(x), expected, rtol=1e-5, atol=1e-5)
    with apart(owner):
        assert "runahead::linear" not in names_of(lambda: owner(x))
    assert "runahead::linear" in names_of(lambda: owner(x))


# ---------------------------------------------------------------- memory that threads keep

# "Anonymous" is memory of the process alone. What is computed is small beside what threads keep: K and N are.
MEASURE = """
import sys
from pathlib import Path
import torch
from runahead.kernels import operators

def own_bytes():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

def run(inner):
    weights = torch.zeros(inner, 16), None, torch.zeros(inner, 16), None, torch.zeros(16, inner), None
    return (lambda: operators.gated_mlp(x, *weights, "swish")) if gated else lambda: operators.linear(y, w, None)

library, threads, gated = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "gated_mlp"
operators.load(library)
torch.set_num_threads(threads)
size = 30000
x, y, w = torch.zeros(128 * threads, 16), torch.zeros(128 * threads, size), torch.zeros(16, size)
small, large = run(16), run(size)
if gated:
    small()
else:
    operators.linear(x, torch.zeros(16, 16), None)
before = own_bytes()
large()
print(own_bytes() - before, threads * (operators.kept_bytes(16, size) if gated else operators.kept_bytes(size)))
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's account of a process's memory")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("operator", ["linear", "gated_mlp"])
def test_threads_keep_the_memory_that_is_counted(operator: str, threads: int) -> None:
    library = loading.build(cache_folder() / TEST_KERNELS)
    command = [sys.executable, "-c", MEASURE, str(library), str(threads), operator]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    kept, counted = map(int, done.stdout.split())
    assert counted > threads * 7e6  # 64 rows and more of 30,000 numbers
    assert kept == pytest.approx(counted, rel=0.05)


def test_a_models_products_are_counted_in_what_a_run_and_a_server_take(
    in_use: None, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of its largest product, here its MLP, or Starcoder2's second layer of an MLP without gate."""
    free = 10**9
    monkeypatch.setattr(serving, "free_bytes", lambda *_: free)
    for family, is_gated in (("llama", True), ("starcoder2", False)):
        plain, model = (Model(build(family, dtype=torch.float32), fuse=fuse) for fuse in (Fuse.off, Fuse.on))
        sizes = (model.config.hidden_size, model.config.intermediate_size)[0 if is_gated else 1 :]
        kept = operators.kept_bytes(*sizes)
        for count in (1, 3):
            threads(count)
            assert (plain.kernel_bytes(), model.kernel_bytes(), model.kernel_bytes(7)) == (0, count * kept, 7 * kept)
            assert _room(plain) == int(0.8 * free / token_bytes(model))
            assert _room(model) == int(0.8 * (free - count * kept) / token_bytes(model))
            assert _predicted(model, None) - _predicted(plain, None) == count * kept
            assert _predicted(model, 7) - _predicted(plain, 7) == 7 * kept
    monkeypatch.setattr(KERNELS, "in_use", False)
    assert model.kernel_bytes() == 0


def _room(model: Model) -> int | None:
    """Tokens for which a server of one rank has room."""
    ranks: Any = SimpleNamespace(device=model.device, local_size=1, stage=0, num_stages=1, gather=lambda x, _: [x])
    return serving.room_in_memory(model, ranks, None, 0, keeps_parts=False).max_tokens


def _predicted(model: Model, num_threads: int | None) -> int:
    """The predicted peak of a run in bytes."""
    model.memory = MemoryReport(base_bytes=1, weights_bytes=2, load_peak_bytes=3, predicted_load_peak_bytes=3)
    model._peak = PeakMemory(model.device)
    found = model.memory_after(kv_bytes=5, batch=1, num_tokens=100, row_tokens=None, num_threads=num_threads)
    assert found is not None
    return found.predicted_peak_bytes
