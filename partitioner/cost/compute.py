"""Compute cost: seconds that one device computes for a chunk of c tokens after a prefix of P tokens.

A model is places in the order in which it runs them: layers that attend to keys and values, and those that hold a state
in place of these (a layer with both is two places). Places of a kind are alike, and so are the steps from one place to
the next; every query attends to all keys before it (no sliding window). Costs are those of the measured device, with
its batch; the `Cluster` has a factor for the speed of each device.
"""

# Legend: c chunk tokens, P prefix tokens.

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Any, Protocol

POINTS = ("first_s", "between_s", "own_s", "last_s", "state_s")
"""Names of the costs that depend on the chunk length only."""
OF_STATES = frozenset({"state_s", "later_s", "states"})
"""Fields of costs that files from before hybrid models do not have."""
FILE_NAMES = {"num_places": "num_layers"}
"""Fields that have another name in files, which are older than models whose places are no layers."""


class ComputeCost(Protocol):
    """Seconds of each step of a rank's forward: `first`, then `own` and `prefix`, or `state`, per place with `between`
    from one place to the next, and on the last rank `last`."""

    @property
    def num_places(self) -> int:
        """Number of places."""

    @property
    def states(self) -> tuple[int, ...]:
        """The places that hold a state, ascending; the others attend."""

    def first(self, c: float) -> float:
        """Embedding, norm and projections of place 0, until its keys and values are known or it waits for its state."""

    def between(self, c: float) -> float:
        """Steps from one place to the next: output projection, MLP, and norm and projections of the next layer."""

    def own(self, c: float) -> float:
        """Causal attention of the chunk to itself in one place."""

    def prefix(self, c: float, P: float) -> float:
        """Attention of the chunk to its prefix in one place, with the merge; 0 without a prefix."""

    def state(self, c: float, P: float) -> float:
        """Work of a place on its state, from when it is there until the one after the chunk is known.

        It depends on P only as far as there is a prefix: some layers take tokens after a given state one by one.
        """

    def last(self, c: float) -> float:
        """Steps after the last place: output projection, MLP, norm, and the logits of one token."""


@dataclass(frozen=True, kw_only=True)
class OtherAttention:
    """A cost with the steps of another one but for attention, which subclasses give (`own`, `prefix`).

    Attributes:
        dense: of attention to all keys.
    """

    dense: ComputeCost

    @property
    def num_places(self) -> int:
        return self.dense.num_places

    @property
    def states(self) -> tuple[int, ...]:
        return self.dense.states

    def first(self, c: float) -> float:
        return self.dense.first(c)

    def between(self, c: float) -> float:
        return self.dense.between(c)

    def state(self, c: float, P: float) -> float:
        return self.dense.state(c, P)

    def last(self, c: float) -> float:
        return self.dense.last(c)


def layer_s(cost: ComputeCost, c: float, P: float) -> float:
    """Seconds per place of a rank, their mean, without the first and the last step."""
    held = len(cost.states) / cost.num_places
    return cost.between(c) + (1 - held) * cost.own(c) + (1 - held) * cost.prefix(c, P) + held * cost.state(c, P)


def check_num_places(num_places: object) -> None:
    """Raises: ValueError: it is no number of places; the message has its name in files."""
    if isinstance(num_places, bool) or not isinstance(num_places, int) or num_places < 1:
        raise ValueError(f"compute cost: num_layers={num_places!r} must be a whole number of at least 1")


def check_states(states: object, num_places: int) -> tuple[int, ...]:
    """The places that hold a state, if they are ascending numbers of places. Raises: ValueError: they are not."""
    places: list[Any] = list(states) if isinstance(states, list | tuple) else [None]
    if any(type(place) is not int or not 0 <= place < num_places for place in places) or places != sorted(set(places)):
        raise ValueError(f"compute cost: states={states!r} must be ascending numbers below num_layers={num_places}")
    return tuple(places)


def check_seconds(name: str, seconds: Any, number: int | None = None) -> None:
    if not isinstance(seconds, list | tuple) or number not in (None, len(seconds)):
        raise ValueError(f"compute cost: {name}={seconds!r} must be {number} numbers of seconds")
    for value in seconds:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"compute cost: {name} holds {value!r}, which is not a number of seconds")


def parsed_fields(text: str, kind: type[Any]) -> dict[str, Any]:
    """Parse JSON with exactly the fields of a dataclass, by their `FILE_NAMES`; those of states may be missing."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: brackets that are nested too deep
        raise ValueError(f"compute cost is not JSON: {error}") from error
    names = {FILE_NAMES.get(each.name, each.name): each.name for each in fields(kind)}
    if not isinstance(values, dict) or not set(names) - OF_STATES <= set(values) <= set(names):
        got = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"compute cost must have the fields {sorted(names)}, not {got}")
    return {names[name]: value for name, value in values.items()}
