"""Evaluated points of all searches, kept in memory or on disk, so that a stopped search can be resumed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

from partitioner.searches.evaluations import Cost
from runahead.context import ContextPartition
from runahead.files import KeptLines

Key = tuple[int, ...]


class Points:
    """Costs by boundaries, appended to a file of JSON lines as they are measured.

    Args:
        path: the file; None keeps points in memory only.
        purpose: what the points in the file are valid for: a model, device, objective, ...
    """

    def __init__(self, path: Path | None = None, purpose: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._lines = KeptLines(path, purpose)
        self.known: dict[Key, float] = {}

    def read(self) -> dict[Key, float]:
        """Read the points of earlier runs.

        Raises:
            OSError: the file cannot be read.
        """
        for point in self._lines.read():
            with suppress(ValueError, KeyError, TypeError):
                boundaries, cost_s = _checked(point["boundaries"], point["cost_s"])
                self.known[boundaries] = cost_s
        return self.known

    def add(self, boundaries: Key, cost_s: float) -> None:
        self.known[boundaries] = cost_s
        self._lines.add(boundaries=boundaries, cost_s=cost_s)

    def remembering(self, cost: Cost) -> Cost:
        """The same cost function, which takes known points from here and adds new ones."""

        def remembered(partition: ContextPartition) -> float:
            if partition.boundaries not in self.known:
                self.add(partition.boundaries, cost(partition))
            return self.known[partition.boundaries]

        return remembered


def _checked(boundaries: Any, cost_s: Any) -> tuple[Key, float]:
    """Check the values of a point. Raises ValueError or TypeError if they are not valid."""
    if not all(type(each) is int for each in boundaries):
        raise ValueError("boundaries that are not whole numbers")
    if isinstance(cost_s, bool) or not 0 < cost_s < inf:
        raise ValueError("a cost that is not positive and finite")
    return ContextPartition(boundaries=tuple(boundaries)).boundaries, float(cost_s)
