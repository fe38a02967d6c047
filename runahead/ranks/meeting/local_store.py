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
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

import psutil
import torch.distributed as dist

from runahead.ranks.meeting.polled_store import LOOK_S, PolledStore
from runahead.ranks.meeting.presence import Presence

YOUNG_S = 600.0
"""Age in seconds until which a folder in which nobody is yet belongs to a rank that is making it."""

JOB = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
"""Variables that tell the jobs of one host apart."""

LOOPBACK = ("127.", "localhost", "::1")


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
    """

    def __init__(self, folder: Path, own: Presence, patience_s: float) -> None:
        super().__init__(patience_s)
        self.folder, self._own = folder, own

    def clone(self) -> LocalStore:
        """This store, which needs no connection of its own."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Raises: DistStoreError: the value cannot be written."""
        path, data = self._path(key), _bytes(value)
        part = self.folder / f"part-{os.getpid()}-{threading.get_ident()}"
        try:
            part.write_bytes(data)
            os.replace(part, path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not path.exists():
                raise dist.DistStoreError(f"{self.folder}: {error.strerror}") from error
            part.unlink(missing_ok=True)
            with path.open("r+b") as file:  # a full disk must not silence a heartbeat, whose file has room for it
                file.write(data)
                file.truncate()

    def found(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a value that is not there yet, and return what is there then."""
        assert not expected_value, "values are never replaced under a condition"
        with tempfile.NamedTemporaryFile(dir=self.folder) as file:
            file.write(_bytes(desired_value))
            file.flush()
            with suppress(FileExistsError):
                os.link(file.name, self._path(key))
        return self._path(key).read_bytes()

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which is apart from the values, and return it.

        No lock is taken, since a process that is stopped would keep it: a counter is the sum of what was appended.
        """
        path = self._path(f"counter {key}")
        with path.open("ab+", buffering=0) as file:
            file.write(value.to_bytes(8, "little", signed=True))
            end = file.tell()
            file.seek(0)
            data = file.read(end) or b""
        return sum(int.from_bytes(data[at : at + 8], "little", signed=True) for at in range(0, end, 8))

    def delete_key(self, key: str) -> bool:
        path = self._path(key)
        was_there = path.exists()
        path.unlink(missing_ok=True)
        return was_there

    deleteKey = delete_key  # as C++ calls it

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
        DistStoreError: rank 0 made none in time, or nothing can be written.
    """
    own = Presence.here(rank, {})
    name = hashlib.sha256("\0".join([own.machine, *(environment.get(each, "") for each in JOB)]).encode()).hexdigest()
    try:
        base = private_folder(Path(tempfile.gettempdir()) / f"runahead-{os.getuid()}")
        if rank == 0:
            _sweep(base, own)
            folder = Path(tempfile.mkdtemp(prefix=f"{name[:32]}-", dir=base))
            _enter(folder, own)
        else:
            folder = _found(base, name[:32], own, patience_s)
    except OSError as error:
        raise dist.DistStoreError(f"{error.filename}: {error.strerror}") from error
    store = LocalStore(folder, own, patience_s)
    atexit.register(store.leave)
    return store


def private_folder(folder: Path) -> Path:
    """Make a folder that no other user can enter, unless it is there.

    Raises:
        OSError: it cannot be made, or others can enter the one that is there.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        reason = "it is not a folder of this user alone; remove it, or set TMPDIR to another folder"
        raise PermissionError(errno.EPERM, reason, str(folder))
    return folder


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
    for path in sorted(folder.glob("rank-*")):
        with suppress(OSError):
            found.append(Presence(host="", facts={}, **json.loads(path.read_text())))
    return found


def _found(base: Path, name: str, own: Presence, patience_s: float) -> Path:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        for folder in base.glob(f"{name}-*"):
            with suppress(FileNotFoundError):  # just removed
                # That of a job before, whose rank 0 still ends, has had this rank.
                if any(each.rank == 0 and not each.has_ended for each in _inside(folder)) and _enter(folder, own):
                    return folder
        time.sleep(LOOK_S)
    raise dist.DistStoreError(f"rank 0 did not start within {patience_s:.0f} s; check its messages")


def _sweep(base: Path, own: Presence) -> None:
    """Remove the folders of jobs whose processes have all ended without leaving them."""
    for folder in base.iterdir():
        with suppress(OSError):
            inside = _inside(folder)
            is_young = time.time() - folder.stat().st_mtime < YOUNG_S
            if all(each.is_beside(own) and each.has_ended for each in inside) and (inside or not is_young):
                shutil.rmtree(folder)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
