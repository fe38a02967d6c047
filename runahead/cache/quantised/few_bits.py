"""A layer's older tokens are in 8, 4 or 2 bits, and its newest ones, the window, exact or in 16 bits (KIVI)."""

# Legend: T slots, B batch, K kv heads, S tokens, X = key + value dim.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runahead.cache.quantised.groups import GROUP, dtype_of_16_bits
from runahead.cache.slabs import KVSlab


@dataclass(frozen=True, kw_only=True)
class FewBits:
    """Precision of a layer's older tokens. Tokens leave the window of the newest ones in whole groups of 32.

    Attributes:
        bits: of a code.
        residual: a row or head has at least so many tokens in the window, if it has so many and none is dropped later.
        residual_bits: 16, or None for the layer's dtype: of the numbers in the window.
        keys_by_token: keys are grouped by token rather than by channel, as single tokens are dropped later.
        becomes_ragged: whether cutting a layer back makes it ragged, however many tokens each head keeps. Heads of
            other rows may differ, and which tokens are quantised then does not depend on these.
    """

    bits: int
    residual: int
    residual_bits: int | None
    keys_by_token: bool
    becomes_ragged: bool = False

    def window_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the newest tokens of a layer of this dtype."""
        return dtype if self.residual_bits is None else dtype_of_16_bits(dtype)

    def leaving(self, num_exact: int) -> int:
        """Number of tokens that leave a window of `num_exact`: whole groups."""
        return max(0, num_exact - self.residual) // GROUP * GROUP


@dataclass(frozen=True, kw_only=True)
class ExactWindow(KVSlab):
    """Slots that are read in another dtype than they are stored in."""

    dtype: torch.dtype

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        k_BKSH, v_BKSV = super().read(start, end)
        return k_BKSH.to(self.dtype), v_BKSV.to(self.dtype)
