"""Memory of the KV cache: token-major slabs, in which any run of tokens is one contiguous message.

A slab is (T, B, K, H + V): token, batch row, KV head, key and value side by side. A prefix is its leading part and a
chunk the part after it; both are received in place and sent without a copy. Attention kernels read keys and values as
strided views.
"""

# Legend: T stored tokens, B batch, K kv heads, H key dim, V value dim, X = H + V, S tokens.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

Allocator: TypeAlias = Callable[[Sequence[int]], list[Tensor]]
"""Allocates byte tensors of given sizes. Raises ValueError or RuntimeError if they do not fit."""


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """Shape of one layer's keys and values per token.

    Attributes:
        readers: later layers of the model that read these keys and values and store none, ascending.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    readers: tuple[int, ...] = ()

    def bytes_per_token(self, batch: int = 1) -> int:
        return batch * self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class KVSlab:
    """One layer's keys and values of the tokens [first, first + T)."""

    slab_TBKX: Tensor
    key_dim: int
    first: int

    @property
    def end(self) -> int:
        return self.first + self.slab_TBKX.shape[0]

    @property
    def value_dim(self) -> int:
        return self.slab_TBKX.shape[-1] - self.key_dim

    def tokens(self, start: int, end: int) -> Tensor:
        """The contiguous part (S, B, K, X) that holds tokens [start, end), as it is sent and received."""
        assert self.first <= start <= end <= self.end, (self.first, start, end, self.end)
        return self.slab_TBKX[start - self.first : end - self.first]

    def write(self, start: int | Tensor, k_BKSH: Tensor, v_BKSV: Tensor) -> None:
        """Store keys and values of tokens in the slots [start, start + S), or in slots (S) that the device knows."""
        if isinstance(start, Tensor):
            new_SBKX = torch.cat([k_BKSH, v_BKSV], dim=-1).reshape(len(start), *self.slab_TBKX.shape[1:])
            self.slab_TBKX.index_copy_(0, start, new_SBKX)
            return
        k_stored, v_stored = self._views(start, start + k_BKSH.shape[2])
        k_stored.copy_(k_BKSH)
        v_stored.copy_(v_BKSV)

    def row(self, row: int, pad: int) -> KVSlab:
        """One row's tokens, numbered from the first after its padding, as a view."""
        skipped = max(0, pad - self.first)
        return KVSlab(
            slab_TBKX=self.slab_TBKX[skipped:, row : row + 1], key_dim=self.key_dim, first=self.first + skipped - pad
        )

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys (B, K, S, H) and values (B, K, S, V) of tokens [start, end), as views."""
        return self._views(start, end)

    def _views(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        assert self.first <= start <= end <= self.end, (self.first, start, end, self.end)
        k_BKTH, v_BKTV = self._all
        return k_BKTH.narrow(2, start - self.first, end - start), v_BKTV.narrow(2, start - self.first, end - start)

    @cached_property
    def sequences(self) -> tuple[Tensor, Tensor]:
        """Keys (1, U, T, H) and values (1, U, T, V) of all tokens, U = B K, as views."""
        slab_1UTX = self.slab_TBKX.flatten(1, 2).transpose(0, 1)[None]
        return slab_1UTX[..., : self.key_dim], slab_1UTX[..., self.key_dim :]

    @cached_property  # so that each read and write takes one more view
    def _all(self) -> tuple[Tensor, Tensor]:
        """Keys (B, K, T, H) and values (B, K, T, V) of all tokens, as views."""
        slab_BKTX = self.slab_TBKX.permute(1, 2, 0, 3)
        return slab_BKTX[..., : self.key_dim], slab_BKTX[..., self.key_dim :]


@dataclass(frozen=True, kw_only=True)
class SlotsToCopy:
    """Slots of a layer that are to be copied to the device that computes.

    Attributes:
        rows_X: rows of the memory as a (T * B * K, X) matrix, those of one slot side by side; None is all slots.
        room: slots after them.
        heads: (1, number of heads) if these are rows of some heads only; None is (B, K).
        skips_keys: copy values alone; the slots' keys are not initialised.
    """

    rows_X: Tensor | None
    room: int = 1
    heads: tuple[int, int] | None = None
    skips_keys: bool = False

    def copied(self, memory: Tensor, rows_X: Tensor, all_heads: Sequence[int], key_dim: int) -> Tensor:
        """The slots (m + room, *heads, X), of these rows of a (rows, X) matrix, where it is."""
        batch, heads = self.heads or all_heads
        num_slots, width = len(rows_X) // (batch * heads), memory.shape[1]
        slab_TBKX = memory.new_empty(num_slots + self.room, batch, heads, width)
        out = slab_TBKX[:num_slots].view(-1, width)
        if self.skips_keys:
            out[:, key_dim:] = memory[:, key_dim:].index_select(0, rows_X)
        else:
            torch.index_select(memory, 0, rows_X, out=out)
        return slab_TBKX


def taken(source: Tensor, slots_SBK: Tensor, room: int) -> Tensor:
    """A copy of these slots of (T, B, K, ...), with `room` uninitialised slots after them."""
    num_taken = slots_SBK.shape[0]
    _, batch, heads = source.shape[:3]
    taken = source.new_empty(num_taken + room, *source.shape[1:])
    rows_B1 = torch.arange(batch, device=source.device)[:, None]
    heads_K = torch.arange(heads, device=source.device)
    # Rows of a flat view, so that contiguous runs are copied instead of single numbers.
    flat_SBK = (slots_SBK * batch + rows_B1) * heads + heads_K
    flat = source.reshape(-1, *source.shape[3:])
    torch.index_select(flat, 0, flat_SBK.flatten(), out=taken[:num_taken].view(-1, *source.shape[3:]))
    return taken


@dataclass(frozen=True, kw_only=True, eq=False)
class Slabs:
    """The memory of all layers: a slab for each, or a ring of fewer slabs that the layers take in turn.

    Attributes:
        shapes: shape of every layer's keys and values.
        by_layer: slabs of all layers; in a ring each is valid until layer + num_slabs takes its memory.
        num_slabs: number of slabs; with fewer than layers they form a ring.
    """

    shapes: Sequence[KVShape]
    by_layer: list[KVSlab] = field(repr=False)
    num_slabs: int

    @classmethod
    def empty(
        cls,
        shapes: Sequence[KVShape],
        *,
        batch: int,
        spans: Sequence[tuple[int, int]],
        num_slabs: int,
        device: torch.device,
        pin_memory: bool = False,
        allocate: Allocator | None = None,
    ) -> Slabs:
        """Allocate slabs.

        Args:
            batch: number of rows.
            spans: tokens [first, end) that each layer stores.
            num_slabs: number of slabs, at most one per layer.
            pin_memory: page-lock host memory, for copies to and from a GPU.
            allocate: allocates the slabs; by default each is memory of its own.

        Raises:
            ValueError: the memory cannot be allocated.
        """
        num_slabs = min(num_slabs, len(shapes))
        layer_bytes = [
            (end - first) * shape.bytes_per_token(batch) for shape, (first, end) in zip(shapes, spans, strict=True)
        ]
        sizes = _largest(layer_bytes, num_slabs)

        def each_its_own(sizes: Sequence[int]) -> list[Tensor]:
            return [torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pin_memory) for size in sizes]

        try:
            memory = (allocate or each_its_own)(sizes)
        except RuntimeError as error:  # torch.OutOfMemoryError on GPUs, a plain RuntimeError on CPUs
            raise ValueError(
                f"{sum(sizes):,} bytes of keys and values do not fit on {device}; use a shorter prompt, a smaller "
                "prompt.batch or generation.max_new_tokens, or more memory"
            ) from error
        slabs = []
        for layer, (shape, (first, end)) in enumerate(zip(shapes, spans, strict=True)):
            flat = memory[layer % num_slabs][: layer_bytes[layer]].view(shape.dtype)
            slab_TBKX = flat.view(end - first, batch, shape.num_kv_heads, shape.key_dim + shape.value_dim)
            slabs.append(KVSlab(slab_TBKX=slab_TBKX, key_dim=shape.key_dim, first=first))
        return cls(shapes=list(shapes), by_layer=slabs, num_slabs=num_slabs)

    @classmethod
    def each_its_own(cls, by_layer: Sequence[KVSlab]) -> Slabs:
        """Slabs of which no two share memory."""
        shapes = [
            KVShape(
                num_kv_heads=slab.slab_TBKX.shape[2],
                key_dim=slab.key_dim,
                value_dim=slab.value_dim,
                dtype=slab.slab_TBKX.dtype,
            )
            for slab in by_layer
        ]
        return cls(shapes=shapes, by_layer=list(by_layer), num_slabs=len(by_layer))

    @property
    def is_ring(self) -> bool:
        """Whether layers share memory."""
        return self.num_slabs < len(self.by_layer)

    @property
    def device(self) -> torch.device:
        """Where the slabs are; the host where there are none, as in models whose layers hold states alone."""
        return self.by_layer[0].slab_TBKX.device if self.by_layer else torch.device("cpu")

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.by_layer[0].slab_TBKX.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return sum(_largest([slab.slab_TBKX.nbytes for slab in self.by_layer], self.num_slabs))

    def clone(self) -> Slabs:
        """A copy in memory of its own."""
        assert not self.is_ring, "layers share slabs"
        return replace(self, by_layer=[replace(slab, slab_TBKX=slab.slab_TBKX.clone()) for slab in self.by_layer])

    def only(self, layers: Sequence[int]) -> Slabs:
        """The slabs of these layers alone, in the same memory."""
        by_layer, shapes = [self.by_layer[layer] for layer in layers], [self.shapes[layer] for layer in layers]
        num_slabs = min(self.num_slabs, len(layers) - 1) if self.is_ring else len(layers)
        return Slabs(shapes=shapes, by_layer=by_layer, num_slabs=max(1, num_slabs))

    def take(self) -> Iterator[KVSlab]:
        """Hand over the slabs in the order of layers. Each belongs to the caller; nothing is left afterwards."""
        assert not self.is_ring, "layers share slabs"
        while self.by_layer:
            yield self.by_layer.pop(0)


def _largest(layer_bytes: Sequence[int], num_slabs: int) -> list[int]:
    """Bytes of each slab: those of the largest of the layers that take it."""
    return [max(layer_bytes[slab::num_slabs], default=0) for slab in range(num_slabs)]
