"""The file of API keys, which is read again when it changes."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launch.program.ending import say
from launch.server.keys import Key, Keys
from runahead.files import read_user_file

LOOK_S = 1.0
"""Seconds between two looks at whether the file has changed."""


class KeyFile:
    """A file of keys: one per line, "name:key" or "key"; empty lines and those that begin with # are left out.

    A file that has changed is read once it is the same at two looks, as it may be half written at the first. While it
    cannot be used the keys from before stay, so a server with keys never becomes one without.

    Args:
        keys: of the server, which become those of the file, now and whenever it has changed.

    Raises:
        ValueError, OSError: it cannot be read, has no key, or one that is too short.
    """

    def __init__(self, path: str, keys: Keys) -> None:
        self._path, self._option, self._keys = Path(path).expanduser(), f"serve.api_key_file={path}", keys
        self._read = self._seen = self._state()
        self._now = self._of_file()
        keys.replace(self._now)
        if any(key.is_named for key in self._now):
            _tell(f"{self._option}: {_counted(self._now)}; names, before the first colon of a line, are in the log")

    def watch(self) -> None:
        """Begin to look again and again, in a thread of its own, until the process ends."""

        def look() -> None:
            while True:
                time.sleep(LOOK_S)
                self.look()

        threading.Thread(target=look, name="keys", daemon=True).start()

    def look(self) -> None:
        """Read the file if it has changed, and say once what has become of it."""
        before, self._seen = self._seen, self._state()
        if self._seen == self._read or self._seen != before:
            return
        self._read = self._seen
        try:
            keys = self._of_file()
        except (OSError, ValueError) as error:
            told = f"{self._option}: {error.strerror}" if isinstance(error, OSError) else str(error)
            _tell(f"warning: {told}; until it is mended the {len(self._now)} keys from before stay")
            return
        num_new, num_gone = len(set(keys) - set(self._now)), len(set(self._now) - set(keys))
        self._now = keys
        self._keys.replace(keys)
        _tell(f"{self._option} was read again: {_counted(keys)}, {num_new} new, {num_gone} gone")

    def _state(self) -> tuple[int, ...] | None:
        """Identity of the file's content, by its inode, size and times; None if there is no file."""
        try:
            about = os.stat(self._path)
        except OSError:
            return None
        return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns

    def _of_file(self) -> list[Key]:
        try:
            lines = read_user_file(self._path).decode("utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self._option} is not text; give a file with a key per line") from error
        try:
            keys = [Key.of_line(line) for line in map(str.strip, lines) if line and not line.startswith("#")]
        except ValueError as error:
            raise ValueError(f"{self._option} {error}") from error
        if not keys:
            raise ValueError(f"{self._option} has no key; give a file with a key per line")
        if os.stat(self._path).st_mode & (stat.S_IRGRP | stat.S_IROTH):
            _tell(f"warning: {self._option} can be read by other users of this host; chmod 600 it")
        return keys


def _counted(keys: Sequence[Key]) -> str:
    return f"{len(keys)} keys, {sum(key.is_named for key in keys)} with names"


def _tell(message: str) -> None:
    """Say a sentence, if anybody reads: the thread that watches has to go on without standard error."""
    with suppress(OSError, ValueError):
        say(message)
