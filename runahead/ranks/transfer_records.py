"""The last transfers of this rank: what was posted, what has arrived or left, and what is outstanding."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

KEPT = 512
"""Records that are kept. A layer has at most two for each other rank, and only a few layers are in flight."""


@dataclass(kw_only=True)
class TransferRecord:
    """One message, from when it was posted.

    Attributes:
        direction: "send" or "receive".
        peer, layer: from or to whom, and of which layer.
        start, end: tokens of the padded prompt whose K,V it holds.
        num_bytes: what it moves.
        posted_s, done_s: when, by `time.monotonic`; `done_s` is None while it is under way.
        has_happened: on a GPU, where the host does not wait: asks the device whether it is over.
        prefill: number of the prefill that it belongs to.
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

    @property
    def is_done(self) -> bool:
        if self.done_s is None and self.has_happened is not None and self.has_happened():
            self.done()
        return self.done_s is not None

    def done(self) -> None:
        """It has arrived or left."""
        self.done_s, self.has_happened = time.monotonic(), None

    def as_json(self, now_s: float) -> dict[str, Any]:
        """For a fault report; times are seconds before `now_s`."""
        is_done = self.is_done
        values = {name: getattr(self, name) for name in ("prefill", "direction", "layer", "peer", "start", "end")}
        values |= {"bytes": self.num_bytes, "posted_s_ago": round(now_s - self.posted_s, 3)}
        done_s_ago = round(now_s - self.done_s, 3) if is_done and self.done_s is not None else None
        return values | {"done_s_ago": done_s_ago}


class TransferRecords:
    """A ring of the last `KEPT` records. Any thread may add to it."""

    def __init__(self) -> None:
        self._ring: deque[TransferRecord] = deque(maxlen=KEPT)
        self._prefill = 0

    def begin(self) -> None:
        """A prefill begins: its layers are other ones than those of the prefills before."""
        self._prefill += 1

    def posted(self, record: TransferRecord) -> TransferRecord:
        record.prefill = self._prefill
        self._ring.append(record)
        return record

    def all(self) -> list[TransferRecord]:
        """Oldest first."""
        return list(self._ring)

    def oldest_outstanding(self) -> str:
        """The first transfer of this prefill that is not over, in a few words."""
        for record in self.all():
            if record.prefill == self._prefill and not record.is_done:
                way = "receive of layer {} from" if record.direction == "receive" else "send of layer {} to"
                posted_s = time.monotonic() - record.posted_s
                where = f"{way.format(record.layer)} rank {record.peer}"
                return f"outstanding: {where}, {record.num_bytes:,} bytes, posted {posted_s:.1f} s ago"
        return "no transfer is outstanding"

    def state(self, direction: str, layer: int, peers: Collection[int], expected_bytes: int) -> str:
        """What became of a layer's messages in this prefill, in a few words, such as "1,024 bytes, receive posted".

        Args:
            expected_bytes: of all of them, also of those that were not posted yet.
        """
        records = [
            record
            for record in self.all()
            if (record.prefill, record.direction, record.layer) == (self._prefill, direction, layer)
            and record.peer in peers
        ]
        done = sum(record.num_bytes for record in records if record.is_done)
        posted = sum(record.num_bytes for record in records) - done
        words = {f"{direction} not posted": expected_bytes - posted - done, f"{direction} posted": posted, "done": done}
        parts = [(text, count) for text, count in words.items() if count > 0]
        if len(parts) == 1:
            return f"{expected_bytes:,} bytes, {parts[0][0]}"
        return f"{expected_bytes:,} bytes: " + ", ".join(f"{count:,} {text}" for text, count in parts)
