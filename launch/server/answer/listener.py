"""One request between two threads: the scheduler's, which makes its tokens, and the event loop's, which sends them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from launch.server.answer.pieces import Piece, joined
from launch.server.answer.row_text import RowText
from launch.server.metrics import Metrics
from runahead.serving.items import CANCELLED, Handed


class RequestListener:
    """Listener of one request. What is attributes is read and written in the event loop's thread only.

    Text that was not sent yet is kept per row, so a slow client costs the memory of one answer.

    Attributes:
        rows: text of each row so far.
        started_s: `time.monotonic` of the beginning of its prefill; None before it.
        failure: why there is no answer; None so far.
        first_token_s: `time.monotonic` of the first token; None before it.
        last_token_s: likewise of the last one so far.
        first_token: id of it, of the first row; None before it.
        handed: what has become of its prompt that is to be handed over; None so far, or if it is not.
        handed_s: `time.monotonic` of that.
    """

    def __init__(
        self,
        rows: list[RowText],
        metrics: Metrics,
        *,
        num_prompt_tokens: int,
        counts_tokens: bool = True,
        awaits_file: bool = False,
    ) -> None:
        self.rows, self._metrics, self._num_prompt_tokens = rows, metrics, num_prompt_tokens
        self._counts_tokens, self._awaits_file = counts_tokens, awaits_file
        self.first_token: int | None = None
        self.handed: Handed | None = None
        self.handed_s: float | None = None
        self.arrived_s = time.monotonic()
        self.started_s: float | None = None
        self.failure: str | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self._unsent: list[list[Piece]] = [[] for _ in rows]
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more."""
        return self._has_ended and (self.failure is not None or not self._awaits_file or self.handed is not None)

    async def changed(self, timeout_s: float | None) -> bool:
        """Wait until something has changed since the last call; False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    def take(self) -> list[list[Piece]]:
        """Pieces of each row that were not taken before."""
        taken, self._unsent = self._unsent, [[] for _ in self.rows]
        return [joined(pieces) for pieces in taken]

    # From the scheduler's thread.

    def on_start(self) -> None:
        now = time.monotonic()  # here, as of tokens: the loop may run later than they come
        self._post(lambda: self._start(now))

    def on_tokens(self, tokens: Sequence[int | None]) -> None:
        now, tokens = time.monotonic(), list(tokens)
        self._post(lambda: self._add(tokens, now))

    def on_end(self) -> None:
        self._post(lambda: None if self._has_ended else self._fail("the answer has no end"))

    def on_handed(self, handed: Handed) -> None:
        now = time.monotonic()
        self._post(lambda: self._hand(handed, now))

    def on_failure(self, reason: str) -> None:
        self._post(lambda: None if self.is_over else self._fail(reason))

    def _post(self, call: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop has ended, and the request with it
            self._loop.call_soon_threadsafe(call)

    # In the event loop's thread.

    def _start(self, now: float) -> None:
        self.started_s = now
        self._metrics.histograms["request_queue_time_seconds"].add(now - self.arrived_s)
        self._changed.set()

    def _add(self, tokens: list[int | None], now: float) -> None:
        if all(token is None for token in tokens):  # its rows have ended, and others of the batch go on
            return
        histograms, counters = self._metrics.histograms, self._metrics.counters
        if self.last_token_s is None:
            self.first_token_s, self.first_token = now, tokens[0]
            histograms["time_to_first_token_seconds"].add(now - self.arrived_s)
            counters["prompt_tokens_total"] += self._num_prompt_tokens
        else:
            histograms["inter_token_latency_seconds"].add(now - self.last_token_s)
        self.last_token_s = now
        for index, token in enumerate(tokens):
            if token is not None:
                counters["generation_tokens_total"] += self._counts_tokens
                self._unsent[index] += self.rows[index].add(token)
        self._note_end(now)

    def _hand(self, handed: Handed, now: float) -> None:
        counters, self.handed, self.handed_s = self._metrics.counters, handed, now
        if handed.error != CANCELLED:  # the client has gone, or all have
            counters["handover_failures_total" if handed.error else "handover_files_total"] += 1
        counters["handover_bytes_total"] += handed.num_bytes if handed.is_new else 0
        self._note_end(now)

    def _note_end(self, now: float) -> None:
        if self.is_over and self.failure is None:
            self._metrics.histograms["e2e_request_latency_seconds"].add(now - self.arrived_s)
        self._changed.set()

    @property
    def _has_ended(self) -> bool:
        """Whether all rows have ended, or failed."""
        return self.failure is not None or all(row.finish_reason is not None for row in self.rows)

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._changed.set()
