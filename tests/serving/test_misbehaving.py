"""Clients that misbehave, one kind after another: others are answered meanwhile, and nothing of them is left."""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import httpx2
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from launch.server.answer.listener import RequestListener
from launch.server.request import bodies
from tests.examples import examples
from tests.fuzz.mutations import changed_bytes
from tests.serving.fakes import Served, serving
from tests.serving.test_api import TEXT, read_until, request_of
from tests.waiting import until

ENDLESS = {"prompt": "a", "max_tokens": 4000, "stream": True}
LIMIT_S = 60.0
"""Most seconds in which another client is answered; it takes milliseconds on an idle machine."""


def connect(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=LIMIT_S)


def reset(connection: socket.socket) -> None:
    """Close a connection by a reset, as the end of a process with unread data does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def send(connection: socket.socket, data: bytes) -> None:
    """Send what the server takes; it may close its end meanwhile."""
    try:
        connection.sendall(data)
    except OSError:
        return


def status_of(connection: socket.socket) -> int:
    """Status of the answer on a connection; 0 for an end without one."""
    try:
        line = connection.makefile("rb").readline()
    except OSError:
        return 0
    return int(line.split()[1]) if line else 0


def cut_off(served: Served, close: Callable[[socket.socket], object]) -> None:
    """Close in the header, in the body, before the answer, while it waits and between two events."""
    whole = request_of(json.dumps(ENDLESS).encode())
    for length in (1, 30, len(whole) - 5, len(whole)):
        for _ in range(5):
            connection = connect(served)
            send(connection, whole[:length])
            close(connection)
    for wanted in (b"HTTP/1.1 200", b"data: "):
        connection = connect(served)
        send(connection, whole)
        read_until(connection, wanted)
        close(connection)


def close_at_once(served: Served) -> None:
    cut_off(served, socket.socket.close)


def reset_at_once(served: Served) -> None:
    cut_off(served, reset)


def read_one_byte_at_a_time(served: Served) -> None:
    with connect(served) as connection:
        send(connection, request_of(json.dumps(ENDLESS).encode()))
        for _ in range(300):
            assert connection.recv(1)
            time.sleep(1e-3)


def write_one_byte_at_a_time(served: Served) -> None:
    """The body has a time limit as a whole."""
    whole = request_of(json.dumps({"prompt": "x" * 10_000}).encode())
    with connect(served) as connection:
        send(connection, whole[:-5000])
        deadline = time.monotonic() + 5 * served.options.read_timeout_s
        connection.settimeout(0.02)
        while time.monotonic() < deadline:
            send(connection, b"x")
            try:
                answer = connection.recv(12)
            except TimeoutError:
                continue
            assert answer == b"HTTP/1.1 408"
            return
    raise AssertionError("the body was waited for")


def send_garbage(served: Served) -> None:
    draw = random.Random(0)
    tls = bytes.fromhex("16030100f5010000f10303") + draw.randbytes(200)
    lines = (b"GET /health FTP/1.1\r\n\r\n", b"POST\r\n\r\n", b"\r\n" * 5000, b"GET " + b"/" * 50_000, b"\0" * 5000)
    for data in (tls, *lines, *(draw.randbytes(3000) for _ in range(5))):
        with connect(served) as connection:
            send(connection, data)
            connection.shutdown(socket.SHUT_WR)
            assert status_of(connection) in (0, 400)


def send_ten_megabytes(served: Served) -> None:
    body = json.dumps({"prompt": "x" * 10 * 2**20}).encode()
    with mock.patch.object(bodies, "DISCARD_S", LIMIT_S), connect(served) as connection:
        send(connection, request_of(body))
        assert status_of(connection) == 413
    with connect(served) as connection:  # and says that it will send even more
        send(connection, request_of(b"").replace(b"content-length: 0", b"content-length: 1" + b"0" * 19) + body)
        connection.shutdown(socket.SHUT_WR)
        assert status_of(connection) in (0, 413)


def send_a_million_stops(served: Served) -> None:
    post(served, b'{"prompt": "x", "stop": [' + b",".join([b'""'] * 1_000_000) + b"]}", 400)


def send_nested_json(served: Served) -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        post(served, b'{"prompt": ' + opening * 200_000 + b"1" + closing * 200_000 + b"}", 400)


def send_many_names(served: Served) -> None:
    post(served, json.dumps({f"name {number}": number for number in range(100_000)}).encode(), 400)


def open_five_hundred(served: Served) -> None:
    """Connections that send nothing, all at once."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # each has two in this process
    with ExitStack() as undo:
        for _ in range(min(500, files // 3)):
            undo.enter_context(connect(served))
        until(lambda: num_connections(served) > min(500, files // 3))
        assert httpx2.get(served.url + "/health", trust_env=False, timeout=LIMIT_S).status_code == 200


KINDS = (
    close_at_once,
    reset_at_once,
    read_one_byte_at_a_time,
    write_one_byte_at_a_time,
    send_garbage,
    send_ten_megabytes,
    send_a_million_stops,
    send_nested_json,
    send_many_names,
    open_five_hundred,
)


def post(served: Served, body: bytes, status: int) -> None:
    answer = httpx2.post(
        served.url + TEXT, content=body, headers={"content-type": "application/json"}, trust_env=False, timeout=30
    )
    assert answer.status_code == status and set(answer.json()) == {"error"}


def num_connections(served: Served) -> int:
    return len(served.http._server.server_state.connections)


@contextmanager
def another_client(served: Served) -> Iterator[list[float]]:
    """A client that asks all the time in this block; seconds until each of its answers."""
    seconds, over = list[float](), threading.Event()

    def ask() -> None:
        with httpx2.Client(trust_env=False, timeout=60) as client:
            while not over.is_set():
                began_s = time.monotonic()
                answer = client.post(served.url + TEXT, json={"prompt": "hello", "max_tokens": 3})
                assert answer.json()["usage"]["completion_tokens"] == 3
                seconds.append(time.monotonic() - began_s)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            until(lambda: bool(seconds) or asking.done())
            yield seconds
        finally:
            over.set()
        asking.result()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(read_timeout_s=2.0, write_timeout_s=5.0, ping_s=0.05) as running:
        running.engine.step_s = 0.001
        yield running


def nothing_is_left(served: Served) -> None:
    until(lambda: served.scheduler.num_running == served.scheduler.num_waiting == 0)
    until(lambda: num_connections(served) == 0)
    until(lambda: served.api._bodies.num_bytes == 0)
    assert served.ended is None and served.thread.is_alive()


@pytest.mark.parametrize("misbehave", KINDS, ids=lambda kind: kind.__name__)
def test_others_are_answered_and_nothing_is_left(
    served: Served, misbehave: Callable[[Served], object], capfd: pytest.CaptureFixture[str]
) -> None:
    with another_client(served) as seconds:
        before = len(seconds)
        misbehave(served)
        until(lambda: len(seconds) > before)
    assert max(seconds) < LIMIT_S
    nothing_is_left(served)
    assert "Traceback" not in (said := capfd.readouterr().err) and "Error" not in said, said


def num_exchanges() -> int:
    """Requests that this process still holds, as the server's object or as uvicorn's."""
    gc.collect()
    return sum(isinstance(each, (RequestListener, RequestResponseCycle)) for each in gc.get_objects())


def test_a_reset_after_an_answer_leaves_nothing(served: Served) -> None:
    """Seen to fail: a connection is held until its time for another request is over."""
    others = num_exchanges()
    connection = connect(served)
    send(connection, request_of(b'{"prompt": "x", "max_tokens": 2}'))
    read_until(connection, b'"completion_tokens":2')
    reset(connection)
    nothing_is_left(served)
    until(lambda: num_exchanges() <= others)


def test_memory_threads_and_files_are_back_afterwards(served: Served) -> None:
    held, others = list[tuple[int, int]](), num_exchanges()
    for _ in range(2):
        for misbehave in (close_at_once, send_ten_megabytes, send_a_million_stops, send_nested_json):
            misbehave(served)
        nothing_is_left(served)
        until(lambda: num_exchanges() <= others)
        held.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    (threads, files), (threads_after, files_after) = held
    assert threads_after <= threads and files_after <= files + 2


REQUESTS = (
    request_of(b'{"prompt": "x", "max_tokens": 2}'),
    request_of(b'{"prompt": [5, 6], "max_tokens": 2, "stream": true}'),
    request_of(b'{"prompt": "x"}')
    .replace(b"content-length: 15", b"transfer-encoding: chunked")
    .replace(b"{", b"f\r\n{")
    + b"\r\n0\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\nGET /v1/models HTTP/1.0\r\n\r\n",
)
WORDS = (
    b"\r\n",
    b"\r\n\r\n",
    b"\0",
    b"\xff",
    b" ",
    b":",
    b"0",
    b"-1",
    b"9" * 5000,
    b"chunked",
    b"HTTP/1.1",
    b"{",
    b"}",
)


@examples(80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=changed_bytes(REQUESTS, WORDS), parts=st.integers(1, 3))
def test_any_bytes_get_an_answer_or_the_end_of_their_connection(served: Served, data: bytes, parts: int) -> None:
    with connect(served) as connection:
        for part in range(parts):
            send(connection, data[part * len(data) // parts : (part + 1) * len(data) // parts])
        try:
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            return
        assert status_of(connection) in (0, 200, 400, 403, 404, 405, 408, 413, 415)


def test_afterwards_the_server_serves(served: Served) -> None:
    nothing_is_left(served)
    answer: Any = httpx2.post(served.url + TEXT, json={"prompt": "x", "max_tokens": 2}, trust_env=False).json()
    assert answer["usage"]["completion_tokens"] == 2
