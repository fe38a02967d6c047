"""Records of this rank's last KV transfers, for messages and fault reports: posted, done and outstanding."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

KEPT = 512
"""Number of records kept. A layer has at most two per other rank, and only a few layers are in flight."""


@dataclass(kw_only=True)
class TransferRecord:
    """One KV message that was posted.

    Attributes:
        direction: "send" or "receive".
        peer: rank at the other end.
        start, end: tokens of the padded prompt whose keys and values it holds.
        num_bytes: size of the message.
        posted_s, done_s: `time.monotonic` when it was posted and completed; `done_s` is None until then.
        has_happened: on a GPU, asks the device whether the transfer is complete; the host does not wait for it. Only
            `TransferRecords.ask_device` calls it, in the thread that posts: a GPU in trouble may not answer, with locks
            held, and the thread that has to say so must not ask.
        prefill: number of the prefill that it belongs to.
        kind: what it holds, "KV" or "state".
    """

    direction: str
    peer: int
    layer: int
    start: int
    end: int
    num_bytes: int
    posted_s: float = field(default_factory=time.monotonic)
    done_s: float | None = None
    has_happened: Callable[[], bool] | None = None
    prefill: int = 0
    kind: str = "KV"

    @property
    def is_done(self) -> bool:
        """Whether the message is known to have arrived or left."""
        return self.done_s is not None

    def done(self) -> None:
        """Note that the message has arrived or left."""
        self.done_s, self.has_happened = time.monotonic(), None

    def as_json(self, now_s: float) -> dict[str, Any]:
        """The record for a fault report; times are seconds before `now_s` (`time.monotonic`)."""
        values = {name: getattr(self, name) for name in ("prefill", "direction", "layer", "peer", "start", "end")}
        values |= {"bytes": self.num_bytes, "posted_s_ago": round(now_s - self.posted_s, 3)}
        done_s_ago = None if self.done_s is None else round(now_s - self.done_s, 3)
        return values | {"done_s_ago": done_s_ago} | ({} if self.kind == "KV" else {"kind": self.kind})


class TransferRecords:
    """Ring buffer of the last `KEPT` records. Any thread may add to it."""

    def __init__(self) -> None:
        self._ring: deque[TransferRecord] = deque(maxlen=KEPT)
        self._prefill = 0

    def begin(self) -> int:
        """Begin a new prefill. Returns its number, which tells its layers apart from those of others.

        Prefills may be nested: a server computes a short prompt between two layers of a long one.
        """
        self._prefill += 1
        return self._prefill

    def posted(self, record: TransferRecord) -> TransferRecord:
        """Keep a record of a message that has been posted."""
        self._ring.append(record)
        return record

    def ask_device(self) -> None:
        """Note which transfers on a GPU are complete by now."""
        for record in self.all():
            if record.has_happened is not None and record.has_happened():
                record.done()

    def all(self) -> list[TransferRecord]:
        """All records kept, oldest first."""
        return list(self._ring)

    def oldest_outstanding(self, prefill: int) -> str:
        """Describe the oldest transfer of a prefill that is not complete, for a message."""
        for record in self.all():
            if record.prefill == prefill and not record.is_done:
                what = f"layer {record.layer}" if record.kind == "KV" else f"the {record.kind} of layer {record.layer}"
                way = f"receive of {what} from" if record.direction == "receive" else f"send of {what} to"
                posted_s = time.monotonic() - record.posted_s
                where = f"{way} rank {record.peer}"
                return f"outstanding: {where}, {record.num_bytes:,} bytes, posted {posted_s:.1f} s ago"
        return "no transfer is outstanding"

    def state(
        self,
        prefill: int,
        direction: str,
        layer: int,
        peers: Collection[int],
        expected_bytes: int,
        *,
        kind: str = "KV",
    ) -> str:
        """Describe the state of a layer's messages in a prefill, such as "1,024 bytes, receive posted".

        Args:
            expected_bytes: total size of the messages, also of those that were not posted yet.
        """
        records = [
            record
            for record in self.all()
            if (record.prefill, record.direction, record.layer, record.kind) == (prefill, direction, layer, kind)
            and record.peer in peers
        ]
        done = sum(record.num_bytes for record in records if record.is_done)
        posted = sum(record.num_bytes for record in records) - done
        words = {f"{direction} not posted": expected_bytes - posted - done, f"{direction} posted": posted, "done": done}
        parts = [(text, count) for text, count in words.items() if count > 0]
        if len(parts) == 1:
            return f"{expected_bytes:,} bytes, {parts[0][0]}"
        return f"{expected_bytes:,} bytes: " + ", ".join(f"{count:,} {text}" for text, count in parts)
