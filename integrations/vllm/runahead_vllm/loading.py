"""The worker's side: files are read by a thread and written into vLLM's paged cache, layer by layer."""

# Legend: T tokens of the prompt, K kv heads of the whole model, X = key dims + value dims.

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runahead_vllm.prompt_file import PromptFile
from runahead_vllm.scheduling import Load, Report

logger = logging.getLogger("vllm.runahead")

NULL_BLOCK = 0
"""vLLM's block for tokens that are out of the window; nothing is ever written to it."""


@dataclass(frozen=True)
class Group:
    """A KV cache group of vLLM: layers that share a table of blocks.

    Attributes:
        layers: names by the layer's number in the model.
    """

    block_size: int
    layers: Mapping[int, str]


@dataclass(frozen=True)
class Rank:
    """A tensor-parallel rank."""

    number: int
    count: int

    def heads(self, total: int, local: int) -> slice:
        """Its kv heads: its share of all, or, with fewer heads than ranks, the one of which it has a copy."""
        first = self.number * total // self.count
        return slice(first, first + local)


def slots_of(block_ids: Sequence[int], block_size: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Tokens of [start, stop) that have a block, and the slot of each."""
    tokens = torch.arange(start, stop)
    blocks = torch.tensor(block_ids, dtype=torch.int64)[tokens // block_size]
    kept = blocks != NULL_BLOCK
    tokens, blocks = tokens[kept], blocks[kept]
    return tokens, blocks * block_size + tokens % block_size


class WorkerSide:
    """Loads, one after another, of which each is reported once, whatever becomes of its request.

    Attributes:
        layers: vLLM's attention layers by name.
    """

    def __init__(self, layers: Mapping[str, Any], groups: Sequence[Group], rank: Rank, *, num_layers: int) -> None:
        self.layers, self._groups, self._rank, self._num_layers = layers, groups, rank, num_layers
        self._reader = ThreadPoolExecutor(1, "runahead-load")
        self._running: dict[str, Future[Report]] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None

    def start(self, loads: Iterable[Load]) -> None:
        """Begin loads, in the model runner's thread.

        Blocks may still be in use by kernels that the runner has queued: steps of the request that had them before,
        or the zeroing of new blocks. Each load is written after those.
        """
        queued = self._queued()
        for load in loads:
            assert load.request_id not in self._running, load
            self._running[load.request_id] = self._reader.submit(self._load, load, queued)

    def ended(self) -> dict[str, Report]:
        """Loads that have ended since the last call, by request."""
        done = [name for name, load in self._running.items() if load.done()]
        return {name: self._running.pop(name).result() for name in done}

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _queued(self) -> torch.cuda.Event | None:
        """An event after what the model runner has queued by now; None where it queues nothing, as on a CPU."""
        device = next(iter(self.layers.values())).kv_cache.device
        return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def _load(self, load: Load, queued: torch.cuda.Event | None) -> Report:
        """Load a file; an error is its report, since vLLM waits for one."""
        began_s = time.monotonic()
        try:
            with torch.inference_mode():
                num_bytes = self._read(load, queued)
        except FileNotFoundError:
            error = "it is gone"
        except Exception as found:  # also one of vLLM's kernels
            error = f"{found}" if isinstance(found, ValueError) else f"{type(found).__name__}: {found}"
        else:
            return Report(num_bytes, time.monotonic() - began_s)
        return Report(0, time.monotonic() - began_s, error)

    def _read(self, load: Load, queued: torch.cuda.Event | None) -> int:
        """Raises: OSError, ValueError: the file is not usable; what was written by then is computed anew by vLLM."""
        with PromptFile(Path(load.path)) as file:
            self._make_room(max(layer.num_bytes for layer in file.layers))
            if (file.num_tokens, len(file.layers)) != (load.num_tokens, self._num_layers):
                raise ValueError(f"it has {file.num_tokens} tokens of {len(file.layers)} layers")
            places: dict[int, tuple[str, Tensor, Tensor]] = {}
            for group, block_ids in zip(self._groups, load.block_ids, strict=True):
                tokens, slots = slots_of(block_ids, group.block_size, load.start, load.stop)
                for number, name in group.layers.items():
                    self._require(file, number, name, tokens)
                    places[number] = name, tokens, slots
            if queued is not None:
                self._own_stream().wait_event(queued)
            try:
                for number in sorted(places):
                    name, tokens, slots = places[number]
                    layer_TKX = file.read(number, self._buffer)
                    self._write(self.layers[name], layer_TKX, tokens - file.layers[number].first, slots)
            finally:  # after an error, too: vLLM then computes the same blocks
                if queued is not None:
                    self._own_stream().synchronize()
            return file.num_bytes

    def _require(self, file: PromptFile, number: int, name: str, tokens: Tensor) -> None:
        """Raises: ValueError: the file's layer has other shapes, or lacks tokens of a block that vLLM keeps.

        vLLM offers its blocks to later prompts as a whole, so that each token of a kept block can be attended to, also
        one that is out of the window of this prompt's next token.
        """
        layer, there = self.layers[name], file.layers[number]
        dims = layer.head_size + layer.head_size_v
        if there.shape[2] != dims or there.shape[1] < layer.num_kv_heads:
            raise ValueError(f"layer {number} has {there.shape[1]} heads of {there.shape[2]} dims, vLLM {dims}")
        if there.dtype != layer.dtype:
            raise ValueError(f"layer {number} is in {there.dtype}, vLLM's in {layer.dtype}")
        if len(tokens) and int(tokens[0]) < there.first:
            raise ValueError(
                f"layer {number} begins at token {there.first}, and vLLM keeps tokens from {int(tokens[0])} on"
            )

    def _write(self, layer: Any, layer_TKX: Tensor, rows: Tensor, slots: Tensor) -> None:
        """Write rows of a layer as vLLM's own forward would; its backend knows layout, packing and quantisation."""
        if not len(rows):
            return
        heads = self._rank.heads(layer_TKX.shape[1], layer.num_kv_heads)
        begin, end = int(rows[0]), int(rows[-1]) + 1
        part = layer_TKX[begin:end] if end - begin == len(rows) else layer_TKX[rows]
        device = layer.kv_cache.device
        with torch.cuda.stream(self._own_stream() if device.type == "cuda" else None):
            part = part[:, heads].to(device)
            key, value = part.split([layer.head_size, layer.head_size_v], dim=-1)
            layer.impl.do_kv_cache_update(layer, key.contiguous(), value.contiguous(), layer.kv_cache, slots.to(device))

    def _own_stream(self) -> torch.cuda.Stream:
        """The reading thread's, which is waited for before a load is reported."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(next(iter(self.layers.values())).kv_cache.device)
        return self._stream

    def _make_room(self, num_bytes: int) -> None:
        if len(self._buffer) < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
