"""Sends the answer of a request, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.types import Receive, Scope, Send

from launch.server.answer.form import Event, Form
from launch.server.answer.listener import RequestListener
from launch.server.answer.usage import Usage
from launch.server.errors import APIError, dumps
from launch.server.metrics import Metrics
from launch.server.page.recent import EndedRequest
from launch.server.request.bodies import disconnected
from launch.server.request.fields import ChatRequest, CompletionRequest, HandoverWay
from launch.server.request_log import RequestLog
from policies.reuse import ids_of
from runahead.decoding.sampling import NOT_NUMBERS
from runahead.serving.items import PROGRESS_S
from runahead.serving.request import Request
from runahead.serving.scheduler import Scheduler


class Answering:
    """Sends the answer of a request, as an ASGI application; a client that goes cancels it.

    The connection of one that does not read is closed by `launch/server/connection.py`.
    """

    def __init__(
        self,
        queued: Request,
        listener: RequestListener,
        form: Form,
        read: ChatRequest | CompletionRequest,
        request: HTTPRequest,
        *,
        scheduler: Scheduler,
        metrics: Metrics,
        log: RequestLog,
        ping_s: float,
    ) -> None:
        self._queued, self._listener, self._form = queued, listener, form
        self._read, self._request = read, request
        self._scheduler, self._metrics, self._log, self._ping_s = scheduler, metrics, log, ping_s
        self._num_prompt_tokens = sum(len(ids_of(prompt)) for prompt in queued.prompts[:: len(read.options)])
        self._share_told = -1.0
        self._send: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        watch = asyncio.ensure_future(disconnected(receive))
        work = asyncio.ensure_future(self._stream() if self._read.stream else self._whole())
        ended = "cancelled"
        try:
            await asyncio.wait({watch, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                ended = "failed"
                await work
                if self._listener.failure is None:
                    ended = self._listener.rows[0].finish_reason or "cancelled"
        finally:
            for task in (watch, work):
                task.cancel()
            if self._listener.failure is not None or not self._listener.is_over:
                self._scheduler.cancel(self._queued)
            num_prompt_tokens = 0
            if self._listener.first_token_s is not None:
                num_prompt_tokens = self._num_prompt_tokens
                self._metrics.counters["prefix_cache_queries_total"] += num_prompt_tokens
                self._metrics.counters["prefix_cache_hits_total"] += self._of_prompts(self._queued.cached_tokens)
            key = self._request.state.key.name
            self._metrics.ended(ended, key, prompt_tokens=num_prompt_tokens, new_tokens=self._usage.new)
            self._metrics.recent.append(self._recent(ended))
            self._log_end(ended)

    def _log_end(self, ended: str) -> None:
        usage, listener = self._usage, self._listener
        first = "" if listener.first_token_s is None else f", TTFT {listener.first_token_s - listener.arrived_s:.2f} s"
        counts, handed = f"{usage.prompt} + {usage.new} tokens", ""
        if (found := listener.handed) is not None:
            handed = f", not handed over: {found.error}" if found.error else f", handed over {found.num_bytes} bytes"
        told = f"{ended}, {counts}{first}{handed}{self._log.prompt(self._read)}"
        self._log.ended(self._request, told, listener.arrived_s)

    def _recent(self, ended: str) -> EndedRequest:
        listener, usage, per_s = self._listener, self._usage, None
        first_s, last_s = listener.first_token_s, listener.last_token_s
        num_later = usage.new - len(listener.rows)  # without the first one of each row
        if first_s is not None and last_s is not None and last_s > first_s and num_later > 0:
            per_s = num_later / (last_s - first_s)
        return EndedRequest(
            ended_s=time.time(),
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            new_tokens=usage.new,
            ttft_s=None if first_s is None else first_s - listener.arrived_s,
            tokens_per_s=per_s,
            how=ended,
        )

    @property
    def _usage(self) -> Usage:
        """The usage so far."""
        rows = self._listener.rows if self._read.counts_tokens else []
        return Usage.of(self._num_prompt_tokens, rows, self._of_prompts(self._queued.cached_tokens))

    def _of_prompts(self, of_rows: Sequence[int]) -> int:
        """Sum of a number of each row, over one row of each prompt."""
        return sum(of_rows[:: len(self._read.options)])

    async def _whole(self) -> None:
        while not self._listener.is_over:
            await self._listener.changed(None)
        if (error := self._failure()) is not None:
            await self._start(error.status, "application/json", error.headers)
            await self._write(dumps(self._request.state.dialect.error(error)), more=False)
            return
        body = self._form.whole(self._listener.rows, self._usage)
        data = await asyncio.to_thread(self._encoded, body)  # others are served while log-probabilities are written
        await self._start(200, "application/json")
        await self._write(data, more=False)

    def _encoded(self, body: dict[str, Any]) -> bytes:
        """The body of a whole answer, with its prompts if they are wanted."""
        prompts = list(map(ids_of, self._queued.prompts))
        return dumps(self._form.finished(body, prompts, self._queued, self._listener))

    def _failure(self) -> APIError | None:
        """Why there is no answer; None if there is one."""
        listener = self._listener
        if listener.failure is not None:
            return _error(listener.failure)
        if self._read.handover is HandoverWay.prefill and listener.handed is not None and listener.handed.error:
            message = f"the prompt was computed, but could not be handed over: {listener.handed.error}"
            return APIError(507, message, code="handover_failed")
        return None

    async def _stream(self) -> None:
        listener, form, rows = self._listener, self._form, self._listener.rows
        await self._start(200, "text/event-stream; charset=utf-8")
        await self._write_events(form.opened())
        begun, ended = [False] * len(rows), [False] * len(rows)
        while not all(ended) and listener.failure is None:
            await self._await_change()
            await self._tell_progress()
            events, usage = list[Event](), self._usage
            for index, (row, pieces) in enumerate(zip(rows, listener.take(), strict=True)):
                if row.num_tokens and not begun[index]:
                    begun[index] = True
                    events += form.begin(index, usage)
                for piece in pieces:
                    events += form.piece(index, piece, row.take_scored(), usage)
                if row.finish_reason is not None and not ended[index]:
                    ended[index] = True
                    events += form.end(index, row, row.take_scored(), usage)
            await self._write_events(events)
        if listener.failure is not None and not all(ended):
            await self._write_events(form.failed(_error(listener.failure)))
            await self._write(b"", more=False)
        else:
            await self._write_events(form.closed(self._usage))
            await self._write(form.ending, more=False)

    async def _await_change(self) -> None:
        """Wait until there is something new of the answer, with comments and the progress of the prefill meanwhile."""
        ping_s, pauses = self._ping_s, 0
        follows = self._read.return_progress and self._listener.first_token_s is None
        pause_s = min(PROGRESS_S, ping_s) if follows else ping_s
        while not await self._listener.changed(pause_s):
            await self._tell_progress()
            pauses += 1
            if pauses * pause_s >= ping_s:
                pauses = 0
                await self._write(f": {self._state()}\n\n".encode())

    async def _tell_progress(self) -> None:
        """Send how far the prefill is, if the client asked for it and it is farther than it was told."""
        listener = self._listener
        if not self._read.return_progress or listener.started_s is None or self._share_told == 1:
            return
        share, now_s, cache = 1.0, listener.first_token_s, self._of_prompts(self._queued.cached_tokens)
        if now_s is None:
            share, now_s = self._scheduler.share_computed(self._queued) or 0.0, time.monotonic()
            cache = self._of_prompts(self._queued.found_tokens)
        if share > self._share_told:
            self._share_told, total = share, self._num_prompt_tokens
            processed, time_ms = cache + int(share * (total - cache)), round(1e3 * (now_s - listener.started_s))
            progress = self._form.progress(total=total, cache=cache, processed=processed, time_ms=time_ms)
            await self._write_events(progress)

    def _state(self) -> str:
        """State of a request without tokens, for a comment."""
        if self._listener.first_token_s is not None:
            return "decoding"
        if self._listener.started_s is not None:
            share = self._scheduler.share_computed(self._queued)
            return "prefill" if share is None else f"prefill, {share:.0%} of the layers"
        before = self._scheduler.num_before(self._queued)
        return "waiting" if before is None else f"waiting, {before} requests before it"

    async def _start(self, status: int, kind: str, more: Mapping[str, str] | None = None) -> None:
        headers = {
            "content-type": kind,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # nginx would hold a stream back
            "x-request-id": self._request.state.identity,
            "x-predicted-ttft": f"{self._queued.predicted_ttft_s:.3f}",
        } | dict(more or {})
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _write_events(self, events: Sequence[Event]) -> None:
        if data := b"".join(map(self._form.encoded, events)):
            await self._write(data)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def _error(failure: str) -> APIError:
    """The error for a request that is not answered any more. Clients need not try again where the prompt is why."""
    if failure == NOT_NUMBERS:
        return APIError(500, failure, headers={"x-should-retry": "false"})
    return APIError(503, failure)
