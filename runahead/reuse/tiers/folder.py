"""Folder with one file per entry of a store, named by a key, within a budget.

A file appears complete or not at all, and the time at which it was modified is that of its last use. So several
processes may share a folder: each removes the files that were not used for longest, whoever wrote them.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from filelock import FileLock

from runahead.files import remove_partial_files

SUFFIX = ".safetensors"
PIN = ".pin"
LOCK = ".lock"
KEY = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file of the folder.

    Attributes:
        used_ns: time of its last use in ns.
    """

    key: str
    used_ns: int
    num_bytes: int


class TierFolder:
    """A folder of keys and values. What killed processes have left of unfinished files is removed.

    Args:
        folder: created if it is missing.
        limit_bytes: most bytes of all files.
        option: where the folder was named, for messages.
        suffix: of the files; others in the folder are left alone.
        is_private: folder and files are for this user alone.

    Raises:
        ValueError: the folder cannot be created or written to, or is to be private and is not.

    Attributes:
        file_mode: most permissions of its files.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        limit_bytes: float,
        *,
        option: str,
        suffix: str = SUFFIX,
        is_private: bool = False,
    ) -> None:
        self.folder, self.limit_bytes, self._suffix = Path(folder), limit_bytes, suffix
        self.file_mode = 0o600 if is_private else 0o666
        try:
            missing = [each for each in self.folder.parents if not each.exists()]
            for each in (*reversed(missing), self.folder):  # parents=True would make these for everybody
                each.mkdir(mode=0o700 if is_private else 0o777, exist_ok=True)
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise PermissionError(13, "it is read-only")
        except OSError as error:
            raise ValueError(
                f"{option}={os.fspath(folder)} is not a writable folder: {error.strerror}; name another"
            ) from error
        found = self.folder.stat()
        mode = stat.S_IMODE(found.st_mode)
        if is_private and found.st_uid != os.geteuid():
            raise ValueError(
                f"{option}={os.fspath(folder)} is of another user (uid {found.st_uid}), who could exchange its files; "
                "name another folder"
            )
        if is_private and mode & 0o077:
            raise ValueError(
                f"{option}={os.fspath(folder)} holds what clients have asked, and other users may read or write in it "
                f"(mode {mode:o}); use chmod 700, or name another folder"
            )
        remove_partial_files(self.folder)

    def path(self, key: str) -> Path:
        """Path of the file of a key."""
        return self.folder / f"{key}{self._suffix}"

    def touch(self, key: str, used_ns: int | None = None) -> None:
        """Set the time of a file's last use, which other processes read; in ns, by default now."""
        used_ns = time.time_ns() if used_ns is None else used_ns
        with suppress(OSError):  # removed by another process, or a read-only folder
            os.utime(self.path(key), ns=(used_ns, used_ns))

    def pin(self, key: str) -> None:
        """Let no process remove this file to make room."""
        self._pin(key).touch()

    def files(self) -> Iterator[StoredFile]:
        """All files."""
        for path in self.folder.glob(f"*{self._suffix}"):
            key = path.name.removesuffix(self._suffix)
            with suppress(OSError):  # removed by another process
                about = path.stat()
                if KEY.fullmatch(key):
                    yield StoredFile(key=key, used_ns=about.st_mtime_ns, num_bytes=about.st_size)

    def make_room(
        self,
        num_bytes: int | None = None,
        *,
        keep: Collection[str] = (),
        coming: Mapping[str, int] = MappingProxyType({}),
    ) -> list[str]:
        """Remove the least recently used files until the budget holds. A mapped file stays readable until unmapped.

        Args:
            num_bytes: remove files of as many bytes instead, as the disk is full.
            keep: keys of files that go last.
            coming: bytes of files that are being written, by key, which count and do not go.

        Returns:
            the keys of the files that were removed.
        """
        removed: list[str] = []
        with FileLock(self.folder / LOCK):
            files = sorted(self.files(), key=lambda file: (file.key in keep, file.used_ns))
            files = [file for file in files if file.key not in coming]
            used = sum(file.num_bytes for file in files) + sum(coming.values())
            excess = used - self.limit_bytes if num_bytes is None else num_bytes
            for file in files:
                if excess <= 0:
                    break
                if not self._pin(file.key).exists():
                    self.remove(file.key)
                    removed.append(file.key)
                    excess -= file.num_bytes
        return removed

    def remove(self, key: str) -> None:
        """Remove a file, if it is there."""
        self.path(key).unlink(missing_ok=True)

    def _pin(self, key: str) -> Path:
        return self.folder / f"{key}{PIN}"
