"""Memory layout of the KV cache: token-major slabs, in which any run of tokens is one contiguous message.

A slab is (T, B, K, H + V): token, batch row, KV head, key and value side by side. A prefix is its leading part and a
chunk the part after it; both are received in place and sent without a copy. Attention kernels read keys and values as
strided views.
"""

# Legend: T stored tokens, B batch, K kv heads, H key dim, V value dim, X = H + V, S tokens.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from runahead.attention.op import Lengths, Run, Span, Step, spans_of
from runahead.cache.new_tokens import NewTokens


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
        """Keys (T, U, H) and values (T, U, V) of all tokens, U = B K, as views."""
        slab_TUX = self.slab_TBKX.flatten(1, 2)
        return slab_TUX[..., : self.key_dim], slab_TUX[..., self.key_dim :]

    @cached_property  # so that each read and write takes one more view
    def _all(self) -> tuple[Tensor, Tensor]:
        """Keys (B, K, T, H) and values (B, K, T, V) of all tokens, as views."""
        slab_BKTX = self.slab_TBKX.permute(1, 2, 0, 3)
        return slab_BKTX[..., : self.key_dim], slab_BKTX[..., self.key_dim :]


class Index:
    """Where the tokens of a text lie in the memory of its layers: each in the slot of its index in the padded batch.

    An index is a function of a forward's new tokens, which say where in the text they are. So nothing is committed
    after a forward, and nothing is taken back: a later forward that begins earlier stores its tokens over others.

    Attributes:
        is_whole: whether all tokens that queries see are in a layer's own memory.
    """

    is_whole: bool = True

    def slot(self, tokens: NewTokens) -> int | Tensor | None:
        """Where the new tokens are stored; None: another rank stores them.

        Returns:
            the slot of the first one, which others follow; or of the only one of each sequence, on the device.
        """
        return tokens.start

    def spans(self, tokens: NewTokens, num_new: int) -> Sequence[Span] | Lengths:
        """The stored tokens that the last `num_new` tokens see, once they are stored, in a layer's own memory."""
        slots = range(tokens.start + num_new)
        return spans_of(slots, start=tokens.start, num_new=num_new, pads=tokens.row_pads)

    def steps(self, layer: int, slab: KVSlab, tokens: NewTokens, num_new: int) -> Sequence[Step]:
        """Steps over all that the last `num_new` tokens see in a layer.

        Args:
            slab: the layer's own memory.
        """
        return [Step([Run(slab, tokens.once((self, num_new), lambda: self.spans(tokens, num_new)))])]


ALL_TOKENS = Index()


class AfterPrefix(Index):
    """Index of tokens that follow a prefix in other memory.

    Args:
        prefixes: the prefix of each layer. Each slot has the number of its token's index in the padded batch.
    """

    is_whole = False

    def __init__(self, prefixes: Sequence[KVSlab]) -> None:
        self._prefixes = prefixes

    def steps(self, layer: int, slab: KVSlab, tokens: NewTokens, num_new: int) -> Sequence[Step]:
        prefix, start, pads = self._prefixes[layer], tokens.start, tokens.row_pads
        own = spans_of(range(slab.first, start + num_new), start=start, num_new=num_new, pads=pads)
        slots = range(prefix.first, prefix.end)
        before = spans_of(slots, start=start, num_new=num_new, pads=pads, has_new=False)
        return [Step([Run(slab, own)], arrives=False), Step([Run(prefix, before)])]
