"""Store of a job whose ranks are all on one host: a file per key, in a folder that only this user can enter.

torchrun's own store listens on all interfaces, and believes whoever connects to it.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
import torch.distributed as dist

from runahead.ranks.meeting.polled_store import LOOK_S, PolledStore
from runahead.ranks.meeting.presence import Presence

YOUNG_S = 600.0
"""Age in seconds until which a folder in which nobody is yet belongs to a rank that is making it."""

OLD_S = 86_400.0
"""Age in seconds from which a folder is left by processes of another container that are not there any more."""

JOB = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
"""Variables that tell the jobs of one host apart."""

LOOPBACK = ("127.", "localhost", "::1")

T = TypeVar("T")

FULL, SCARCE = {errno.ENOSPC, errno.EDQUOT}, {errno.EMFILE, errno.ENFILE}
"""Errors of a full disk, and of too many open files."""

SCARCE_S = 5.0
"""Seconds in which a process may come to have fewer open files."""

KEPT_BYTES = 16_384
"""Room that each rank keeps for what it may have to say when there is none left: a failure, in UTF-8."""

REMEDIES = {
    **dict.fromkeys(FULL, "free some of its disk, or set TMPDIR to another folder"),
    errno.EMFILE: "raise `ulimit -n`",
    errno.ENFILE: "raise fs.file-max",
}


class FolderFailure(dist.DistStoreError):
    """The folder in which the ranks of one host meet cannot be used. The message names it, the reason and a remedy."""


def is_on_one_host(environment: Mapping[str, str]) -> bool:
    """Whether the launcher's variables say that all ranks are on this host."""
    if "LOCAL_WORLD_SIZE" in environment:
        return environment["LOCAL_WORLD_SIZE"] == environment.get("WORLD_SIZE")
    return environment.get("MASTER_ADDR", "").startswith(LOOPBACK)


def listen_on_loopback(environment: MutableMapping[str, str]) -> None:
    """Have Gloo listen where no other host can connect, unless the user has named an interface."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == "127.0.0.1" for each in addresses):
            environment.setdefault("GLOO_SOCKET_IFNAME", name)


class LocalStore(PolledStore):
    """Values by key, each in a file that appears whole. Threads and processes may use it at once.

    Args:
        folder: exists, and no other user can enter it.
        own: this process, as it has entered the folder.

    Raises:
        FolderFailure: nothing can be written there.
    """

    def __init__(self, folder: Path, own: Presence, patience_s: float) -> None:
        super().__init__(patience_s)
        self.folder, self._own = folder, own
        self._kept: tuple[int, str] | None = _access(folder, lambda: _keep(folder))
        weakref.finalize(self, os.close, self._kept[0])

    def clone(self) -> LocalStore:
        """This store, which needs no connection of its own."""
        return self

    def put(self, key: str, data: bytes) -> None:
        """Raises: FolderFailure: the value cannot be written."""
        _access(self.folder, lambda: self._put(self._path(key), data))

    def _put(self, path: Path, data: bytes) -> None:
        part = self.folder / f"part-{os.getpid()}-{threading.get_ident()}"
        try:
            part.write_bytes(data)
            os.replace(part, path)
        except OSError as error:
            if error.errno not in FULL or not path.exists():
                raise
            with path.open("r+b") as file:  # a full disk must not silence a heartbeat, whose file has room for it
                file.write(data)
                file.truncate()
        finally:
            part.unlink(missing_ok=True)

    def found(self, key: str) -> bytes | None:
        """Raises: FolderFailure: what is there cannot be read."""
        return _access(self.folder, lambda: self._found(self._path(key)))

    def _found(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def put_first(self, key: str, data: bytes) -> bytes:
        """As `PolledStore.put_first`. The first that finds no room takes what was kept for it: a failure can be told.

        Raises:
            FolderFailure: the value cannot be written.
        """
        return _access(self.folder, lambda: self._put_first(self._path(key), data))

    def _put_first(self, path: Path, data: bytes) -> bytes:
        try:
            with tempfile.NamedTemporaryFile(dir=self.folder) as file:
                file.write(data)
                file.flush()
                os.link(file.name, path)
        except FileExistsError:
            return path.read_bytes()
        except OSError as error:
            kept, self._kept = self._kept, None
            if error.errno not in FULL | SCARCE or kept is None or len(data) > KEPT_BYTES:
                self._kept = kept
                raise
            os.ftruncate(kept[0], os.pwrite(kept[0], data, 0))
            try:
                os.link(kept[1], path)
            except FileExistsError:
                return path.read_bytes()
        return data

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which is apart from the values, and return it.

        No lock is taken, since a process that is stopped would keep it: a counter is the sum of what was appended.

        Raises:
            FolderFailure: the counter cannot be written.
        """
        return _access(self.folder, lambda: self._add(self._path(f"counter {key}"), value))

    def _add(self, path: Path, value: int) -> int:
        with path.open("ab+", buffering=0) as file:
            file.write(value.to_bytes(8, "little", signed=True))
            end = file.tell()
            file.seek(0)
            data = file.read(end) or b""
        return sum(int.from_bytes(data[at : at + 8], "little", signed=True) for at in range(0, end, 8))

    def delete_key(self, key: str) -> bool:
        """Raises: FolderFailure: the value cannot be removed."""
        return _access(self.folder, lambda: self._delete(self._path(key)))

    def _delete(self, path: Path) -> bool:
        was_there = path.exists()
        path.unlink(missing_ok=True)
        return was_there

    def leave(self) -> None:
        """Say that this process has left the job, and remove the folder if nobody is in there any more."""
        if os.getpid() == self._own.pid:
            with suppress(OSError):
                (self.folder / f"rank-{self._own.rank}").unlink()
                if all(each.has_ended for each in _inside(self.folder)):
                    shutil.rmtree(self.folder)

    def _path(self, key: str) -> Path:
        return self.folder / hashlib.sha256(key.encode()).hexdigest()


def meet_on_host(rank: int, environment: Mapping[str, str], patience_s: float) -> LocalStore:
    """The store of a job on this host: rank 0 makes its folder, in which the others find rank 0's process.

    The folder is in that of temporary files. Who leaves it last, removes it; rank 0 of the next job removes what
    killed jobs have left.

    Raises:
        DistStoreError: rank 0 made none in time.
        FolderFailure: nothing can be written, or others can enter the folder of all jobs.
    """
    base = Path(environment.get("TMPDIR") or "/tmp") / f"runahead-{os.getuid()}"  # no search: all ranks need the same
    own = _access(base, lambda: Presence.here(rank, {}))
    name = hashlib.sha256("\0".join([own.machine, *(environment.get(each, "") for each in JOB)]).encode()).hexdigest()
    _access(base, lambda: make_private(base))
    if rank == 0:
        _access(base, lambda: _sweep(base, own))
        folder = _access(base, lambda: Path(tempfile.mkdtemp(prefix=f"{name[:32]}-", dir=base)))
        store = LocalStore(folder, own, patience_s)
        _access(folder, lambda: _enter(folder, own))
    else:
        store = LocalStore(_found(base, name[:32], own, patience_s), own, patience_s)
    atexit.register(store.leave)
    return store


def make_private(folder: Path) -> None:
    """Make a folder that no other user can enter, unless it is there.

    Raises:
        OSError: it cannot be made.
        FolderFailure: others can enter the one that is there.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        reason = "it is not a folder of this user alone; remove it, or set TMPDIR to another folder"
        raise FolderFailure(f"{folder}: {reason}")


def _access(folder: Path, call: Callable[[], T]) -> T:
    """Do something in a folder. Raises: FolderFailure: it cannot be done."""
    deadline = time.monotonic() + SCARCE_S
    while True:
        try:
            return call()
        except OSError as error:
            if error.errno not in SCARCE or time.monotonic() > deadline:
                remedy = REMEDIES.get(error.errno or 0, "set TMPDIR to another folder")
                raise FolderFailure(f"{folder}: {error.strerror}; {remedy}") from error
        time.sleep(LOOK_S)


def _keep(folder: Path) -> tuple[int, str]:
    """Keep room on a folder's disk: the descriptor and the path of a file."""
    descriptor, path = tempfile.mkstemp(prefix="kept-", dir=folder)
    try:
        os.posix_fallocate(descriptor, 0, KEPT_BYTES)
    except OSError:
        os.close(descriptor)
        os.unlink(path)
        raise
    return descriptor, path


def _enter(folder: Path, own: Presence) -> bool:
    """Say that this process is a rank of the folder's job. Returns False if another process has been that rank."""
    with tempfile.NamedTemporaryFile("w", dir=folder) as file:
        json.dump({"rank": own.rank, "machine": own.machine, "pid": own.pid, "started": own.started}, file)
        file.flush()
        try:
            os.link(file.name, folder / f"rank-{own.rank}")
        except FileExistsError:
            return False
    return True


def _inside(folder: Path) -> list[Presence]:
    """Processes that are in a folder, ended or not."""
    found = []
    for path in sorted(each for each in folder.iterdir() if each.name.startswith("rank-")):
        with suppress(FileNotFoundError):  # it leaves
            found.append(Presence(host="", facts={}, **json.loads(path.read_text())))
    return found


def _found(base: Path, name: str, own: Presence, patience_s: float) -> Path:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if (folder := _access(base, lambda: _entered(base, name, own))) is not None:
            return folder
        time.sleep(LOOK_S)
    raise dist.DistStoreError(
        f"rank 0 did not come to {base} within {patience_s:.0f} s; check its messages. All ranks of a host need the "
        "same TMPDIR, /tmp and process-id namespace"
    )


def _entered(base: Path, name: str, own: Presence) -> Path | None:
    for folder in base.glob(f"{name}-*"):
        with suppress(FileNotFoundError):  # just removed
            # That of a job before, whose rank 0 still ends, has had this rank.
            if any(each.rank == 0 and not each.has_ended for each in _inside(folder)) and _enter(folder, own):
                return folder
    return None


def _sweep(base: Path, own: Presence) -> None:
    """Remove the folders of jobs whose processes have all ended without leaving them, as far as that can be told."""
    for folder in base.iterdir():
        with suppress(OSError):
            inside = _inside(folder)
            age_s = time.time() - folder.stat().st_mtime
            # Of processes that cannot be seen from here only beats tell, each of which makes a file anew.
            have_ended = all(each.has_ended if each.is_beside(own) else age_s > OLD_S for each in inside)
            if have_ended and (inside or age_s > YOUNG_S):
                shutil.rmtree(folder)
