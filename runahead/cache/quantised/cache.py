"""The KV cache in 4 or 2 bits: layers are quantised once the prompt, or a turn, has attended to them."""

# Legend: N query heads, C new tokens, H head dim, B batch.

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from policies.base import Phase
from runahead.attention.partial import AttentionTerms
from runahead.cache.base import LayerStore
from runahead.cache.kept import KeptCache, KeptLayer
from runahead.cache.new_tokens import NewTokens
from runahead.cache.quantised.layer import QuantisedLayer


class QuantisedCache(KeptCache):
    """KV cache of a batch. Tokens of a prompt are exact until all of them have attended to each other.

    Args:
        layers: empty or exact ones, or those of another such cache.
        bits, residual, residual_bits, keys_by_token: as in `QuantisedLayer.of`.
    """

    def __init__(
        self,
        layers: Sequence[KeptLayer],
        *,
        bits: int,
        residual: int,
        residual_bits: int | None,
        keys_by_token: bool,
    ) -> None:
        super().__init__(layers)
        self._bits, self._residual, self._residual_bits = bits, residual, residual_bits
        self._keys_by_token = keys_by_token

    def open(self, layer: int, q_BNCH: Tensor, terms: AttentionTerms, tokens: NewTokens) -> LayerStore:
        if tokens.phase is Phase.decode:  # after a turn of one token the layer may still be exact
            self._quantise(layer, room=q_BNCH.shape[2])
        return self.layers[layer]

    def own(self, layer: int, *, room: int, is_borrowed: bool) -> None:
        self._quantise(layer, room=room)
        self.close(layer, room=room)

    def settle(self, *, room: int) -> None:
        for number in range(len(self.layers)):
            self._quantise(number, room=room)
            layer = self.layers[number]
            assert isinstance(layer, QuantisedLayer)
            layer.flush()
            layer.free(room=room)

    def _forked(self) -> KeptCache:
        return QuantisedCache(
            [layer.fork(copy=False) for layer in self.layers],
            bits=self._bits,
            residual=self._residual,
            residual_bits=self._residual_bits,
            keys_by_token=self._keys_by_token,
        )

    def _quantise(self, layer: int, *, room: int) -> None:
        if not isinstance(self.layers[layer], QuantisedLayer):
            self.layers[layer] = QuantisedLayer.of(
                self.layers[layer],
                bits=self._bits,
                residual=self._residual,
                residual_bits=self._residual_bits,
                keys_by_token=self._keys_by_token,
                room=room,
            )
