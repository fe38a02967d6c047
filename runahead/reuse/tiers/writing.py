"""Writing into a folder of files, where on a full disk those that were not used for longest make room."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection
from pathlib import Path

from runahead.reuse.tiers.folder import TierFolder

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of the errors of a disk without room, and of a user without more of it."""

TRIES = 3
"""Times that the oldest files make room for one on a full disk. After that something else fills it."""


class FolderWriter:
    """Writes files that are not there.

    Args:
        lost: called, perhaps in another thread, with the names of files that have made room.
    """

    def __init__(self, folder: TierFolder, lost: Callable[[str], object]) -> None:
        self._folder, self._lost = folder, lost
        self._removes = True  # files make room for others on a full disk
        self.told = ""
        """A sentence to be told of a disk that was full; "" if none was."""

    def write(self, name: str, write: Callable[[Path], object], num_bytes: int, *, keep: Collection[str] = ()) -> bool:
        """Write a file, unless it is there. On a full disk those that were not used for longest make room for it.

        Once that was in vain, as something else fills the disk, no more of them do until a file could be written.

        Args:
            write: called with its path, and again where room was made.
            keep: names of files that are removed last.

        Returns:
            whether it was written.

        Raises:
            OSError: it cannot be written.
            Exception: whatever else `write` raises.
        """
        path = self._folder.path(name)
        for num_tries in range(TRIES + 1):
            if path.exists():
                return False
            try:
                write(path)
                self._removes = True
                return True
            except OSError as error:
                self._removes = self._removes and num_tries < TRIES
                if error.errno not in FULL or not self._removes:
                    raise
                removed = self._folder.make_room(num_bytes, keep=keep)
                if not removed:
                    raise
                for each in removed:
                    self._lost(each)
                self.told = f"{error.strerror} ({path.parent}): what was not used for longest makes room there"
        return False
