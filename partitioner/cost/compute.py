"""Compute cost: seconds that one device computes for a chunk of c tokens after a prefix of P tokens.

All layers are alike, and every query attends to all keys before it (no sliding window). Costs are those of the measured
device, with its batch; the `Cluster` has a factor for the speed of each device.
"""

# Legend: c chunk tokens, P prefix tokens.

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any, Protocol

POINTS = ("first_s", "between_s", "own_s", "last_s")
"""Names of the costs that depend on the chunk length only."""


class ComputeCost(Protocol):
    """Seconds of each step of a rank's forward: `first`, then `own` and `prefix` per layer with `between` from one
    layer to the next, and on the last rank `last`."""

    @property
    def num_layers(self) -> int: ...

    def first(self, c: float) -> float:
        """Embedding, norm and projections of layer 0, until its keys and values are known."""

    def between(self, c: float) -> float:
        """Steps from one attention to the next: output projection, MLP, and norm and projections of the next layer."""

    def own(self, c: float) -> float:
        """Causal attention of the chunk to itself in one layer."""

    def prefix(self, c: float, P: float) -> float:
        """Attention of the chunk to its prefix in one layer, with the merge; 0 without a prefix."""

    def last(self, c: float) -> float:
        """Steps after the last attention: output projection, MLP, norm, and the logits of one token."""


def layer_s(cost: ComputeCost, c: float, P: float) -> float:
    """Seconds per layer of a rank, without the first and the last step."""
    return cost.between(c) + cost.own(c) + cost.prefix(c, P)


def check_layers(num_layers: object) -> None:
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
        raise ValueError(f"compute cost: num_layers={num_layers!r} must be a whole number of at least 1")


def check_seconds(name: str, seconds: Any, number: int | None = None) -> None:
    if not isinstance(seconds, list | tuple) or number not in (None, len(seconds)):
        raise ValueError(f"compute cost: {name}={seconds!r} must be {number} numbers of seconds")
    for value in seconds:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"compute cost: {name} holds {value!r}, which is not a number of seconds")


def parsed_fields(text: str, kind: type[Any]) -> dict[str, Any]:
    """Parse JSON with exactly the fields of a dataclass."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: brackets that are nested too deep
        raise ValueError(f"compute cost is not JSON: {error}") from error
    names = {each.name for each in fields(kind)}
    if not isinstance(values, dict) or set(values) != names:
        got = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"compute cost must have the fields {sorted(names)}, not {got}")
    return values
