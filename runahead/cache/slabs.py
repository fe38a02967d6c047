"""Memory layout of the KV cache: token-major slabs, in which any run of tokens is one contiguous message.

A slab is (T, B, K, H + V): token, batch row, KV head, key and value side by side. A prefix is its leading part and a
chunk the part after it; both are received in place and sent without a copy. Attention kernels read keys and values as
strided views.
"""

# Legend: T stored tokens, B batch, K kv heads, H key dim, V value dim, X = H + V, S tokens.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """Shape of one layer's keys and values per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

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

    def write(self, start: int, k_BKSH: Tensor, v_BKSV: Tensor) -> None:
        """Store keys and values of the tokens [start, start + S)."""
        part = self.tokens(start, start + k_BKSH.shape[2])
        part[..., : self.key_dim].copy_(k_BKSH.permute(2, 0, 1, 3))
        part[..., self.key_dim :].copy_(v_BKSV.permute(2, 0, 1, 3))

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys (B, K, S, H) and values (B, K, S, V) of tokens [start, end), as views."""
        part_BKSX = self.tokens(start, end).permute(1, 2, 0, 3)
        return part_BKSX[..., : self.key_dim], part_BKSX[..., self.key_dim :]
