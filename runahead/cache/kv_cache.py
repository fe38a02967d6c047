"""The full KV cache: one slab per layer, or a ring of a few slabs that the layers of a rank take in turn.

The last rank of a chain, which decodes, has a slab for every layer. A rank that only passes keys and values on needs
those of a few layers at a time.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens, H key dim, V value dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from runahead.attention.causal import attend_causally, nothing
from runahead.attention.partial import AttentionTerms
from runahead.cache.base import KVStore, LayerStore, SeenKV
from runahead.cache.new_tokens import NewTokens
from runahead.cache.slabs import KVShape, KVSlab
from runahead.cache.slot_positions import at_slots
from runahead.rotary import Rotary


@dataclass(kw_only=True)
class SeenSlab(SeenKV):
    """A slab as the queries of its newest tokens see it.

    Attributes:
        start: index of the first of these tokens in the slab's numbering.
        pads: tokens on the left of each row that are padding.
    """

    slab: KVSlab
    start: int
    pads: Sequence[int]

    @classmethod
    def of(
        cls, slab: KVSlab, q_BNCH: Tensor, *, start: int, pads: Sequence[int], rotary: Rotary | None = None
    ) -> SeenSlab:
        """With a `rotary`, keys and queries of the slab are unrotated, and seen as rotated to their slots."""
        if rotary is not None:
            slab, q_BNCH = at_slots(rotary, slab, q_BNCH, new=start, pads=pads)
        return cls(q_BNCH=q_BNCH, slab=slab, start=start, pads=pads)

    def attend(self, terms: AttentionTerms, await_prefix: Callable[[], None] = nothing) -> tuple[Tensor, Tensor]:
        return attend_causally(
            self.q_BNCH, self.slab, terms, start=self.start, pads=self.pads, await_prefix=await_prefix
        )

    def read(self) -> tuple[Tensor, Tensor]:
        return self.slab.read(self.slab.first, self.start + self.q_BNCH.shape[2])


@dataclass(kw_only=True)
class SlabLayer(LayerStore):
    """One layer in a slab that has room for all its tokens. New tokens go where their index in the batch says.

    Attributes:
        rotary: of this layer, if keys are stored unrotated.
    """

    slab: KVSlab
    rotary: Rotary | None = None

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        self.slab.write(tokens.start, k_BKCH, v_BKCV)

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenSlab:
        return SeenSlab.of(self.slab, q_BNCH, start=tokens.start, pads=tokens.row_pads, rotary=self.rotary)

    @property
    def num_bytes(self) -> int:
        return self.slab.slab_TBKX.nbytes


class KVCache(KVStore):
    """Slabs for all layers of a batch, either one each or a ring of fewer that the layers take in turn.

    Args:
        shapes: shape of every layer.
        batch: rows.
        spans: tokens [first, end) that each layer stores.
        num_slabs: slabs that exist; fewer than the layers makes a ring.
        pin_memory: page-lock host memory, for copies to and from a GPU.
        rotaries: of every layer, if keys are stored unrotated.

    Raises:
        ValueError: the bytes are not there.
    """

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
    ) -> None:
        self.shapes, self.batch, self.spans, self.device = list(shapes), batch, list(spans), device
        self.num_slabs, self._rotaries = min(num_slabs, self.num_layers), rotaries
        rings = [range(slab, self.num_layers, self.num_slabs) for slab in range(self.num_slabs)]
        sizes = [max(self._layer_bytes(layer) for layer in ring) for ring in rings]
        try:
            self._slabs = [torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pin_memory) for size in sizes]
        except RuntimeError as error:  # torch.OutOfMemoryError on GPUs, a plain RuntimeError on CPUs
            raise ValueError(
                f"{sum(sizes):,} bytes of keys and values do not fit on {device}; use a shorter prompt, a smaller "
                "prompt.batch or generation.max_new_tokens, or more memory"
            ) from error

    def _layer_bytes(self, layer: int) -> int:
        first, end = self.spans[layer]
        return (end - first) * self.shapes[layer].bytes_per_token(self.batch)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(slab.numel() for slab in self._slabs)

    @property
    def num_layers(self) -> int:
        return len(self.shapes)

    @property
    def rotates(self) -> bool:
        return self._rotaries is not None

    @cached_property
    def layers(self) -> list[SlabLayer]:  # type: ignore[override]
        """All layers. In a ring each is valid as its slab is."""
        return [
            SlabLayer(slab=self.layer(layer), rotary=None if self._rotaries is None else self._rotaries[layer])
            for layer in range(self.num_layers)
        ]

    def layer(self, layer: int) -> KVSlab:
        """The slab of a layer. In a ring it is valid until layer + num_slabs takes its memory."""
        shape, (first, end) = self.shapes[layer], self.spans[layer]
        flat = self._slabs[layer % self.num_slabs][: self._layer_bytes(layer)].view(shape.dtype)
        slab = flat.view(end - first, self.batch, shape.num_kv_heads, shape.key_dim + shape.value_dim)
        return KVSlab(slab_TBKX=slab, key_dim=shape.key_dim, first=first)
