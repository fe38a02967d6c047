"""The KV cache in 4 or 2 bits: layers are quantised once the prompt, or a turn, has attended to them."""

# Legend: N query heads, C new tokens, H head dim, B batch.

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from policies.base import Phase
from runahead.attention.partial import AttentionTerms
from runahead.cache.base import LayerStore
from runahead.cache.kept import KeptCache, KeptLayer
from runahead.cache.new_tokens import NewTokens
from runahead.cache.quantised.layer import InFewBits


class QuantisedCache(KeptCache):
    """KV cache of a batch. Tokens of a prompt are exact until all of them have attended to each other.

    Args:
        layers: empty or exact ones, or those of another such cache.
        in_few_bits: makes of an exact layer one in few bits, with room for so many new tokens.
        waits: whether a policy decides on all layers after the prompt, until which they are exact; then `settle`
            quantises them.
    """

    def __init__(
        self, layers: Sequence[KeptLayer], in_few_bits: Callable[[KeptLayer, int], KeptLayer], *, waits: bool = False
    ) -> None:
        super().__init__(layers)
        self._in_few_bits, self._waits = in_few_bits, waits

    def open(self, layer: int, q_BNCH: Tensor, terms: AttentionTerms, tokens: NewTokens) -> LayerStore:
        if tokens.phase is Phase.decode:  # after a turn of one token the layer may still be exact
            self._quantise(layer, room=q_BNCH.shape[2])
        return self.layers[layer]

    def own(self, layer: int, *, room: int, is_borrowed: bool) -> None:
        if self._waits:
            super().own(layer, room=room, is_borrowed=is_borrowed)
            return
        self._quantise(layer, room=room)
        self.close(layer, room=room)

    def settle(self, *, room: int) -> None:
        for number in range(len(self.layers)):
            self._quantise(number, room=room)
            layer = self.layers[number]
            assert isinstance(layer, InFewBits)
            layer.flush()
            layer.free(room=room)

    def _forked(self) -> KeptCache:
        layers = [layer.fork(copy=False) for layer in self.layers]
        return QuantisedCache(layers, self._in_few_bits, waits=self._waits)

    def _quantise(self, layer: int, *, room: int) -> None:
        if not isinstance(self.layers[layer], InFewBits):
            self.layers[layer] = self._in_few_bits(self.layers[layer], room)
