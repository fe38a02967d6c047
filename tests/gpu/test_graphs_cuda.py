"""Graphs of decoding steps: what they compute, the memory in which they do, a capture that fails, and their end."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from runahead import GenerationOptions, Ranks
from runahead.cache.attention import CausalAttention
from runahead.cache.fixed import in_fixed_shape
from runahead.cache.kv_cache import KVCache
from runahead.decoding.forward import Forward, forward_over
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import Row
from runahead.model.model import Model
from runahead.ranks.accelerator import Accelerator, Communicator, accelerator_for
from runahead.ranks.worker import Worker
from tests.gpu.conftest import HAS_GPU
from tests.gpu.models import CUDA, alone, model
from tests.virtual.cuda.graphs import ALLOCATOR

END, NEW = 40, 7
IDS = torch.randint(211, (1, END + NEW), generator=torch.Generator().manual_seed(4))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """The GPU with no graph yet, and as if none had failed."""
    accelerator_for.cache_clear()
    found = accelerator_for(CUDA)
    assert found is not None
    yield found
    accelerator_for.cache_clear()


@pytest.fixture(scope="module")
def half() -> Model:
    return model(CUDA, torch.bfloat16)


def decoding(half: Model, *, fixed: bool) -> tuple[Forward, list[Tensor]]:
    """The forward after a prompt, and ids of the tokens that follow it."""
    ids_1S = IDS.to(half.device)
    cache = half.empty_cache(END + NEW)
    half.forward(ids_1S[:, :END], CausalAttention(cache, start=0, pads=[0]), start=0, pads=[0])
    over = in_fixed_shape(cache, pads=[0], num_tokens=END) if fixed else cache
    assert over is not None
    return forward_over(half, over, [], pads=[0], prompt_tokens=END), list(ids_1S[:, END:].split(1, dim=1))


def logits_of(half: Model, *, fixed: bool) -> Tensor:
    forward, following = decoding(half, fixed=fixed)
    return torch.stack([forward(ids_11, END + step).clone() for step, ids_11 in enumerate(following)])


def require_near(found: Tensor, expected: Tensor) -> None:
    """Within bfloat16's last places: keys are summed up in another order."""
    assert (found - expected).abs().max() < 6e-2 * expected.std()


class Noted:
    """Notes about graphs.

    Attributes:
        pools: that of each graph that was captured; the first one of a pool stays in it.
        living: graphs that are not destroyed.
    """

    def __init__(self) -> None:
        self.pools: list[object] = []
        self.living: weakref.WeakSet[Any] = weakref.WeakSet()


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    noted = Noted()

    class NotedGraph(torch.cuda.CUDAGraph):
        def capture_end(self) -> None:
            super().capture_end()
            noted.pools.append(self.pool())
            noted.living.add(self)

        def reset(self) -> None:
            super().reset()
            noted.living.discard(self)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", NotedGraph)
    return noted


def test_prompts_one_after_the_other_use_one_pool(gpu: Accelerator, half: Model, noted: Noted) -> None:
    expected = logits_of(half, fixed=False)
    for _ in range(3):
        require_near(logits_of(half, fixed=True), expected)
    assert len(noted.pools) == 1 + 3 and len(set(noted.pools)) == 1, "one graph stays in the pool"


def test_a_graph_for_so_many_rows_stays_while_rows_join_and_leave(gpu: Accelerator, half: Model, noted: Noted) -> None:
    """Each row's logits are those that it has alone, also after it has taken the place of another one."""
    lanes, lengths, fed = Lanes(half), {0: 40, 1: 33, 2: 21, 3: 30}, dict[int, list[int]]()
    kept = dict[int, KVCache]()
    options = GenerationOptions(max_new_tokens=2 * NEW, ignore_eos=True)

    def cache_of(row: int) -> KVCache:
        ids_1S, cache = IDS[:, : lengths[row]].to(half.device), half.empty_cache(END + 2 * NEW)
        half.forward(ids_1S, CausalAttention(cache, start=0, pads=[0]), start=0, pads=[0])
        return cache

    def join(row: int) -> None:
        ids = IDS[0, : lengths[row]].tolist()
        lanes.join([(row, 0)], [Row(half, ids, options, seed=0)], cache_of(row), [lengths[row]], [0])
        kept[row] = cache_of(row)
        fed[row] = []

    def step(*rows: int) -> None:
        ids = {row: (7 * row + len(fed[row])) % 211 for row in rows}
        order, logits_BV = lanes.plain({(row, 0): id for row, id in ids.items()})
        for (row, _), logits_V in zip(order, logits_BV, strict=True):
            start = lengths[row] + len(fed[row])
            alone = CausalAttention(kept[row], start=start, pads=[0])
            ids_11 = torch.tensor([[ids[row]]], device=half.device)
            require_near(logits_V, half.forward(ids_11, alone, start=start, pads=[0])[0])
            fed[row].append(ids[row])

    for number in range(3):
        join(number)
        for _ in range(4):
            step(*range(number + 1))
    num_captured = len(noted.pools)
    assert num_captured == 2 * 3, "for 1, 2 and 4 rows, each with one that stays in its pool"
    lanes.leave((1, 0), 0)
    step(0, 2)
    join(3)
    step(0, 2, 3)
    lanes.leave((0, 0), 0)
    step(2, 3)
    assert len(noted.pools) == num_captured


def test_graphs_that_live_at_once_overwrite_nothing_of_each_other(gpu: Accelerator, half: Model, noted: Noted) -> None:
    expected = logits_of(half, fixed=False)
    both = [decoding(half, fixed=True) for _ in range(2)]
    for step in range(NEW):
        in_turn = both if step % 2 == 0 else both[::-1]  # neither goes first always, as in the capture
        logits = [forward(following[step], END + step) for forward, following in in_turn]
        for found in logits:
            require_near(found, expected[step])
    assert len(set(noted.pools)) == 2
    del both, in_turn, logits, found
    gc.collect()
    require_near(logits_of(half, fixed=True), expected)
    assert len(set(noted.pools)) == 2, "a pool is taken over"


def test_a_float32_forward_is_replayed_with_the_same_result(gpu: Accelerator) -> None:
    """GPUs have no kernel for decoding steps of fixed shape in float32, so a prefill is captured."""
    single = model(gpu.device)
    cache, ids_1S = single.empty_cache(END), IDS[:, :END].to(gpu.device)
    assert in_fixed_shape(cache, pads=[0], num_tokens=END) is None

    def step() -> Tensor:
        return single.forward(ids_1S, CausalAttention(cache, start=0, pads=[0]), start=0, pads=[0])

    step()
    graph = gpu.capture(step)
    for seed in range(2):
        other = torch.randint(211, (1, END), generator=torch.Generator().manual_seed(seed))
        ids_1S.copy_(other)
        assert torch.equal(graph(), step())


@pytest.mark.usefixtures("_ends_failed_captures")
class TestAfterAFailedCapture:
    """The host waits unseen by torch's debug mode, so that a step is captured that cannot be."""

    @pytest.fixture(params=[False, True], ids=["torch 2.11", "torch 2.13"])
    def _ends_failed_captures(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """A real GPU has the torch that it has."""
        if HAS_GPU and request.param:
            pytest.skip("a real GPU is here")
        monkeypatch.setattr(ALLOCATOR, "ends_failed_captures", request.param)

    @pytest.fixture
    def waiting(self, gpu: Accelerator, half: Model, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
        begun = []
        capture_begin = torch.cuda.CUDAGraph.capture_begin

        def noted(graph: Any, *args: Any, **kwargs: Any) -> None:
            begun.append(True)
            capture_begin(graph, *args, **kwargs)

        def logits_after_an_event(self: Model, *args: Any, **kwargs: Any) -> Tensor:
            gpu.mark().synchronize()
            return forward(self, *args, **kwargs)

        forward = Model.forward
        monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", noted)
        monkeypatch.setattr(Model, "forward", logits_after_an_event)
        return begun

    def test_decoding_goes_on_eagerly_and_nothing_is_captured_any_more(
        self, half: Model, waiting: list[bool], recwarn: pytest.WarningsRecorder
    ) -> None:
        expected = logits_of(half, fixed=False)
        warnings.simplefilter("always")
        for _ in range(2):
            require_near(logits_of(half, fixed=True), expected)
        assert waiting == [True, True], "of the pool and of the first prompt; the second begins no capture"
        (told,) = [str(each.message) for each in recwarn if "without a CUDA graph" in str(each.message)]
        assert "capturing" in told

    def test_torchs_allocator_records_no_capture(self, gpu: Accelerator, half: Model, waiting: list[bool]) -> None:
        logits_of(half, fixed=True)
        assert waiting == [True, True]
        torch.cuda.empty_cache()  # torch would fail if it did
        assert gpu.graphs._failed is not None
        assert gpu.graphs._failed[-1].use_count() == 2  # its own and that of the graph that stays in it


def test_an_error_of_the_step_alone_forbids_no_later_graph(gpu: Accelerator, noted: Noted) -> None:
    x = torch.ones(2, device=gpu.device)

    def failing() -> None:
        x.add_(1)
        raise KeyError("x")

    with pytest.raises(KeyError):
        gpu.capture(failing)
    assert x.tolist() == [1, 1]
    graph = gpu.capture(lambda: x + 1)
    assert graph().tolist() == [2, 2] and len(set(noted.pools)) == 1


class Group:
    """A process group of NCCL: its end waits until no graph is there that could hold its operations."""

    def __init__(self, noted: Noted) -> None:
        self._noted = noted
        self.has_ended = False

    def abort(self) -> None:
        self.has_ended = not self._noted.living


def decode_and_fail(half: Model, held: list[Forward]) -> None:
    forward, following = decoding(half, fixed=True)
    for step, ids_11 in enumerate(following):
        forward(ids_11, END + step)
    held.append(forward)
    raise RuntimeError("out of luck")


def ranks_with(gpu: Accelerator, group: Any) -> Ranks:
    ranks = alone()
    ranks._links = {((0, 0), 4): Communicator(group)}
    return ranks


def test_graphs_end_before_groups_are_aborted(gpu: Accelerator, half: Model, noted: Noted) -> None:
    """A traceback holds the graph of a step, which may hold operations of the group."""
    group, held = Group(noted), list[Forward]()
    with pytest.raises(RuntimeError, match="out of luck") as error, ranks_with(gpu, group):
        decode_and_fail(half, held)
    assert group.has_ended and error.traceback and len(noted.pools) == 1 + 1
    (forward,) = held
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        forward(torch.zeros(1, 1, dtype=torch.long, device=gpu.device), END + NEW)


def test_graphs_end_before_groups_are_destroyed(
    gpu: Accelerator, half: Model, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(noted)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", group.abort)
    ranks, held = ranks_with(gpu, group), list[Forward]()
    with pytest.raises(RuntimeError, match="out of luck"):
        decode_and_fail(half, held)
    ranks.size, ranks._worker = 2, Worker("control")
    monkeypatch.setattr(ranks, "barrier", lambda what: None)
    ranks.close()
    assert group.has_ended and len(noted.pools) == 1 + 1


def test_a_graph_ends_with_the_process() -> None:
    """NCCL's own destructors would wait for a graph that lives."""
    gpu = accelerator_for(CUDA)
    assert gpu is not None
    x = torch.ones(1, device=gpu.device)
    assert gpu.capture(lambda: x + 1).destroy.atexit
