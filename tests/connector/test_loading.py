"""The worker's side: slots, heads of TP ranks, windows, and loads that fail, against plain indexing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runahead_vllm.loading import Group, Rank, WorkerSide, slots_of
from runahead_vllm.scheduling import Load, Report
from tests.connector.written import numbers, write

BLOCK = 4
IDS = list(range(100, 113))
HEADS, DIMS = 2, 6
NAMES = ["m.layers.0.attn", "m.layers.1.attn", "m.layers.2.attn"]


class Layer:
    """An attention layer with a cache of (blocks, slots, heads, dims), and vLLM's call that writes to it."""

    def __init__(self, heads: int, fails: bool = False) -> None:
        self.num_kv_heads, self.head_size, self.head_size_v, self.dtype = heads, 4, 2, torch.float32
        self.kv_cache = torch.full((10 * BLOCK, heads, DIMS), -1.0)
        self.impl = SimpleNamespace(do_kv_cache_update=self.update)
        self.fails = fails

    def update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        if self.fails:
            raise RuntimeError("no such kernel")
        assert key.is_contiguous() and value.is_contiguous()
        cache[slots] = torch.cat([key, value], -1)


def loaded(worker: WorkerSide, load: Load) -> Report:
    worker.start([load])
    end = time.monotonic() + 20
    while not (ended := worker.ended()):
        assert time.monotonic() < end
        time.sleep(0.001)
    assert list(ended) == [load.request_id] and not worker.ended(), "each load is reported once"
    return ended[load.request_id]


def worker_of(layers: list[Layer], groups: list[Group] | None = None, rank: Rank | None = None) -> WorkerSide:
    groups = groups or [Group(BLOCK, dict(enumerate(NAMES)))]
    return WorkerSide(dict(zip(NAMES, layers, strict=True)), groups, rank or Rank(0, 1), num_layers=3)


def load_of(path: Path, blocks: tuple[list[int], ...], start: int = 0) -> Load:
    return Load("a", str(path), len(IDS), start, len(IDS) - 1, blocks)


def test_slots_leave_out_null_blocks() -> None:
    tokens, slots = slots_of([0, 5, 2], 4, 2, 11)
    assert tokens.tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert slots.tolist() == [20, 21, 22, 23, 8, 9, 10]


RANKS = [(total, count) for total in (1, 2, 3, 4, 6, 8) for count in (1, 2, 3, 4, 8)]


@pytest.mark.parametrize(("total", "count"), [each for each in RANKS if max(each) % min(each) == 0])
def test_ranks_have_the_heads_that_vllm_gives_them(total: int, count: int) -> None:
    """vLLM: an equal share, or with fewer heads than ranks copies, ranks beside each other having the same one.

    It refuses numbers of which none is a multiple of the other.
    """
    local = max(1, total // count)
    expected = [
        list(range(rank * local, (rank + 1) * local)) if total >= count else [rank // (count // total)]
        for rank in range(count)
    ]
    assert [list(range(total))[Rank(rank, count).heads(total, local)] for rank in range(count)] == expected


def test_every_token_but_the_last_goes_to_its_slot(tmp_path: Path) -> None:
    path, layers, blocks = write(tmp_path, IDS, numbers(IDS)), [Layer(HEADS) for _ in NAMES], [3, 1, 7]
    report = loaded(worker_of(layers), load_of(path, (blocks,)))
    assert report.error == "" and report.num_bytes == 3 * len(IDS) * HEADS * DIMS * 4
    for layer, expected in zip(layers, numbers(IDS), strict=True):
        for token in range(len(IDS) - 1):
            slot = blocks[token // BLOCK] * BLOCK + token % BLOCK
            assert torch.equal(layer.kv_cache[slot], expected[token])
        assert (layer.kv_cache == -1).all(-1).all(-1).sum() == 10 * BLOCK - (len(IDS) - 1)


@pytest.mark.parametrize(("total", "count"), [(2, 2), (1, 3), (6, 3), (2, 4)])
def test_a_rank_has_its_heads(tmp_path: Path, total: int, count: int) -> None:
    path, local = write(tmp_path, IDS, numbers(IDS, heads=total)), max(1, total // count)
    for rank in range(count):
        layers = [Layer(local) for _ in NAMES]
        assert not loaded(worker_of(layers, rank=Rank(rank, count)), load_of(path, ([0, 1, 2],), start=4)).error
        first = rank * local if total >= count else rank // (count // total)
        assert torch.equal(layers[0].kv_cache[4:12], numbers(IDS, heads=total)[0][4:12, first : first + local])


def test_a_local_prefix_is_left_as_it_is(tmp_path: Path) -> None:
    layers = [Layer(HEADS) for _ in NAMES]
    loaded(worker_of(layers), load_of(write(tmp_path, IDS, numbers(IDS)), ([1, 2, 3],), start=8))
    assert (layers[0].kv_cache[4:12] == -1).all() and (layers[0].kv_cache[12:16] != -1).all()


GROUPS = [Group(BLOCK, {0: NAMES[0], 2: NAMES[2]}), Group(BLOCK, {1: NAMES[1]})]


def test_a_window_layer_is_loaded_from_the_first_block_that_vllm_keeps(tmp_path: Path) -> None:
    written = numbers(IDS)
    written[1] = written[1][7:]
    path, layers = write(tmp_path, IDS, written, first=[0, 7, 0]), [Layer(HEADS) for _ in NAMES]
    assert not loaded(worker_of(layers, GROUPS), load_of(path, ([1, 2, 3], [0, 0, 4]))).error
    assert torch.equal(layers[1].kv_cache[16:20], numbers(IDS)[1][8:12])
    assert (layers[1].kv_cache[:16] == -1).all()


def test_a_window_layer_that_lacks_tokens_of_a_kept_block_is_not_loaded(tmp_path: Path) -> None:
    """vLLM offers the whole block to later prompts, which would attend to what was never written."""
    written = numbers(IDS)
    written[1] = written[1][7:]
    path, layers = write(tmp_path, IDS, written, first=[0, 7, 0]), [Layer(HEADS) for _ in NAMES]
    report = loaded(worker_of(layers, GROUPS), load_of(path, ([1, 2, 3], [0, 5, 4])))
    assert report.error == "layer 1 begins at token 7, and vLLM keeps tokens from 4 on"
    assert all((layer.kv_cache == -1).all() for layer in layers)


def test_nothing_of_a_layer_with_another_checksum_is_written(tmp_path: Path) -> None:
    path, layers = write(tmp_path, IDS, numbers(IDS)), [Layer(HEADS) for _ in NAMES]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert loaded(worker_of(layers), load_of(path, ([1, 2, 3],))).error == "the checksum of layer 2 differs"
    assert (layers[2].kv_cache == -1).all()


@pytest.mark.parametrize("what", ["gone", "kernel", "shape", "dtype", "heads"])
def test_whatever_fails_is_reported_and_the_next_load_is_well(tmp_path: Path, what: str) -> None:
    path, layers = write(tmp_path, IDS, numbers(IDS)), [Layer(HEADS) for _ in NAMES]
    good = write(tmp_path, [1, *IDS[1:]], numbers(IDS))
    match what:
        case "gone":
            path.unlink()
        case "kernel":
            layers[1].fails = True
        case "shape":
            layers[1].head_size = 5
        case "dtype":
            layers[1].dtype = torch.float16
        case "heads":
            layers[1].num_kv_heads = 3
    worker = worker_of(layers)
    words = {"gone": "it is gone", "kernel": "no such kernel", "dtype": "torch.float16"}.get(
        what, "layer 1 has 2 heads"
    )
    assert words in loaded(worker, load_of(path, ([1, 2, 3],))).error
    for layer in layers:
        layer.fails, layer.head_size, layer.dtype, layer.num_kv_heads = False, 4, torch.float32, HEADS
    assert not loaded(worker, load_of(good, ([1, 2, 3],))).error


def test_memory_is_that_of_one_layer(tmp_path: Path) -> None:
    worker = worker_of([Layer(HEADS) for _ in NAMES])
    loaded(worker, load_of(write(tmp_path, IDS, numbers(IDS)), ([1, 2, 3],)))
    assert len(worker._buffer) == len(IDS) * HEADS * DIMS * 4


class Order:
    """Calls of streams and writes, in their order; no GPU is needed for that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        runner = SimpleNamespace(record_event=lambda: self.seen.append("runner: record") or "event")
        reader = SimpleNamespace(
            wait_event=lambda event: self.seen.append(f"reader: wait for {event}"),
            synchronize=lambda: self.seen.append("reader: synchronize"),
        )
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: runner)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: reader)
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self.seen.append("write")
        yield


class OnGpu(Layer):
    """A layer whose cache says that it is on a GPU; tensors stay where they are."""

    def __init__(self) -> None:
        super().__init__(HEADS)
        cache = self.kv_cache
        self.kv_cache = SimpleNamespace(device=SimpleNamespace(type="cuda"))  # type: ignore[assignment]
        self.impl = SimpleNamespace(do_kv_cache_update=lambda *given: self.update(*given[:3], cache, given[4]))


@pytest.mark.parametrize("damaged", [False, True])
def test_a_gpu_writes_behind_what_the_runner_has_queued_and_before_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """Else a kernel of the block's last request could write later, or a load over what vLLM computes anew."""
    path, order = write(tmp_path, IDS, numbers(IDS)), Order(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *given: self)
    if damaged:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    report = loaded(worker_of([OnGpu() for _ in NAMES]), load_of(path, ([1, 2, 3],)))
    assert report.error == ("the checksum of layer 2 differs" if damaged else "")
    writes = ["write"] * (2 if damaged else 3)
    assert order.seen == ["runner: record", "reader: wait for event", *writes, "reader: synchronize"]
