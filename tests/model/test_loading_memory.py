"""Ranks of a host share one copy of the weights, and a model that does not fit is refused with both figures."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from runahead.config import ModelOptions
from runahead.model.loading import building, hf, load, memory, random_weights
from runahead.model.loading.memory import Footprint, cgroup_limits, require_room
from tests import families
from tests.model.test_loading_hf import ATTENTION, CPU, load_hf, refusal

ROOT = Path(__file__).resolve().parents[2]
GB = 10**9

# "Anonymous" is memory that belongs to the process alone. Private_Dirty would not do: it also counts pages of a mapped
# file that was written a moment ago and that no other process has mapped.
MEASURE = """
import sys
from pathlib import Path
import torch
import transformers.models.llama.modeling_llama
from runahead.config import ModelOptions
from runahead.model.loading import load

def own_bytes():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

torch.set_num_threads(1)
warm_up, path = sys.argv[1:3]
for path, dtype in ((warm_up, "auto"), (path, "auto"), (path, "bfloat16")):
    before = own_bytes()
    loaded = load(
        ModelOptions(name="hf", path=path, dtype=dtype), device=torch.device("cpu"), attn_implementation="sdpa"
    )
    loaded.module(torch.arange(4)[None])
    print(own_bytes() - before)
    del loaded
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's account of a process's memory")
@pytest.mark.slow
def test_weights_are_mapped_from_the_file_and_not_copied(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=24000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=2,
        num_attention_heads=8,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "large")
    families.build("llama", dtype=torch.float32).save_pretrained(tmp_path / "tiny")
    size = (tmp_path / "large" / "model.safetensors").stat().st_size
    assert size > 180e6
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path / "tiny", tmp_path / "large"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    _, mapped, converted = map(int, done.stdout.split())
    assert mapped < size / 4, f"{mapped} bytes of the process's own for a file of {size}"
    # The measure sees copies: another dtype cannot be mapped.
    assert converted > 0.9 * size / 2, f"{converted} bytes of the process's own for {size / 2} bytes of bfloat16"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the memory that is free and there."""

    def set_host(available: float, there: float) -> None:
        monkeypatch.setattr(memory, "available_bytes", lambda: int(available))
        monkeypatch.setattr(memory, "host_bytes", lambda: int(there))

    return set_host


def test_copies_must_fit_into_what_is_free(host: Any) -> None:
    host(available=5 * GB, there=10 * GB)
    require_room(Footprint(copied=5 * GB), CPU, label="model=x")
    message = refusal(lambda: require_room(Footprint(copied=6 * GB), CPU, label="model=x"))
    assert message.startswith("model=x needs 6.0 GB of memory for its weights, but 5.0 GB are free; ")


def test_mapped_weights_must_fit_into_the_host_only(host: Any) -> None:
    host(available=1 * GB, there=10 * GB)
    require_room(Footprint(copied=0, mapped=9 * GB), CPU, label="model=x")
    message = refusal(lambda: require_room(Footprint(copied=GB // 2, mapped=10 * GB), CPU, label="model=x"))
    assert "needs 10.5 GB" in message and "this host has 10.0 GB" in message


def test_copies_of_all_ranks_must_fit_into_the_host(host: Any) -> None:
    host(available=9 * GB, there=10 * GB)
    require_room(Footprint(copied=3 * GB, mapped=1 * GB), CPU, label="model=x", ranks_on_host=3)
    message = refusal(lambda: require_room(Footprint(copied=3 * GB), CPU, label="model=x", ranks_on_host=4))
    assert "needs 12.0 GB of memory for its weights in 4 processes, but this host has 10.0 GB" in message


def test_gpu_is_asked_for_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_device_bytes", lambda device: 8 * GB)
    device = torch.device("cuda", 1)
    require_room(Footprint(copied=8 * GB), device, label="model=x", ranks_on_host=4)
    message = refusal(lambda: require_room(Footprint(copied=7 * GB, mapped=2 * GB), device, label="model=x"))
    assert "needs 9.0 GB for its weights, but cuda:1 has 8.0 GB free" in message


def loaded_footprint(monkeypatch: pytest.MonkeyPatch, path: Path, **options: Any) -> Footprint:
    seen = []
    monkeypatch.setattr(building, "require_room", lambda footprint, device, **keywords: seen.append(footprint))
    load_hf(path, **options)
    return seen[0]


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon", "bloom", "gemma2"])
def test_weights_in_the_files_dtype_count_as_mapped(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = families.build(family, dtype=torch.float32)
    module.save_pretrained(tmp_path)
    num_bytes = sum(parameter.numel() for parameter in module.parameters()) * 4
    assert loaded_footprint(monkeypatch, tmp_path) == Footprint(copied=0, mapped=num_bytes)
    assert loaded_footprint(monkeypatch, tmp_path, dtype="bfloat16") == Footprint(copied=num_bytes // 2)


def test_checkpoint_without_head_counts_as_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = families.build("gpt2", dtype=torch.float32).transformer
    module.save_pretrained(tmp_path)
    assert loaded_footprint(monkeypatch, tmp_path).copied == 0


def test_experts_that_are_stored_one_by_one_count_as_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = families.build("mixtral", dtype=torch.float32)
    module.save_pretrained(tmp_path)
    experts = [parameter for name, parameter in module.named_parameters() if ".experts." in name]
    assert loaded_footprint(monkeypatch, tmp_path).copied >= sum(parameter.numel() for parameter in experts) * 4


def test_loading_stops_before_it_takes_memory(tmp_path: Path, host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    families.build("llama", dtype=torch.float32).save_pretrained(tmp_path)
    host(available=1000, there=10 * GB)
    load_hf(tmp_path)  # mapped
    for module, options in (
        (hf, {"name": "hf", "path": str(tmp_path), "dtype": "bfloat16"}),
        (random_weights, {"name": "random", "config": str(tmp_path)}),
    ):
        monkeypatch.setattr(module, "AutoModelForCausalLM", Untouchable())
        model = ModelOptions(**options)
        message = refusal(lambda model=model: load(model, device=CPU, attn_implementation=ATTENTION))
        assert str(tmp_path) in message and "but 1.0 kB are free" in message


class Untouchable:
    """Describes models, as long as they take no memory."""

    def from_config(self, *arguments: Any, **keywords: Any) -> Any:
        from transformers import AutoModelForCausalLM

        module = AutoModelForCausalLM.from_config(*arguments, **keywords)
        assert module.device.type == "meta"
        return module


def write_group(folder: Path, limit: str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - cache}\nactive_file {cache // 2}\ninactive_file {cache // 2}\n")


def test_limits_of_the_batch_system_and_its_parents_count(tmp_path: Path) -> None:
    root, process = tmp_path / "cgroup", tmp_path / "self"
    process.write_text("1:cpu:/other\n0::/slurm/job7/step0\n")
    write_group(root / "slurm/job7/step0", "max", 100, 0)
    write_group(root / "slurm/job7", "8000", 3000, 1000)
    write_group(root / "slurm", "50000", 9000, 0)
    assert cgroup_limits(root, process) == [(8000, 2000), (50000, 9000)]


def test_host_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path, tmp_path / "self") == []
    (tmp_path / "self").write_text("0::/\n")
    assert cgroup_limits(tmp_path, tmp_path / "self") == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_free_gpu_memory_includes_what_torch_holds_unused() -> None:
    device = torch.device("cuda", 0)
    before = memory.free_device_bytes(device)
    block = torch.empty(2**28, dtype=torch.uint8, device=device)
    assert memory.free_device_bytes(device) <= before - 2**28
    del block
    assert memory.free_device_bytes(device) >= before - 2**26  # the context and small blocks


def test_garbage_that_a_load_made_is_freed_and_what_was_there_before_not_looked_through() -> None:
    class Ring:
        def __init__(self) -> None:
            self.own = self

    ring = Ring()
    gc.collect()
    earlier = weakref.ref(ring)
    del ring
    with memory.giving_back():
        rings = [weakref.ref(Ring()) for _ in range(10_000)]
        assert all(ring() is not None for ring in rings)  # none is passed on among what is old
    assert not any(ring() is not None for ring in rings) and earlier() is not None
    assert gc.isenabled()
    gc.collect()
    assert earlier() is None


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with memory.giving_back():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
