"""Rows of keys and values in every layer: views of memory that may still be on its way.

A row is a token. Rows are split without a copy and without waiting. Only reading a layer waits for it, so that a
forward can begin while later layers are copied.

In tiers of few bits the rows are records (`KVRecords`), which are read by whole groups. What comes back to the device
has its records beside it, so that no number is quantised a second time when it leaves again.
"""

# Legend: T tokens, K kv heads, X = H + V key and value dims.

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from runahead.cache.quantised.records import whole_groups
from runahead.cache.slabs import KVShape


class Layers(Sequence[Tensor], ABC):
    """Keys and values (T, K, X) of every layer, each of which is made when it is read."""

    @abstractmethod
    def layer(self, number: int) -> Tensor:
        """Keys and values of this layer, counted from 0."""

    @overload
    def __getitem__(self, layer: int) -> Tensor: ...
    @overload
    def __getitem__(self, layer: slice) -> list[Tensor]: ...
    def __getitem__(self, layer: int | slice) -> Tensor | list[Tensor]:
        if isinstance(layer, slice):
            return [self[each] for each in range(len(self))[layer]]
        if not -len(self) <= layer < len(self):
            raise IndexError(layer)
        return self.layer(layer % len(self))


class RowsMemory(Protocol):
    """Memory with keys and values of some tokens.

    Attributes:
        num_layers: number of layers.
        num_tokens: number of tokens.
        num_bytes: allocated, also for other tokens and for records.
        token_bytes: of one token in all layers, without its record.
        is_packed: these are records.
        records: the records of the same tokens; None if there are none.
        where: the same for memories of the same allocation.
    """

    num_layers: int
    num_tokens: int
    num_bytes: int
    token_bytes: int
    is_packed: bool
    records: LayerRows | None

    @property
    def where(self) -> Hashable: ...

    @property
    def is_there(self) -> bool:
        """Whether no reader has to wait for a layer."""

    @property
    def is_lost(self) -> bool:
        """Whether it is known that some layer will never be there."""

    def layer(self, number: int) -> Tensor:
        """Keys and values of all its tokens (T, K, H + V), once they are there. Raises: LostRows."""


class LostRows(Exception):
    """Keys and values could not be copied."""


class GivenMemory:
    """Tensors that somebody else has allocated, such as views of a slab."""

    is_there, is_lost = True, False

    def __init__(
        self, layers_TKX: Sequence[Tensor], *, is_packed: bool = False, records: LayerRows | None = None
    ) -> None:
        self._layers_TKX, self.is_packed, self.records = list(layers_TKX), is_packed, records
        self.num_tokens = len(layers_TKX[0]) if layers_TKX else 0
        storages = {storage.data_ptr(): storage for storage in map(Tensor.untyped_storage, self._layers_TKX)}
        self.num_layers = len(self._layers_TKX)
        self.num_bytes = sum(storage.nbytes() for storage in storages.values()) + _bytes_of(records)
        self.token_bytes = sum(layer[:1].nbytes for layer in self._layers_TKX)
        # Identifies the allocations as long as one of these tensors lives.
        self.where: Hashable = tuple(storage.data_ptr() for storage in map(Tensor.untyped_storage, self._layers_TKX))

    def layer(self, number: int) -> Tensor:
        return self._layers_TKX[number]


class CopiedMemory:
    """Memory of its own into which somebody copies, layer by layer, while others wait for the layers that they need.

    Args:
        shapes: of the layers.
        num_tokens: number of tokens.
        hold: called by a reader with the mark of a layer, which it has to wait for.
        is_packed, records: see `RowsMemory`; the records are in memory of their own.

    Attributes:
        block_bytes: of the layers, without the records.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        num_tokens: int,
        hold: Callable[[Any], object] = lambda mark: None,
        *,
        is_packed: bool = False,
        records: LayerRows | None = None,
    ) -> None:
        self.num_layers, self.num_tokens, self._shapes, self._hold = len(shapes), num_tokens, shapes, hold
        self.is_packed, self.records = is_packed, records
        self.token_bytes = sum(shape.bytes_per_token() for shape in shapes)
        self._offsets, end = list[int](), 0
        for shape in shapes:
            end += -end % shape.dtype.itemsize
            self._offsets.append(end)
            end += num_tokens * shape.bytes_per_token()
        self.block_bytes = end
        self.num_bytes = end + _bytes_of(records)
        self._layers_TKX: list[Tensor] = []
        self._marks: list[object] = []
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @property
    def where(self) -> Hashable:
        return self

    def parts(self, block: Tensor) -> list[Tensor]:
        """The layers (T, K, H + V) as views of a block of `block_bytes` bytes."""
        return [
            block[offset : offset + self.num_tokens * shape.bytes_per_token()]
            .view(shape.dtype)
            .view(self.num_tokens, shape.num_kv_heads, shape.key_dim + shape.value_dim)
            for offset, shape in zip(self._offsets, self._shapes, strict=True)
        ]

    def put(self, layer_TKX: Tensor, mark: object = None) -> None:
        """The next layer is there, for a reader that waits for its mark."""
        with self._changed:
            self._layers_TKX.append(layer_TKX)
            self._marks.append(mark)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """No more layers will be there."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def layer(self, number: int) -> Tensor:
        with self._changed:
            self._changed.wait_for(lambda: number < len(self._layers_TKX) or self._error is not None)
            if number >= len(self._layers_TKX):
                raise LostRows(str(self._error)) from self._error
        if self._marks[number] is not None:
            self._hold(self._marks[number])
        return self._layers_TKX[number]

    @property
    def is_there(self) -> bool:
        return len(self._layers_TKX) == self.num_layers

    @property
    def is_lost(self) -> bool:
        return self._error is not None


@dataclass(frozen=True, eq=False)
class LayerRows(Layers):
    """The rows [start, stop) of each layer of a memory."""

    memory: RowsMemory
    start: int
    stop: int

    @classmethod
    def from_tensors(cls, layers_TKX: Sequence[Tensor]) -> LayerRows:
        """All rows of these tensors, which have the same number of rows."""
        memory = GivenMemory(layers_TKX)
        return cls(memory, 0, memory.num_tokens)

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.memory.token_bytes

    @property
    def least_bytes(self) -> int:
        """Bytes that they would take in memory of their own."""
        whole, records = self.whole, self.records
        return whole.num_bytes + (0 if records is None else records.whole.num_bytes)

    @property
    def records(self) -> LayerRows | None:
        """The records of these tokens, if their memory has them."""
        records = self.memory.records
        return None if records is None else records.part(self.start, self.stop)

    @property
    def stored(self) -> LayerRows:
        """The records of these tokens, or the rows where there are none."""
        return self if self.records is None else self.records

    @property
    def whole(self) -> LayerRows:
        """With which these rows are read: of records those of the same groups, too."""
        if not self.memory.is_packed:
            return self
        return LayerRows(self.memory, *whole_groups(self.start, self.stop, self.memory.num_tokens))

    def within(self, whole: RowsMemory) -> LayerRows:
        """These rows in a memory that has the rows of `self.whole`."""
        first = self.start - self.whole.start
        return LayerRows(whole, first, first + self.num_tokens)

    def cloned(self) -> LayerRows:
        """A copy in memory of its own. Raises: LostRows."""
        records = self.records
        layers = [layer.clone(memory_format=torch.contiguous_format) for layer in self.whole]
        memory = GivenMemory(
            layers, is_packed=self.memory.is_packed, records=None if records is None else records.cloned()
        )
        return self.within(memory)

    def are_whole(self) -> bool:
        """Wait for all layers. Returns whether none is lost."""
        try:
            return len(list(self)) == len(self)
        except LostRows:
            return False

    def part(self, start: int, stop: int) -> LayerRows:
        """The rows [start, stop) of these."""
        assert 0 <= start <= stop <= self.num_tokens, (start, stop, self)
        return LayerRows(self.memory, self.start + start, self.start + stop)

    def __len__(self) -> int:
        return self.memory.num_layers

    def layer(self, number: int) -> Tensor:
        return self.memory.layer(number)[self.start : self.stop]


class RecomputedRows(Layers):
    """Rows that are computed anew, in all layers, when a reader finds a layer lost.

    Args:
        compute: gives the layers (T, K, H + V); called at most once, in the reader's thread.
    """

    def __init__(self, rows: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> None:
        self._layers_TKX = rows
        self._compute: Callable[[], Sequence[Tensor]] | None = compute

    def __len__(self) -> int:
        return len(self._layers_TKX)

    def layer(self, number: int) -> Tensor:
        try:
            return self._layers_TKX[number]
        except LostRows:
            if self._compute is None:
                raise
        compute, self._compute = self._compute, None
        self._layers_TKX = compute()
        return self._layers_TKX[number]


def _bytes_of(records: LayerRows | None) -> int:
    return 0 if records is None else records.memory.num_bytes


NO_ROWS = LayerRows.from_tensors([])
"""The rows of a text without keys and values."""
