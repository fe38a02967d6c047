"""Graphs of the virtual GPU compute what CUDA's would, and show where CUDA's would compute something else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.virtual.cuda.graphs import ALLOCATOR, CUDAGraph, MemPool

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _ends_recordings(is_virtual: None) -> Iterator[None]:
    yield
    ALLOCATOR.recording.clear()


def captured(step: Callable[[], Tensor], pool: MemPool | None = None) -> tuple[CUDAGraph, Tensor]:
    graph = CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(None if pool is None else pool.id)
        try:
            result = step()
        finally:
            graph.capture_end()
    return graph, result


def test_a_capture_runs_nothing_and_a_replay_computes_in_the_same_memory() -> None:
    x, total, found = torch.ones(3, device=GPU), torch.zeros(3, device=GPU), []

    def step() -> Tensor:
        total.add_(x)
        total[:1] = 7
        ramp = torch.arange(3, dtype=torch.float32, device=GPU)
        return (total * 2).view(1, 3) + ramp

    graph, result = captured(step)
    assert total.tolist() == [0, 0, 0] and result.isnan().all()
    for value in (1, 10):
        x.fill_(value)
        graph.replay()
        found.append((total.tolist(), result.tolist()))
    assert found == [([7, 1, 1], [[14, 3, 4]]), ([7, 11, 11], [[14, 23, 24]])]


def test_numbers_and_tensors_of_the_host_are_those_of_the_capture() -> None:
    """A call of the step in place of a replay fails here."""
    x, number, scalar, page_locked = torch.ones(2, device=GPU), 2, torch.tensor(3.0), torch.full((2,), 4.0).pin_memory()
    graph, result = captured(lambda: x * number * scalar + page_locked.to("cuda", non_blocking=True))
    number = 5
    scalar.fill_(5)
    page_locked.fill_(5)
    graph.replay()
    assert result.tolist() == [10, 10]


@pytest.mark.parametrize("ends_failed_captures", [False, True], ids=["torch 2.11", "torch 2.13"])
@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1.0], device=GPU),
        lambda x: torch.ones(2).to("cuda", non_blocking=True),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: torch.cuda.Event().synchronize(),
    ],
    ids=["item", "tolist", "cpu", "mask", "upload", "pageable", "device", "stream", "event"],
)
def test_a_wait_of_the_host_makes_the_capture_fail(
    wait: Callable[[Tensor], object], ends_failed_captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ALLOCATOR, "ends_failed_captures", ends_failed_captures)
    x = torch.ones(2, device=GPU)
    graph, pool = CUDAGraph(), MemPool()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(pool.id)
        with pytest.raises(torch.AcceleratorError, match="capturing|CUDA graph capture"):
            wait(x)
        with pytest.raises(torch.AcceleratorError, match="previous error"):
            x.add_(1)
        with pytest.raises(torch.AcceleratorError, match="previous error"):
            graph.capture_end()
    assert x.tolist() == [1, 1]
    assert (ALLOCATOR.recording == [], pool.use_count()) == (ends_failed_captures, 2)
    if not ends_failed_captures:
        with pytest.raises(RuntimeError, match="captures_underway"):
            torch.cuda.empty_cache()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()


def test_a_replay_fails_once_memory_that_it_needs_is_freed() -> None:
    memory = [torch.ones(2, device=GPU), torch.ones(2, device=GPU)]
    view = memory[0][:1]
    graph, result = captured(lambda: memory[0] + memory[1])
    del memory[0]
    graph.replay()
    assert view.tolist() == [1] and result.tolist() == [2, 2]
    del view
    with pytest.raises(AssertionError, match="after memory was freed that its aten::add needs"):
        graph.replay()


def test_graphs_in_one_pool_overwrite_what_later_ones_made() -> None:
    x, pool = torch.ones(2, device=GPU), MemPool()
    (first, one), (second, two) = (captured(lambda: x + 1, pool) for _ in range(2))
    first.replay()
    second.replay()
    assert (one.tolist(), two.tolist()) == ([2, 2], [2, 2])
    first.replay()
    assert one.tolist() == [2, 2] and two.isnan().all()
    second.reset()
    assert pool.use_count() == 2
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        second.replay()


def test_other_threads_compute_during_a_capture() -> None:
    x = torch.ones(2, device=GPU)

    def step() -> Tensor:
        other = threading.Thread(target=lambda: x.add_(x.sum().item()))
        other.start()
        other.join()
        return x * 2

    graph, result = captured(step)
    assert x.tolist() == [3, 3]
    graph.replay()
    assert result.tolist() == [6, 6]


def test_a_capture_needs_a_stream_of_its_own() -> None:
    with pytest.raises(RuntimeError, match="non-default stream"):
        CUDAGraph().capture_begin()
