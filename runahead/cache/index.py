"""Index of slabs: the slots of a text's tokens, and what their queries see in other memory."""

# Legend: B batch, K kv heads, C new tokens, H key dim, V value dim.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from policies.row_values import sent
from runahead.attention.op import Lengths, Run, Span, Step, spans_of
from runahead.cache.new_tokens import NewTokens
from runahead.cache.shard import Shard
from runahead.cache.slabs import KVSlab, Slabs


@dataclass(frozen=True, kw_only=True)
class Block:
    """Tokens of a text that lie side by side in one memory, in order.

    Attributes:
        indices: of the tokens in the padded batch.
        arrives: as of `Step`.
        has_new: as of `Span`.
    """

    keys: KVSlab
    slots: range
    indices: Sequence[int]
    arrives: bool = True
    has_new: bool = True


class Write(NamedTuple):
    """New tokens that are stored side by side.

    Attributes:
        slot: of the first one, which others follow; or that of the only one of each sequence, on the device.
        tokens: which of the new ones, in order, as a tensor on the device; None: all.
    """

    slot: int | Tensor
    tokens: slice | Tensor | None = None

    def select(self, new_BKCX: Tensor) -> Tensor:
        """Keys or values of these tokens."""
        if self.tokens is None:
            return new_BKCX
        return new_BKCX[:, :, self.tokens] if isinstance(self.tokens, slice) else new_BKCX.index_select(2, self.tokens)


class SlabIndex:
    """Where the tokens of a text lie in the slabs of its layers: each in the slot of its index in the padded batch.

    An index is a function of a forward's new tokens, which say where in the text they are. So nothing is committed
    after a forward, and nothing is taken back: a later forward that begins earlier stores its tokens over others.

    Attributes:
        is_whole: whether all tokens that queries see are in a layer's own memory.
        is_part: whether a part of the text alone lies there, so that rows are not told apart.
        repeats_steps: whether a decoding step is the same operations on the same tensors every time; see `advance`.
        numbers: on the device, which say where tokens lie, where a repeated step reads them.
        sees_last_alone: as of `LayerStore`.
        prefix: memory of earlier tokens that belongs to the same cache.
        shard: the tokens that lie there, if the others are on other ranks.
    """

    is_whole: bool = True
    is_part: bool = False
    repeats_steps: bool = False
    numbers: Sequence[Tensor] = ()
    sees_last_alone: bool = True
    prefix: Slabs | None = None
    shard: Shard | None = None

    def writes(self, tokens: NewTokens, num_new: int) -> Sequence[Write]:
        """Where new tokens are stored in a layer's own memory, but for those that other ranks store."""
        return [Write(tokens.start)]

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

    def blocks(self, layer: int, slab: KVSlab, tokens: NewTokens, num_new: int) -> Sequence[Block]:
        """The tokens up to the last `num_new` ones in a layer; arguments are as of `steps`."""
        every = range(tokens.start + num_new)
        return [Block(keys=slab, slots=every, indices=every)]

    def positions_BC(self, index_C: Tensor, start: int) -> Tensor | None:  # noqa: N802
        """Positions (B, C) of tokens, as `KVStore.positions_BC`."""
        return None

    def row(self, row: int, pad: int) -> SlabIndex:
        """Index of one row, without its padding, over the `row_slab` of each layer."""
        return self

    def row_slab(self, slab: KVSlab, row: int, pad: int) -> KVSlab:
        """One row's tokens in a layer, numbered from the first after its padding, as a view."""
        return slab.row(row, pad)

    def held(self, pad: int, num_tokens: int) -> range | None:
        """Slots of those of a row's first tokens that are stored here, in its `row_slab`; None if it cannot be told."""
        if self.shard is not None:
            return self.shard.row(pad).slots(num_tokens)
        return None if self.is_part else range(num_tokens)

    def for_decoding(self) -> SlabIndex:
        """Index of the same tokens in the form that single new tokens attend to fastest."""
        return self

    def advance(self) -> None:
        """Called after each decoding step, if steps repeat."""

    def set_lengths(self, stored: Sequence[int]) -> None:
        """Called before a decoding step, if steps repeat, with the number of tokens of each row."""


ALL_TOKENS = SlabIndex()


class AfterPrefix(SlabIndex):
    """Index of tokens that follow a prefix in other memory.

    Args:
        prefix: slabs of the prefix. Each slot has the number of its token's index in the padded batch.
    """

    is_whole, is_part = False, True

    def __init__(self, prefix: Slabs) -> None:
        self.prefix: Slabs = prefix

    def steps(self, layer: int, slab: KVSlab, tokens: NewTokens, num_new: int) -> Sequence[Step]:
        prefix, start, pads = self.prefix.by_layer[layer], tokens.start, tokens.row_pads
        own = spans_of(range(slab.first, start + num_new), start=start, num_new=num_new, pads=pads)
        slots = range(prefix.first, prefix.end)
        before = spans_of(slots, start=start, num_new=num_new, pads=pads, has_new=False)
        return [Step([Run(slab, own)], arrives=False), Step([Run(prefix, before)])]

    def blocks(self, layer: int, slab: KVSlab, tokens: NewTokens, num_new: int) -> Sequence[Block]:
        prefix = self.prefix.by_layer[layer]
        own, before = range(slab.first, tokens.start + num_new), range(max(0, prefix.first), prefix.end)
        return [
            Block(keys=slab, slots=own, indices=own, arrives=False),
            Block(keys=prefix, slots=before, indices=before, has_new=False),
        ]


class ShardIndex(SlabIndex):
    """Index of the tokens that one stage stores."""

    is_part = True

    def __init__(self, shard: Shard, device: torch.device) -> None:
        self.shard: Shard = shard
        self._indices = shard.indices()
        self._index_T = sent(torch.tensor(self._indices), device)

    def writes(self, tokens: NewTokens, num_new: int) -> Sequence[Write]:
        own = self.shard.own(tokens.start, num_new)
        if not own:
            return []
        slot = self.shard.chunk.stop + self.shard.own_before[tokens.start - self.shard.num_tokens]
        if len(own) == num_new:
            return [Write(slot)]
        return [Write(slot, tokens.once((self, "own"), lambda: sent(torch.tensor(own), self._index_T.device)))]

    def steps(self, layer: int, slab: KVSlab, tokens: NewTokens, num_new: int) -> Sequence[Step]:
        """As of `SlabIndex`; earlier tokens have spans apart from several new ones, of which each query sees some."""
        spans = tokens.once((self, num_new), lambda: self._spans_apart(tokens, num_new))
        return [Step([Run(slab, each)]) for each in spans]

    def _spans_apart(self, tokens: NewTokens, num_new: int) -> list[Sequence[Span]]:
        own_before, first = self.shard.own_before, tokens.start - self.shard.num_tokens
        ends = [own_before[first + 1]] if num_new == 1 else [own_before[first], own_before[first + num_new]]
        places = [0, *(len(self.shard.chunk) + end for end in ends)]
        return [self._spans(tokens, num_new, begin, end) for begin, end in pairwise(places)]

    def _spans(self, tokens: NewTokens, num_new: int, begin: int, end: int) -> Sequence[Span]:
        """The tokens [begin, end) of those that are stored here in the end, as the new ones see them."""
        first = self.shard.chunk.start
        return spans_of(
            range(first + begin, first + end),
            start=tokens.start,
            num_new=num_new,
            pads=tokens.row_pads,
            at=self._indices[begin:] if begin else self._indices,
            at_T=self._index_T[begin:] if begin else self._index_T,
            has_new=False,
        )

    def blocks(self, layer: int, slab: KVSlab, tokens: NewTokens, num_new: int) -> Sequence[Block]:
        shard, chunk = self.shard, self.shard.chunk
        num_own = shard.own_before[tokens.start - shard.num_tokens + 1]
        after = range(chunk.stop, chunk.stop + num_own)
        return [
            Block(keys=slab, slots=chunk, indices=chunk, has_new=False),
            *([Block(keys=slab, slots=after, indices=shard.own_new, has_new=False)] if after else []),
        ]

    def row(self, row: int, pad: int) -> SlabIndex:
        return ShardIndex(self.shard.row(pad), self._index_T.device)

    def row_slab(self, slab: KVSlab, row: int, pad: int) -> KVSlab:
        chunk = self.shard.chunk
        start = max(chunk.start, min(pad, chunk.stop))  # a row may have no token of the chunk
        slab_TBKX = slab.slab_TBKX[start - slab.first :, row : row + 1]
        return KVSlab(slab_TBKX=slab_TBKX, key_dim=slab.key_dim, first=self.shard.row(pad).chunk.start)
