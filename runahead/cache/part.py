"""A stage's part of a text that grows or is cut back: the kept tokens of its chunk, and the new ones that come here.

`ShardCache` is the same for slabs of a size that is known ahead, where every token stays. Here a layer is whatever a
cache policy keeps or retrieves from, and a new token is stored by the stage that owns it.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from policies.row_values import row_values, sent
from runahead.attention.base import LayerInput
from runahead.attention.op import Run, Span, Step, spans_of
from runahead.attention.partial import AttentionTerms
from runahead.cache.base import KVStore, LayerStore, SeenKV
from runahead.cache.kept import KeptCache, KeptLayer
from runahead.cache.new_tokens import NewTokens
from runahead.cache.shard import ShardCache
from runahead.cache.slabs import KVSlab
from runahead.report import RankReport


class PartLayer(LayerStore):
    """One layer of a stage's part."""

    def __init__(self, own: LayerStore, cache: PartCache) -> None:
        self._own, self._cache = own, cache

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor, tokens: NewTokens) -> None:
        if self._cache.takes(tokens, k_BKCH.shape[2]):
            self._own.append(k_BKCH, v_BKCV, tokens)
        else:
            self._own.pass_over(tokens)

    def seen(self, q_BNCH: Tensor, tokens: NewTokens) -> SeenKV:
        if self._own.has_slots_by_head:
            assert q_BNCH.shape[2] == 1, q_BNCH.shape  # so it sees all slots, wherever its own token is
            return self._own.seen(q_BNCH, tokens)
        slab, pads = self._own.slots()
        steps = [Step([Run(slab, self._cache.spans(slab, pads, tokens, q_BNCH.shape[2]))])]
        return self._own.with_rest(SeenKV(q_BNCH=q_BNCH, steps=steps, whole=lambda: slab.read(slab.first, slab.end)))

    @property
    def num_bytes(self) -> int:
        return self._own.num_bytes


class PartCache(KVStore):
    """One stage's part of a batch's KV cache.

    Args:
        kept: the tokens that the stage keeps.
        indices: index in the padded batch of the token in each slot of a layer that is never cut back.
        pads: left padding of each row of the batch.
        owns: index of the first of a forward's new tokens -> whether all of them are stored here.
    """

    def __init__(
        self, kept: KeptCache, indices: Sequence[int], *, pads: Sequence[int], owns: Callable[[int], bool]
    ) -> None:
        self.own, self.indices, self.owns = kept, list(indices), owns
        self._pads = list(pads)

    @property
    def layers(self) -> Sequence[LayerStore]:  # type: ignore[override]
        return [PartLayer(layer, self) for layer in self.own.layers]

    @property
    def num_layers(self) -> int:
        return self.own.num_layers

    @property
    def num_bytes(self) -> int:
        return self.own.num_bytes

    @property
    def kept_layers(self) -> Sequence[LayerStore]:
        return self.own.layers

    @property
    def peak_bytes(self) -> int:  # type: ignore[override]
        return self.own.peak_bytes

    def open(self, layer: int, q_BNCH: Tensor, terms: AttentionTerms, tokens: NewTokens) -> LayerStore:
        return PartLayer(self.own.open(layer, q_BNCH, terms, tokens), self)

    def put(self, layer: int, kept: LayerStore) -> None:
        self.own.put(layer, kept)

    def look_ahead(self, layer: int, given: LayerInput) -> None:
        self.own.look_ahead(layer, given)

    def await_device_by(self, settle: Callable[[], None]) -> None:
        self.own.await_device_by(settle)

    def close(self, layer: int, *, room: int) -> None:
        self.own.close(layer, room=room)

    def describe_prompt(self, report: RankReport) -> None:
        self.own.describe_prompt(report)

    def describe_decoding(self, report: RankReport) -> None:
        self.own.describe_decoding(report)

    def takes(self, tokens: NewTokens, num_new: int) -> bool:
        """Whether these tokens are stored here; called before each layer stores them."""
        if not self.owns(tokens.start):
            return False
        if not self.indices or self.indices[-1] < tokens.start:  # in the first layer
            self.indices += range(tokens.start, tokens.start + num_new)
        return True

    def spans(self, slab: KVSlab, pads: Sequence[int], tokens: NewTokens, num_new: int) -> Sequence[Span]:
        """Where the tokens of a layer lie, as the newest ones see them, wherever those are stored.

        Args:
            slab: the slots.
            pads: padding slots on the left of each row.
        """
        slots, has_new = range(slab.first, slab.end), self.owns(tokens.start)
        # Slots are in causal order whichever tokens they hold.
        start = slab.end - num_new if has_new else slab.end
        spans = spans_of(slots, start=start, num_new=num_new, pads=pads, has_new=has_new)

        @cache
        def by_position() -> Sequence[Span]:
            assert len(slots) == len(self.indices), "of a layer that was cut back only the order of tokens is known"
            start, indices, at_T = tokens.start, self.indices, sent(torch.tensor(self.indices), slab.slab_TBKX.device)
            pads = self._pads
            return spans_of(slots, start=start, num_new=num_new, pads=pads, at=indices, at_T=at_T, has_new=False)

        def apart(number: int) -> Sequence[Span]:
            return by_position() if len(spans) == 1 else by_position()[number : number + 1]

        return [replace(span, apart=partial(apart, number)) for number, span in enumerate(spans)]


def kept_of(cache: ShardCache) -> KeptCache:
    """The tokens of a shard in layers that can grow, without a copy. The shard's slabs are taken over."""
    chunk, device = cache.shard.chunk, cache.own.device
    pads = NewTokens(chunk.start, cache.pads).pads(len(chunk))
    index_T1 = torch.arange(chunk.start, chunk.stop, device=device)[:, None]
    positions_TBK = (index_T1 - row_values(cache.pads, device))[:, :, None].int()
    return KeptCache(
        [
            KeptLayer(
                shape=shape,
                slab_TBKX=layer.slab.slab_TBKX[: len(chunk)],
                positions_TBK=positions_TBK,
                pads=list(pads),
                num_slots=len(chunk),
            )
            for shape, layer in zip(list(cache.own.shapes), cache.take_layers(), strict=True)
        ]
    )
