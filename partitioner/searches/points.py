"""Evaluated points of all searches, kept in memory or on disk, so that a stopped search can be resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

from partitioner.searches.evaluations import Cost
from runahead.context import ContextPartition
from runahead.files import read_user_file

Key = tuple[int, ...]


class Points:
    """Costs by boundaries, appended to a file of JSON lines as they are measured.

    Lines of another `purpose` (another model, device, objective, ...) stay in the file and are not used; a truncated
    last line, and any that is not a point, is ignored.

    Args:
        path: the file; None keeps points in memory only.
        purpose: what the points in the file are valid for.
    """

    def __init__(self, path: Path | None = None, purpose: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._path, self._purpose = path, dict(purpose)
        self.known: dict[Key, float] = {}
        self._is_cut = False  # the file's last line has no end

    def read(self) -> dict[Key, float]:
        """Read the points of earlier runs.

        Raises:
            OSError: the file cannot be read.
        """
        if self._path is not None and self._path.exists():
            text = read_user_file(self._path).decode("utf-8", errors="replace")
            self._is_cut = bool(text) and not text.endswith("\n")
            for line in text.split("\n"):
                with suppress(ValueError, KeyError, TypeError, RecursionError):
                    point = json.loads(line)
                    if point["purpose"] == self._purpose:
                        boundaries, cost_s = _checked(point["boundaries"], point["cost_s"])
                        self.known[boundaries] = cost_s
        return self.known

    def add(self, boundaries: Key, cost_s: float) -> None:
        self.known[boundaries] = cost_s
        if self._path is not None:
            line = json.dumps({"purpose": self._purpose, "boundaries": boundaries, "cost_s": cost_s}) + "\n"
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" + line if self._is_cut else line)
            self._is_cut = False

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
