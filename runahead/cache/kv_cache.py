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
from runahead.attention.op import Run, Step
from runahead.cache.base import KVStore, LayerStore, SeenKV
from runahead.cache.new_tokens import NewTokens
from runahead.cache.slabs import ALL_TOKENS, AfterPrefix, Index, KVShape, KVSlab
from runahead.cache.slot_positions import at_slots
from runahead.rotary import Rotary

Allocator: TypeAlias = Callable[[Sequence[int]], list[Tensor]]
"""Allocates byte tensors of given sizes. Raises ValueError or RuntimeError if they do not fit."""


def seen_in(
    slab: KVSlab,
    q_BNCH: Tensor,
    *,
    start: int,
    pads: Sequence[int],
    steps: Sequence[Step] | None = None,
    rotary: Rotary | None = None,
    positions_BKn: Tensor | None = None,
) -> SeenKV:
    """A slab together with the queries of its newest tokens, which attend to it.

    Args:
        start: number of the slot of the first of these tokens.
        pads: left padding of each row, in slots.
        steps: where the tokens lie that they see; by default in the slots up to their own.
        rotary: keys and queries are unrotated, and are read rotated to their slots.
        positions_BKn: positions of the tokens in the slots, where some were dropped; by default they are contiguous.
    """
    num_new, device = q_BNCH.shape[2], q_BNCH.device
    if rotary is not None:
        slab, q_BNCH = at_slots(rotary, slab, q_BNCH, new=start, pads=pads)
    if steps is None or rotary is not None:
        steps = ALL_TOKENS.steps(0, slab, NewTokens(start, list(pads)), num_new)

    def positions() -> Tensor:
        if positions_BKn is not None:
            return positions_BKn
        return (torch.arange(slab.first, start + num_new, device=device) - row_values(pads, device)[:, None])[:, None]

    return SeenKV(q_BNCH=q_BNCH, steps=steps, whole=lambda: slab.read(slab.first, start + num_new), positions=positions)


def seen_in_part(slab: KVSlab, q_BNCH: Tensor, tokens: NewTokens, pads: Sequence[int]) -> SeenKV:
    """As `seen_in`, with the newest tokens stored on any of the ranks.

    Args:
        slab: the tokens that are stored here.
        pads: padding slots on the left of each row.
    """
    assert tokens.part is not None
    slots, num_new = range(slab.first, slab.end), q_BNCH.shape[2]
    spans = tokens.part.spans(slots, pads, start=tokens.start, num_new=num_new, device=q_BNCH.device)
    return SeenKV(q_BNCH=q_BNCH, steps=[Step([Run(slab, spans)])], whole=lambda: slab.read(slab.first, slab.end))


@dataclass(kw_only=True)
class SlabLayer(LayerStore):
    """One layer in a slab with room for all its tokens.

    Attributes:
        number: of the layer.
        index: where they lie, and what else their queries see.
        rotary: of this layer, if keys are stored unrotated.
    """

    slab: KVSlab
    number: int
    index: Index = ALL_TOKENS
    rotary: Rotary | None = None

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        slot = self.index.slot(tokens)
        if slot is not None:
            self.slab.write(slot, k_BKCH, v_BKCV)

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenKV:
        steps = self.index.steps(self.number, self.slab, tokens, q_BNCH.shape[2])
        start, pads = tokens.start, tokens.row_pads
        if not self.index.is_whole:
            return SeenKV(q_BNCH=q_BNCH, steps=steps)
        return seen_in(self.slab, q_BNCH, start=start, pads=pads, steps=steps, rotary=self.rotary)

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
        slabs = []
        for layer, (shape, (first, end)) in enumerate(zip(shapes, spans, strict=True)):
            flat = self._slabs[layer % self.num_slabs][: layer_bytes[layer]].view(shape.dtype)
            slab_TBKX = flat.view(end - first, batch, shape.num_kv_heads, shape.key_dim + shape.value_dim)
            slabs.append(KVSlab(slab_TBKX=slab_TBKX, key_dim=shape.key_dim, first=first))
            assert own is None or end == own.layer(layer).first, (end, own.layer(layer).first)
        self._by_layer = slabs
        index, new = (ALL_TOKENS, slabs) if own is None else (AfterPrefix(slabs), own._by_layer)
        rotary_of = [None] * len(slabs) if rotaries is None else rotaries
        self.layers = [
            SlabLayer(slab=slab, number=number, index=index, rotary=rotary)
            for number, (slab, rotary) in enumerate(zip(new, rotary_of, strict=True))
        ]

    @property
    def num_bytes(self) -> int:
        return sum(memory.numel() for memory in self._slabs) + (0 if self._own is None else self._own.num_bytes)

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
        self._by_layer.clear()
        while self.layers:
            yield self.layers.pop(0)

    def layer(self, layer: int) -> KVSlab:
        """The slab of a layer's span; in a ring it is valid until layer + num_slabs takes its memory."""
        return self._by_layer[layer]

    def tokens(self, layer: int, start: int, end: int) -> Tensor:
        """The contiguous tokens [start, end) of a layer (S, B, K, X), in its span or after it."""
        is_after = self._own is not None and start >= self._by_layer[layer].end
        return (self.layers[layer].slab if is_after else self._by_layer[layer]).tokens(start, end)

    def extent(self, layer: int) -> tuple[int, int]:
        """The tokens [first, end) of a layer that are stored here, in its span and after it."""
        return self._by_layer[layer].first, self.layers[layer].slab.end


class SlabRow(KVStore):
    """One row of a KV cache, without its padding. The slabs are freed once all rows of the cache are gone."""

    layers: list[SlabLayer]

    def __init__(self, cache: KVCache, row: int, pad: int) -> None:
        self.device = cache.device
        self.layers = [SlabLayer(slab=layer.slab.row(row, pad), number=layer.number) for layer in cache.layers]

    @classmethod
    def of(cls, key_dims: Sequence[int], layers_TKX: Sequence[Tensor]) -> SlabRow:
        """A row in memory of others: keys and values of each layer, and how wide its keys are."""
        row = cls.__new__(cls)
        row.device = layers_TKX[0].device
        row.layers = [
            SlabLayer(slab=KVSlab(slab_TBKX=kv_TKX[:, None], key_dim=key_dim, first=0), number=number)
            for number, (kv_TKX, key_dim) in enumerate(zip(layers_TKX, key_dims, strict=True))
        ]
        return row

    def fork(self) -> SlabRow:
        other = copy(self)
        other.layers = [
            replace(layer, slab=replace(layer.slab, slab_TBKX=layer.slab.slab_TBKX.clone())) for layer in self.layers
        ]
        return other

    def take_back(self, num_tokens: int) -> None:
        """Nothing is to be done, since a token is stored at its index, over what was there."""

    def row_kv(self, row: int, pad: int, num_tokens: int) -> list[Tensor] | None:
        assert (row, pad) == (0, 0), (row, pad)
        if any(layer.slab.first > 0 for layer in self.layers):  # earlier tokens are on other ranks
            return None
        return [layer.slab.tokens(0, num_tokens)[:, 0] for layer in self.layers]
