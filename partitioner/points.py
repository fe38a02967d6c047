"""Measured points of a search, kept on disk while it runs, so that a search that was stopped goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from partitioner.evaluations import Cost
from runahead.context import ContextPartition

Key = tuple[int, ...]


class Points:
    """Costs by boundaries, appended to a file of JSON lines as they are measured.

    Lines of another `purpose` (another model, device, objective, ...) are left alone and not used; a last line that
    was cut off is dropped.

    Args:
        path: the file; None keeps points in memory only.
        purpose: what the points hold for.
    """

    def __init__(self, path: Path | None, purpose: dict[str, Any]) -> None:
        self._path, self._purpose = path, purpose
        self.known: dict[Key, float] = {}

    def read(self) -> dict[Key, float]:
        """Points of earlier runs.

        Raises:
            OSError: the file cannot be read.
        """
        if self._path is not None and self._path.exists():
            for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    point = json.loads(line)
                    if point["purpose"] == self._purpose:
                        self.known[tuple(point["boundaries"])] = float(point["cost_s"])
                except (ValueError, KeyError, TypeError):
                    continue
        return self.known

    def add(self, boundaries: Key, cost_s: float) -> None:
        self.known[boundaries] = cost_s
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"purpose": self._purpose, "boundaries": boundaries, "cost_s": cost_s}) + "\n")

    def remembering(self, cost: Cost) -> Cost:
        """The same cost, which measures nothing twice."""

        def remembered(partition: ContextPartition) -> float:
            if partition.boundaries not in self.known:
                self.add(partition.boundaries, cost(partition))
            return self.known[partition.boundaries]

        return remembered
