"""API keys, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from launch.server.errors import APIError
from runahead.reuse.tiers.folder import TierFolder

LEAST_LENGTH = 16

SECRET_NAME, SECRET_BYTES = "salt", 32

SALT_DIGITS = 32

NAME = re.compile("[A-Za-z0-9._-]{1,64}")
"""Pattern of a key's name: a log or a label of a metric need not escape it."""

LABEL_DIGITS = 6
"""Digits of the label of a key without a name: enough to tell keys apart, too few to find one by trying."""


@dataclass(frozen=True)
class Key:
    """An API key, of which only a digest is kept, so that a comparison takes the same time whatever is given.

    Attributes:
        name: in the log and in metrics; several keys may have the same.
        digest: of the key.
        whole: of all of a line "name:key", which may be one key that has a colon; empty for a key without a name.
    """

    name: str
    digest: bytes
    whole: bytes = b""

    @property
    def is_named(self) -> bool:
        """Whether its name is what stands before a colon in its line."""
        return bool(self.whole)

    @classmethod
    def of_line(cls, line: str) -> Key:
        """The key of a line "name:key" or "key". Raises: ValueError: it is too short, or no header can have it."""
        name, colon, key = line.partition(":")
        if not (colon and NAME.fullmatch(name)):
            name, key = "", line
        if len(key := key.strip()) < LEAST_LENGTH:
            raise ValueError(f"has a key of less than {LEAST_LENGTH} characters; use longer ones")
        if not (key.isascii() and key.isprintable()):
            raise ValueError("has a key with a character that no header can have; use letters and digits")
        if name:
            return cls(name, _digest(key), _digest(line))
        return cls(f"key-{_digest('label ' + key).hex()[:LABEL_DIGITS]}", _digest(key))


NO_KEY = Key("", b"")
"""The key of every request to a server without keys."""


class Keys:
    """The keys with which requests may come; without any, every request may.

    Args:
        lines: a key each, as of a file.
        secret: by which salts are made; by default of this object alone.
        share: requests of different keys have no different salts.
    """

    def __init__(self, lines: Sequence[str] = (), *, secret: bytes | None = None, share: bool = False) -> None:
        self._keys, self._share = list(map(Key.of_line, lines)), share
        self._secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret

    def admitted(self, *headers: str | None) -> Key:
        """The key in the first header "Bearer <key>" that has one; `NO_KEY` if there are no keys.

        Raises:
            APIError: none has one of them.
        """
        if not self._keys:
            return NO_KEY
        matches = [
            key
            for digest in map(_given, headers)
            for key in self._keys
            for own in (key.digest, key.whole)
            if hmac.compare_digest(digest, own)
        ]
        if not matches:
            message = "the API key is wrong; send the header 'Authorization: Bearer <key>'"
            raise APIError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return matches[0]

    def salt(self, key: Key, cache_salt: str | None) -> str:
        """Salt of the prompts of requests with a key, among which prefixes are reused; "" if they have none.

        It does not tell the key, nor depend on its name or its place in the file.

        Args:
            key: as `admitted` returns it.
            cache_salt: that the request has.
        """
        digest = "" if self._share else key.digest.hex()
        if not digest and cache_salt is None:
            return ""
        return hmac.digest(self._secret, json.dumps([digest, cache_salt]).encode(), "sha256").hex()[:SALT_DIGITS]

    def replace(self, keys: Sequence[Key]) -> None:
        """Take these keys from now on, in place of those from before. Any thread may call it."""
        assert keys, "a server with keys becomes none without"
        self._keys = list(keys)


def secret_in(folder: str, option: str) -> bytes:
    """The secret by which the salts of the texts in a folder are made, kept in there for later servers.

    Raises:
        ValueError: the folder cannot be created or written to, or others may read it or the secret.
    """
    path = TierFolder(folder, math.inf, option=option, is_private=True).folder / SECRET_NAME
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent) as new:
            new.write(secrets.token_bytes(SECRET_BYTES))
            new.flush()
            with suppress(FileExistsError):  # of a server before this one, or beside it
                os.link(new.name, path)
        mode, secret = stat.S_IMODE(path.stat().st_mode), path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{option}={folder}: {path.name} cannot be made or read ({error.strerror}); use another folder"
        ) from error
    if mode & 0o077:
        raise ValueError(f"{option}={folder}: other users may read {path.name} (mode {mode:o}); use chmod 600")
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"{option}={folder}: {path.name} has {len(secret)} bytes, not {SECRET_BYTES}; remove it")
    return secret


def _given(header: str | None) -> bytes:
    """Digest of the key in a header, or of nothing."""
    scheme, _, given = (header or "").partition(" ")
    return _digest(given.strip() if scheme.lower() == "bearer" else "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
