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
    def made(rank: int, size: int, folder: Path) -> Silence:
        """Make the pipes of the silent rank."""
        silence = Silence(folder, size, rank)
        for pipe in silence._pipes:
            os.mkfifo(pipe)
        return silence

    @property
    def _pipes(self) -> list[Path]:
        return [self._pipe(rank) for rank in range(self.size) if rank != self.silent]

    def _pipe(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}-ended"

    def keep(self) -> None:
        """Stand still until the others have ended. The silent rank calls this."""
        for pipe in self._pipes:
            pipe.read_bytes()

    def end(self, rank: int) -> None:
        """Tell the silent rank that this one has ended. Every rank calls this."""
        if rank != self.silent:
            self._pipe(rank).open("wb").close()
