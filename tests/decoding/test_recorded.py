"""Steps that a CPU replays: logits of the eager step, what cannot be replayed is told, and each operator of our own."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from runahead import Engine, GenerationOptions
from runahead.cache.arena import ArenaIndex, Placed
from runahead.cache.attention import CausalAttention
from runahead.cache.fixed import DeviceIndex
from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import KVSlab
from runahead.config import Device, Fuse, RanksOptions, Weights
from runahead.decoding.forward import FixedForward, fastest_form, forward_over
from runahead.decoding.lanes import Lanes
from runahead.decoding.recorded import FIRST_REPLAYS, UNRECORDED, Program, RecordedStep, _apart, recorded, records
from runahead.decoding.row import Row
from runahead.files import cache_folder
from runahead.kernels import operators
from runahead.kernels.operators import KERNELS
from runahead.model.layers.int8 import encode_linears
from runahead.model.loading import kernels as loading
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks
from tests.decoding.test_live_rows import Decoding, alone
from tests.families import FAMILIES, VOCAB_SIZE, build
from tests.needs import TEST_KERNELS, missing

TOKENS, NEW = 11, 8

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-5}
"""Share of the largest logit: some roundings in each of three layers."""


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Built once for all runs of the tests."""
    if loading.unsupported() or loading.compiler() is None:
        missing("a processor with AVX2 and a C++ compiler")
    operators.load(loading.build(cache_folder() / TEST_KERNELS))


@pytest.fixture(autouse=True)
def in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS, "in_use", True)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def model_of(family: str, dtype: torch.dtype = torch.float32, *, size: int = 64, made: str = "plain") -> Model:
    """With head dims that the kernels take, which are `size` / 4; made of fused operations, or in 8 bits."""
    sizes = {"hidden_size": size} | ({"head_dim": size // 4} if "head_dim" in FAMILIES[family].config else {})
    module = build(family, dtype=dtype, **sizes)
    if made == "int8":
        encode_linears(module)
    return Model(module, fuse=Fuse.on if made == "fused" else Fuse.off)


def prefilled(model: Model, pads: list[int], length: int = TOKENS) -> tuple[KVCache, Tensor]:
    """A cache with a prompt's keys and values, and random following ids (B, NEW)."""
    ids_BS = torch.randint(3, VOCAB_SIZE, (len(pads), length + NEW), generator=torch.Generator().manual_seed(7))
    cache = model.empty_cache(length + NEW + 1, batch=len(pads))
    for slab in cache.slabs.by_layer:
        slab.slab_TBKX.zero_()
    model.forward(ids_BS[:, :length], CausalAttention(cache, start=0, pads=pads), start=0, pads=pads)
    return cache, ids_BS[:, length:]


def stepped(forward: Callable[[Tensor, int], Tensor], following: Tensor, length: int = TOKENS) -> Tensor:
    """Logits (NEW, B, V) of the following tokens, one step each."""
    steps = enumerate(following.split(1, dim=1), start=length)
    return torch.stack([forward(ids_B1, index).clone() for index, ids_B1 in steps])


def eager(model: Model, pads: list[int], length: int = TOKENS) -> Tensor:
    cache, following = prefilled(model, pads, length)
    return stepped(forward_over(model, cache, [], pads=pads, prompt_tokens=length), following, length)


def replaying(model: Model, pads: list[int], length: int = TOKENS) -> tuple[FixedForward, Tensor]:
    cache, following = prefilled(model, pads, length)
    fixed = fastest_form(cache, model, pads=pads, num_tokens=length)
    assert fixed.repeats_steps
    return FixedForward(model, fixed, num_rows=len(pads)), following


def program_of(forward: FixedForward) -> Program:
    assert forward._recorded is not None and forward._recorded._program is not None
    return forward._recorded._program


def assert_near(found: Tensor, known: Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert (found.double() - known.double()).abs().max() <= TOLERANCE[dtype] * known.abs().max()


READ_BY_HOST = {"gpt2"}
"""Families whose code asks for a number in each step."""


@pytest.mark.parametrize("pads", [[0], [0, 0, 0], [0, 4, 9]], ids=["one row", "rows", "padded rows"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(4)
def test_logits_are_those_over_slabs(family: str, pads: list[int], recwarn: pytest.WarningsRecorder) -> None:
    if not Model(build(family)).repeats_steps:
        pytest.skip("steps of this family differ in more than ids, positions and stored tokens")
    model = model_of(family)
    if not model.repeats_steps or (len(set(pads)) > 1 and model.uneven_limit is not None):
        pytest.skip("this family counts positions itself")
    if not records(model):
        pytest.skip("the kernels do not take keys and values of this size")
    known = eager(model, pads)
    forward, following = replaying(model, pads)
    assert_near(stepped(forward, following), known)
    assert bool(model.unrecordable) == (family in READ_BY_HOST), model.unrecordable
    if not model.unrecordable:
        with patch.object(model, "forward", side_effect=AssertionError("computed by the model")):
            forward(following[:, :1], 0)
        assert not any("recorded step" in str(each.message) for each in recwarn)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_in_bfloat16_are_those_over_slabs(family: str) -> None:
    model = model_of(family, torch.bfloat16)
    known = eager(model, [0, 2])
    forward, following = replaying(model, [0, 2])
    assert_near(stepped(forward, following), known, torch.bfloat16)
    assert program_of(forward)


def test_bits_are_the_same_for_any_number_of_threads_and_again(threads: Callable[[int], None]) -> None:
    found = []
    for num in (1, 2, 3, 1):
        threads(num)
        found.append(stepped(*replaying(model_of("llama"), [0, 0]))[UNRECORDED + 2 :])  # those before are torch's
    assert all(torch.equal(each, found[0]) for each in found)


def forwards_of_prompts(model: Model, rows: list[list[int]], lengths: Sequence[int]) -> list[int]:
    """How often the model computes in steps of prompts, one after another, whose logits are those of eager steps."""
    found = []
    for pads, length in zip(rows, lengths, strict=True):
        known = eager(model, pads, length)
        with patch("runahead.decoding.recorded.FIRST_REPLAYS", 1000):  # so that none is compared meanwhile
            forward, following = replaying(model, pads, length)
        with patch.object(model, "forward", wraps=model.forward) as computed:
            assert_near(stepped(forward, following, length), known)
        found.append(computed.call_count)
        del forward
    assert not model.unrecordable
    return found


ANEW = UNRECORDED + 2


@pytest.mark.parametrize(
    "rows", [[[0]] * 6, [[0, 0]] * 6, [[0, 4, 2], [3, 0, 5], [0, 1, 0], [2, 2, 0], [1, 0, 0], [0, 0, 6]]]
)
def test_a_step_outlives_its_prompt_and_is_right_in_the_memory_of_another(rows: list[list[int]]) -> None:
    """It is compared in its first move and in one to memory of another size; then no step is computed by the model."""
    found = forwards_of_prompts(model_of("llama"), rows, [TOKENS, TOKENS, TOKENS, 20, 9, 33])
    assert found == [ANEW, 1, 0, 1, 0, 0]


@pytest.mark.parametrize("rows", [([0], [0, 0]), ([0], [0, 4, 2]), ([0, 4], [0, 4, 2])])
def test_steps_of_other_numbers_of_rows_are_other_steps(rows: tuple[list[int], list[int]]) -> None:
    """Padded rows lie one after another in slabs of one shape, however many they are."""
    one, other = rows
    found = forwards_of_prompts(model_of("llama"), [one, other, one, other], [TOKENS] * 4)
    assert found == [ANEW, ANEW, 1, 1]


def test_a_step_that_takes_much_memory_goes_with_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that plans do not count has a bound: the oldest go first, and one that is larger alone is not kept."""
    model, rows = model_of("llama"), [[0], [0, 0], [0, 0, 0]]
    forwards_of_prompts(model, rows, [TOKENS] * 3)
    sizes = [each.num_bytes for each in model.recorded_steps.values()]
    assert sizes == sorted(sizes) and sizes[0] > 0 and len(sizes) == 3
    model.recorded_steps.clear()
    monkeypatch.setattr("runahead.decoding.recorded.MOST_STEP_BYTES", sizes[0] + sizes[1])
    found = forwards_of_prompts(model, [[0], [0, 0], [0], [0, 0], [0, 0, 0], [0]], [TOKENS] * 6)
    assert found == [ANEW, ANEW, 1, 1, ANEW, 1 if sizes[0] + sizes[2] <= sizes[0] + sizes[1] else ANEW]
    assert sum(each.num_bytes for each in model.recorded_steps.values()) <= sizes[0] + sizes[1]


def test_a_prompt_that_is_freed_while_another_step_is_recorded_is_no_part_of_it() -> None:
    """Python's collector may do so at any moment; the step is x times 2, and can be replayed."""
    x, y = torch.ones(5, 4), torch.full((5, 4), 3.0)
    (_, left), (_, moved), (_, gone) = [
        recorded(lambda: x.index_copy(0, torch.tensor([1]), x[:1]), [x]) for _ in range(3)
    ]
    programs = [left, moved, gone]
    assert all(isinstance(each, Program) for each in programs)

    def step() -> Tensor:
        doubled = y * 2
        programs[0].difference(programs[1])
        assert programs[0].let_go() and programs[1].move_to([torch.ones(5, 4)])
        del programs[2]
        return doubled

    del gone
    _, program = recorded(step, [y])
    assert isinstance(program, Program), program
    assert program.names == ["aten::mul.Tensor"]
    y.fill_(5)
    assert torch.equal(program(), torch.full((5, 4), 10.0))


@pytest.mark.parametrize("left_out", [0, 1, 2, 3], ids=["starts", "lengths", "slots", "positions"])
def test_a_step_that_reads_other_memory_of_its_prompt_is_recorded_anew(left_out: int) -> None:
    """Memory that it changes is known at once; memory that it only reads is found as it is compared."""
    make = DeviceIndex.__init__

    def without(index: DeviceIndex, *args: object, **more: object) -> None:
        make(index, *args, **more)  # type: ignore[arg-type]
        index.numbers = [each for number, each in enumerate(index.numbers) if number != left_out]

    with patch.object(DeviceIndex, "__init__", without):
        found = forwards_of_prompts(model_of("llama"), [[0, 4, 2]] * 2, [TOKENS, 20])
    assert found == [ANEW, ANEW if left_out else 2]


@pytest.mark.parametrize(
    ("step", "moves"),
    [
        (lambda x: (x.index_copy_(0, torch.tensor([1]), x[:1] * 2), torch.ones(1) * 3)[1], False),
        (lambda x: x.index_copy(0, torch.tensor([1]), torch.ones(1, 4)).sum(), False),
        (lambda x: x.sum(dim=0), False),
        (lambda x: x[:5] * 2, False),
        (lambda x: (x.index_copy_(0, torch.tensor([1]), torch.full((1, 4), 2.0)), torch.ones(1) * 3)[1], True),
    ],
    ids=["reads some", "reads all of a copy", "reads all", "reads the first", "stores"],
)
def test_a_program_moves_to_memory_of_another_size_if_it_reads_slots_alone(
    step: Callable[[Tensor], Tensor], moves: bool
) -> None:
    x, same, larger = torch.ones(5, 4), torch.full((5, 4), 7.0), torch.full((9, 4), 7.0)
    _, program = recorded(lambda: step(x), [x])
    assert isinstance(program, Program), program
    assert program.move_to(larger.split(9)) == moves
    assert program.let_go() and program.move_to([same])
    expected = step(same.clone())
    assert torch.equal(program(), expected)


OF_OURS = {"plain": set[str](), "fused": {"runahead::rms_norm", "runahead::rotate"}}


@pytest.mark.parametrize("pads", [[0], [0, 2, 5]], ids=["one row", "rows"])
@pytest.mark.parametrize("made", OF_OURS)
def test_nothing_but_a_few_numbers_of_positions_goes_through_the_dispatcher(made: str, pads: list[int]) -> None:
    model = model_of("llama", size=128, made=made)
    known = eager(model, pads)
    forward, following = replaying(model, pads)
    assert_near(stepped(forward, following), known)
    dispatched = [name for name in program_of(forward).names if name.startswith("(")]
    assert len(dispatched) <= 8, dispatched
    assert OF_OURS[made] <= {*program_of(forward).names}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma", "gpt_neox", "phi3"])
def test_a_program_with_products_in_8_bits_has_the_bits_of_its_step(family: str, dtype: torch.dtype) -> None:
    """A last bit more before a product may be a code more in it, by which logits differ as if it were wrong."""
    model = model_of(family, dtype, size=128, made="int8")
    known = eager(model, [0, 2])
    forward, following = replaying(model, [0, 2])
    assert torch.equal(stepped(forward, following), known)
    assert "runahead::linear_int8" in program_of(forward).names


def test_rows_that_join_and_leave_have_the_tokens_that_each_has_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step for one row and two, each recorded once; the tokens are those without kernels."""
    ranks, model, own = Ranks.start(RanksOptions(device=Device.cpu)), model_of("llama"), Program.__call__
    with monkeypatch.context() as without:
        without.setattr(KERNELS, "in_use", False)
        expected = alone(Engine(model, ranks))
    calls = list[int]()
    monkeypatch.setattr(Program, "__call__", lambda self: calls.append(len(self.result)) or own(self))
    decoding = Decoding(Engine(model, ranks))
    for rows, steps in (((0,), 5), ((1, 2), 4), ((3,), 12)):
        decoding.join(*rows)
        decoding.step(steps)
    assert [decoding.tokens[row] for row in range(4)] == expected
    assert set(calls) >= {1, 2} and not model.unrecordable


SPARSE, TWO = torch.eye(64).to_sparse(), TwoTensor(torch.ones(64), torch.ones(64))


class Reads(nn.Module):
    """A layer that asks for a number of what it is given."""

    def __init__(self, inner: nn.Module, read: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.inner, self.read = inner, read

    def forward(self, x: Tensor) -> Tensor:
        self.read(x)
        return self.inner(x)


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda x: x.sum().item(), "asks for a number"),
        (lambda x: bool(x.sum() > 0), "asks for a number"),
        (lambda x: x.tolist(), "tolist reads numbers"),
        (lambda x: x.numpy(), "numpy reads numbers"),
        (lambda x: x.nonzero(), "a shape that depends on numbers"),
        (lambda x: x[x > 0], "a shape that depends on numbers"),
        (lambda x: torch.equal(x, x + 1), "asks for a number"),
        (lambda x: SPARSE @ x[0].mT, "no plain memory"),
        (lambda x: x.to_mkldnn(), "no plain memory"),
        (lambda x: TWO + x, "no plain memory"),
    ],
    ids=["item", "bool", "tolist", "numpy", "nonzero", "mask", "equal", "sparse", "oneDNN", "subclass"],
)
def test_a_step_that_cannot_be_replayed_stays_as_it_is_and_is_told_once(
    read: Callable[[Tensor], object], reason: str, recwarn: pytest.WarningsRecorder
) -> None:
    model = model_of("llama")
    known = eager(model, [0])
    model.module.model.layers[1].mlp = Reads(model.module.model.layers[1].mlp, read)
    assert_near(stepped(*replaying(model, [0])), known)
    cache, _ = prefilled(model, [0])
    assert not fastest_form(cache, model, pads=[0], num_tokens=TOKENS).repeats_steps, (
        "not what others are faster without"
    )
    assert_near(eager(model, [0]), known)
    told = [str(each.message) for each in recwarn if "recorded step" in str(each.message)]
    assert len(told) == 1 and reason in told[0]


def test_a_number_of_the_host_that_is_another_in_each_step_is_found(recwarn: pytest.WarningsRecorder) -> None:
    model = model_of("llama")
    mlp, steps = model.module.model.layers[1].mlp, iter(range(100))
    known = eager(model, [0])
    forward, following = replaying(model, [0])
    model.module.model.layers[1].mlp = Reads(mlp, lambda x: x.add_(0.01 * next(steps)))
    found = stepped(forward, following)
    assert "is given another" in model.unrecordable
    with pytest.raises(AssertionError):
        assert_near(found, known)


def elsewhere(slab: KVSlab, *given: Tensor) -> None:
    """Store in another thread, which does not record."""
    thread = threading.Thread(target=WRITE, args=(slab, *given))
    thread.start()
    thread.join()


WRITE = KVSlab.write


@pytest.mark.parametrize(("left_out", "told"), [("stores", "logits differ"), ("moves on", "is given another")])
def test_a_program_that_leaves_something_out_is_found(left_out: str, told: str) -> None:
    """It stores nothing, or keeps the first step's position."""
    model = model_of("llama")
    known, positions = eager(model, [0]), iter(range(TOKENS, TOKENS + NEW))
    forward, following = replaying(model, [0])
    owner, name, wrong = {
        "stores": (KVSlab, "write", elsewhere),
        "moves on": (DeviceIndex, "positions_BC", lambda *_: torch.tensor([[next(positions)]])),
    }[left_out]
    with patch.object(owner, name, wrong), pytest.warns(UserWarning, match=told):
        found = stepped(forward, following)
    assert_near(found, known)


@pytest.mark.parametrize("compares_calls", [True, False])
def test_a_number_of_the_host_that_changes_logits_little_is_found(compares_calls: bool) -> None:
    """In bfloat16 a far position is, nearly, the one before: logits alone do not show it."""
    model, numbers = model_of("llama", torch.bfloat16), count()
    forward, following = replaying(model, [0])
    mlp = model.module.model.layers[1].mlp
    model.module.model.layers[1].mlp = Reads(mlp, lambda x: x.add_(torch.tensor(1e-3 * next(numbers))))
    if compares_calls:
        with pytest.warns(UserWarning, match="is given another"):
            stepped(forward, following)
    else:
        with patch.object(Program, "difference", lambda *_: ""):
            stepped(forward, following)
    assert bool(model.unrecordable) == compares_calls


class Told:
    """The warnings about a model whose step is repeated."""

    dtype, weights, unrecordable = torch.float32, Weights.full, ""


def test_a_number_of_the_host_that_changes_seldom_is_found_later() -> None:
    x, number = torch.zeros(1, 1), 0

    def step() -> Tensor:
        return x.add_(1).clone() * (1 + (number > UNRECORDED + 8))

    repeated, found = RecordedStep(step, Told()), list[float]()  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=f"is given another other .*after {FIRST_REPLAYS} replayed steps"):
        for number in range(UNRECORDED + FIRST_REPLAYS + 4):  # noqa: B007 (the step reads it)
            found.append(repeated().item())
    known = list(map(float, range(1, len(found) + 1)))
    assert found == [*known[:-2], 2 * known[-2], 2 * known[-1]], "right again, from there on"


def test_what_a_step_makes_for_the_next_ones_is_recorded_as_those_find_it() -> None:
    x, kept, number = torch.zeros(1, 1), dict[str, Tensor](), 0

    def step() -> Tensor:
        if number <= UNRECORDED:
            kept["factor"] = x * 0 + 3
        return x.add_(1) * kept["factor"]

    model = Told()
    repeated = RecordedStep(step, model)  # type: ignore[arg-type]
    for number in range(UNRECORDED + 6):
        assert repeated().item() == 3 * (number + 1)
    assert repeated._program is not None and not model.unrecordable


def test_a_row_without_numbers_is_not_compared_and_the_others_are_compared_again() -> None:
    """It ends alone, and says nothing of the program: which is compared until all rows can be."""
    x, of_row, calls, model = torch.zeros(1, 2), torch.tensor([[torch.nan]]), list[int](), Told()

    def step() -> Tensor:
        calls.append(0)
        return torch.cat([x.add_(1), x * of_row])

    repeated = RecordedStep(step, model)  # type: ignore[arg-type]
    for _ in range(UNRECORDED + 4):
        repeated()
    assert len(calls) == UNRECORDED + 4
    of_row.fill_(1)
    assert [repeated()[1, 0].item() for _ in range(3)] == [UNRECORDED + 5, UNRECORDED + 6, UNRECORDED + 7]
    assert len(calls) == UNRECORDED + 5 and not model.unrecordable


NAN, RULED_OUT = torch.nan, torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("ours", "known", "apart", "are_all"),
    [
        ([[1.0, 2, -4]], [[1.0, 2, -4]], 0, True),
        ([[1.0, 2.5, -4]], [[1.0, 2, -4]], 0.125, True),
        ([[1.0, 2, -4], [1, 2, 3]], [[1.0, 2, -4], [1, NAN, 3]], 0, False),
        ([[1.0, 2.5, -4], [1, 2, 3]], [[1.0, 2, -4], [1, torch.inf, 3]], 0.125, False),
        ([[1.0, NAN, -4]], [[1.0, 2, -4]], torch.inf, True),
        ([[1.0, -torch.inf, -4]], [[1.0, -torch.inf, -4]], 0, True),
        ([[1.0, 2, -4]], [[1.0, -torch.inf, -4]], torch.inf, True),
        ([[1.0, 2.5, -4, RULED_OUT]], [[1.0, 2, -4, RULED_OUT]], 0.125, True),
        ([[1.0, 2.5, -4, -1e4]], [[1.0, 2, -4, -1e4]], 0.125, True),
        ([[0.5, 200, 400], [1, 2, 4]], [[0.5, 200, 400], [1.5, 2, 4]], 0.125, True),
    ],
    ids=["same", "apart", "NaN", "infinite", "ours NaN", "ruled out", "ours not", "least number", "far", "of its row"],
)
def test_logits_are_compared_with_the_largest_that_a_model_has_computed(
    ours: list[list[float]], known: list[list[float]], apart: float, are_all: bool
) -> None:
    assert _apart(torch.tensor(ours), torch.tensor(known)) == (apart, are_all)


class Other:
    """What one step computes, of a tensor that is another one when it is replayed."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32, like: str = "plain") -> None:
        generator = torch.Generator().manual_seed(math.prod(shape))
        self.memory = torch.randn(2, *shape, generator=generator).to(dtype)
        self.x = self.memory[0].clone()
        if like == "transposed":
            self.x = self.memory[0].mT.contiguous().mT
        self.first, self.second = self.x.clone(), self.memory[1]

    def compare(self, of: Callable[[Tensor], Tensor], *, is_own: bool = True) -> Tensor:
        result, program = recorded(lambda: of(self.x))
        assert isinstance(program, Program), program
        assert not is_own or not [name for name in program.names if name.startswith("(")], program.names
        self.x.copy_(self.second)
        assert torch.equal(result, of(self.first)), "what was recorded is as it was"
        result = program()
        known = of(self.second.double())
        dtype, eps = self.x.dtype, {torch.float32: 3e-6, torch.bfloat16: 2**-6}[self.x.dtype]
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), known.double(), atol=eps, rtol=eps)
        with pytest.raises(AssertionError):  # of what it was recorded with
            torch.testing.assert_close(result.double(), of(self.first.double()).double(), atol=eps, rtol=eps)
        return result


def weights(*shape: int) -> Callable[[Tensor], Tensor]:
    """The same numbers in the dtype of a tensor."""
    known = torch.randn(*shape, generator=torch.Generator().manual_seed(3)) / shape[-1] ** 0.5
    kept = {dtype: known.to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)}
    return lambda x: kept[x.dtype]


W, V, B = weights(37, 50), weights(50), weights(37)


def by_onednn(x: Tensor, activation: str, *, gate: bool = False) -> Tensor:
    if x.dtype == torch.float64:
        out = F.linear(x, W(x), B(x))
        return out * x[:, :37] if gate else F.silu(out) if activation == "swish" else out
    multiply, x = torch.ops.mkldnn._linear_pointwise, x.contiguous()
    if gate:
        return multiply.binary(x, x[:, :37].contiguous(), W(x), B(x), "mul")
    return multiply(x, W(x), B(x), activation, [], "")


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + V(x),
    "add alpha": lambda x: torch.add(x, V(x), alpha=0.3),
    "subtract": lambda x: x - 3 * V(x),
    "multiply": lambda x: x * 1.7,
    "divide": lambda x: V(x) / (x * x + 1.0),
    "broadcast": lambda x: x[:, :1] * x[:1],
    "negative": lambda x: -x,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "inverse root": lambda x: torch.rsqrt(x * x + 0.5),
    "powers": lambda x: x.pow(2) + x.pow(3),
    "mean": lambda x: x.mean(-1, keepdim=True) + x,
    "rms norm": lambda x: F.rms_norm(x, (50,), V(x), 1e-5),
    "layer norm": lambda x: F.layer_norm(x, (50,), None, None, 1e-5),
    "concatenation": lambda x: torch.cat([-x[:, 25:], x[:, :25], x[:, 3:4]], dim=-1),
    "copy": lambda x: x.mT.contiguous().clone(),
    "linear": lambda x: F.linear(x.contiguous(), W(x), B(x)),
    "linear without bias": lambda x: F.linear(x.contiguous(), W(x)),
    "linear by oneDNN": lambda x: by_onednn(x, "none"),
    "linear and activation": lambda x: by_onednn(x, "swish"),
    "linear and gate": lambda x: by_onednn(x, "none", gate=True),
    "row": lambda x: F.linear(x[:1].contiguous(), W(x)),
    "product": lambda x: x.contiguous() @ W(x).mT,
    "vector": lambda x: torch.mv(W(x), x[0].contiguous()),
}


@pytest.mark.parametrize("rows", [1, 2, 5, 7, 32])
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_computes_what_it_does_in_float64(name: str, rows: int) -> None:
    Other(rows, 50).compare(OPERATORS[name])


ONE_ROUNDING = ["multiply", "broadcast", "negative", "silu", "sigmoid", "tanh", "relu", "gelu", "layer norm", "copy"]
"""In bfloat16 others round between two operators, or have weights that are rounded."""


@pytest.mark.parametrize("name", ONE_ROUNDING)
def test_an_operator_computes_what_it_does_in_bfloat16(name: str) -> None:
    Other(3, 50, dtype=torch.bfloat16).compare(OPERATORS[name])


@pytest.mark.parametrize("name", ["add", "broadcast", "silu", "concatenation", "copy", "mean"])
def test_an_operator_takes_strides(name: str) -> None:
    Other(7, 50, like="transposed").compare(OPERATORS[name], is_own=name != "mean")


STARTS, USED = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 1400, 1500], [1390, 90]))
WIDE, V2, B2, KEYS = weights(700, 300), weights(200), weights(700), weights(2, 1, 2, 1500, 16)


def attended(x: Tensor) -> Tensor:
    """Two sequences, one of which is in several parts."""
    q_SNH, (k_1KTH, v_1KTH) = x.reshape(2, 4, 16), KEYS(x)
    if x.dtype != torch.float64:
        return operators.attend_sequences(q_SNH, k_1KTH, v_1KTH, STARTS, USED, 0.25)[0].flatten(1)
    found = []
    for q_NH, start, used in zip(q_SNH, STARTS.tolist(), USED.tolist(), strict=False):
        k_NTH, v_NTH = (each[0, :, start : start + used].repeat_interleave(2, dim=0) for each in (k_1KTH, v_1KTH))
        scores_N1T = q_NH[:, None] @ k_NTH.mT * 0.25
        found.append((scores_N1T.softmax(dim=-1) @ v_NTH).flatten())
    return torch.stack(found)


SHARED: dict[str, tuple[tuple[int, int], Callable[[Tensor], Tensor]]] = {
    "product": ((5, 300), lambda x: F.linear(x.contiguous(), WIDE(x), B2(x))),
    "loop": ((300, 200), lambda x: x * V2(x)),
    "norm": ((300, 200), lambda x: F.rms_norm(x, (200,), V2(x), 1e-5)),
    "attention": ((2, 64), attended),
}
"""Operators that are large enough for several threads."""


@pytest.mark.parametrize("name", SHARED)
def test_threads_share_an_operator_and_its_bits_are_the_same(name: str, threads: Callable[[int], None]) -> None:
    (rows, length), of = SHARED[name]
    found = []
    for num in (1, 2, 3):
        threads(num)
        found.append(Other(rows, length).compare(of))
    assert all(torch.equal(each, found[0]) for each in found)


def test_tensors_that_are_not_needed_at_the_same_time_share_memory() -> None:
    """And what the recorded step has made is not among them: others may hold it."""
    x, kept = torch.ones(1000), list[Tensor]()

    def step() -> Tensor:
        first = x * 2
        y = first
        for _ in range(20):
            y = y + x
            kept.append(y)
        return y - first

    _, program = recorded(step)
    assert isinstance(program, Program)
    assert 3 * x.nbytes <= program.num_bytes <= 4 * (x.nbytes + 64)
    x.copy_(torch.arange(1000))
    assert torch.equal(program(), 20 * torch.arange(1000.0))
    assert all(each.eq(3 + number).all() for number, each in enumerate(kept))


def test_what_is_made_once_is_not_computed_again() -> None:
    x = torch.ones(3)
    result, program = recorded(lambda: x + torch.arange(3) * 2 + torch.zeros(3).add_(x))
    assert isinstance(program, Program)
    x.fill_(5)
    assert program().tolist() == [10, 12, 14]
    assert sum("arange" in name for name in program.names) == 0
    assert sum("zeros" in name for name in program.names) == 1, "what is changed in place is made anew"


def test_an_error_ends_the_recording() -> None:
    def step() -> Tensor:
        raise KeyError("of the model")

    with pytest.raises(KeyError):
        recorded(step)
    x = torch.zeros(2)
    assert isinstance(recorded(lambda: x + 1)[1], Program)


def test_a_program_ends_with_what_holds_it() -> None:
    x = torch.zeros(2)
    _, program = recorded(lambda: x + 1)
    assert isinstance(program, Program)
    number = program._number
    del program
    with pytest.raises(RuntimeError, match=f"there is no program {number}"):
        torch.ops.runahead.replay(number)


def test_a_slot_that_is_none_is_an_error() -> None:
    slab, slot = torch.zeros(4, 2), torch.zeros(1, dtype=torch.long)
    _, program = recorded(lambda: slab.index_copy_(0, slot, torch.ones(1, 2)))
    assert isinstance(program, Program)
    slot.fill_(4)
    with pytest.raises(IndexError, match="slot 4 is not among 4"):
        program()


def test_two_steps_are_computed_by_the_model_once_it_repeats() -> None:
    """One is recorded, the next compared; all others are replayed, and some of these compared again."""
    x, calls = torch.zeros(1, 1), list[int]()

    def step() -> Tensor:
        calls.append(0)
        return x.add_(1).clone()

    repeated = RecordedStep(step, Told())  # type: ignore[arg-type]
    num = UNRECORDED + 2 + FIRST_REPLAYS
    assert [repeated().item() for _ in range(num)] == list(range(1, num + 1))
    assert len(calls) == UNRECORDED + 2
    assert [repeated().item() for _ in range(3)] == [num + 1, num + 2, num + 3]
    assert len(calls) == UNRECORDED + 3


def rows_alone(model: Model, lengths: list[int], ids: list[int]) -> Tensor:
    """Logits (rows, NEW, V) of rows that each have a cache of their own."""
    found = []
    for length in lengths:
        cache, of_row = prompt_of(model, length), []
        for number, id in enumerate(ids):
            start = length + number
            attention = CausalAttention(cache, start=start, pads=[0])
            of_row.append(model.forward(torch.tensor([[id]]), attention, start=start, pads=[0])[0])
        found.append(torch.stack(of_row))
    return torch.stack(found)


def prompt_of(model: Model, length: int) -> KVCache:
    cache = model.empty_cache(length + 2 * NEW)
    ids_1S = torch.randint(3, VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(length))
    model.forward(ids_1S, CausalAttention(cache, start=0, pads=[0]), start=0, pads=[0])
    return cache


def of_arena(model: Model, lengths: list[int], ids: list[int]) -> tuple[Lanes, Tensor]:
    """The same of rows that lie in one arena, from which another row leaves in between."""
    lanes, options = Lanes(model), GenerationOptions(max_new_tokens=NEW + 1, ignore_eos=True)
    for number, length in enumerate([*lengths, 4]):
        row = Row(model, list(range(3, 3 + length)), options, seed=0)
        lanes.join([(number, 0)], [row], prompt_of(model, length), [length], [0])
    names, found = [(number, 0) for number in range(len(lengths) + 1)], list[Tensor]()
    for number, id in enumerate(ids):
        if number == 6:
            lanes.leave(names.pop(), ids[number - 1])
        order, logits_BV = lanes.plain(dict.fromkeys(names, id))
        assert order == names
        found.append(logits_BV[: len(lengths)].clone())
    return lanes, torch.stack(found, dim=1)


@pytest.mark.parametrize("wrong", [False, True])
def test_rows_of_an_arena_are_replayed_as_each_is_computed_alone(wrong: bool) -> None:
    """Four rows fit a step, three are filled up; where rows are told other places their logits are others."""
    model, lengths, ids = model_of("llama"), [11, 7, 16], [5, 9, 6, 7, 8, 4, 3, 6]
    calls, place = list[int](), ArenaIndex.place

    def noted(program: Program) -> Tensor:
        calls.append(len(program.result))
        return replay(program)

    def placed(index: ArenaIndex, rows: Sequence[Placed], **how: bool) -> None:
        place(index, [rows[0], *rows[:-1]] if wrong else rows, **how)

    replay = Program.__call__
    with torch.inference_mode():
        expected = rows_alone(model, lengths, ids)
        with patch.object(Program, "__call__", noted), patch.object(ArenaIndex, "place", placed):
            lanes, found = of_arena(model, lengths, ids)
    assert calls == [4] * (len(ids) - UNRECORDED - 1), "one step of a program is recorded, the next one compared"
    is_near = (found - expected).abs().max() <= TOLERANCE[torch.float32] * expected.abs().max()
    assert bool(is_near) != wrong and not model.unrecordable
    assert lanes.num_bytes == sum(length + NEW + 1 for length in lengths) * sum(
        shape.bytes_per_token() for shape in model.kv_shapes
    )
