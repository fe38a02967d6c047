"""Compute cost of a prefill with prefill.attention=xattention: attention to the blocks that are chosen, and the choice.

The attention term of another cost is multiplied by the share of pairs that are attended, and what the choice takes is
added. A rank chooses once it has the keys of all tokens before its own, so all of its attention comes after its wait.
"""

# Legend: c chunk tokens, P prefix tokens.

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from partitioner.cost.compute import ComputeCost, OtherAttention
from runahead.config import SPARSE_BLOCK, Attention, PrefillOptions

CHOSEN, GROWTH = 1.07, 0.35
"""Blocks that a block of queries sees at a threshold t are about CHOSEN ln(1 / (1 - t)) n^GROWTH of n. So it was with
SmolLM2 and this documentation at 4,096 tokens (t of 0.9, 0.95, 0.97: 37, 48, 59% of all) and at 8,000 (0.95: 30%); the
split of other models and texts is learned from prompts."""
CHOICE = 7.0
"""Seconds of a product of two cells, with its part of the softmax, in those of attention of a query to a key."""
MOST_BLOCKS = 1 << 20
"""Blocks of a prompt that are counted; where it has more, those after them see the last one's share."""


@dataclass(frozen=True, kw_only=True)
class Sparsity:
    """Expected share of the keys that blocks of queries see: options of a prefill.

    Attributes:
        threshold, density, stride, exact_layers: as of `PrefillOptions`.
    """

    threshold: float = PrefillOptions.threshold
    density: float | None = None
    stride: int = PrefillOptions.stride
    exact_layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, prefill: PrefillOptions) -> Self | None:
        """The sparsity of a prefill; None if it attends to all keys."""
        if prefill.attention is not Attention.xattention:
            return None
        return cls(
            threshold=prefill.threshold,
            density=prefill.density,
            stride=prefill.stride,
            exact_layers=tuple(prefill.exact_layers),
        )

    def blocks(self, seen: np.ndarray) -> np.ndarray:
        """Blocks of keys that are chosen of so many: the first and the own one in any case."""
        least = np.minimum(seen, 2)
        if self.density is not None:
            return np.maximum(np.ceil(self.density * seen), least)
        if self.threshold >= 1:
            return seen
        factor = CHOSEN * math.log(1 / (1 - self.threshold))
        return np.clip(factor * seen.astype(float) ** GROWTH, least, seen)

    def exact_share(self, num_layers: int) -> float:
        """Share of so many layers with attention that attend to all keys."""
        return min(1.0, len(self.exact_layers) / max(1, num_layers))

    def mean_share(self, c: float, P: float, num_layers: int) -> float:
        """`share`, mean over so many layers with attention, with those that attend to all keys."""
        exact = self.exact_share(num_layers)
        return exact + (1 - exact) * self.share(c, P)

    def share(self, c: float, P: float) -> float:
        """Share of the pairs of a query and a key it may see that are attended, in a layer that chooses."""
        c = max(c, 1.0)
        return (self._pairs_up_to(P + c) - self._pairs_up_to(P)) / (c * P + c * c / 2)

    def _pairs_up_to(self, num_tokens: float) -> float:
        """Pairs of the first queries; half of a block's own ones are later keys."""
        at = num_tokens / SPARSE_BLOCK
        blocks_of = _pairs_of_blocks(self, min(1 << math.ceil(at).bit_length(), MOST_BLOCKS))
        last = len(blocks_of) - 1
        if at < last:
            whole, part = int(at), at % 1
            earlier = blocks_of[whole + 1] - blocks_of[whole] - 0.5  # blocks before the own one
            pairs = blocks_of[whole] + part * earlier + part**2 / 2
        else:
            last_share = (blocks_of[last] - blocks_of[last - 1]) / last
            pairs = blocks_of[last] + last_share * (at**2 - last**2) / 2
        return float(pairs) * SPARSE_BLOCK**2


@functools.lru_cache(maxsize=64)
def _pairs_of_blocks(sparsity: Sparsity, num_blocks: int) -> np.ndarray:
    """Pairs of blocks that the first so many blocks of queries attend to, from none on."""
    seen = np.arange(1, num_blocks + 1)
    return np.concatenate([[0.0], np.cumsum(sparsity.blocks(seen) - 0.5)])


@dataclass(frozen=True, kw_only=True)
class SparseCost(OtherAttention):
    """A cost whose attention is sparse, as a `ComputeCost`: the mean over its places, of which some may be exact.

    Layers with windows, which see all keys of theirs, count as the others: their attention is a small part of the mean.
    """

    sparsity: Sparsity

    @property
    def _exact(self) -> float:
        return self.sparsity.exact_share(self.num_places - len(self.states))

    def own(self, c: float) -> float:
        """Attention of exact layers: in others a rank does not attend before it has all keys before its own."""
        return self._exact * self.dense.own(c)

    def prefix(self, c: float, P: float) -> float:
        """The choice, and attention of the chunk to what is chosen of itself and of its prefix; all in exact layers."""
        share, exact = self.sparsity.share(c, P) + CHOICE / self.sparsity.stride**2, self._exact
        chosen = share * (self.dense.own(c) + self.dense.prefix(c, P))
        return (1 - exact) * chosen + exact * self.dense.prefix(c, P)


def cost_of(dense: ComputeCost, prefill: PrefillOptions) -> ComputeCost:
    """The cost of a prefill from that of attention to all keys."""
    sparsity = Sparsity.of(prefill)
    return dense if sparsity is None else SparseCost(dense=dense, sparsity=sparsity)
