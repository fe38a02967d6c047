"""The API: the endpoints, from a request's body to its place in the queue."""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from launch.server.answer.answering import Answering
from launch.server.answer.listener import RequestListener
from launch.server.answer.logprobs import TokenTexts
from launch.server.answer.parser import BEGIN_REASONING, END_REASONING, Parts
from launch.server.answer.row_text import RowText
from launch.server.dialects.base import Dialect
from launch.server.dialects.messages import CountedMessages, Messages
from launch.server.dialects.openai import Chats as ChatDialect
from launch.server.dialects.openai import Completions
from launch.server.dialects.prefill import PATH as PREFILL
from launch.server.dialects.prefill import Prefills
from launch.server.dialects.responses import CountedResponses, Responses
from launch.server.dialects.translating import Translated
from launch.server.errors import APIError, json_response, shown, too_long, wrong
from launch.server.handover import HandingOver, PromptFiles
from launch.server.keys import NO_KEY, Key, Keys
from launch.server.metrics import Metrics, prefix_lines
from launch.server.options import ServeOptions, UnknownFields, without_port
from launch.server.page.files import page_routes
from launch.server.page.state import state_json
from launch.server.process import process_lines
from launch.server.request.bodies import Bodies
from launch.server.request.chats import Chats
from launch.server.request.fields import ChatRequest, CompletionRequest, HandoverWay
from launch.server.request.prompts import prompts_of
from launch.server.request.reader import compressed, read_json, unknown
from launch.server.request.readers import Readers, rested
from launch.server.request.tokens import detokenized, tokenized
from launch.server.request_log import RequestLog
from policies.prompt_cache.schemas import Schemas
from policies.reuse import GivenPrompt, PromptTooLong, ids_of
from runahead.config import GenerationOptions
from runahead.decoding.sampling import refused_option
from runahead.failures import first_line
from runahead.model.grammars import Grammars
from runahead.serving.request import Request
from runahead.serving.scheduler import RequestRefused, Scheduler

DIALECTS: dict[str, Callable[[], Dialect]] = {
    "/v1/chat/completions": ChatDialect,
    "/v1/completions": Completions,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
    PREFILL: Prefills,
}
"""How answers are asked for, by path."""
COUNTS: dict[str, Callable[[], Translated]] = {
    "/v1/responses/input_tokens": CountedResponses,
    "/v1/messages/count_tokens": CountedMessages,
}
"""How the tokens of a prompt are asked for, by path."""
COUNTED = 8
"""Times as many tokens as a prompt may have are counted of a longer one, as clients ask in order to shorten it."""
GUIDES = ("json_schema", "grammar")
"""Generation options for which requests have other fields."""


class API:
    """The endpoints of one server.

    Args:
        scheduler: of rank 0.
        tokenizer: of the model; None if it has none. Nothing else may use it.
        eos_ids: token ids that end an answer.
        vocab_size: number of token ids.
        names: the model's names, by any of which requests may ask for it; the first is told.
        adapters: names of the adapters in its weights, which are told.
        options: limits and log.
        defaults: generation options of requests that do not say otherwise.
        schemas: for prompts that reuse modules; None if there are none.
        slower: a sentence for each faster way that is not taken, for the state.
        setup: version, policy and partition, likewise.
        files: of prompts that are handed over; None: none are.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        tokenizer: Any | None,
        eos_ids: set[int],
        vocab_size: int,
        names: Sequence[str],
        adapters: Sequence[str] = (),
        options: ServeOptions,
        defaults: GenerationOptions,
        keys: Keys,
        schemas: Schemas | None = None,
        slower: Sequence[str] = (),
        setup: Mapping[str, Any] | None = None,
        files: PromptFiles | None = None,
    ) -> None:
        self.scheduler, self.options, self.metrics = scheduler, options, Metrics()
        self.model, self._names, self._adapters = names[0], names, list(adapters)
        self._tokenizer, self._eos_ids, self._defaults, self._keys = tokenizer, eos_ids, defaults, keys
        self._schemas, self._slower, self._setup = schemas, list(slower), setup or {}
        self._vocab_size, self._texts = vocab_size, TokenTexts(tokenizer)
        self._grammars = Grammars(tokenizer, vocab_size, eos_ids)
        self._grammars.warm_up()
        self._seeds = random.Random(defaults.seed)
        self._created = int(time.time())
        self._readers = Readers()
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="compiler")  # a guide may take seconds
        self._reading = Counter[str]()
        self._bodies, self._log = Bodies(options), RequestLog(options)
        self._handing = HandingOver(files, self.metrics, self._log)
        self._chats = Chats(
            tokenizer, tools=options.tools, reasoning=options.reasoning, variables=options.template_kwargs
        )
        routes = [
            *page_routes(),
            Route("/health", self._safely(self._health, is_open=True)),
            Route("/ready", self._safely(self._ready, is_open=True)),
            Route("/metrics", self._safely(self._metrics)),
            Route("/state", self._safely(self._state)),
            Route("/v1/models", self._safely(self._models)),
            Route("/v1/models/{name:path}", self._safely(self._one_model)),
            Route(PREFILL, self._safely(self._about_prefill), methods=["GET"]),
            *(
                Route(path, self._safely(self._generate, dialect), methods=["POST"])
                for path, dialect in DIALECTS.items()
            ),
            *(Route(path, self._safely(self._count, dialect), methods=["POST"]) for path, dialect in COUNTS.items()),
            Route("/tokenize", self._safely(self._tokenize), methods=["POST"]),
            Route("/detokenize", self._safely(self._detokenize), methods=["POST"]),
        ]
        self._hosts = options.named_hosts
        self.app = Starlette(
            routes=routes, exception_handlers={HTTPException: self._unrouted}, middleware=_cors(options.cors_origins)
        )

    # Endpoints.

    async def _health(self, request: HTTPRequest) -> Response:
        return json_response({"status": "ok"})

    async def _ready(self, request: HTTPRequest) -> Response:
        refuses = self.scheduler.refuses
        return json_response({"status": refuses or "ready"}, 200 if refuses is None else 503)

    async def _metrics(self, request: HTTPRequest) -> Response:
        per_token, per_square = self.scheduler.estimate.constants
        gauges = {
            "num_requests_running": ("Requests that are being answered.", self.scheduler.num_running),
            "num_requests_waiting": ("Requests in the queue.", self.scheduler.num_waiting),
            "predicted_seconds_per_token": ("Of a prefill, as learned so far.", per_token),
            "predicted_seconds_per_squared_token": ("Of a prefill, as learned so far.", per_square),
        }
        if (share := self.scheduler.share_in_use) is not None:
            gauges["kv_cache_usage_perc"] = ("Share of the memory for keys and values that rows have; 1: all.", share)
        stored = self.scheduler.state().stored
        most_bytes = 0.0 if stored is None else stored.most_bytes
        gauges["prefix_cache_limit_bytes"] = ("Most bytes of stored prefixes now; 0: none are reused.", most_bytes)
        if stored is not None:
            gauges |= {
                "prefix_cache_tokens": (
                    "Tokens whose keys and values are stored for later prompts.",
                    stored.num_tokens,
                ),
                "prefix_cache_bytes": ("Bytes of these, as last reported.", stored.num_bytes),
            }
        text = self.metrics.text(gauges, dict(self.scheduler.busy_s)) + prefix_lines(self.scheduler.last_part)
        text += await asyncio.to_thread(process_lines)  # the system is asked
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _state(self, request: HTTPRequest) -> Response:
        chats = bool(getattr(self._tokenizer, "chat_template", None))
        told = {"model": self.model, "chats": chats, "slower": self._slower}
        return json_response(told | state_json(self.scheduler, self.metrics, self._setup))

    async def _models(self, request: HTTPRequest) -> Response:
        return json_response({"object": "list", "data": [self._about_model()]})

    async def _one_model(self, request: HTTPRequest) -> Response:
        self._check_model(request.path_params["name"])
        return json_response(self._about_model())

    async def _about_prefill(self, request: HTTPRequest) -> Response:
        files, salt = self._handing.files(HandoverWay.prefill), self._keys.salt(request.state.key, None)
        return json_response(files.told(model=self.model, salt=salt, max_model_len=self.scheduler.longest_text))

    async def _tokenize(self, request: HTTPRequest) -> ASGIApp:
        def read(body: bytes) -> dict[str, Any]:
            ids, texts, asked = tokenized(
                read_json(body), self._chats, self._tokenizer, longest=self.scheduler.longest_text
            )
            self._check_named(asked.model, asked.unknown)
            told = {"count": len(ids), "max_model_len": self.scheduler.longest_text, "tokens": ids}
            return told | {"token_strs": texts}

        async with self._body(request) as body:
            return json_response(await self._readers.run(len(body), partial(read, body)))

    async def _detokenize(self, request: HTTPRequest) -> ASGIApp:
        def read(body: bytes) -> dict[str, Any]:
            text, fields = detokenized(read_json(body), self._tokenizer, self._vocab_size)
            model = fields.take("model", lambda value: isinstance(value, str), "must be a text")
            self._check_named(model, fields.end())
            return {"prompt": text}

        async with self._body(request) as body:
            return json_response(await self._readers.run(len(body), partial(read, body)))

    async def _count(self, request: HTTPRequest) -> ASGIApp:
        dialect = request.state.dialect

        def read(body: bytes) -> dict[str, Any]:
            asked, chat = self._asked(body, dialect)
            longest = self.scheduler.longest_text
            most = None if longest is None else COUNTED * longest
            with dialect.renaming():
                try:
                    [prompt] = prompts_of(asked, chat, self._tokenizer, longest=most)
                except APIError as error:
                    if error.code != "context_length_exceeded":
                        raise
                    what = f"'messages' has more than {most:,} tokens, and no more are counted"
                    raise too_long("messages", longest, what) from error
            counted: dict[str, Any] = dialect.counted(len(ids_of(prompt)))
            return counted

        async with self._body(request) as body:
            return json_response(await self._readers.run(len(body), partial(read, body)))

    async def _generate(self, request: HTTPRequest) -> ASGIApp:
        """Queue a request. Returns what sends its answer. Raises: APIError."""
        client, dialect = request.state.client, request.state.dialect
        async with self._body(request) as body:
            read, chat = await self._readers.run(len(body), partial(self._asked, body, dialect))
            with dialect.renaming():
                if read.options[0].guide is not None:
                    await asyncio.get_running_loop().run_in_executor(self._compiler, self._check_options, read)
                prompts, rows = await self._readers.run(len(body), partial(self._rows, read, chat, client))
        rows = [self._with_seed(options, read.chose_seed) for options in rows]
        salt, name, handed = self._keys.salt(request.state.key, read.cache_salt), "", None
        if read.handover is not None:
            files, ids = self._handing.checked(read.handover, prompts[0]), ids_of(prompts[0])
            name = files.name(salt, ids)
            if read.handover is not HandoverWay.prefill or not read.gives_token:
                handed = await asyncio.to_thread(files.found, name)
        queued = Request(
            prompts=prompts,
            options=rows,
            listener=(
                listener := RequestListener(
                    [RowText(self._tokenizer, self._eos_ids, options, read.parts) for options in rows],
                    self.metrics,
                    num_prompt_tokens=sum(len(ids_of(prompt)) for prompt in prompts[:: len(read.options)]),
                    counts_tokens=read.counts_tokens,
                    awaits_file=bool(name),
                )
            ),
            client=client,
            salt=salt,
            scores=read.scores if isinstance(read, CompletionRequest) else None,
            handover=name,
        )
        form = dialect.form(request.state.identity, self.model, read, self._texts)
        if handed is not None:
            return self._handing.found(request, handed, form, queued, listener)
        try:
            with _refusals():
                self.scheduler.submit(queued)
        except APIError as error:
            if error.status != 429 or read.handover in (None, HandoverWay.prefill):
                raise
            return self._handing.without_file(request, error, read.handover, form, queued, listener)
        return Answering(
            queued,
            listener,
            form,
            read,
            request,
            scheduler=self.scheduler,
            metrics=self.metrics,
            log=self._log,
            ping_s=self.options.ping_s,
        )

    @asynccontextmanager
    async def _body(self, request: HTTPRequest) -> AsyncIterator[bytes]:
        """Context manager of a request's body, in which the request counts as its client's. Raises: APIError."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            message = "the body must be JSON; send the header 'Content-Type: application/json'"
            raise APIError(415, message, code="unsupported_media_type")
        encoding = request.headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            raise compressed(encoding)
        if (refuses := self.scheduler.refuses) is not None:
            raise APIError(503, refuses)
        with self._counted(request.state.client):
            async with self._bodies.read(request) as body:
                yield body

    @contextmanager
    def _counted(self, client: str) -> Iterator[None]:
        """Context manager in which a request is read, which counts as one of its client's. Raises: APIError."""
        with _refusals():
            self.scheduler.check_client(client, self._reading[client])
        self._reading[client] += 1
        try:
            yield
        finally:
            self._reading[client] -= 1
            if not self._reading[client]:
                del self._reading[client]

    def _with_seed(self, options: GenerationOptions, chose_seed: bool) -> GenerationOptions:
        """Options of a row; one that is sampled without a seed takes the next of the server's."""
        return options if chose_seed or not options.do_sample else replace(options, seed=self._seeds.getrandbits(32))

    def _asked(self, body: bytes, dialect: Dialect) -> tuple[ChatRequest | CompletionRequest, str | None]:
        """A request, and its prompt as text if it is a chat. Raises: APIError."""
        fields = dialect.translated(read_json(body))
        with dialect.renaming():
            return self._checked(dialect.read(fields, self._defaults))

    def _checked(self, read: ChatRequest | CompletionRequest) -> tuple[ChatRequest | CompletionRequest, str | None]:
        """The same request, checked, with the parts of its answers, and its prompt as text if it is a chat."""
        self._check_named(read.model, read.unknown)
        if isinstance(read, CompletionRequest) and read.scores is not None:
            try:
                self.scheduler.check_scores()
            except ValueError as error:
                raise wrong("echo", f"is refused: {shown(str(error), 300)}", code="unsupported_value") from error
        num_prompts = len(read.prompts) if isinstance(read, CompletionRequest) else 1
        if num_prompts * len(read.options) > self.options.batch:
            what = f"asks for {num_prompts * len(read.options)} answers, and this server gives at most"
            raise wrong("n" if num_prompts == 1 else "prompt", f"{what} {self.options.batch} at once")
        chat = None
        if isinstance(read, ChatRequest) and read.prompt_cache is None:
            chat, parts = self._chats.prompt(read)
            read = replace(read, parts=parts, options=[_with_parts(options, parts) for options in read.options])
        if read.options[0].guide is None:
            self._check_options(read)
        return read, chat

    def _check_options(self, read: ChatRequest | CompletionRequest) -> None:
        """Check what answers may be asked for, for which a guide is compiled. Raises: APIError."""
        refused = refused_option(read.options[0], self._tokenizer, self._vocab_size, self._grammars)
        if refused is not None:
            name, reason = refused
            field = (read.guided_by or name) if name in GUIDES else name
            raise wrong(field, shown(reason, 300))

    def _rows(
        self, read: ChatRequest | CompletionRequest, chat: str | None, client: str
    ) -> tuple[list[GivenPrompt], list[GenerationOptions]]:
        """The prompt and the options of each row of a request, checked. Raises: APIError."""
        num_prompts = len(read.prompts) if isinstance(read, CompletionRequest) else 1
        prompts = prompts_of(read, chat, self._tokenizer, self._schemas, client, longest=self.scheduler.longest_text)
        rows = [prompt for prompt in prompts for _ in read.options]
        length = self.scheduler.fitting(rows, read.options[0].max_new_tokens, is_chosen=read.length_field is not None)
        options = [replace(options, max_new_tokens=length) for options in read.options * num_prompts]
        try:
            self.scheduler.check(rows, options)
        except ValueError as error:
            raise self._refused_length(read, rows, options, error) from error
        return rows, options

    def _refused_length(
        self,
        read: ChatRequest | CompletionRequest,
        prompts: Sequence[GivenPrompt],
        options: Sequence[GenerationOptions],
        error: ValueError,
    ) -> APIError:
        """The error for rows that cannot be answered as asked: one prompt cannot, or all together, or at this length.

        Clients that read `context_length_exceeded` send a shorter prompt, so only what this helps has that code.
        """
        field = "messages" if isinstance(read, ChatRequest) else "prompt"
        field, code = field if read.prompt_cache is None else "prompt_cache.prompt", "invalid_value"
        message = str(error).partition("; use ")[0].replace("generation.max_new_tokens", "max_tokens")
        least = [replace(each, max_new_tokens=1) for each in options]
        one_by_one = [self._why_not([prompt], least[:1]) for prompt in prompts[:: len(read.options)]]
        if any(one_by_one):
            if any(isinstance(why, PromptTooLong) for why in one_by_one):
                return too_long(field, self.scheduler.longest_text, message)
        elif self._why_not(prompts, least):
            field = "n" if len(one_by_one) == 1 else field
        else:
            field = read.length_field or field
            wanted = max(each.max_new_tokens for each in options)
            most = self.scheduler.fitting(prompts, wanted, is_chosen=False)
            message += f"; {field}={most} would fit" if most < wanted else ""
        return APIError(400, message, param=field, code=code)

    def _why_not(self, prompts: Sequence[GivenPrompt], options: Sequence[GenerationOptions]) -> ValueError | None:
        try:
            self.scheduler.check(prompts, options)
        except ValueError as error:
            return error
        return None

    # What endpoints share.

    def _safely(
        self,
        endpoint: Callable[[HTTPRequest], Awaitable[ASGIApp]],
        dialect: Callable[[], Dialect] = ChatDialect,
        *,
        is_open: bool = False,
    ) -> Callable[[HTTPRequest], Awaitable[ASGIApp]]:
        """An endpoint of which whatever goes wrong is an error in its API's shape."""

        async def safe(request: HTTPRequest) -> ASGIApp:
            request.state.dialect = dialect()
            request.state.identity, request.state.key = uuid.uuid4().hex, NO_KEY
            began_s, tell = time.monotonic(), self._log.refused
            request.state.began_s = began_s
            try:
                if not is_open:
                    request.state.key = self._admitted(request)
                key, tell = request.state.key, self._log.ended
                request.state.client = f"{key.digest.hex()} {request.client.host if request.client else ''}"
                return await endpoint(request)
            except ClientDisconnect:
                error = APIError(400, "the client has gone")
            except APIError as caught:
                error = caught
                error.__traceback__ = error.__cause__ = error.__context__ = None  # which would keep the body
            except Exception as caught:
                print(
                    f"request {request.state.identity}: {type(caught).__name__}: {first_line(caught)}", file=sys.stderr
                )
                error = APIError(500, f"the server has made a mistake; its log says more of {request.state.identity}")
            if error.rest_s:
                await rested(error.rest_s, request.receive)
            self.metrics.ended(str(error.status), request.state.key.name)
            tell(request, f"{error.status} {shown(error.logged, 120)}", began_s)
            headers = {"x-request-id": request.state.identity, **error.headers}
            if not await self._bodies.discarded(request):
                headers["connection"] = "close"
            return json_response(request.state.dialect.error(error), error.status, headers)

        return safe

    def _admitted(self, request: HTTPRequest) -> Key:
        """The key with which a request comes. Raises: APIError: a wrong key, or the name of a page's host."""
        host = request.headers.get("host")  # which every browser sends
        if self._hosts is not None and host and without_port(host) not in self._hosts:
            message = f"this server is not called '{shown(host)}'; add the name to serve.hosts, or start it with a key"
            raise APIError(403, message, code="unknown_host")
        key = request.headers.get("x-api-key")  # as Anthropic's clients send it
        try:
            return self._keys.admitted(request.headers.get("authorization"), None if key is None else f"Bearer {key}")
        except APIError:
            self.metrics.counters["wrong_keys_total"] += 1
            raise

    async def _unrouted(self, request: HTTPRequest, error: Exception) -> Response:
        """The answer to a request for what is not here."""
        assert isinstance(error, HTTPException), error
        what, is_unknown = f"{shown(request.method)} {shown(request.url.path)}", error.status_code == 404
        message, code = f"no {what}", "method_not_allowed"
        if is_unknown:
            message, code = f"there is no {what} here", "unknown_url"
        request.state.identity = uuid.uuid4().hex
        self.metrics.counters["unrouted_requests_total"] += 1
        self._log.refused(request, str(error.status_code), time.monotonic())
        headers = {"x-request-id": request.state.identity, **(error.headers or {})}
        body = _dialect_at(request.url.path).error(APIError(error.status_code, message, code=code))
        return json_response(body, error.status_code, headers)

    def _check_named(self, model: str | None, strangers: Sequence[str]) -> None:
        """Check the model that a request names, and its fields that nobody knows. Raises: APIError."""
        for name in strangers:
            if self.options.unknown_fields is UnknownFields.refuse:
                raise unknown(name)
            self._log.ignored(name)
        if model is not None:
            self._check_model(model)

    def _check_model(self, name: str) -> None:
        if name not in self._names:
            message = f"there is no model '{shown(name)}'; this server has '{self.model}'"
            raise APIError(404, message, param="model", code="model_not_found")

    def _about_model(self) -> dict[str, Any]:
        model = {"id": self.model, "object": "model", "created": self._created, "owned_by": "runahead"}
        told = {"adapters": self._adapters} if self._adapters else {}
        return model | told | {"max_model_len": self.scheduler.longest_text}  # as vLLM names it


def _dialect_at(path: str) -> Dialect:
    """The dialect of what is asked for at a path, whether or not it is here."""
    at = [dialect for each, dialect in (COUNTS | DIALECTS).items() if f"{path}/".startswith(f"{each}/")]
    return (at[0] if at else ChatDialect)()


def _with_parts(options: GenerationOptions, parts: Parts) -> GenerationOptions:
    """Options of a row whose text has what its parts are told apart by. Reasoning is free of what guides an answer."""
    free_part = options.free_part
    if parts.reasons and options.guide is not None:
        free_part = ["" if parts.in_reasoning else BEGIN_REASONING, END_REASONING]
    return replace(options, kept_tokens=[*options.kept_tokens, *parts.tokens], free_part=free_part)


@contextmanager
def _refusals() -> Iterator[None]:
    """Context manager in which a refusal of the queue is an error of the API."""
    try:
        yield
    except RequestRefused as refused:
        if refused.retry_after_s is None:
            raise APIError(503, str(refused)) from refused
        wait_s = max(1, math.ceil(refused.retry_after_s))
        message = f"{refused}; try again in {wait_s} s"
        headers = {"retry-after": str(wait_s)}
        raise APIError(429, message, code="rate_limit_exceeded", headers=headers) from refused


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Middleware by which browsers let pages of these origins read answers."""
    if not origins:
        return []
    exposed = ["retry-after", "x-predicted-ttft", "x-request-id"]
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's clients have headers of their own
            expose_headers=exposed,
        )
    ]
