"""The full KV cache: one slab per layer, or a ring of a few slabs that the layers take in turn.

The last rank of a chain, which decodes, has a slab for every layer. A rank that only forwards keys and values needs
slabs for a few layers at a time. With sharded decoding every rank has a ring for the prefix, and slabs of their own for
its chunk.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens, H key dim, V value dim.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from policies.row_values import row_values
from runahead.attention.marked import attend_marked
from runahead.attention.op import Lengths, Part, Span, attend, nothing
from runahead.attention.partial import AttentionTerms
from runahead.cache.base import KVStore, LayerStore, SeenKV
from runahead.cache.new_tokens import NewTokens
from runahead.cache.slabs import ALL_TOKENS, Index, KVShape, KVSlab, SplitSlab
from runahead.cache.slot_positions import at_slots
from runahead.rotary import Rotary

Allocator: TypeAlias = Callable[[Sequence[int]], list[Tensor]]
"""Allocates byte tensors of given sizes. Raises ValueError or RuntimeError if they do not fit."""


@dataclass(kw_only=True)
class SeenSlab(SeenKV):
    """A slab together with the queries of its newest tokens, which attend to it.

    Attributes:
        start: index of the first of these tokens in the slab's numbering.
        pads: left padding of each row, in tokens.
        spans: where the tokens lie that they see.
        positions_BKn: positions of the tokens in the slots, where some were dropped; by default they are contiguous.
    """

    slab: KVSlab
    start: int
    pads: Sequence[int]
    spans: Sequence[Span] | Lengths
    positions_BKn: Tensor | None = None

    @classmethod
    def of(
        cls,
        slab: KVSlab,
        q_BNCH: Tensor,
        *,
        start: int,
        pads: Sequence[int],
        spans: Sequence[Span] | Lengths | None = None,
        rotary: Rotary | None = None,
        positions_BKn: Tensor | None = None,
    ) -> SeenSlab:
        """Create from a slab and queries.

        Args:
            spans: by default the tokens before the new ones lie in the slots before theirs.
            rotary: both are unrotated, and are read rotated to their slots.
        """
        if spans is None:
            spans = ALL_TOKENS.spans(NewTokens(start, list(pads)), q_BNCH.shape[2])
        if rotary is not None:
            slab, q_BNCH = at_slots(rotary, slab, q_BNCH, new=start, pads=pads)
        return cls(q_BNCH=q_BNCH, slab=slab, start=start, pads=pads, spans=spans, positions_BKn=positions_BKn)

    def attend(self, terms: AttentionTerms, await_prefix: Callable[[], None] = nothing) -> Part:
        if terms.marked_window is not None:  # a key may be marked by the first token after the prefix
            await_prefix()
            return attend_marked(self.q_BNCH, *self.read(), terms, self._positions())
        return attend(self.q_BNCH, self.slab, self.spans, terms, await_prefix=await_prefix)

    def read(self) -> tuple[Tensor, Tensor]:
        end = self.start + self.q_BNCH.shape[2]
        assert not isinstance(self.spans, Lengths) and all(span.slots.stop == end for span in self.spans), self.spans
        return self.slab.read(self.slab.first, end)

    def _positions(self) -> Tensor:
        """Positions of all tokens up to the newest ones (B, K, n), or (B, 1, n)."""
        if self.positions_BKn is not None:
            return self.positions_BKn
        index_n = torch.arange(self.slab.first, self.start + self.q_BNCH.shape[2], device=self.q_BNCH.device)
        return (index_n - row_values(self.pads, index_n.device)[:, None])[:, None]


@dataclass(kw_only=True)
class SlabLayer(LayerStore):
    """One layer in a slab with room for all its tokens.

    Attributes:
        index: where they lie.
        rotary: of this layer, if keys are stored unrotated.
    """

    slab: KVSlab
    index: Index = ALL_TOKENS
    rotary: Rotary | None = None

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        slot = self.index.slot(tokens)
        if slot is not None:
            self.slab.write(slot, k_BKCH, v_BKCV)

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenSlab:
        spans = self.index.spans(tokens, q_BNCH.shape[2])
        start, pads = tokens.start, tokens.row_pads
        return SeenSlab.of(self.slab, q_BNCH, start=start, pads=pads, spans=spans, rotary=self.rotary)

    @property
    def num_bytes(self) -> int:
        return self.slab.slab_TBKX.nbytes


class KVCache(KVStore):
    """KV cache in slabs: one per layer, or a ring of fewer slabs that the layers take in turn.

    Args:
        shapes: shape of every layer's keys and values.
        batch: number of rows.
        spans: tokens [first, end) that each layer stores.
        num_slabs: number of slabs; with fewer than layers they form a ring.
        pin_memory: page-lock host memory, for copies to and from a GPU.
        rotaries: of every layer, if keys are stored unrotated.
        allocate: allocates the slabs; by default each is memory of its own.
        own: stores what follows the spans, in memory that this cache's layers do not share.

    Attributes:
        layers: all layers; in a ring each is valid until a later layer takes its slab.

    Raises:
        ValueError: the memory cannot be allocated.
    """

    layers: list[SlabLayer]

    def __init__(
        self,
        shapes: Sequence[KVShape],
        *,
        batch: int,
        spans: Sequence[tuple[int, int]],
        num_slabs: int,
        device: torch.device,
        pin_memory: bool = False,
        rotaries: Sequence[Rotary] | None = None,
        allocate: Allocator | None = None,
        own: KVCache | None = None,
    ) -> None:
        self.shapes, self.batch, self.spans, self.device = list(shapes), batch, list(spans), device
        self._own = own
        self.num_slabs, self._rotaries = min(num_slabs, len(shapes)), rotaries
        layer_bytes = [
            (end - first) * shape.bytes_per_token(batch) for shape, (first, end) in zip(shapes, spans, strict=True)
        ]
        sizes = [max(layer_bytes[slab :: self.num_slabs]) for slab in range(self.num_slabs)]

        def each_its_own(sizes: Sequence[int]) -> list[Tensor]:
            return [torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pin_memory) for size in sizes]

        try:
            self._slabs = (allocate or each_its_own)(sizes)
        except RuntimeError as error:  # torch.OutOfMemoryError on GPUs, a plain RuntimeError on CPUs
            raise ValueError(
                f"{sum(sizes):,} bytes of keys and values do not fit on {device}; use a shorter prompt, a smaller "
                "prompt.batch or generation.max_new_tokens, or more memory"
            ) from error
        self.layers = []
        for layer, (shape, (first, end)) in enumerate(zip(shapes, spans, strict=True)):
            flat = self._slabs[layer % self.num_slabs][: layer_bytes[layer]].view(shape.dtype)
            slab_TBKX = flat.view(end - first, batch, shape.num_kv_heads, shape.key_dim + shape.value_dim)
            slab = KVSlab(slab_TBKX=slab_TBKX, key_dim=shape.key_dim, first=first)
            if own is not None:
                after = own.layer(layer)
                slab = SplitSlab(slab_TBKX=slab_TBKX, key_dim=shape.key_dim, first=first, own=after)
                assert end == after.first, (end, after.first)
            self.layers.append(SlabLayer(slab=slab, rotary=None if rotaries is None else rotaries[layer]))

    @property
    def num_bytes(self) -> int:
        return sum(slab.numel() for slab in self._slabs) + (0 if self._own is None else self._own.num_bytes)

    @property
    def rotates(self) -> bool:
        return self._rotaries is not None

    def split(self, pads: Sequence[int]) -> list[KVStore]:
        assert self.num_slabs == self.num_layers, "layers share slabs"
        return [SlabRow(self, row, pad) for row, pad in enumerate(pads)]

    def row_kv(self, row: int, pad: int, num_tokens: int) -> list[Tensor] | None:
        if self.rotates or self.num_slabs < self.num_layers:
            return None
        return SlabRow(self, row, pad).row_kv(0, 0, num_tokens)

    def readers(self, layer: int) -> Sequence[int]:
        return self.shapes[layer].readers

    def take_layers(self) -> Iterator[SlabLayer]:
        """Hand over the layers in order. The memory of each belongs to the caller; this cache is empty afterwards."""
        assert self.num_slabs == self.num_layers, "layers share slabs"
        self._slabs.clear()
        while self.layers:
            yield self.layers.pop(0)

    def layer(self, layer: int) -> KVSlab:
        """The slab of a layer; in a ring it is valid until layer + num_slabs takes its memory."""
        return self.layers[layer].slab


class SlabRow(KVStore):
    """One row of a KV cache, without its padding. The slabs are freed once all rows of the cache are gone."""

    layers: list[SlabLayer]

    def __init__(self, cache: KVCache, row: int, pad: int) -> None:
        self.device = cache.device
        self.layers = [SlabLayer(slab=layer.slab.row(row, pad)) for layer in cache.layers]

    @classmethod
    def of(cls, key_dims: Sequence[int], layers_TKX: Sequence[Tensor]) -> SlabRow:
        """A row in memory of others: keys and values of each layer, and how wide its keys are."""
        row = cls.__new__(cls)
        row.device = layers_TKX[0].device
        row.layers = [
            SlabLayer(slab=KVSlab(slab_TBKX=kv_TKX[:, None], key_dim=key_dim, first=0))
            for kv_TKX, key_dim in zip(layers_TKX, key_dims, strict=True)
        ]
        return row

    def fork(self) -> SlabRow:
        other = copy(self)
        other.layers = [
            SlabLayer(slab=replace(layer.slab, slab_TBKX=layer.slab.slab_TBKX.clone())) for layer in self.layers
        ]
        return other

    def take_back(self, num_tokens: int) -> None:
        """Nothing is to be done, since a token is stored at its index, over what was there."""

    def row_kv(self, row: int, pad: int, num_tokens: int) -> list[Tensor] | None:
        assert (row, pad) == (0, 0), (row, pad)
        if any(layer.slab.first > 0 for layer in self.layers):  # earlier tokens are on other ranks
            return None
        return [layer.slab.tokens(0, num_tokens)[:, 0] for layer in self.layers]
