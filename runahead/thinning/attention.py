"""Attention under cache policies: store new tokens, attend to all, then let the policies drop some."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from runahead.attention.op import nothing
from runahead.attention.partial import AttentionTerms
from runahead.cache.attention import CausalAttention
from runahead.cache.base import KVStore, LayerStore, SeenKV
from runahead.cache.kept import KeptLayer
from runahead.thinning.steps import PolicySteps


class KeptAttention(CausalAttention):
    """Attention of new tokens to the kept ones of all tokens before them.

    Args:
        cache: holds the kept tokens, or this rank's part of them, and receives the new ones.
        steps: policies that run after each layer's attention.
        on_layer: called after each layer.
    """

    def __init__(self, cache: KVStore, steps: PolicySteps, *, on_layer: Callable[[], None] = nothing) -> None:
        tokens = steps.tokens
        super().__init__(cache, start=tokens.start, pads=tokens.row_pads, phase=tokens.phase, on_layer=on_layer)
        self.tokens, self.steps = tokens, steps
        tokens.part = cache.part

    def see_attention_input(self, layer: int, x_BCD: Tensor) -> None:
        self.steps.input_BCD = x_BCD

    def after(self, layer: int, store: LayerStore, seen: SeenKV, terms: AttentionTerms) -> None:
        kept = self.cache.kept_layers[layer]
        assert isinstance(kept, KeptLayer), type(kept)
        stored = self.steps.run(layer, kept, seen, terms)
        if stored is not kept:
            self.cache.put(layer, stored)
        self.cache.close(layer, room=self.steps.room)
