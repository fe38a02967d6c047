"""model.fuse=on: one product for linear layers of one input, norms by one operation, and all else as it was.

The reference is the same module with model.fuse=off, and in the check at load transformers' own logits.
"""

# Legend: B batch, C new tokens, D model dim, V vocabulary.

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runahead import Conversation, Model, ModelOptions
from runahead.attention.base import Recording
from runahead.config import Fuse
from runahead.model.checks.logits_check import LogitsCheck, StatesLost
from runahead.model.held import Held
from runahead.model.layers import products
from runahead.model.layers.fusing import Calls, FusedForward, apart, is_fused, watching
from runahead.model.layers.norms import fuse_norms
from runahead.model.layers.products import Product, fuse_products
from runahead.model.loading.memory import PeakMemory
from runahead.model.loading.sharing import bytes_of
from runahead.ranks.devices import keep_freed_memory
from runahead.ranks.ranks import Ranks
from tests.families import FAMILIES, HYBRIDS, MARKING, PRODUCTS, build, prompt
from tests.model.test_nested_forwards import nested
from tests.rank_pool import RankPool

CPU = torch.device("cpu")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def logits(model: Model, seed: int = 0, num_tokens: int = 40) -> Tensor:
    """Logits (B, V) of a prompt, then of two tokens one by one."""
    conversation = Conversation(model)
    found = [conversation.feed(torch.tensor([prompt(length, seed + length)])) for length in (num_tokens, 1, 1)]
    return torch.cat(found)


def fused_names(module: nn.Module) -> set[str]:
    names = {name for name, child in module.named_modules() if isinstance(vars(child).get("forward"), FusedForward)}
    return {name.rpartition(".")[2] for name in names}


def both(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Model, Model]:
    """A model as it is, and another one of the same weights that is fused."""
    plain = Model(build(family, dtype=dtype, **changes))
    return plain, Model(build(family, dtype=dtype, **changes), fuse=Fuse.on)


@pytest.mark.usefixtures("onednn")  # with which most is fused
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_logits_of_every_family_stay(family: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* is computed as")  # none is taken apart again
        plain, fused = both(family)
    expected, found = logits(plain), logits(fused)
    assert (found - expected).abs().max() <= 1e-4 * max(1.0, float(expected.std()))
    assert not is_fused(plain.module)


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", {*PROJECTIONS, "input_layernorm", "post_attention_layernorm", "norm"}),
        ("qwen2", {*PROJECTIONS, "input_layernorm", "post_attention_layernorm", "norm"}),  # with biases
        ("qwen3", {*PROJECTIONS, "q_norm", "k_norm", "input_layernorm", "post_attention_layernorm", "norm"}),
        ("gemma", {*PROJECTIONS}),  # its norms multiply by 1 + weight
        ("phi", {"q_proj", "k_proj", "v_proj"}),  # its norms subtract the mean
        ("gpt2", set()),
    ],
)
def test_found_by_structure(family: str, names: set[str]) -> None:
    assert fused_names(both(family)[1].module) == names


@pytest.mark.usefixtures("by_torch")
def test_every_layer_is_fused_and_called_once() -> None:
    plain, fused = both("llama")
    assert sum(isinstance(vars(child).get("forward"), FusedForward) for child in fused.module.modules()) == 3 * 7 + 1
    counts = []
    for model in (plain, fused):
        with torch.profiler.profile() as profile:
            logits(model)
        of_products = [each for each in profile.key_averages() if each.key in PRODUCTS]
        counts.append(sum(event.count for event in of_products))
    forwards, again = 3, 1  # of a forward of several tokens the last layer begins once more for the last one
    assert counts == [forwards * (3 * 7 + 1) + again * 3, forwards * (3 * 4 + 1) + again]


def test_weights_are_views_and_all_else_stays() -> None:
    plain, fused = both("qwen2")
    assert fused.fingerprint == plain.fingerprint and bytes_of(fused.module) == bytes_of(plain.module)
    memory = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in fused.module.parameters()}
    assert sum(memory.values()) == bytes_of(fused.module), "no weight is there twice"
    expected = plain.module.state_dict()
    found = fused.module.state_dict()
    assert list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)
    for model in (plain, fused):
        layer: Any = model._layers[1]
        with torch.no_grad():
            layer.self_attn.k_proj.weight.mul_(2)  # read where it lies
            layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight * 3)  # and where it is another one
            layer.self_attn.v_proj.weight.data = layer.self_attn.v_proj.weight * 5
    torch.testing.assert_close(logits(fused), logits(plain), rtol=1e-4, atol=1e-4)


def test_a_second_model_of_the_module_has_its_own_way() -> None:
    module = build("llama", dtype=torch.float32)
    expected = logits(Model(module))
    again = logits(Model(module, fuse=Fuse.on)), logits(Model(module, fuse=Fuse.on))
    assert torch.equal(*again)
    assert torch.equal(logits(Model(module)), expected) and not is_fused(module)


def neighbours_in_storages_of_their_own(module: nn.Module) -> None:
    """Move the weights of a model to one block of memory, where they lie one after another, as an allocator may."""
    parameters = [*module.parameters()]
    block, start = bytearray(sum(each.nbytes for each in parameters)), 0
    for each in parameters:
        own = torch.frombuffer(block, dtype=each.dtype, count=each.numel(), offset=start).view(each.shape)
        each.data, start = own.copy_(each.data), start + each.nbytes


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("may_move", [True, False])
def test_adjacent_storages_are_spanned_in_mapped_files_alone(may_move: bool) -> None:
    """On a GPU no tensor spans two of them."""
    module, plain = build("llama", dtype=torch.float32), Model(build("llama", dtype=torch.float32))
    neighbours_in_storages_of_their_own(module)
    fused = Model(module, fuse=Fuse.on, is_mapped=not may_move)
    assert set(PROJECTIONS) <= fused_names(module)
    storages = {name: each.untyped_storage().data_ptr() for name, each in module.named_parameters()}
    for layer in ("model.layers.0.self_attn", "model.layers.1.mlp"):
        of_layer = [place for name, place in storages.items() if name.startswith(layer) and "o_proj" not in name]
        of_layer = of_layer[:-1] if "mlp" in layer else of_layer
        assert len(set(of_layer)) == (1 if may_move else len(of_layer))
    torch.testing.assert_close(logits(fused), logits(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"])
def test_forwards_between_two_projections_do_not_meet(name: str) -> None:
    fused = both("llama")[1]
    outside, inside = partial(logits, fused, 0), partial(logits, fused, 70)
    alone, alone_inside = outside(), inside()
    modules = [each for path, each in fused.module.named_modules() if path.endswith(name)]
    found, *found_inside = nested(modules, outside, inside)
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)  # of a layer's own product the bits are others
    assert found_inside and all(torch.equal(each, alone_inside) for each in found_inside)


def test_parts_of_the_wrong_layer_are_found_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Product.part
    monkeypatch.setattr(Product, "part", lambda self, number, x: own(self, len(self.layers) - 1 - number, x))
    with pytest.warns(UserWarning, match=r"is computed as with model\.fuse=off"):
        Model(build("llama", dtype=torch.float32, num_key_value_heads=4), fuse=Fuse.on)


@pytest.mark.usefixtures("by_torch")
def test_nothing_is_kept_after_an_error() -> None:
    fused = both("llama")[1]
    expected, layer = logits(fused), fused._layers[1]
    product = layer.mlp.gate_proj.forward.func.__self__  # type: ignore[union-attr]

    def fail(*_: object) -> None:
        raise RuntimeError("between the two")

    hook = layer.mlp.up_proj.register_forward_pre_hook(fail)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="between the two"):
        logits(fused)
    hook.remove()
    assert product._kept is None
    assert torch.equal(logits(fused), expected)


def three_layers(*, bias: bool) -> tuple[list[nn.Linear], list[Callable[[Tensor], Tensor]]]:
    """Layers that lie in memory in another order than that of their calls, and the products of each alone."""
    torch.manual_seed(0)
    weight, own_bias = torch.randn(60, 16), torch.randn(60)
    layers = [nn.Linear(16, size, bias=bias) for size in (30, 20, 10)]
    for layer, first in zip(layers, (10, 40, 0), strict=True):
        layer.weight = nn.Parameter(weight[first : first + layer.out_features], requires_grad=False)
        if bias:
            layer.bias = nn.Parameter(own_bias[first : first + layer.out_features], requires_grad=False)
    return layers, [partial(nn.Linear.forward, layer) for layer in layers]


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_parts_of_products(bias: bool) -> None:
    """In any order of calls, twice, and of the same tensor with other numbers in it."""
    layers, alone = three_layers(bias=bias)
    product = Product(layers)
    product.fuse()
    x = torch.randn(2, 7, 16)
    for order in ((0, 1, 2), (2, 1, 0), (0, 0, 1), (0, 2, 1), (1, 1), (0, 1)):
        for number in order:
            torch.testing.assert_close(layers[number](x), alone[number](x))
        x = x + 1 if order[-1] == 1 else x.add_(1)
    for number in (0, 1, 2):
        layers[number](x)
    assert product._kept is None


@torch.inference_mode()
def test_a_layer_that_is_called_alone_computes_its_own_product(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, alone = three_layers(bias=True)
    product, sizes, own = Product(layers), list[int](), F.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        sizes.append(len(weight))
        return own(x, weight, bias)

    product._multiply = linear
    product.fuse()
    monkeypatch.setattr(F, "linear", linear)
    x, other = torch.randn(3, 16), torch.randn(3, 16)
    found = [(number, layers[number](given)) for number, given in ((1, x), (2, x), (0, x), (1, other), (1, x), (2, x))]
    assert sizes == [20, 10, 60, 20]
    for (number, part), given in zip(found, (x, x, x, other, x, x), strict=True):
        torch.testing.assert_close(part, alone[number](given))


@pytest.mark.parametrize("right", [True, False])
@torch.inference_mode()
def test_calls_with_two_tensors_in_turn(right: bool) -> None:
    """As of two forwards, one inside the other; a part is wrong if it does not ask which tensor it was made of."""
    layers, alone = three_layers(bias=False)
    product = Product(layers)
    product.fuse()
    tensors, found = torch.randn(2, 3, 16).unbind(), []
    for number, which in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (2, 0)):
        if not right and number and product._kept is not None:
            product._kept = (lambda which=which: tensors[which]), product._kept[1]  # type: ignore[assignment, misc]
        found.append(torch.allclose(layers[number](tensors[which]), alone[number](tensors[which]), atol=1e-5))
    assert all(found) == right


def test_what_changes_its_input_in_between_is_taken_apart() -> None:
    """A family whose code writes into the hidden states between two projections: the check at load sees it."""
    module = build("llama", dtype=torch.float32)

    def write(_: nn.Module, args: tuple[Tensor]) -> None:
        args[0].mul_(2)

    for child in module.modules():
        if hasattr(child, "k_proj"):
            child.k_proj.register_forward_pre_hook(write)  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match=r"is computed as with model\.fuse=off \(.*not computed right"):
        fused = Model(module, fuse=Fuse.on)
    assert not is_fused(module)
    assert torch.equal(logits(fused), logits(Model(module)))


LACKS = {
    "PyTorch's on a CPU": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    "PyTorch's on a GPU": torch.OutOfMemoryError("CUDA has no room"),
    "Python's": MemoryError(),
}


@pytest.mark.parametrize("lack", LACKS)
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_lack_of_memory_in_the_check_ends_the_start(family: str, lack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fusing there is no more memory; the error stays what it is."""
    error = LACKS[lack]

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(LogitsCheck, "expected", fail)
    monkeypatch.setattr(LogitsCheck, "require_states", fail)
    module = build(family, dtype=torch.float32)
    with warnings.catch_warnings(), pytest.raises(type(error)) as raised:
        warnings.filterwarnings("error", message=".* is computed as")
        Model(module, fuse=Fuse.on)
    assert raised.value is error and is_fused(module)


def test_what_is_fused_is_taken_apart_before_tokens_are_given_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """States that are lost with fused modules alone: a prompt token by token would be right, too, but far slower."""
    own = LogitsCheck.require_states

    def lost(self: LogitsCheck, held: Held) -> None:
        if is_fused(self.module) and not given[0].gives_one_by_one:
            raise StatesLost("model x loses states")
        own(self, held)

    given, look = list[Model](), Model._check_logits
    monkeypatch.setattr(LogitsCheck, "require_states", lost)
    monkeypatch.setattr(Model, "_check_logits", lambda self, made_from: (given.append(self), look(self, made_from)))
    with pytest.warns(UserWarning, match=r"is computed as with model\.fuse=off \(model x loses states\)"):
        fused = Model(build("qwen3_next", dtype=torch.float32), fuse=Fuse.on)
    assert not fused.gives_one_by_one and not is_fused(fused.module)


def test_states_that_are_lost_either_way_leave_what_is_fused() -> None:
    fused = both("jamba")[1]
    assert fused.gives_one_by_one and is_fused(fused.module)


@pytest.mark.usefixtures("by_torch")
def test_tied_weights_stay_tied() -> None:
    module: Any = build("llama", dtype=torch.float32)
    layers = module.model.layers
    layers[2].mlp.gate_proj.weight = layers[0].mlp.gate_proj.weight
    Model(module, fuse=Fuse.on)
    assert layers[2].mlp.gate_proj.weight is layers[0].mlp.gate_proj.weight
    assert "forward" not in vars(layers[0].mlp.gate_proj) and "forward" in vars(layers[1].mlp.gate_proj)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    with nullcontext() if dtype is torch.bfloat16 else pytest.warns(UserWarning, match="no effect .*float64"):
        plain, fused = both("llama", dtype)
    assert is_fused(fused.module) == (dtype is torch.bfloat16)
    expected, found = logits(plain), logits(fused)
    bound = 0.1 * float(expected.std()) if dtype is torch.bfloat16 else 0
    assert (found - expected).abs().max() <= bound


def test_a_family_without_such_layers_is_told() -> None:
    with pytest.warns(UserWarning, match=r"no effect on .*gpt2.* \(it has no layers that can be fused\)"):
        assert not is_fused(both("gpt2", torch.float32)[1].module)


@pytest.mark.parametrize("family", MARKING)
def test_what_is_not_checked_is_not_fused(family: str) -> None:
    with pytest.warns(UserWarning, match=r"no effect .*\(DMS, DMC\)"):
        assert not is_fused(both(family)[1].module)


def test_gradients_go_through() -> None:
    """Of hidden states by an embedding: the layers compute products of their own."""
    found = []
    for model in both("llama"):
        model.module.requires_grad_(False)
        embedding = model.module.get_input_embeddings().weight.requires_grad_()
        model.hidden_states(torch.tensor([prompt(5, 0)]), Recording(start=0, pads=[0])).sum().backward()
        found.append(embedding.grad)
    torch.testing.assert_close(*found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build("llama", dtype=torch.float32).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("by_torch")
def test_mapped_weights_are_fused_where_they_lie_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, as safetensors are written: gate before up, k before o before q before v."""
    monkeypatch.setattr(products, "_move_together", None)  # nothing is copied
    fused, plain = (Model.load(ModelOptions(name="hf", path=str(folder), fuse=each), CPU) for each in ("on", "off"))  # type: ignore[arg-type]
    monkeypatch.undo()
    norms = {"input_layernorm", "post_attention_layernorm", "norm"}
    assert fused_names(fused.module) == {"gate_proj", "up_proj", "q_proj", "v_proj", *norms}
    assert not is_fused(plain.module)
    assert fused.memory is not None and plain.memory is not None
    assert fused.memory.weights_bytes == plain.memory.weights_bytes
    torch.testing.assert_close(logits(fused), logits(plain), rtol=1e-4, atol=1e-4)


def test_weights_that_were_copied_are_moved_one_product_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    own: Callable[..., Tensor] = torch.cat

    def cat(tensors: Any, *args: Any, **keywords: Any) -> Tensor:
        out = own(tensors, *args, **keywords)
        if out.ndim == 2 and out.dtype is torch.bfloat16:
            sizes.append(out.nbytes)
        return out

    options = ModelOptions(name="hf", path=str(folder), dtype="bfloat16", fuse="on")  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "cat", cat)
    fused = Model.load(options, CPU)
    monkeypatch.undo()
    assert set(PROJECTIONS) <= fused_names(fused.module)
    assert fused.memory is not None and bytes_of(fused.module) == fused.memory.weights_bytes
    width, heads, inner = 32, 64, 48
    assert max(sizes) == max(2 * inner, heads) * width * torch.bfloat16.itemsize


def moving_bytes(_: Ranks) -> tuple[int, int]:
    """Peak of memory that this process takes to move 8 products' weights together, and the bytes of one of them.

    The weights lie in the heap, as those of a rank do, each with other memory after it.
    """
    keep_freed_memory()
    module, calls, others = nn.Module(), Calls(), []
    for number in range(8):
        given, block = torch.empty(1, 1024), nn.Module()
        for name in ("q", "k", "v"):
            block.add_module(name, layer := nn.Linear(1024, 1024, bias=False).requires_grad_(False))
            calls.linears.append((given, layer))
            others.append(torch.ones(64, 1024))
        module.add_module(str(number), block)
    peak = PeakMemory(CPU)
    before = peak.now_bytes()
    fuse_products(module, calls, may_move=True)
    assert fused_names(module) == {"q", "k", "v"} and len(others) == 24
    return peak.peak_bytes() - before, 3 * layer.weight.nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc and Linux's peak of a process")
def test_memory_of_weights_that_were_moved_is_returned_before_the_next_are() -> None:
    with closing(RankPool(1)) as pool:  # a new process: in a used one the weights would take memory that is there
        [(taken, of_a_product)] = pool.run(moving_bytes)
    assert of_a_product <= taken < 1.5 * of_a_product  # beside the weights, the new ones of one product


@pytest.mark.parametrize("name", ["input_layernorm", "self_attn.k_proj", "mlp.up_proj"])
def test_a_forward_of_the_instance_stays(name: str) -> None:
    """Also where it computes what could be fused: with `apart` the class would compute in its place."""
    module = build("llama", dtype=torch.float32)
    child = module.get_submodule(f"model.layers.1.{name}")
    own = child.forward
    child.forward = replaced = lambda x: own(x)  # type: ignore[assignment]
    fused = Model(module, fuse=Fuse.on)
    assert is_fused(fused.module) and child.forward is replaced
    with apart(fused.module):
        assert child.forward is replaced


@torch.inference_mode()
def test_only_rms_norms_are_fused() -> None:
    class Norm(nn.Module):
        def __init__(self, power: int, eps: float, told: float) -> None:
            super().__init__()
            self.weight, self.power, self.eps, self.told = nn.Parameter(torch.rand(8) + 0.5), power, eps, told

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * (x / (x.abs().pow(self.power).mean(-1, keepdim=True) + self.eps) ** (1 / self.power))

    right, other, hidden = Norm(2, 1e-5, 0.1), Norm(3, 1e-5, 0.1), Norm(2, 1e-5, 0.1)
    del hidden.told
    hidden.eps = torch.tensor(1e-5)  # type: ignore[assignment]
    model = nn.Sequential(right, other, hidden, nn.RMSNorm(8), nn.LayerNorm(8))
    x = torch.randn(3, 8)
    expected = model(x)
    with watching(model) as calls:
        model(x)
    fuse_norms(calls)
    assert [isinstance(vars(each).get("forward"), FusedForward) for each in model] == [True, *[False] * 4]
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(
    ("family", "dtype", "is_so"),
    [("llama", torch.float32, True), ("llama", torch.bfloat16, False), ("gpt2", torch.float32, False)],
)
def test_auto_fuses_in_float32_on_a_cpu_without_a_word(family: str, dtype: torch.dtype, is_so: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_fused(Model(build(family, dtype=dtype), fuse=Fuse.auto).module) == is_so
    assert ModelOptions().fuse is Fuse.auto
