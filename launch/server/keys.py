"""API keys: read from a file, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import secrets
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launch.program.ending import say
from launch.server.errors import APIError
from runahead.files import read_user_file
from runahead.reuse.tiers.folder import TierFolder

LEAST_LENGTH = 16

SECRET_NAME, SECRET_BYTES = "salt", 32

SALT_DIGITS = 32


class Keys:
    """The keys with which requests may come; without any, every request may.

    Only digests are kept, so that a comparison takes the same time whatever is given.

    Args:
        secret: by which salts are made; by default of this object alone.
        share: requests of different keys have no different salts.
    """

    def __init__(self, keys: Sequence[str] = (), *, secret: bytes | None = None, share: bool = False) -> None:
        self._digests, self._share = [_digest(key) for key in keys], share
        self._secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret

    @classmethod
    def read(cls, path: str, *, secret: bytes | None = None, share: bool = False) -> Keys:
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
        return cls(keys, secret=secret, share=share)

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

    def salt(self, number: int, cache_salt: str | None) -> str:
        """Salt of the prompts of requests with a key, among which prefixes are reused; "" if they have none.

        It does not tell the key, nor depend on its place in the file.

        Args:
            number: of the key, as `number_of` returns it.
            cache_salt: that the request has.
        """
        key = self._digests[number].hex() if self._digests and not self._share else ""
        if not key and cache_salt is None:
            return ""
        return hmac.digest(self._secret, json.dumps([key, cache_salt]).encode(), "sha256").hex()[:SALT_DIGITS]


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


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
