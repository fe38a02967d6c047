"""API keys: read from a file, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from launch.program.ending import say
from launch.server.errors import APIError
from runahead.files import read_user_file

LEAST_LENGTH = 16


class Keys:
    """The keys with which requests may come; without any, every request may.

    Only digests are kept, so that a comparison takes the same time whatever is given.
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def read(cls, path: str) -> Keys:
        """Keys of a file, one per line; empty lines and those that begin with # are left out.

        Raises:
            ValueError, OSError: the file cannot be read, has no key, or one that is too short.
        """
        name = f"serve.api_key_file={path}"
        try:
            lines = read_user_file(path).decode("utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not text; give a file with a key per line") from error
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not keys:
            raise ValueError(f"{name} has no key; give a file with a key per line")
        if min(map(len, keys)) < LEAST_LENGTH:
            raise ValueError(f"{name} has a key of less than {LEAST_LENGTH} characters; use longer ones")
        if os.stat(Path(path).expanduser()).st_mode & (stat.S_IRGRP | stat.S_IROTH):
            say(f"warning: {name} can be read by other users of this host; chmod 600 it")
        return cls(keys)

    def number_of(self, header: str | None) -> int:
        """Number of the key in a header "Bearer <key>"; 0 if there are no keys.

        Raises:
            APIError: it has none of them.
        """
        if not self._digests:
            return 0
        scheme, _, key = (header or "").partition(" ")
        given = _digest(key.strip() if scheme.lower() == "bearer" else "")
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            message = "the API key is wrong; send the header 'Authorization: Bearer <key>'"
            raise APIError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return matches.index(True)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
