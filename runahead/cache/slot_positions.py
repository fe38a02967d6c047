"""Re-encoded positions: a kept token's position is its slot in its layer's cache, so positions have no gaps.

The cache holds keys as they are before RoPE, since the model is given position 0 for every token (see rotary.py).
Keys are rotated when attention reads them, to the slots that they have then. So positions never exceed the number of
stored tokens, however long the text.
"""

# Legend: T slots, B batch, N query heads, K kv heads, C new tokens, H key dim.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runahead.cache.slabs import KVSlab
from runahead.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class RotatedSlab(KVSlab):
    """A slab of unrotated keys that are read rotated to their slots.

    Keys are rotated when they are first read. Those of the new tokens are rotated apart from those before them, which
    may not have arrived yet.

    Attributes:
        rotary: of this layer.
        pads: slots on the left of each row that are padding.
        new: number of the first new token's slot.
        rotated_TBKH: rotated keys.
        done: whether the keys before the new tokens and those of the new tokens have been rotated.
    """

    rotary: Rotary
    pads: Sequence[int]
    new: int
    rotated_TBKH: Tensor
    done: list[bool]

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        k_BKSH, v_BKSV = super().read(start, end)
        if start == end:
            return k_BKSH, v_BKSV
        for part, (first, last) in enumerate(((self.first, self.new), (self.new, self.end))):
            if not self.done[part] and start < last and end > first:
                keys_TBKH = self.tokens(first, last)[..., : self.key_dim]
                self.rotated_TBKH[first - self.first : last - self.first] = self.rotary.rotated(
                    keys_TBKH, first, self.pads
                )
                self.done[part] = True
        return self.rotated_TBKH[start - self.first : end - self.first].permute(1, 2, 0, 3), v_BKSV


def at_slots(rotary: Rotary, slab: KVSlab, q_BNCH: Tensor, *, new: int, pads: Sequence[int]) -> tuple[KVSlab, Tensor]:
    """The slab with keys rotated to their slots on reading, and the new tokens' queries rotated to theirs.

    Args:
        slab: unrotated keys, including those of the new tokens.
        q_BNCH: unrotated queries of the new tokens.
        new: number of the first new token's slot.
        pads: slots on the left of each row that are padding.
    """
    shape = (*slab.slab_TBKX.shape[:3], slab.key_dim)
    rotated = RotatedSlab(
        slab_TBKX=slab.slab_TBKX,
        key_dim=slab.key_dim,
        first=slab.first,
        rotary=rotary,
        pads=list(pads),
        new=new,
        rotated_TBKH=torch.empty(shape, dtype=slab.slab_TBKX.dtype, device=slab.slab_TBKX.device),
        done=[False, False],
    )
    return rotated, rotary.rotated(q_BNCH.permute(2, 0, 1, 3), new, pads).permute(1, 2, 0, 3)
