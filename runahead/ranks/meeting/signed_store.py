"""Store of a job of several hosts, in which only what a rank has written counts: values carry a signature.

TCPStore takes what anybody writes who reaches its port. Ranks sign with a secret that all of them are given, so that
others can be in their way, but tell them nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from runahead.ranks.meeting.polled_store import PolledStore
from runahead.ranks.meeting.seal import Seal

SECRET, SECRET_FILE = "RUNAHEAD_SECRET", "RUNAHEAD_SECRET_FILE"
"""Variables of a job's ranks: its secret, or the file that has it."""

LEAST_CHARACTERS = 16
REMEDY = "use that of `openssl rand -hex 32`"


def job_secret(environment: Mapping[str, str]) -> bytes | None:
    """The secret that the ranks of a job were given; None if there is none.

    Raises:
        ValueError: its file cannot be read, or others can read it, too; or the secret is too short.
    """
    secret, source = environment.get(SECRET, ""), SECRET
    if path := environment.get(SECRET_FILE):
        source = f"{SECRET_FILE}={path}"
        try:
            mode = stat.S_IMODE(os.stat(path).st_mode)
            secret = Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise ValueError(f"{source} cannot be read ({reason}); name a file that every rank has") from error
        if mode & 0o077:
            raise ValueError(f"{source} can be read or written by other users (mode {mode:o}); use chmod 600")
    elif not secret:
        return None
    if len(secret) < LEAST_CHARACTERS:
        raise ValueError(f"{source} has {len(secret)} characters, of at least {LEAST_CHARACTERS}; {REMEDY}")
    return secret.encode()


class SignedStore(PolledStore):
    """The values of another store that have the signature of their key; others are as if they were not there.

    Counters (`add`) have none: torch makes groups by them, and a wrong one only ends the start of a job.

    Args:
        store: where the values are.
    """

    def __init__(self, store: dist.Store, secret: bytes, patience_s: float) -> None:
        super().__init__(patience_s)
        self._store, self._secret, self._seal = store, secret, Seal(secret)
        self._clones: list[SignedStore] = []

    def clone(self) -> SignedStore:
        """The same values over a connection of its own."""
        connection: dist.Store = self._store.clone()  # type: ignore[attr-defined]
        self._clones.append(SignedStore(connection, self._secret, self._patience_s))
        return self._clones[-1]

    def put(self, key: str, data: bytes) -> None:
        self._store.set(key, self._seal.close(data, key))  # type: ignore[arg-type]

    def found(self, key: str) -> bytes | None:
        return self._seal.opened(self._store.get(key), key) if self._store.check([key]) else None

    def put_first(self, key: str, data: bytes) -> bytes:
        given = self._seal.close(data, key)
        there = self._seal.opened(self._store.compare_set(key, "", given), key)  # type: ignore[arg-type]
        if there is None:  # a stranger's
            self._store.set(key, given)  # type: ignore[arg-type]
            return self.get(key)
        return there

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)
