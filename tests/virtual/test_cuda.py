"""The virtual GPU comes and goes; what it refuses and counts is tested in tests/gpu/test_virtual_gpu.py."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from runahead.cache.host.memory import host_empty
from runahead.ranks.accelerator import accelerator_for
from tests.virtual.cuda import GpuTensor, guard, virtual_gpu
from tests.virtual.cuda.generators import GENERATOR
from tests.virtual.cuda.memory import HOST
from tests.virtual.cuda.torch_cuda import CUDA

GPU = torch.device("cuda", 0)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU is here")


@pytest.fixture
def has_guard() -> None:
    guard.require_guard()


def names() -> list[object]:
    """Objects of torch under the names that the virtual GPU takes."""
    of_gpus = [vars(torch.cuda)[name] for name in CUDA]
    return [*of_gpus, torch.empty, torch.as_tensor, torch.Generator, torch.Tensor.pin_memory, torch.Tensor.is_pinned]


BEFORE = names()


def no_gpu_is_left() -> bool:
    with pytest.raises((RuntimeError, AssertionError, NotImplementedError)):
        torch.zeros(2, device=GPU)
    return names() == BEFORE and not torch.__future__.get_swap_module_params_on_conversion()


@pytest.mark.usefixtures("has_guard")
def test_a_gpu_is_there_in_all_threads_as_long_as_the_context() -> None:
    found = list[torch.Tensor]()
    for _ in range(2):
        assert no_gpu_is_left()
        with virtual_gpu():
            thread = threading.Thread(target=lambda: found.append(torch.zeros(2, device=GPU)))
            thread.start()
            thread.join()
            host_empty((2,), torch.float32, GPU)
            before = accelerator_for(GPU)
            assert before is accelerator_for(GPU)
        assert accelerator_for(GPU) is not before
        accelerator_for.cache_clear()
    assert no_gpu_is_left()
    assert all(isinstance(each, GpuTensor) for each in found) and found[1].tolist() == [0.0, 0.0]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.usefixtures("has_guard")
def test_an_error_takes_the_gpu_away_too() -> None:
    with pytest.raises(ZeroDivisionError), virtual_gpu():
        torch.cuda.manual_seed(5)
        torch.cuda.set_sync_debug_mode("error")
        HOST.cudaHostRegister(4096, 4096, 0)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.CUDAGraph().capture_begin()
            raise ZeroDivisionError
    assert no_gpu_is_left()
    with virtual_gpu():
        assert torch.cuda.get_sync_debug_mode() == 0 and torch.zeros(1, device=GPU).tolist() == [0]
        assert GENERATOR.initial_seed() == torch._C.Generator().initial_seed()
        torch.cuda.empty_cache()
    assert not HOST._registered


def test_without_a_compiler_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler; install g\+\+, or set CXX"):
        guard.load_guard.__wrapped__()
