"""Copies of keys and values between device and host memory.

Copies are made by threads, beside compute and decoding. On a CPU both are the same memory, and the copies are made all
the same: limits and code are those of a GPU. With bits host memory has records: rows are quantised when they leave the
device, and dequantised there when they come back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from runahead.cache.host.copy_stream import copies_for
from runahead.cache.host.memory import host_empty
from runahead.cache.quantised.records import KVRecords
from runahead.cache.slabs import KVShape
from runahead.ranks.accelerator import Event, accelerator_for
from runahead.ranks.worker import Worker
from runahead.reuse.tiers.layer_rows import CopiedMemory, LayerRows, Layers


class TierCopies:
    """Copies between a device and host memory.

    Args:
        device: that computes.
        shapes: of the layers.
        on_failure: called, perhaps in another thread, with a copy that could not be made, before its readers know:
            there is no host memory, or what is copied is lost.
        bits: of each number in host memory and on disk, 8, 4 or 2; None is the model's dtype.

    Attributes:
        is_packed: host memory and files have records.
        stored_shapes: of the layers there.
        token_bytes, stored_token_bytes: of one token in all layers on the device, and there.
    """

    def __init__(
        self,
        device: torch.device,
        shapes: Sequence[KVShape],
        on_failure: Callable[[CopiedMemory], object],
        bits: int | None = None,
    ) -> None:
        self.device, self.shapes, self._on_failure = device, list(shapes), on_failure
        self._records = None if bits is None else KVRecords(shapes, bits)
        self.is_packed = bits is not None
        self.stored_shapes = self.shapes if self._records is None else self._records.shapes
        self.token_bytes, self.stored_token_bytes = (
            sum(shape.bytes_per_token() for shape in each) for each in (self.shapes, self.stored_shapes)
        )
        self._accelerator, self._stream = accelerator_for(device), copies_for(device)
        self._on_their_way: list[tuple[Event, LayerRows]] = []  # host memory that copies read
        self._changes = threading.Lock()  # of this list

    @cached_property
    def _lowering(self) -> Worker:
        return Worker("keys and values to the host")

    @cached_property
    def _raising(self) -> Worker:
        return Worker("keys and values to the device")

    @property
    def is_direct(self) -> bool:
        """Whether the device computes with what is in host memory, as it is there."""
        return self.device.type == "cpu" and not self.is_packed

    def to_host(self, rows: LayerRows) -> LayerRows:
        """Begin to copy rows of the device, or of host memory, into host memory of their own."""
        is_exact = rows.records is None and not rows.memory.is_packed
        stored = rows.stored
        copy = self.stored_memory(stored.whole.num_tokens)

        def run() -> None:
            try:
                parts = copy.parts(self.host_block(copy.block_bytes))
                layers: Layers = stored.whole
                if self._records is not None and is_exact:
                    layers = _PackedLayers(stored, self._records)
                if self._accelerator is None or self._stream is None:
                    for part, layer in zip(parts, layers, strict=True):
                        copy.put(part.copy_(layer))
                    return
                self._accelerator.enter_thread()
                with self._stream.copying():
                    for part, layer in zip(parts, layers, strict=True):
                        part.copy_(layer, non_blocking=True)
                self._stream.mark().synchronize()  # until then `rows` keeps the memory that is read
                for part in parts:
                    copy.put(part)
            except Exception as error:
                self._on_failure(copy)
                copy.fail(error)

        self._lowering.submit(run)
        return stored.within(copy)

    def to_device(self, rows: LayerRows) -> LayerRows:
        """Begin to copy rows of host memory, which may be on their way, to the device.

        Compute waits for each layer when it reads it.
        """
        whole, stream, records = rows.whole, self._stream, self._records
        stored = copy = CopiedMemory(self.stored_shapes, whole.num_tokens, self._hold, is_packed=self.is_packed)
        if records is not None:
            copy = CopiedMemory(self.shapes, rows.num_tokens, self._hold, records=rows.within(stored))
        memories, first = list(dict.fromkeys((stored, copy))), rows.start - whole.start
        with nullcontext() if stream is None else stream.copying(), torch.inference_mode(False):
            # An inference tensor could not be written to by another thread.
            blocks = [torch.empty(each.block_bytes, dtype=torch.uint8, device=self.device) for each in memories]
        parts = [memory.parts(block) for memory, block in zip(memories, blocks, strict=True)]

        def run() -> None:
            try:
                for number, layer in enumerate(whole):
                    with nullcontext() if stream is None else stream.copying():
                        stored_TKX = parts[0][number].copy_(layer, non_blocking=True)
                        if records is not None:
                            exact_TKX = records.unpack(number, stored_TKX)
                            parts[1][number].copy_(exact_TKX[first : first + rows.num_tokens])
                    for memory, layers in zip(memories, parts, strict=True):
                        memory.put(layers[number], None if stream is None else stream.mark())
                if stream is not None:
                    with self._changes:
                        self._on_their_way = [each for each in self._on_their_way if not each[0].query()]
                        self._on_their_way.append((stream.mark(), rows))
            except Exception as error:  # so that nobody waits for ever
                self._on_failure(copy)
                for memory in memories:
                    memory.fail(error)

        def run_in_thread() -> None:
            if self._accelerator is not None:
                self._accelerator.enter_thread()
            run()

        if stream is not None and rows.memory.is_there:  # the copies are queued, and the host goes on
            run()
        else:
            self._raising.submit(run_in_thread)
        return LayerRows(copy, 0, copy.num_tokens)

    def stored_memory(self, num_tokens: int) -> CopiedMemory:
        """Memory of the host for so many tokens, without a block yet."""
        return CopiedMemory(self.stored_shapes, num_tokens, is_packed=self.is_packed)

    def host_block(self, num_bytes: int) -> Tensor:
        """Uninitialised host memory, page-locked for a GPU. Raises: ValueError: there is none."""
        return host_empty((num_bytes,), torch.uint8, self.device)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all copies so far are made."""
        for name in ("_lowering", "_raising"):
            if (worker := vars(self).get(name)) is not None:
                worker.submit(lambda: None).done.wait(timeout_s)

    def _hold(self, mark: Any) -> None:
        assert self._stream is not None
        self._stream.hold_compute(mark)


class _PackedLayers(Layers):
    """Records of rows, each layer's quantised when it is read."""

    def __init__(self, rows: LayerRows, records: KVRecords) -> None:
        self._rows, self._records = rows, records

    def __len__(self) -> int:
        return len(self._rows)

    def layer(self, number: int) -> Tensor:
        return self._records.pack(number, self._rows.layer(number))
