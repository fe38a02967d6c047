"""The full KV cache: slabs, and an index of where the tokens of a text lie in them.

The last rank of a chain, which decodes, has a slab for every layer. A rank that only forwards keys and values needs
slabs for a few layers at a time. With sharded decoding every rank has a ring for the prefix, and slabs of their own for
its chunk.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens, H key dim, V value dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.row_values import row_values
from runahead.attention.op import Run, Step
from runahead.attention.partial import KeyBias
from runahead.cache.base import KVStore, LayerStore, SeenKV
from runahead.cache.index import ALL_TOKENS, SlabIndex
from runahead.cache.new_tokens import NewTokens
from runahead.cache.slabs import KVSlab, Slabs
from runahead.cache.slot_positions import at_slots
from runahead.report import RankReport
from runahead.rotary import Rotary


def seen_in(
    slab: KVSlab,
    q_BNCH: Tensor,
    *,
    start: int,
    pads: Sequence[int],
    steps: Sequence[Step] | None = None,
    rotary: Rotary | None = None,
    positions: Callable[[], Tensor] | None = None,
) -> SeenKV:
    """A slab together with the queries of its newest tokens, which attend to it.

    Args:
        start: number of the slot of the first of these tokens.
        pads: left padding of each row, in slots.
        steps: where the tokens lie that they see; by default in the slots up to their own.
        rotary: keys and queries are unrotated, and are read rotated to their slots.
        positions: as of `SeenKV`, where tokens were dropped; by default they are contiguous.
    """
    num_new, device = q_BNCH.shape[2], q_BNCH.device
    if rotary is not None:
        slab, q_BNCH = at_slots(rotary, slab, q_BNCH, new=start, pads=pads)
    if steps is None or rotary is not None:
        steps = ALL_TOKENS.steps(0, slab, NewTokens(start, list(pads)), num_new)

    def contiguous() -> Tensor:
        return (torch.arange(slab.first, start + num_new, device=device) - row_values(pads, device)[:, None])[:, None]

    return SeenKV(
        q_BNCH=q_BNCH,
        steps=steps,
        whole=lambda: slab.read(slab.first, start + num_new),
        positions=positions or contiguous,
    )


def seen_in_part(
    slab: KVSlab,
    q_BNCH: Tensor,
    tokens: NewTokens,
    pads: Sequence[int],
    *,
    bias: Callable[[KeyBias, slice | Tensor, slice], Tensor] | None = None,
) -> SeenKV:
    """Return the same as `seen_in`, with the newest tokens stored on any of the ranks.

    Args:
        slab: the tokens that are stored here.
        pads: padding slots on the left of each row.
        bias: as of `Run`.
    """
    assert tokens.part is not None
    slots, num_new = range(slab.first, slab.end), q_BNCH.shape[2]
    spans = tokens.part.spans(slots, pads, start=tokens.start, num_new=num_new, device=q_BNCH.device)
    return SeenKV(q_BNCH=q_BNCH, steps=[Step([Run(slab, spans, bias)])], whole=lambda: slab.read(slab.first, slab.end))


@dataclass(kw_only=True)
class SlabLayer(LayerStore):
    """One layer in a slab with room for all its tokens.

    Attributes:
        slabs: memory of all layers.
        number: of the layer.
        index: where its tokens lie, and what else their queries see.
        rotary: of this layer, if keys are stored unrotated.
    """

    slabs: Slabs
    number: int
    index: SlabIndex = ALL_TOKENS
    rotary: Rotary | None = None

    @property
    def slab(self) -> KVSlab:
        """The memory of this layer."""
        return self.slabs.by_layer[self.number]

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        for write in self.index.writes(tokens, k_BKCH.shape[2]):
            self.slab.write(write.slot, write.select(k_BKCH), write.select(v_BKCV))

    @property
    def sees_last_alone(self) -> bool:  # type: ignore[override]
        return self.index.sees_last_alone

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenKV:
        slab = self.slab
        steps = self.index.steps(self.number, slab, tokens, q_BNCH.shape[2])
        start, pads = tokens.start, tokens.row_pads
        if not self.index.is_whole:
            return SeenKV(q_BNCH=q_BNCH, steps=steps)
        return seen_in(slab, q_BNCH, start=start, pads=pads, steps=steps, rotary=self.rotary)

    @property
    def num_bytes(self) -> int:
        return self.slab.slab_TBKX.nbytes


class KVCache(KVStore):
    """KV cache in slabs: one per layer, or a ring of fewer slabs that the layers take in turn.

    Args:
        slabs: the memory, which other caches may share; one of them may take it over (`Slabs.take`).
        index: where the tokens lie in it, and what else their queries see.
        rotaries: of every layer, if keys are stored unrotated.

    Attributes:
        layers: all layers; in a ring each is valid until a later layer takes its slab.
    """

    layers: list[SlabLayer]
    slabs: Slabs
    slab_index: SlabIndex

    def __init__(
        self, slabs: Slabs, index: SlabIndex = ALL_TOKENS, *, rotaries: Sequence[Rotary] | None = None
    ) -> None:
        self.slabs, self.slab_index, self._rotaries = slabs, index, rotaries
        rotary_of = [None] * len(slabs.by_layer) if rotaries is None else rotaries
        # No layer refers to the cache: a cycle would keep both until the garbage collector comes.
        self.layers = [
            SlabLayer(slabs=slabs, number=number, index=index, rotary=rotary) for number, rotary in enumerate(rotary_of)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for the tokens of this cache, not for what it reuses of others."""
        of_prefix = 0 if self.slab_index.prefix is None else self.slab_index.prefix.num_bytes
        return self.slabs.num_bytes + of_prefix + self.state_bytes

    @property
    def rotates(self) -> bool:
        return self._rotaries is not None

    @property
    def repeats_steps(self) -> bool:
        return self.slab_index.repeats_steps

    def set_lengths(self, stored: Sequence[int]) -> None:
        self.slab_index.set_lengths(stored)

    def advance(self) -> None:
        self.slab_index.advance()

    def positions_BC(self, index_C: Tensor, start: int) -> Tensor | None:  # noqa: N802
        return self.slab_index.positions_BC(index_C, start)

    def for_decoding(self) -> KVCache:
        index = self.slab_index.for_decoding()
        if index is self.slab_index:
            return self
        other = KVCache(self.slabs, index, rotaries=self._rotaries)
        other.states = self.states
        return other

    def split(self, pads: Sequence[int]) -> list[KVStore]:
        """The slabs are freed once all rows are gone."""
        if self.slab_index.is_part and self.slab_index.shard is None:
            return super().split(pads)
        return [self._row(row, pad) for row, pad in enumerate(pads)]

    def _row(self, row: int, pad: int) -> KVCache:
        assert not self.slabs.is_ring, "layers share slabs"
        by_layer = [self.slab_index.row_slab(slab, row, pad) for slab in self.slabs.by_layer]
        alone = KVCache(Slabs.each_its_own(by_layer), self.slab_index.row(row, pad), rotaries=self._rotaries)
        alone.states = None if self.states is None else self.states.row(row)
        return alone

    def fork(self) -> KVCache:
        assert not self.repeats_steps, "numbers on the device are of one cache"
        other = KVCache(self.slabs.clone(), self.slab_index, rotaries=self._rotaries)
        other.shared_TKX = self.shared_TKX
        other.states = None if self.states is None else self.states.fork()
        return other

    def take_back(self, num_tokens: int) -> None:
        """Nothing is to be done, since a token is stored at its index, over what was there."""

    def row_kv(self, row: int, pad: int, num_tokens: int) -> list[Tensor] | None:
        slots = self.slab_index.held(pad, num_tokens)
        if self.rotates or self.slabs.is_ring or slots is None:
            return None
        slabs = self._row(row, pad).slabs.by_layer
        if any(slab.first > slots.start for slab in slabs):  # earlier tokens are on other ranks
            return None
        return [slab.tokens(slots.start, slots.stop)[:, 0] for slab in slabs]

    def readers(self, layer: int) -> Sequence[int]:
        return self.slabs.shapes[layer].readers

    def describe_decoding(self, report: RankReport) -> None:
        super().describe_decoding(report)
        report.kv_peak_bytes = max(report.kv_peak_bytes, self.peak_bytes)

    @property
    def _span(self) -> Slabs:
        """The memory of the first tokens that are stored here."""
        return self.slabs if self.slab_index.prefix is None else self.slab_index.prefix

    def layer(self, layer: int) -> KVSlab:
        """The slab of a layer's first tokens; in a ring it is valid until layer + num_slabs takes its memory."""
        return self._span.by_layer[layer]

    def tokens(self, layer: int, start: int, end: int) -> Tensor:
        """The contiguous tokens [start, end) of a layer (S, B, K, X), in a prefix in memory of its own or after it."""
        first = self.layer(layer)
        return (first if start < first.end else self.slabs.by_layer[layer]).tokens(start, end)

    def extent(self, layer: int) -> tuple[int, int]:
        """The tokens [first, end) of a layer that are stored here, in a prefix and after it."""
        return self.layer(layer).first, self.slabs.by_layer[layer].end
