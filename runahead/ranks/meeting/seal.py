"""Seal of a job: the signature by which its ranks know each other's messages."""

from __future__ import annotations

import hmac
import secrets

import torch.distributed as dist

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


def job_seal(store: dist.Store, rank: int, size: int, secret: bytes) -> Seal:
    """The seal of a job: its key is made of the secret and of a fresh random text of every rank. Every rank calls this.

    So what ranks of an earlier job with this secret have written or sent gives no key that a rank of this job takes.
    """
    own = secrets.token_hex(32).encode()
    store.set(f"nonce of {rank}", own.decode())
    nonces = [own if peer == rank else store.get(f"nonce of {peer}") for peer in range(size)]
    told = b"".join(len(each).to_bytes(8, "little") + each for each in nonces)
    return Seal(hmac.digest(secret, told, "sha256"))
