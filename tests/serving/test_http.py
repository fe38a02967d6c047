"""Limits of a connection: headers that are too large, and clients that read nothing."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from launch.program.signals import ending_signals
from launch.server import http
from launch.server import serving as serving_module
from launch.server.keys import Keys
from launch.server.options import ServeRun
from runahead.serving.estimate import TimeEstimate
from runahead.serving.room import Room
from tests.serving.fakes import Served, serving
from tests.waiting import until

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@contextmanager
def client_of(served: Served) -> Iterator[socket.socket]:
    """A connection with little room for what it has not read."""
    with socket.socket() as connection:
        connection.settimeout(60)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", served.port))
        yield connection


def num_connections(served: Served) -> int:
    return len(served.http._server.server_state.connections)


def answer_bytes(served: Served) -> int:
    """Bytes of the answer to `HEALTH`."""
    with client_of(served) as connection:
        connection.sendall(HEALTH)
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(4096)
        return len(answer)


def read(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes and (part := connection.recv(65536)):
        data += part
    return data


def test_a_client_that_asks_again_and_again_and_reads_nothing_is_given_up() -> None:
    with serving(write_timeout_s=0.5) as served, client_of(served) as connection:
        until(lambda: num_connections(served) == 1)
        with suppress(ConnectionError):  # it may be given up while this still asks
            connection.sendall(2000 * HEALTH)
        until(lambda: num_connections(served) == 0)


def test_a_client_that_reads_late_gets_all_its_answers() -> None:
    with serving(write_timeout_s=20.0) as served:
        size = answer_bytes(served)
        with client_of(served) as connection:
            connection.sendall(1000 * HEALTH)
            until(lambda: any(each.flow.write_paused for each in served.http._server.server_state.connections))
            assert read(connection, 1000 * size).count(b"HTTP/1.1 200") == 1000


def test_an_idle_connection_with_unread_answers_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "KEEP_ALIVE_S", 0.2)
    with serving(write_timeout_s=0.5) as served:
        num = 50_000 // answer_bytes(served)  # less than makes the server pause, more than the sockets take
        with client_of(served) as connection:
            until(lambda: num_connections(served) == 1)
            connection.sendall(num * HEALTH)
            until(lambda: num_connections(served) == 0)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_header_larger_than_allowed_is_refused_however_it_arrives(parts: int) -> None:
    with serving(max_header_bytes=2048) as served:
        for num_bytes, status in ((1500, b"200"), (2100, b"400"), (3900, b"400")):
            header = b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"x" * num_bytes + b"\r\n\r\n"
            with client_of(served) as connection:
                for part in range(parts):
                    connection.sendall(header[part * len(header) // parts : (part + 1) * len(header) // parts])
                answer = connection.makefile("rb").read() if status == b"400" else connection.recv(100)
                assert answer.startswith(b"HTTP/1.1 " + status)
                assert (b"its header is too large" in answer) is (status == b"400")


def answers(served: Served, line: bytes) -> tuple[int, bytes]:
    """Status and answer on a connection of its own, which the server closes."""
    with client_of(served) as connection:
        connection.sendall(line + b" HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = connection.makefile("rb").read()
        return int(answer.split()[1]), answer


@pytest.mark.parametrize("num_silent", [3, 4, 9])
def test_those_who_watch_are_answered_when_all_connections_are_taken(num_silent: int) -> None:
    with serving(max_connections=3) as served, ExitStack() as opened:
        silent = [opened.enter_context(client_of(served)) for _ in range(num_silent)]
        for path in (b"/health", b"/ready", b"/metrics?x=1", b"/health"):
            status, answer = answers(served, b"GET " + path)
            assert status == 200 and b"connection: close" in answer
        for line in (b"GET /v1/models", b"POST /v1/completions", b"GET /", b"GET /healthy", b"GET /health/"):
            status, answer = answers(served, line)
            assert status == 503 and b"too many connections are open" in answer
        for connection in silent[3:-1]:  # others make way for them, and for the newest
            assert connection.recv(100).startswith(b"HTTP/1.1 503")
        for connection in (*silent[:3], *silent[3:][-1:]):
            connection.sendall(HEALTH)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_no_more_than_two_connections_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Event()
    monkeypatch.setattr("launch.server.api.process_lines", lambda: str(gate.wait(60)))
    with serving(max_connections=1) as served, client_of(served), ExitStack() as opened:
        try:
            for _ in range(2):
                connection = opened.enter_context(client_of(served))
                connection.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
            until(lambda: sum(each.cycle is not None for each in served.http._server.server_state.connections) == 2)
            with client_of(served) as third:
                assert third.recv(100).startswith(b"HTTP/1.1 503")
        finally:
            gate.set()
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def serve_clients(engine: Any, asked: Event) -> None:
    """Serve nobody, on an address that is none."""
    bound: Any = Mock(getsockname=lambda: ("127.0.0.1", 1))
    front = serving_module.Front(bound=bound, keys=Keys(), tokenizer=None, schemas=None)
    serving_module._serve_clients(
        ServeRun(), engine, TimeEstimate(), Room(max_tokens=10), front, [], asked, (None, None), no_tree=None
    )


def test_rank_0_counts_as_busy_while_clients_read_their_last_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for it then, perhaps for longer than ranks.timeout_s."""
    events: list[str] = []

    @contextmanager
    def busy() -> Iterator[None]:
        events.append("busy")
        yield
        events.append("not busy")

    http = Mock(stop=lambda seconds: events.append("stop"))
    scheduler = Mock(run=lambda: events.append("run"))
    monkeypatch.setattr(serving_module, "HTTPServer", Mock(return_value=http))
    monkeypatch.setattr(serving_module, "Scheduler", Mock(return_value=scheduler))
    monkeypatch.setattr(serving_module, "API", Mock())
    engine: Any = SimpleNamespace(ranks=SimpleNamespace(busy=busy), model=Mock(), prefixes=None)
    serve_clients(engine, Event())
    assert events == ["run", "busy", "stop", "not busy"]


@pytest.fixture
def handlers() -> Iterator[None]:
    """Those of this process, to which it comes back after the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("when", ["while it works", "while it leaves", "once it has left"])
def test_a_signal_ends_a_server_in_good_order_whenever_it_comes(when: str) -> None:
    """The first rank that torchrun signals may have told this one of the end before."""
    told: list[bool] = []

    def work(asked: Event) -> None:
        if when == "while it works":
            signal.raise_signal(signal.SIGTERM)
        told.append(asked.is_set())

    def close() -> None:
        signal.raise_signal(signal.SIGTERM)  # within seconds of the first one, if there was one
        told.append(True)

    ranks: Any = SimpleNamespace(close=close if when == "while it leaves" else lambda: told.append(True))
    with ending_signals(lambda error: None):
        serving_module._to_the_end(ranks, work)
        if when == "once it has left":
            signal.raise_signal(signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # until the process ends
        signal.raise_signal(number)
    assert told == [when == "while it works", True]


@pytest.mark.usefixtures("handlers")
def test_a_server_that_fails_leaves_signals_as_they_were() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    def work(asked: Event) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError), ending_signals(lambda error: None):
        serving_module._to_the_end(Mock(), work)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_server_that_was_asked_to_end_before_it_serves_takes_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    scheduler = Mock(run=lambda: events.append("run"), drain=lambda: events.append("drain"))
    monkeypatch.setattr(serving_module, "HTTPServer", Mock(return_value=Mock(start=lambda: events.append("start"))))
    monkeypatch.setattr(serving_module, "Scheduler", Mock(return_value=scheduler))
    monkeypatch.setattr(serving_module, "API", Mock())
    asked = Event()
    asked.set()
    engine: Any = MagicMock()
    engine.prefixes = None
    serve_clients(engine, asked)
    assert events == ["drain", "start", "run"]
