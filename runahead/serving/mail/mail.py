"""Mail: small objects from rank 0 to all others, and from each to rank 0, while the main threads compute.

Collectives of `ControlMessages` need every rank's main thread. Mail is sent and received by threads of its own, over a
Gloo group of its own, so it arrives while a rank is in a prefill or decodes. Messages of one sender stay in order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from runahead.failures import RunFailure
from runahead.ranks.ranks import Ranks
from runahead.ranks.worker import Worker
from runahead.serving.mail.wire import from_bytes, to_bytes

TAG = 5

END = None
"""The last message of a sender."""


class LostConnection(Exception):
    """Mail can no longer be sent to a rank, or received from it. The message is torch's."""


class Mail:
    """One rank's end. Every rank makes one, in the same order among all that they do together, and closes it.

    Args:
        on_message: called with each message, in the thread that received it.
        on_error: called, in such a thread, with the error after which there is no more mail. If it is a LostConnection,
            the main thread should raise `Ranks.lost_connection`, which names the rank; else, the error: a stranger's
            message or one that cannot be read (RunFailure), or what `on_message` raises.
    """

    def __init__(
        self, ranks: Ranks, on_message: Callable[[Any], object], on_error: Callable[[Exception], object]
    ) -> None:
        self._ranks, self._on_message, self._on_error = ranks, on_message, on_error
        self._peers = list(range(1, ranks.size)) if ranks.rank == 0 else [0]
        self._group = ranks.mail_group()
        self._sending, self._num_sent = Worker("mail"), dict.fromkeys(self._peers, 0)
        self._receiving = [
            threading.Thread(target=self._receive, args=(peer,), name=f"mail from rank {peer}", daemon=True)
            for peer in self._peers
        ]
        for thread in self._receiving:
            thread.start()

    def post(self, message: object, to: Sequence[int] | None = None) -> None:
        """Send a message and return at once.

        Args:
            to: the receivers; by default rank 0, or all others.
        """
        content = to_bytes(message)

        def send() -> None:
            try:
                for peer in self._peers if to is None else to:
                    self._num_sent[peer] += 1
                    about = f"mail {self._num_sent[peer]} from {self._ranks.rank} to {peer}"
                    data = torch.frombuffer(bytearray(self._ranks.seal.close(content, about)), dtype=torch.uint8)
                    with _connected():
                        dist.send(torch.tensor([len(data)]), peer, group=self._group, tag=TAG)
                        dist.send(data, peer, group=self._group, tag=TAG)
            except Exception as error:
                self._on_error(error)

        self._sending.submit(send)

    def close(self) -> None:
        """Send what is posted, and wait for the last message of every peer. Every rank calls this."""
        self.post(END)

        def ended(block_s: float) -> bool:
            deadline = time.monotonic() + block_s
            for thread in self._receiving:
                thread.join(max(0.0, deadline - time.monotonic()))
            return not any(thread.is_alive() for thread in self._receiving)

        self._ranks.wait_until(ended, "the last mail of all ranks", self._peers)
        self._sending.close()

    def _receive(self, peer: int) -> None:
        try:
            for number in count(1):
                length = torch.empty(1, dtype=torch.long)
                with _connected():
                    dist.recv(length, peer, group=self._group, tag=TAG)
                    data = torch.empty(int(length), dtype=torch.uint8)
                    dist.recv(data, peer, group=self._group, tag=TAG)
                about = f"mail {number} from {peer} to {self._ranks.rank}"
                message = _read(self._ranks.seal.open(data.numpy().tobytes(), about))
                if message is END:
                    return
                self._on_message(message)
        except Exception as error:
            self._on_error(error)


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise LostConnection(str(error)) from error


def _read(data: bytes) -> Any:
    try:
        return from_bytes(data)
    except ValueError as error:  # no mistake of the user's
        raise RunFailure(str(error)) from error
