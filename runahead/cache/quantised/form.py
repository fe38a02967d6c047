"""The form of a KV cache in few bits: layers are quantised once the prompt, or a turn, has attended to them."""

from __future__ import annotations

from dataclasses import dataclass

from runahead.cache.kept import KeptLayer
from runahead.cache.quantised.few_bits import FewBits


@dataclass(frozen=True, kw_only=True)
class InFewBits:
    """Implements `policies.base.LayerForm`.

    Attributes:
        few: precision of older tokens.
        waits: a policy decides on all layers after the prompt, until which they are exact.
        most_room: new tokens for which layers have room at most, if they are copied on; None: any number.
    """

    few: FewBits
    waits: bool = False
    most_room: int | None = None

    def store(self, layers: list[KeptLayer], number: int, *, room: int) -> bool:
        if not self.waits:
            self.complete(layers, number, room=room)
        return not self.waits

    def settle(self, layers: list[KeptLayer], *, room: int) -> None:
        for number in range(len(layers)):
            self.complete(layers, number, room=room)
            layers[number].flush()
            layers[number].free(room=self._limited(room))

    def complete(self, layers: list[KeptLayer], number: int, *, room: int) -> bool:
        layer = layers[number]
        if layer.few is not None:
            return False
        layers[number] = layer.to_device().in_bits(self.few, room=self._limited(room))
        return True

    def forked(self, layers: list[KeptLayer]) -> None:
        """Nothing is to be done, since layers do not know of each other."""

    def _limited(self, room: int) -> int:
        return room if self.most_room is None else min(room, self.most_room)
