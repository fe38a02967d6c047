"""Storage for keys and values: one slab per layer, token-major, so that any run of tokens is one contiguous message.

A slab is (T, B, K, H + V): token, batch row, kv head, key and value side by side. A prefix is its leading part, a
chunk the part behind it; both are received in place and sent as they lie. Attention kernels read keys and values as
strided views. A rank that only passes K,V on keeps a ring of a few slabs, which its layers take in turn.
"""

# Legend: T stored tokens, B batch, K kv heads, H key dim, V value dim, S tokens.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """Shape of one layer's K,V per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    def bytes_per_token(self, batch: int = 1) -> int:
        return batch * self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class KVSlab:
    """One layer's K,V of the tokens [first, first + T)."""

    slab_TBKX: Tensor
    key_dim: int
    first: int

    @property
    def end(self) -> int:
        return self.first + self.slab_TBKX.shape[0]

    def tokens(self, start: int, end: int) -> Tensor:
        """The contiguous part that holds tokens [start, end): what goes over the network."""
        assert self.first <= start <= end <= self.end, (self.first, start, end, self.end)
        return self.slab_TBKX[start - self.first : end - self.first]

    def write(self, start: int, k_BKSH: Tensor, v_BKSV: Tensor) -> None:
        part = self.tokens(start, start + k_BKSH.shape[2])
        part[..., : self.key_dim].copy_(k_BKSH.permute(2, 0, 1, 3))
        part[..., self.key_dim :].copy_(v_BKSV.permute(2, 0, 1, 3))

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys (B, K, S, H) and values (B, K, S, V) of tokens [start, end), as views."""
        part_BKSX = self.tokens(start, end).permute(1, 2, 0, 3)
        return part_BKSX[..., : self.key_dim], part_BKSX[..., self.key_dim :]


class KVCache:
    """Slabs for all layers of a batch, either one each or a ring of fewer that the layers take in turn.

    Args:
        shapes: K,V shape of every layer.
        batch: rows.
        spans: tokens [first, end) that each layer stores.
        num_slots: slabs that exist; fewer than the layers makes a ring.
        pin_memory: page-lock host memory, for copies to and from a GPU.

    Raises:
        ValueError: the bytes are not there.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        *,
        batch: int,
        spans: Sequence[tuple[int, int]],
        num_slots: int,
        device: torch.device,
        pin_memory: bool = False,
    ) -> None:
        self.shapes, self.batch, self.spans, self.device = list(shapes), batch, list(spans), device
        self.num_layers = len(self.shapes)
        self.num_slots = min(num_slots, self.num_layers)
        rings = [range(slot, self.num_layers, self.num_slots) for slot in range(self.num_slots)]
        sizes = [max(self._layer_bytes(layer) for layer in ring) for ring in rings]
        try:
            self._slots = [torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pin_memory) for size in sizes]
        except RuntimeError as error:  # torch.OutOfMemoryError on GPUs, a plain RuntimeError on CPUs
            raise ValueError(
                f"{sum(sizes):,} bytes of K,V do not fit on {device}; use a shorter prompt, a smaller prompt.batch "
                "or generation.max_new_tokens, or more memory"
            ) from error

    def _layer_bytes(self, layer: int) -> int:
        first, end = self.spans[layer]
        return (end - first) * self.shapes[layer].bytes_per_token(self.batch)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for K,V."""
        return sum(slot.numel() for slot in self._slots)

    def layer(self, layer: int) -> KVSlab:
        """The slab of a layer. In a ring it is valid until layer + num_slots takes the slot."""
        shape, (first, end) = self.shapes[layer], self.spans[layer]
        flat = self._slots[layer % self.num_slots][: self._layer_bytes(layer)].view(shape.dtype)
        slab = flat.view(end - first, self.batch, shape.num_kv_heads, shape.key_dim + shape.value_dim)
        return KVSlab(slab_TBKX=slab, key_dim=shape.key_dim, first=first)
