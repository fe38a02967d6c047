"""OpenAI's API: the endpoints, from a request's body to its answer."""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from launch.server.answers import Form, RowText, usage_of
from launch.server.errors import APIError, dumps, shown, wrong
from launch.server.exchange import Exchange
from launch.server.fields import ChatRequest, CompletionRequest, read_chat, read_completion
from launch.server.generation import FIELD_OF
from launch.server.keys import Keys
from launch.server.logprobs import TokenTexts
from launch.server.metrics import Metrics, prefix_lines
from launch.server.options import ServeOptions
from launch.server.page.files import page_routes
from launch.server.page.state import state_json
from launch.server.prompts import prompts_of
from launch.server.reader import read_json
from policies.prompt_cache.schemas import Schemas
from policies.reuse import GivenPrompt, ids_of
from runahead.config import GenerationOptions
from runahead.decoding.sampling import refused_option
from runahead.failures import first_line
from runahead.model.json_schemas import JSONSchemas
from runahead.serving.items import PROGRESS_S
from runahead.serving.request import Request
from runahead.serving.scheduler import Refused, Scheduler

BODIES = 8
"""Bodies of the largest size that may be read at a time."""
DISCARD_S = 2.0
"""Seconds for which the body of a refused request is read."""
READERS = 2
"""Threads that turn bodies into tokens."""


class API:
    """The endpoints of one server.

    Args:
        scheduler: of rank 0.
        tokenizer: of the model; None if it has none. Nothing else may use it.
        eos_ids: token ids that end an answer.
        vocab_size: number of token ids.
        model: the model's name in the API.
        options: limits and log.
        defaults: generation options of requests that do not say otherwise.
        schemas: for prompts that reuse modules; None if there are none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        tokenizer: Any | None,
        eos_ids: set[int],
        vocab_size: int,
        model: str,
        options: ServeOptions,
        defaults: GenerationOptions,
        keys: Keys,
        schemas: Schemas | None = None,
    ) -> None:
        self.scheduler, self.options, self.model, self.metrics = scheduler, options, model, Metrics()
        self._tokenizer, self._eos_ids, self._defaults, self._keys = tokenizer, eos_ids, defaults, keys
        self._schemas = schemas
        self._vocab_size, self._texts = vocab_size, TokenTexts(tokenizer)
        self._json_schemas = JSONSchemas(tokenizer, vocab_size, eos_ids)
        self._json_schemas.warm_up()
        self._seeds = random.Random(defaults.seed)
        self._created = int(time.time())
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="reader")
        self._bytes_being_read = 0
        routes = [
            *page_routes(),
            Route("/health", self._safely(self._health, needs_key=False)),
            Route("/ready", self._safely(self._ready, needs_key=False)),
            Route("/metrics", self._safely(self._metrics)),
            Route("/state", self._safely(self._state)),
            Route("/v1/models", self._safely(self._models)),
            Route("/v1/models/{name:path}", self._safely(self._one_model)),
            Route("/v1/chat/completions", self._safely(self._chat), methods=["POST"]),
            Route("/v1/completions", self._safely(self._completion), methods=["POST"]),
        ]
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_route})

    # Endpoints.

    async def _health(self, request: HTTPRequest) -> Response:
        return _json({"status": "ok"})

    async def _ready(self, request: HTTPRequest) -> Response:
        refuses = self.scheduler.refuses
        return _json({"status": refuses or "ready"}, 200 if refuses is None else 503)

    async def _metrics(self, request: HTTPRequest) -> Response:
        per_token, per_square = self.scheduler.estimate.constants
        gauges = {
            "num_requests_running": ("Requests that are being answered.", self.scheduler.num_running),
            "num_requests_waiting": ("Requests in the queue.", self.scheduler.num_waiting),
            "predicted_seconds_per_token": ("Of a prefill, as learned so far.", per_token),
            "predicted_seconds_per_squared_token": ("Of a prefill, as learned so far.", per_square),
        }
        if (stored := self.scheduler.state().stored) is not None:
            gauges |= {
                "prefix_cache_tokens": (
                    "Tokens whose keys and values are stored for later prompts.",
                    stored.num_tokens,
                ),
                "prefix_cache_bytes": ("Bytes of these, as last reported.", stored.num_bytes),
            }
        text = self.metrics.text(gauges, dict(self.scheduler.busy_s)) + prefix_lines(self.scheduler.last_part)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _state(self, request: HTTPRequest) -> Response:
        chats = bool(getattr(self._tokenizer, "chat_template", None))
        return _json(state_json(self.scheduler, self.metrics, model=self.model, chats=chats))

    async def _models(self, request: HTTPRequest) -> Response:
        return _json({"object": "list", "data": [self._about_model()]})

    async def _one_model(self, request: HTTPRequest) -> Response:
        self._check_model(request.path_params["name"])
        return _json(self._about_model())

    async def _chat(self, request: HTTPRequest) -> ASGIApp:
        return await self._generate(request, is_chat=True)

    async def _completion(self, request: HTTPRequest) -> ASGIApp:
        return await self._generate(request, is_chat=False)

    async def _generate(self, request: HTTPRequest, *, is_chat: bool) -> ASGIApp:
        """Queue a request. Returns what sends its answer. Raises: APIError."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise APIError(400, "the body must be JSON; send the header 'Content-Type: application/json'")
        if (refuses := self.scheduler.refuses) is not None:
            raise APIError(503, refuses)
        loop = asyncio.get_running_loop()
        async with self._body(request) as body:
            client = request.state.client
            read, prompts = await loop.run_in_executor(self._readers, self._read, body, is_chat, client)
        n = len(read.options)
        rows = [self._with_seed(options, read.chose_seed) for _ in prompts for options in read.options]
        queued = Request(
            prompts=[prompt for prompt in prompts for _ in range(n)],
            options=rows,
            listener=(
                exchange := Exchange(
                    [RowText(self._tokenizer, self._eos_ids, options) for options in rows],
                    self.metrics,
                    num_prompt_tokens=sum(len(ids_of(prompt)) for prompt in prompts),
                )
            ),
            client=request.state.client,
        )
        try:
            self.scheduler.submit(queued)
        except Refused as refused:
            if refused.retry_after_s is None:
                raise APIError(503, str(refused)) from refused
            wait_s = max(1, math.ceil(refused.retry_after_s))
            message = f"{refused}; try again in {wait_s} s"
            headers = {"retry-after": str(wait_s)}
            raise APIError(429, message, code="rate_limit_exceeded", headers=headers) from refused
        form = Form(request.state.identity, self.model, is_chat=is_chat, texts=self._texts)
        return Answering(self, queued, exchange, form, read, request)

    def _with_seed(self, options: GenerationOptions, chose_seed: bool) -> GenerationOptions:
        """Options of a row; one that is sampled without a seed takes the next of the server's."""
        return options if chose_seed or not options.do_sample else replace(options, seed=self._seeds.getrandbits(32))

    def _read(
        self, body: bytes, is_chat: bool, client: str
    ) -> tuple[ChatRequest | CompletionRequest, list[GivenPrompt]]:
        """A request and its prompts, checked. Raises: APIError."""
        fields = read_json(body)
        read: ChatRequest | CompletionRequest
        read = read_chat(fields, self._defaults) if is_chat else read_completion(fields, self._defaults)
        if read.model is not None:
            self._check_model(read.model)
        refused = refused_option(read.options[0], self._tokenizer, self._vocab_size, self._json_schemas)
        if refused is not None:
            name, reason = refused
            raise wrong(FIELD_OF.get(name, name), shown(reason, 300))
        num_prompts = len(read.prompts) if isinstance(read, CompletionRequest) else 1
        if num_prompts * len(read.options) > self.options.batch:
            what = f"asks for {num_prompts * len(read.options)} answers, and this server gives at most"
            raise wrong("n" if num_prompts == 1 else "prompt", f"{what} {self.options.batch} at once")
        prompts = prompts_of(read, self._tokenizer, self._schemas, client)
        repeated = [prompt for prompt in prompts for _ in read.options]
        if not read.chose_length:
            fitting = self.scheduler.fitting(repeated, read.options[0].max_new_tokens)
            for options in read.options:
                options.max_new_tokens = fitting
        try:
            self.scheduler.check(repeated, [options for _ in prompts for options in read.options])
        except ValueError as error:
            message = str(error).partition("; use ")[0].replace("generation.max_new_tokens", "max_tokens")
            field = "messages" if is_chat else "prompt"
            field = field if read.prompt_cache is None else "prompt_cache.prompt"
            raise APIError(400, message, param=field, code="context_length_exceeded") from error
        return read, prompts

    # What endpoints share.

    def _safely(
        self, endpoint: Callable[[HTTPRequest], Awaitable[ASGIApp]], *, needs_key: bool = True
    ) -> Callable[[HTTPRequest], Awaitable[ASGIApp]]:
        """An endpoint of which whatever goes wrong is an error in OpenAI's shape."""

        async def safe(request: HTTPRequest) -> ASGIApp:
            request.state.identity = uuid.uuid4().hex
            began_s = time.monotonic()
            try:
                number = self._keys.number_of(request.headers.get("authorization")) if needs_key else 0
                request.state.client = f"{number} {request.client.host if request.client else ''}"
                return await endpoint(request)
            except ClientDisconnect:
                error = APIError(400, "the client has gone")
            except APIError as caught:
                error = caught
            except Exception as caught:
                print(
                    f"request {request.state.identity}: {type(caught).__name__}: {first_line(caught)}", file=sys.stderr
                )
                error = APIError(500, f"the server has made a mistake; its log says more of {request.state.identity}")
            self.metrics.ended(str(error.status))
            told = str(error)
            if (error.param or "").startswith("prompt_cache."):  # which quotes the request
                told = f"'{error.param}' is wrong"
            self.log(request, f"{error.status} {shown(told, 120)}", began_s)
            headers = {"x-request-id": request.state.identity, **error.headers}
            if not await self._discarded(request):
                headers["connection"] = "close"
            return _json(error.body, error.status, headers)

        return safe

    async def _discarded(self, request: HTTPRequest) -> bool:
        """Read what is left of a refused body; whether all was read. Closing at once might lose the answer."""
        size = 0
        with suppress(TimeoutError, ClientDisconnect, RuntimeError):  # RuntimeError: it was read before
            async with asyncio.timeout(DISCARD_S):
                async for part in request.stream():
                    size += len(part)
                    if size > BODIES * self.options.max_body_bytes:
                        return False
        return request._stream_consumed

    @asynccontextmanager
    async def _body(self, request: HTTPRequest) -> AsyncIterator[bytes]:
        """The body, within the limits of size and time. It counts as being read until the block ends."""
        limit, size, parts = self.options.max_body_bytes, 0, list[bytes]()
        declared = request.headers.get("content-length", "0")
        too_large = APIError(413, f"the body is larger than {limit:,} bytes", code="request_too_large")
        if not declared.isdecimal() or int(declared[:20]) > limit:
            raise too_large
        try:
            async with asyncio.timeout(self.options.read_timeout_s):
                async for part in request.stream():
                    size += len(part)
                    self._bytes_being_read += len(part)
                    parts.append(part)
                    if size > limit:
                        raise too_large
                    if self._bytes_being_read > BODIES * limit:
                        raise APIError(429, "too many large requests are being read", headers={"retry-after": "1"})
            yield b"".join(parts)
        except TimeoutError as error:
            raise APIError(408, f"the body did not arrive within {self.options.read_timeout_s:g} s") from error
        finally:
            self._bytes_being_read -= size

    def _check_model(self, name: str) -> None:
        if name != self.model:
            message = f"there is no model '{shown(name)}'; this server has '{self.model}'"
            raise APIError(404, message, param="model", code="model_not_found")

    def _about_model(self) -> dict[str, Any]:
        return {"id": self.model, "object": "model", "created": self._created, "owned_by": "runahead"}

    def log(self, request: HTTPRequest, what: str, began_s: float) -> None:
        """Print a line about a request that has ended."""
        if self.options.log and request.url.path.startswith("/v1/"):
            client = request.client.host if request.client else "-"
            now = time.strftime("%Y-%m-%dT%H:%M:%S")
            seconds = time.monotonic() - began_s
            path = shown(request.url.path)
            print(f"{now} {request.state.identity} {client} {path} {seconds:.2f} s: {what}", file=sys.stderr)

    def log_text(self, read: ChatRequest | CompletionRequest) -> str:
        """A prompt's text for the log, if that is asked for."""
        if not self.options.log_prompts:
            return ""
        text: Any = read.messages if isinstance(read, ChatRequest) else read.prompts
        if read.prompt_cache is not None:
            text = [read.prompt_cache.prompt, text]
        return f", prompt {shown(str(text), 10_000)}"


class Answering:
    """Sends the answer of a request, as an ASGI application; a client that goes cancels it.

    The connection of one that does not read is closed by `launch/server/http.py`.
    """

    def __init__(
        self,
        api: API,
        queued: Request,
        exchange: Exchange,
        form: Form,
        read: ChatRequest | CompletionRequest,
        request: HTTPRequest,
    ) -> None:
        self._api, self._queued, self._exchange, self._form = api, queued, exchange, form
        self._read, self._request = read, request
        self._share_told = -1.0
        self._send: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        watch = asyncio.ensure_future(_disconnected(receive))
        work = asyncio.ensure_future(self._stream() if self._read.stream else self._whole())
        ended = "cancelled"
        try:
            await asyncio.wait({watch, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                ended = "failed"
                await work
                if self._exchange.failure is None:
                    ended = self._exchange.rows[0].finish_reason or "cancelled"
        finally:
            for task in (watch, work):
                task.cancel()
            if self._exchange.failure is not None or not self._exchange.is_over:
                self._api.scheduler.cancel(self._queued)
            if self._exchange.first_token_s is not None:
                self._api.metrics.counters["prefix_cache_queries_total"] += self._num_prompt_tokens
                self._api.metrics.counters["prefix_cache_hits_total"] += self._of_prompts(self._queued.cached_tokens)
            self._api.metrics.ended(ended)
            self._log(ended)

    def _log(self, ended: str) -> None:
        usage, exchange = self._usage, self._exchange
        first = "" if exchange.first_token_s is None else f", TTFT {exchange.first_token_s - exchange.arrived_s:.2f} s"
        counts = f"{usage['prompt_tokens']} + {usage['completion_tokens']} tokens"
        self._api.log(self._request, f"{ended}, {counts}{first}{self._api.log_text(self._read)}", exchange.arrived_s)

    @property
    def _num_prompt_tokens(self) -> int:
        return sum(len(ids_of(prompt)) for prompt in self._queued.prompts[:: len(self._read.options)])

    @property
    def _usage(self) -> dict[str, Any]:
        """The usage so far. A prompt counts once, however many answers it gets."""
        return usage_of(self._num_prompt_tokens, self._exchange.rows, self._of_prompts(self._queued.cached_tokens))

    def _of_prompts(self, of_rows: Sequence[int]) -> int:
        """Sum of a number of each row, over one row of each prompt."""
        return sum(of_rows[:: len(self._read.options)])

    async def _whole(self) -> None:
        while not self._exchange.is_over:
            await self._exchange.changed(None)
        if self._exchange.failure is not None:
            error = APIError(503, self._exchange.failure)
            await self._start(503, "application/json")
            await self._write(dumps(error.body), more=False)
            return
        await self._start(200, "application/json")
        body = self._form.whole(self._exchange.rows, self._usage)
        await self._write(dumps(body), more=False)

    async def _stream(self) -> None:
        exchange, form, rows = self._exchange, self._form, self._exchange.rows
        await self._start(200, "text/event-stream; charset=utf-8")
        begun, ended = [False] * len(rows), [False] * len(rows)
        while not all(ended) and exchange.failure is None:
            await self._await_change()
            await self._tell_progress()
            events: list[dict[str, Any] | None] = []
            for index, (row, text) in enumerate(zip(rows, exchange.take(), strict=True)):
                if row.num_tokens and not begun[index]:
                    begun[index] = True
                    events.append(form.begin(index))
                if text:
                    events.append(form.text(index, text, row.take_scored()))
                if row.finish_reason is not None and not ended[index]:
                    ended[index] = True
                    events.append(form.end(index, row.finish_reason, row.take_scored()))
            if self._read.continuous_usage:
                events = [event and event | {"usage": self._usage} for event in events]
            await self._write_events(events)
        if exchange.failure is not None and not all(ended):
            await self._write_events([APIError(503, exchange.failure).body])
        else:
            if self._read.include_usage:
                await self._write_events([form.usage(self._usage)])
            await self._write(b"data: [DONE]\n\n")
        await self._write(b"", more=False)

    async def _await_change(self) -> None:
        """Wait until there is something new of the answer, with comments and the progress of the prefill meanwhile."""
        ping_s, pauses = self._api.options.ping_s, 0
        follows = self._read.return_progress and self._exchange.first_token_s is None
        pause_s = min(PROGRESS_S, ping_s) if follows else ping_s
        while not await self._exchange.changed(pause_s):
            await self._tell_progress()
            pauses += 1
            if pauses * pause_s >= ping_s:
                pauses = 0
                await self._write(f": {self._state()}\n\n".encode())

    async def _tell_progress(self) -> None:
        """Send how far the prefill is, if the client asked for it and it is farther than it was told."""
        exchange = self._exchange
        if not self._read.return_progress or exchange.started_s is None or self._share_told == 1:
            return
        share, now_s, cache = 1.0, exchange.first_token_s, self._of_prompts(self._queued.cached_tokens)
        if now_s is None:
            share, now_s = self._api.scheduler.share_computed(self._queued) or 0.0, time.monotonic()
            cache = self._of_prompts(self._queued.found_tokens)
        if share > self._share_told:
            self._share_told, total = share, self._num_prompt_tokens
            processed, time_ms = cache + int(share * (total - cache)), round(1e3 * (now_s - exchange.started_s))
            progress = self._form.progress(total=total, cache=cache, processed=processed, time_ms=time_ms)
            await self._write_events([progress])

    def _state(self) -> str:
        """State of a request without tokens, for a comment."""
        if self._exchange.first_token_s is not None:
            return "decoding"
        if self._exchange.started_s is not None:
            share = self._api.scheduler.share_computed(self._queued)
            return "prefill" if share is None else f"prefill, {share:.0%} of the layers"
        before = self._api.scheduler.num_before(self._queued)
        return "waiting" if before is None else f"waiting, {before} requests before it"

    async def _start(self, status: int, kind: str) -> None:
        headers = {
            "content-type": kind,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # nginx would hold a stream back
            "x-request-id": self._request.state.identity,
            "x-predicted-ttft": f"{self._queued.predicted_ttft_s:.3f}",
        }
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _write_events(self, events: list[dict[str, Any] | None]) -> None:
        data = b"".join(b"data: " + dumps(event) + b"\n\n" for event in events if event is not None)
        if data:
            await self._write(data)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(value), status, headers, media_type="application/json")


async def _no_such_route(request: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException), error
    what = f"{shown(request.method)} {shown(request.url.path)}"
    found = APIError(error.status_code, f"there is no {what} here" if error.status_code == 404 else f"no {what}")
    return _json(found.body, error.status_code, dict(error.headers or {}))
