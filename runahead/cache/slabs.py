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

    def write(self, start: int, k_BKSH: Tensor, v_BKSV: Tensor) -> None:
        """Store keys and values of the tokens [start, start + S)."""
        part = self.tokens(start, start + k_BKSH.shape[2])
        part[..., : self.key_dim].copy_(k_BKSH.permute(2, 0, 1, 3))
        part[..., self.key_dim :].copy_(v_BKSV.permute(2, 0, 1, 3))

    def row(self, row: int, pad: int) -> KVSlab:
        """One row's tokens, numbered from the first after its padding, as a view."""
        skipped = max(0, pad - self.first)
        return KVSlab(
            slab_TBKX=self.slab_TBKX[skipped:, row : row + 1], key_dim=self.key_dim, first=self.first + skipped - pad
        )

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys (B, K, S, H) and values (B, K, S, V) of tokens [start, end), as views."""
        part_BKSX = self.tokens(start, end).permute(1, 2, 0, 3)
        return part_BKSX[..., : self.key_dim], part_BKSX[..., self.key_dim :]


@dataclass(frozen=True, kw_only=True)
class SplitSlab(KVSlab):
    """A slab in two pieces of memory: a prefix, which later layers take over, and the tokens after it, which stay.

    Attributes:
        slab_TBKX: the prefix.
        own: the tokens after it.
    """

    own: KVSlab

    @property
    def end(self) -> int:
        return self.own.end

    def tokens(self, start: int, end: int) -> Tensor:
        if start >= self.own.first:
            return self.own.tokens(start, end)
        assert self.first <= start <= end <= self.own.first, (self.first, start, end, self.own.first)
        return self.slab_TBKX[start - self.first : end - self.first]

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        if not start < self.own.first < end:
            return super().read(start, end)
        prefix, own = super().read(start, self.own.first), self.own.read(self.own.first, end)
        # Only a chunk of one token is read together with its prefix.
        return torch.cat([prefix[0], own[0]], dim=2), torch.cat([prefix[1], own[1]], dim=2)
