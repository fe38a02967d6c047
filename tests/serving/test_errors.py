"""Every error answer of the server: its status, type, code and param, on which clients act."""

from __future__ import annotations

import ast
import gzip
import json
import shutil
import socket
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import launch.server
from launch.server.errors import APIError
from launch.server.keys import Keys
from launch.server.request.bodies import BODIES
from runahead.config import Guide
from runahead.failures import PeerFailure
from runahead.model.grammars import Grammars
from runahead.serving.limits import QueueLimits
from tests.serving.fakes import POSITIONS, TEMPLATE, Served, chat_tokenizer, held, serving
from tests.serving.test_api import CHAT, CLIENT, HELLO, TEXT, TOOL, post, request_of
from tests.waiting import until

FOLDER = Path(launch.server.__path__[0])
INVALID, LIMITED, SERVER = "invalid_request_error", "rate_limit_error", "server_error"
LONG = "hello " * POSITIONS
SECRET_TOOL = {"type": "function", "function": {"name": "SECRET", "parameters": {"type": "robot"}}}
REFUSING = "{{ raise_exception('no ' + messages[0].content) }}"
"""A chat template that takes no message, and says of it what it is."""
FEW_TOKENS = QueueLimits(max_tokens=100)

Answer = tuple[int, dict[str, Any]]
"""Status and body of an answer."""


Ask = Callable[[Served], Answer]
"""Gets an answer from a server of the default options, or from one of its own."""


def asked(body: Any, path: str = TEXT, headers: dict[str, str] | None = None, **how: Any) -> Ask:
    """A request, to a server of these options if there are any."""

    def ask(common: Served) -> Answer:
        with serving(**how) if how else nullcontext(common) as served:
            response = post(served, path, body, headers=headers or {})
            return response.status_code, response.json()

    return ask


def compressed(body: bytes, encoding: str | None) -> Ask:
    return asked(body, headers={} if encoding is None else {"content-encoding": encoding})


def fetched(path: str) -> Ask:
    def ask(common: Served) -> Answer:
        response = CLIENT.get(common.url + path)
        return response.status_code, response.json()

    return ask


def sent(raw: bytes, **how: Any) -> Ask:
    """Bytes on a connection to a server of these options."""

    def ask(common: Served) -> Answer:
        with serving(**how) as served, socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
            connection.sendall(raw)
            with connection.makefile("rb") as answer:
                status = int(answer.readline().split()[1])
                while answer.readline().strip():
                    pass
                return status, json.loads(answer.readline().strip() or b"{}")

    return ask


def prepared(prepare: Callable[[Served], object], body: dict[str, Any] | None = None) -> Ask:
    """A request to a server to which something was done."""

    def ask(common: Served) -> Answer:
        with serving() as served:
            prepare(served)
            response = post(served, TEXT, body or {"prompt": "hello"})
            if response.status_code != 200:
                return response.status_code, response.json()
            [event] = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
            return 200, json.loads(event.removeprefix("data: "))

    return ask


def without_numbers(served: Served) -> None:
    served.engine.logits = lambda rows: torch.full((len(rows), len(served.engine.tokenizer)), torch.nan)


def losing_a_rank(served: Served) -> None:
    served.engine.error = PeerFailure("rank 1 has ended")


def failing_inside(served: Served) -> None:
    served.api._rows = lambda *_: 1 / 0  # type: ignore[method-assign]


def with_large_bodies(served: Served) -> None:
    served.api._bodies.num_bytes = BODIES * served.options.max_body_bytes


def draining(common: Served) -> Answer:
    with serving(batch=1) as served, ThreadPoolExecutor(1) as pool, held(served.engine) as gate:
        first = pool.submit(post, served, TEXT, {"prompt": "a b c", "max_tokens": 2})
        until(lambda: served.scheduler.num_running == 1)
        served.scheduler.drain()
        response = post(served, TEXT, {"prompt": "a b c"})
        gate.set()
        assert first.result().status_code == 200
        return response.status_code, response.json()


def draining_after_the_first_look(common: Served) -> Answer:
    """The server begins to shut down while a request is read."""
    with serving() as served:
        read = served.api._rows

        def reading(*given: Any) -> Any:
            served.scheduler.drain()
            return read(*given)

        served.api._rows = reading  # type: ignore[method-assign]
        response = post(served, TEXT, {"prompt": "hello"})
        return response.status_code, response.json()


def late(common: Served) -> Answer:
    """The first token would come too late."""
    with serving(limits=QueueLimits(max_ttft_s=5.0)) as served:
        served.scheduler.estimate.alone.learn([1], 100.0)
        response = post(served, TEXT, {"prompt": "hello"})
        return response.status_code, response.json()


def handed_over(prepare: Callable[[Served], object], body: dict[str, Any], path: str) -> Ask:
    """A request to a server that hands prompts over, and to which something was done."""

    def ask(common: Served) -> Answer:
        limits = QueueLimits(max_ttft_s=5.0)
        with tempfile.TemporaryDirectory() as folder, serving(handover=f"{folder}/a", limits=limits) as served:
            prepare(served)
            response = post(served, path, body)
        return response.status_code, response.json()

    return ask


def without_folder(served: Served) -> None:
    shutil.rmtree(str(served.options.handover))


def busy(served: Served) -> None:
    served.scheduler.estimate.alone.learn([1], 100.0)


def too_many_connections(common: Served) -> Answer:
    with serving(max_connections=1) as served, ExitStack() as opened:
        for _ in range(2):
            last = opened.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=20))
        last.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        with last.makefile("rb") as answer:
            head, _, body = answer.read().partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)


JSON = json.dumps({"prompt": "hello"}).encode()
ERRORS: dict[str, tuple[Ask, tuple[int, str, str | None, str | None]]] = {
    # what is asked for
    "path": (fetched("/v1/nope"), (404, INVALID, "unknown_url", None)),
    "method": (fetched(CHAT), (405, INVALID, "method_not_allowed", None)),
    "model": (asked(HELLO | {"model": "gpt"}, CHAT), (404, INVALID, "model_not_found", "model")),
    "model by path": (fetched("/v1/models/gpt"), (404, INVALID, "model_not_found", "model")),
    "key": (asked(HELLO, CHAT, keys=Keys(["k" * 16])), (401, "authentication_error", "invalid_api_key", None)),
    # bodies
    "no HTTP": (sent(b"\x00\x01\r\n\r\n"), (400, INVALID, None, None)),
    "content type": (
        asked(JSON, headers={"content-type": "text/plain"}),
        (415, INVALID, "unsupported_media_type", None),
    ),
    "gzip": (compressed(gzip.compress(JSON), "gzip"), (415, INVALID, "unsupported_media_type", None)),
    "deflate": (compressed(zlib.compress(JSON), "deflate"), (415, INVALID, "unsupported_media_type", None)),
    "brotli": (compressed(b"\x0b\x02\x80{}\x03", "br"), (415, INVALID, "unsupported_media_type", None)),
    "zstd, gzip": (compressed(b"\x28\xb5\x2f\xfd", "zstd, gzip"), (415, INVALID, "unsupported_media_type", None)),
    "gzip that is not declared": (
        compressed(gzip.compress(JSON), None),
        (415, INVALID, "unsupported_media_type", None),
    ),
    "zlib that is not declared": (
        compressed(zlib.compress(JSON), None),
        (415, INVALID, "unsupported_media_type", None),
    ),
    "zstd that is not declared": (
        compressed(b"\x28\xb5\x2f\xfd", None),
        (415, INVALID, "unsupported_media_type", None),
    ),
    "no JSON": (asked(b"\xff"), (400, INVALID, None, None)),
    "no object": (asked(b"[1]"), (400, INVALID, None, None)),
    "nested": (asked(b'{"a":' * 100 + b"1" + b"}" * 100), (400, INVALID, None, None)),
    "large": (asked(b" " * 200_001), (413, INVALID, "request_too_large", None)),
    "slow": (sent(request_of(JSON)[:-5], read_timeout_s=0.3), (408, INVALID, "request_timeout", None)),
    "bodies at once": (prepared(with_large_bodies), (429, LIMITED, "rate_limit_exceeded", None)),
    # fields
    "missing messages": (asked({}, CHAT), (400, INVALID, "missing_required_parameter", "messages")),
    "missing prompt": (asked({}), (400, INVALID, "missing_required_parameter", "prompt")),
    "value": (asked({"prompt": "a", "temperature": "hot"}), (400, INVALID, "invalid_value", "temperature")),
    "unknown": (
        asked({"prompt": "a", "colour": 1}, unknown_fields="refuse"),
        (400, INVALID, "unknown_parameter", "colour"),
    ),
    "a page's name": (asked(JSON, headers={"host": "evil.example:80"}), (403, INVALID, "unknown_host", None)),
    "two ends of a body": (
        sent(request_of(JSON).replace(b"content-length", b"transfer-encoding: chunked\r\ncontent-length")),
        (400, INVALID, None, None),
    ),
    "unsupported": (asked({"prompt": "a", "suffix": "b"}), (400, INVALID, "unsupported_parameter", "suffix")),
    "echo in a stream": (asked({"prompt": "a", "echo": True, "stream": True}), (400, INVALID, "invalid_value", "echo")),
    "no tokens without echo": (asked({"prompt": "a", "max_tokens": 0}), (400, INVALID, "invalid_value", "max_tokens")),
    "tools of no template": (
        asked(HELLO | {"tools": [TOOL]}, CHAT, tools="none"),
        (400, INVALID, "unsupported_parameter", "tools"),
    ),
    "modules": (
        asked({"prompt": "a", "prompt_cache": {"prompt": "<prompt/>"}}),
        (400, INVALID, "unsupported_parameter", "prompt_cache"),
    ),
    "tool choice": (
        asked(HELLO | {"tools": [TOOL], "tool_choice": {"type": "custom"}}, CHAT),
        (400, INVALID, "unsupported_value", "tool_choice"),
    ),
    "no template": (asked(HELLO, CHAT, tokenizer=chat_tokenizer("")), (400, INVALID, None, "messages")),
    # lengths
    "long text": (asked({"prompt": LONG}), (400, INVALID, "context_length_exceeded", "prompt")),
    "long chat": (
        asked({"messages": [{"role": "user", "content": LONG}], "max_tokens": 5}, CHAT),
        (400, INVALID, "context_length_exceeded", "messages"),
    ),
    "one of two is long": (asked({"prompt": ["a", LONG]}), (400, INVALID, "context_length_exceeded", "prompt")),
    "as long as the model": (asked({"prompt": [5] * POSITIONS}), (400, INVALID, "context_length_exceeded", "prompt")),
    "longer than the memory": (
        asked({"prompt": [5] * 100}, limits=FEW_TOKENS),
        (400, INVALID, "context_length_exceeded", "prompt"),
    ),
    "answer": (asked({"prompt": "a", "max_tokens": POSITIONS}), (400, INVALID, "invalid_value", "max_tokens")),
    "answer in a chat": (
        asked(HELLO | {"max_completion_tokens": POSITIONS}, CHAT),
        (400, INVALID, "invalid_value", "max_completion_tokens"),
    ),
    "answer and memory": (
        asked({"prompt": [5] * 50, "max_tokens": 51}, limits=FEW_TOKENS),
        (400, INVALID, "invalid_value", "max_tokens"),
    ),
    "answers and memory": (
        asked({"prompt": [5] * 50, "max_tokens": 5, "n": 2}, limits=FEW_TOKENS),
        (400, INVALID, "invalid_value", "n"),
    ),
    "prompts and memory": (
        asked({"prompt": [[5] * 50, [6] * 50]}, limits=FEW_TOKENS),
        (400, INVALID, "invalid_value", "prompt"),
    ),
    "answers": (asked({"prompt": "a", "n": 9}), (400, INVALID, "invalid_value", "n")),
    "prompts": (asked({"prompt": ["a"] * 9}), (400, INVALID, "invalid_value", "prompt")),
    "token ids": (asked({"prompt": [2**30]}), (400, INVALID, "invalid_value", "prompt")),
    "token ids and a long text": (asked({"prompt": [2**30] * POSITIONS}), (400, INVALID, "invalid_value", "prompt")),
    # the server
    "queue": (late, (429, LIMITED, "rate_limit_exceeded", None)),
    "no prefill for others": (
        asked({"prompt": "hello"}, "/v1/prefill"),
        (404, INVALID, "handover_off", None),
    ),
    "a folder that has gone": (
        handed_over(without_folder, {"prompt": "hello"}, "/v1/prefill"),
        (507, SERVER, "handover_failed", None),
    ),
    "a proxy's prompt in the queue": (
        handed_over(busy, {"prompt": "hello", "kv_transfer_params": {"do_remote_decode": True}}, TEXT),
        (503, SERVER, None, None),
    ),
    "shutting down": (draining, (503, SERVER, None, None)),
    "shutting down while it is read": (draining_after_the_first_look, (503, SERVER, None, None)),
    "connections": (too_many_connections, (503, SERVER, None, None)),
    "a lost rank": (prepared(losing_a_rank), (503, SERVER, None, None)),
    "a lost rank in a stream": (prepared(losing_a_rank, {"prompt": "a", "stream": True}), (200, SERVER, None, None)),
    "no numbers": (prepared(without_numbers), (500, SERVER, None, None)),
    "no numbers in a stream": (prepared(without_numbers, {"prompt": "a", "stream": True}), (200, SERVER, None, None)),
    "own mistake": (prepared(failing_inside), (500, SERVER, None, None)),
}
"""Requests by name, with the status, type, code and param of their error. A stream's error comes after its 200."""

UNSEEN = "the client has gone"
"""The error that nobody is there to get."""


@contextmanager
def places_of_errors() -> Iterator[set[tuple[str, int]]]:
    """Context manager that collects file and line of every error that is made."""
    found, init = set[tuple[str, int]](), APIError.__init__

    def noting(self: APIError, *given: Any, **named: Any) -> None:
        caller = sys._getframe(1)
        found.add((caller.f_code.co_filename, caller.f_lineno))
        init(self, *given, **named)

    with mock.patch.object(APIError, "__init__", noting):
        yield found


def test_every_error_has_the_status_and_the_code_on_which_clients_act() -> None:
    found = {}
    with places_of_errors() as places, serving(max_body_bytes=200_000) as common:
        for name, (ask, _) in ERRORS.items():
            status, body = ask(common)
            assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, (name, body)
            found[name] = (status, *(body["error"][key] for key in ("type", "code", "param")))
    assert found == {name: expected for name, (_, expected) in ERRORS.items()}
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "APIError":
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                is_unseen = any(isinstance(each, ast.Constant) and each.value == UNSEEN for each in node.args)
                assert is_unseen != any((str(path), line) in places for line in lines), (path, node.lineno)


def test_what_is_compressed_is_named() -> None:
    with serving() as served:
        for body, encoding, named in ((b"x", "gzip, br", "gzip, br"), (gzip.compress(JSON), None, "gzip")):
            message = compressed(body, encoding)(served)[1]["error"]["message"]
            assert f"compressed ({named})" in message
        response = post(served, TEXT, b"x", headers={"content-encoding": "br"})
        assert response.headers["accept-encoding"] == "identity"
        assert post(served, TEXT, JSON, headers={"content-encoding": "identity"}).status_code == 200


def test_an_answer_that_is_too_long_is_told_the_length_that_fits() -> None:
    with serving(limits=FEW_TOKENS) as served:
        refused = post(served, TEXT, {"prompt": [5] * 90, "max_tokens": 11})
        assert refused.json()["error"]["message"].endswith("; max_tokens=10 would fit")
        assert post(served, TEXT, {"prompt": [5] * 90, "max_tokens": 10}).status_code == 200


@pytest.mark.parametrize(
    ("options", "host", "status"),
    [
        ({}, "127.0.0.1:8000", 200),
        ({}, "LocalHost.", 200),
        ({}, "[::1]:8000", 200),
        ({}, "a.example", 403),
        ({"hosts": ["A.example"]}, "a.example:80", 200),
        ({"hosts": ["a.example"]}, "127.0.0.1", 200),
        ({"hosts": ["a.example"], "host": "0.0.0.0"}, "127.0.0.1", 403),
        ({"hosts": ["::2"], "host": "0.0.0.0"}, "[::2]:80", 200),
        ({"host": "0.0.0.0"}, "a.example", 200),
        ({"api_key_file": "keys"}, "a.example", 200),  # which no page has
    ],
)
def test_a_server_without_keys_on_this_host_is_called_by_its_names_alone(
    options: dict[str, Any], host: str, status: int
) -> None:
    with serving(**options) as served:
        for path in ("/v1/models", "/state", "/metrics"):
            assert CLIENT.get(served.url + path, headers={"host": host}).status_code == status


def test_pages_of_named_origins_read_answers_and_others_do_not() -> None:
    with serving(cors_origins=["https://a.example"]) as served:
        found = {}
        for origin in ("https://a.example", "https://b.example"):
            asks = {"origin": origin, "access-control-request-method": "POST"}
            asks["access-control-request-headers"] = "authorization,content-type,x-stainless-lang"
            allowed = CLIENT.options(served.url + CHAT, headers=asks)
            answer = post(served, TEXT, JSON, headers={"origin": origin})
            assert answer.status_code == 200
            found[origin[8]] = allowed.status_code, answer.headers.get("access-control-allow-origin")
        assert found == {"a": (200, "https://a.example"), "b": (400, None)}
    with serving() as served:
        answer = post(served, TEXT, JSON, headers={"origin": "https://a.example"})
        assert "access-control-allow-origin" not in answer.headers


def test_a_field_that_nobody_knows_is_told_once_and_changes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with serving() as served:
        plain = post(served, TEXT, {"prompt": "a"}).json()["choices"]
        for _ in range(2):
            assert post(served, TEXT, {"prompt": "a", "colour": 1, "echo": False}).json()["choices"] == plain
        assert post(served, TEXT, {"prompt": "a", "length_penalty": 2}).status_code == 400  # known, and another answer
        for number in range(200):
            post(served, TEXT, {"prompt": "a", f"colour {number}": 1, "max_tokens": 1})
    told = capfd.readouterr().err
    assert told.count("the field 'colour' is unknown and ignored") == 1
    assert told.count("is unknown and ignored") == 100 and told.count("no more are told") == 1


@pytest.mark.parametrize(
    ("fields", "template"),
    [
        ({"tools": [SECRET_TOOL], "tool_choice": "required"}, TEMPLATE),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "SECRET"}}}, TEMPLATE),
        ({"tools": [TOOL], "tool_choice": {"type": "SECRET"}}, TEMPLATE),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "SECRET"}}}}, TEMPLATE),
        ({"guided_grammar": "start: SECRET"}, TEMPLATE),
        ({"structured_outputs": {"grammar": "start: SECRET"}}, TEMPLATE),
        ({"messages": [{"role": "user", "content": "SECRET"}]}, REFUSING),
        ({"messages": [{"role": "user", "content": "SECRET " * POSITIONS}]}, TEMPLATE),
    ],
)
def test_the_log_has_nothing_of_a_requests_texts(
    fields: dict[str, Any], template: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(log=True, tokenizer=chat_tokenizer(template)) as served:
        refused = post(served, CHAT, HELLO | fields)
        assert refused.status_code == 400, refused.text
    told = capfd.readouterr().err
    assert f"{CHAT} " in told and " 400 " in told and "SECRET" not in told, told


def test_a_seed_is_any_whole_number_of_64_bits_and_a_wrong_one_is_told_the_rule_it_breaks() -> None:
    with serving() as served:
        for seed in (-(2**63), -1, 0, 2**62, 2**63 - 1):
            assert post(served, TEXT, {"prompt": "a", "seed": seed, "temperature": 1}).status_code == 200
        for seed, rule in ((2**63, f"at most {2**63 - 1}"), (-(2**63) - 1, f"of at least {-(2**63)}")):
            message = post(served, TEXT, {"prompt": "a", "seed": seed}).json()["error"]["message"]
            assert rule in message


def test_clients_find_their_words_for_a_prompt_that_is_too_long() -> None:
    with serving(limits=FEW_TOKENS) as served:
        message = post(served, TEXT, {"prompt": [5] * 101}).json()["error"]["message"]
        assert message.startswith("This model's maximum context length is 100 tokens. However, ")


class WatchedTokenizer:
    """A tokenizer that notes how much it has read, and waits for a gate before a long text."""

    def __init__(self, gate: threading.Event) -> None:
        self._inner, self._gate, self.num_characters = chat_tokenizer(), gate, 0

    def __call__(self, text: str, **how: Any) -> Any:
        self.num_characters += len(text)
        if len(text) > 10_000:
            assert self._gate.wait(60)
        return self._inner(text, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)


@pytest.mark.parametrize(("path", "is_chat"), [(TEXT, False), (CHAT, True), ("/tokenize", False), ("/tokenize", True)])
def test_a_text_that_is_far_too_long_is_refused_before_all_of_it_is_tokenised(path: str, is_chat: bool) -> None:
    (gate := threading.Event()).set()
    tokenizer = WatchedTokenizer(gate)
    with serving(tokenizer=tokenizer, max_body_bytes=10_000_000) as served:
        text = "the ice " * 400_000
        body = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
        refused = post(served, path, body)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        assert tokenizer.num_characters < len(text) / 10
        # As long as the model is what fits, however many characters it has.
        words = "                " * 10
        whole = post(served, TEXT, {"prompt": words * 20, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
        assert whole == len(chat_tokenizer()(words * 20)["input_ids"])


def test_a_short_text_does_not_wait_for_long_ones_to_be_tokenised() -> None:
    gate = threading.Event()
    with serving(tokenizer=WatchedTokenizer(gate), max_body_bytes=10_000_000) as served, ThreadPoolExecutor(6) as pool:
        long = [pool.submit(post, served, TEXT, {"prompt": "the ice " * 100_000}) for _ in range(6)]
        until(lambda: served.api._bodies.num_bytes > 800_000)
        assert post(served, TEXT, {"prompt": "a"}).status_code == 200
        gate.set()
        assert {each.result().status_code for each in long} == {400}


def test_a_request_does_not_wait_for_the_schema_of_another_to_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, begun = threading.Event(), threading.Event()

    def slow(self: Grammars, guide: Guide, real: Any = Grammars.check) -> None:
        begun.set()
        assert gate.wait(60)
        real(self, guide)

    monkeypatch.setattr(Grammars, "check", slow)
    with serving() as served, ThreadPoolExecutor(3) as pool:
        try:
            guided = [
                pool.submit(post, served, TEXT, {"prompt": "a", "max_tokens": 1, "guided_json": {"const": number}})
                for number in range(3)
            ]
            assert begun.wait(60)
            assert post(served, TEXT, {"prompt": "a", "max_tokens": 1}).status_code == 200
            assert not any(each.done() for each in guided)
        finally:
            gate.set()
        assert {each.result().status_code for each in guided} == {200}


def test_a_request_counts_as_its_clients_as_soon_as_its_header_is_read() -> None:
    with serving(limits=QueueLimits(max_per_client=1)) as served:
        with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
            connection.sendall(request_of(JSON)[:-5])
            until(lambda: bool(served.api._reading))
            assert post(served, TEXT, JSON).status_code == 429
            connection.sendall(JSON[-5:])
            assert connection.recv(12).endswith(b" 200")
        until(lambda: post(served, TEXT, JSON).status_code == 200)
