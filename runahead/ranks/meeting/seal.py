"""Seal of a job: the signature by which its ranks know each other's messages."""

from __future__ import annotations

import hmac

from runahead.failures import RunFailure

DIGEST_BYTES = 32


class Seal:
    """HMAC-SHA256 (RFC 2104) by a key that only ranks of the job have, over a message and what it is about.

    What it is about is not sent, so a message counts in its own place alone.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def close(self, data: bytes, about: str) -> bytes:
        """A message with its seal."""
        return self._signature(data, about) + data

    def opened(self, sealed: bytes, about: str) -> bytes | None:
        """The message; None if its seal is not that of this job, or of another place."""
        told, data = sealed[:DIGEST_BYTES], sealed[DIGEST_BYTES:]
        return data if hmac.compare_digest(told, self._signature(data, about)) else None

    def open(self, sealed: bytes, about: str) -> bytes:
        """The message. Raises: RunFailure: a stranger has sent it."""
        if (data := self.opened(sealed, about)) is None:
            raise RunFailure(
                f"a message came that no rank of this job has sent ({about}); who reaches the ranks' ports?"
            )
        return data

    def _signature(self, data: bytes, about: str) -> bytes:
        place = about.encode()
        return hmac.digest(self._key, len(place).to_bytes(8, "little") + place + data, "sha256")
