"""One stage's share of the keys and values of a text: its chunk of the prompt, and some of the new tokens.

Which stage stores which new token is known before the prefill, and so are the bytes of every stage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from policies.layer_view import PromptPart
from runahead.cache.slabs import KVShape, Slabs
from runahead.context import ContextPartition


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The tokens of a padded batch that one stage stores.

    Attributes:
        chunk: indices of the prompt's tokens.
        num_tokens: length of the padded prompt.
        is_own: of each new token that is stored anywhere, whether it is stored here; () if all of them are.
    """

    chunk: range
    num_tokens: int
    is_own: tuple[bool, ...] = ()

    @classmethod
    def whole(cls, num_tokens: int) -> Shard:
        """All tokens of a text whose prompt has so many."""
        return cls(chunk=range(num_tokens), num_tokens=num_tokens)

    @cached_property
    def own_new(self) -> list[int]:
        """Indices of the new tokens that are stored here."""
        return [self.num_tokens + new for new, is_own in enumerate(self.is_own) if is_own]

    @cached_property
    def own_before(self) -> list[int]:
        """Number of own tokens among the new tokens before each one, and among all of them."""
        return list(accumulate(self.is_own, initial=0))

    @property
    def span(self) -> tuple[int, int]:
        """The chunk, followed by slots for the own new tokens and one for those of others.

        A step over tensors of fixed shape stores its token in any case: that of another stage in the last slot, which
        is never read.
        """
        return self.chunk.start, self.chunk.stop + len(self.own_new) + (1 if self.is_own else 0)

    def indices(self) -> list[int]:
        """Indices in the padded batch of all tokens that are stored here in the end, in the order of their slots."""
        return [*self.chunk, *self.own_new]

    def slots(self, num_tokens: int) -> range:
        """Slots of those of the text's first tokens that are stored here."""
        return range(self.chunk.start, self.chunk.start + bisect_left(self.indices(), num_tokens))

    def owns(self, index: int) -> bool:
        """Whether a new token is stored here, by its index in the padded batch."""
        return self.is_own[index - self.num_tokens]

    def own(self, start: int, num_new: int) -> list[int]:
        """The numbers of those of some new tokens that are stored here; `start` is the index of the first of them."""
        return [new for new in range(num_new) if self.owns(start + new)]

    def row(self, pad: int) -> Shard:
        """The tokens of a row, without its padding."""
        chunk = range(max(0, self.chunk.start - pad), max(0, self.chunk.stop - pad))
        return Shard(chunk=chunk, num_tokens=self.num_tokens - pad, is_own=self.is_own)

    def part(self, pads: Sequence[int]) -> PromptPart:
        """The prompt's tokens of this stage, for cache policies. `pads` are the left padding of each row."""
        return PromptPart(chunk=self.chunk, num_tokens=self.num_tokens, row_pads=tuple(pads))


def shards(partition: ContextPartition, num_new: int, *, by_share: bool = False) -> dict[int, Shard]:
    """The shard of every stage with a chunk. A new token goes to the stage that stores fewest tokens by then.

    Args:
        num_new: number of new tokens that are stored.
        by_share: new tokens are shared out as the prompt is, as cache policies share out their budgets.
    """
    chunks = {stage: len(partition.chunk(stage)) for stage in partition.chain}
    if by_share:
        owners = least_filled(dict.fromkeys(chunks, 0), num_new, sizes=chunks)
    else:
        owners = least_filled(chunks, num_new)
    return {
        stage: Shard(
            chunk=partition.chunk(stage),
            num_tokens=partition.num_tokens,
            is_own=tuple(owner == stage for owner in owners),
        )
        for stage in partition.chain
    }


def least_filled(stored: Mapping[int, int], num_new: int, *, sizes: Mapping[int, int] | None = None) -> list[int]:
    """The stage that stores each of some new tokens: the one that is emptiest by then.

    Args:
        stored: number of tokens that each stage stores already.
        sizes: stages are filled in proportion to these; by default alike.
    """
    stored, owners = dict(stored), list[int]()
    for _ in range(num_new):
        owner = min(stored, key=lambda stage: (stored[stage] + 1) / (1 if sizes is None else sizes[stage]))
        stored[owner] += 1  # of several, the first
        owners.append(owner)
    return owners


def shard_bytes(shapes: Sequence[KVShape], shard: Shard, batch: int) -> int:
    """Bytes of the keys and values of a shard in all layers."""
    first, end = shard.span
    return (end - first) * sum(shape.bytes_per_token(batch) for shape in shapes)


def shard_slabs(shapes: Sequence[KVShape], shard: Shard, *, batch: int, device: torch.device) -> Slabs:
    """Empty slabs for a shard. Raises: ValueError: the memory cannot be allocated."""
    spans = [shard.span] * len(shapes)
    return Slabs.empty(shapes, batch=batch, spans=spans, num_slabs=len(shapes), device=device)
