"""A rank that stands still until the others have ended, however long they take for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Silence:
    """Named pipes, one for each other rank: whoever opens one waits for the other end, without computing."""

    folder: Path
    size: int
    silent: int

    @staticmethod
    def of(rank: int, size: int, folder: Path) -> Silence:
        """Make the pipes of the silent rank."""
        silence = Silence(folder, size, rank)
        for other in silence._others:
            os.mkfifo(other)
        return silence

    @property
    def _others(self) -> list[Path]:
        return [self.folder / f"rank-{rank}-ended" for rank in range(self.size) if rank != self.silent]

    def keep(self) -> None:
        """On the silent rank: stand still until the others have ended."""
        for other in self._others:
            other.read_bytes()

    def end(self, rank: int) -> None:
        """On every rank: it has ended."""
        if rank != self.silent:
            (self.folder / f"rank-{rank}-ended").open("wb").close()
