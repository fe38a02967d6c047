"""Places of a model: keys and values and states of its layers, in the order in which a forward is done with them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runahead.model.held import Held
    from runahead.model.model import Model


@dataclass(frozen=True, kw_only=True)
class Places:
    """The places of a model, in which a chain hands something on.

    Attributes:
        num_layers: layers of the model; one may be two places, or none.
        state_bytes: per place, bytes of its state, of one text; 0 for keys and values.
        steps: per place, the types of the layers from its own to that of the next place, or to the last layer: where
            they are the same, the step from a place to the next is the same.
    """

    num_layers: int
    state_bytes: tuple[int, ...]
    steps: tuple[tuple[str, ...], ...]

    @classmethod
    def of_model(cls, model: Model, num_layers: int | None = None, layer_types: Sequence[str] = ()) -> Places:
        """The places of a loaded model, or of one with more layers of the same types.

        Args:
            num_layers: layers of the model to plan for, if `model` was loaded with fewer.
            layer_types: their types, as its config names them; needed only where some hold a state.

        Raises:
            ValueError: a type of layers that the loaded model lacks.
        """
        if model.held is None:
            from runahead.features.layer_types import (
                WITH_STATES,  # here, since programs that only read costs do not load it
            )

            _check_lacking(set(layer_types) & set(WITH_STATES), model.num_layers)
            return cls.of_attention(num_layers or model.num_layers)
        return cls.of_held(model.held, layer_types)

    @classmethod
    def of_attention(cls, num_layers: int) -> Places:
        """The places of a model whose layers all attend, each to keys and values."""
        return cls(num_layers=num_layers, state_bytes=(0,) * num_layers, steps=((),) * num_layers)

    @classmethod
    def of_held(cls, held: Held, layer_types: Sequence[str] = ()) -> Places:
        """The places of layers some of which hold states, or of more of these types. Raises: as `of_model`."""
        types, found = list(layer_types or held.kinds), dict[str, dict[int, list[int]]]()
        layer_of = {("kv", number): layer for layer, number in held.kv_of.items()}
        layer_of |= {("state", number): layer for layer, number in held.state_of.items()}
        for kind, number in held.order:
            layer, num_bytes = layer_of[kind, number], held.shapes[number].num_bytes if kind == "state" else 0
            found.setdefault(held.kinds[layer], {}).setdefault(layer, []).append(num_bytes)
        _check_lacking(set(types) - set(held.kinds), len(held.kinds))
        # Layers of a type hold the same.
        holds = {kind: next(iter(layers.values())) for kind, layers in found.items()}
        places = [(layer, each) for layer, kind in enumerate(types) for each in holds.get(kind, ())]
        ends = [*(layer for layer, _ in places[1:]), len(types) - 1]
        return cls(
            num_layers=len(types),
            state_bytes=tuple(num_bytes for _, num_bytes in places),
            steps=tuple(tuple(types[layer : end + 1]) for (layer, _), end in zip(places, ends, strict=True)),
        )

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def states(self) -> tuple[int, ...]:
        """The places that hold a state."""
        return tuple(place for place, num_bytes in enumerate(self.state_bytes) if num_bytes)

    @property
    def bytes_of_state(self) -> float:
        """Bytes of the state of a place, their mean; 0 if none holds any."""
        return sum(self.state_bytes) / max(1, len(self.states))

    def alike(self, place: int) -> tuple[int, tuple[str, ...]]:
        """Attributes that places with the same costs have in common: their own, and that of the step to the next."""
        return self.state_bytes[place], self.steps[place]


def _check_lacking(kinds: Collection[str], num_loaded: int) -> None:
    """Raises: ValueError: the layers that are loaded leave some kinds out."""
    if kinds:
        raise ValueError(
            f"model.layers={num_loaded} leaves out all {' and '.join(sorted(kinds))} layers, whose cost is then not "
            "measured; give more layers, or leave model.layers out"
        )
