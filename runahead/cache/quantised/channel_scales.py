"""Keys in groups of a token's channels, of which each channel is brought to a like size before.

In such a group the largest channel sets the step of all, and a few channels of keys are far larger than the others. So
each channel loses its middle m and is divided by a scale s: m = (max k + min k) / 2, s = sqrt((max k - min k) / 2). The
root is the exponent 0.5 of QServe's SmoothAttention (Lin et al., MLSys 2025, arXiv 2405.04532), which divides by the
root of max |k|, found once for a model. Here the first quantised tokens of each row and KV head set both for all that
come later. These may have a larger range, and a root is then less wrong than the range itself.
"""

# Legend: B rows, K kv heads, T tokens, D key dim.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.precision import widened
from runahead.cache.quantised.groups import TokenGroups, blocks, dtype_of_16_bits, narrowed


@dataclass(frozen=True, kw_only=True)
class ChannelScales:
    """The middle and the scale of each channel, (B, K, 1, D), in 16 bits as those of groups."""

    middle_BK1D: Tensor
    scale_BK1D: Tensor

    @classmethod
    def from_keys(cls, k_BKTD: Tensor) -> ChannelScales:
        """By the range of these tokens. A channel without one, as of no tokens, has scale 1."""
        dtype = dtype_of_16_bits(k_BKTD.dtype)
        if not k_BKTD.shape[2]:
            none_BK1D = k_BKTD.new_zeros(*k_BKTD.shape[:2], 1, k_BKTD.shape[3], dtype=dtype)
            return cls(middle_BK1D=none_BK1D, scale_BK1D=torch.ones_like(none_BK1D))
        least, most = (widened(x) / 2 for x in torch.aminmax(k_BKTD, dim=2, keepdim=True))
        scale_BK1D = narrowed((most - least).sqrt(), dtype)
        scale_BK1D = scale_BK1D.masked_fill(scale_BK1D == 0, 1)
        return cls(middle_BK1D=narrowed(most + least, dtype), scale_BK1D=scale_BK1D)

    @classmethod
    def joined(cls, parts: Sequence[ChannelScales]) -> ChannelScales:
        """Scales of the rows of all parts."""
        middle, scale = (torch.cat([getattr(each, name) for each in parts]) for name in ("middle_BK1D", "scale_BK1D"))
        return cls(middle_BK1D=middle, scale_BK1D=scale)

    @property
    def num_bytes(self) -> int:
        return self.middle_BK1D.nbytes + self.scale_BK1D.nbytes

    def by_head(self) -> ChannelScales:
        """Each head of each row as a row of its own; views."""
        middle, scale = (x.flatten(0, 1).unsqueeze(1) for x in (self.middle_BK1D, self.scale_BK1D))
        return ChannelScales(middle_BK1D=middle, scale_BK1D=scale)

    def row(self, row: int) -> ChannelScales:
        return self.rows(row, row + 1)

    def rows(self, first: int, end: int) -> ChannelScales:
        """Scales of the rows [first, end); views."""
        return ChannelScales(middle_BK1D=self.middle_BK1D[first:end], scale_BK1D=self.scale_BK1D[first:end])

    def groups(self, k_BKTD: Tensor, bits: int) -> TokenGroups:
        """Quantise keys, a block of tokens at a time."""
        parts_BKSD = (k_BKTD[:, :, first:end] for first, end in blocks(k_BKTD.shape[2]))
        scaled = ((widened(each_BKSD) - self.middle_BK1D) / self.scale_BK1D for each_BKSD in parts_BKSD)
        return TokenGroups.joined([TokenGroups.quantise(each_BKSD, bits) for each_BKSD in scaled])

    def read(self, keys: TokenGroups, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """The keys (B, K, S, D) of the tokens [start, end)."""
        scaled_BKSD = keys.read(start, end, torch.promote_types(dtype, torch.float32))
        middle, scale = (x.to(scaled_BKSD.dtype) for x in (self.middle_BK1D, self.scale_BK1D))
        return torch.addcmul(middle, scaled_BKSD, scale).to(dtype)
