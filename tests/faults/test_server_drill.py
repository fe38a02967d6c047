"""Drills of a running server: a rank is killed, stopped or suspended while it is idle, in a prefill or decoding."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.families import save_tiny_llama
from tests.serving.fakes import chat_tokenizer
from tests.serving.test_server import Job, job, options
from tests.waiting import until

FAULTY_SERVE = Path(__file__).with_name("faulty_serve.py")
TIMEOUT_S = {"kill": 30.0, "stop": 3.0, "suspend": 60.0}
"""`ranks.timeout_s` by the kind of a fault: a rank is to be given up where it is stopped for good, and only there."""

POSITIONS = 40_000
ENDLESS = {"prompt": list(range(5, 45)), "max_tokens": 30_000, "ignore_eos": True, "stream": True}
WHOLE = {"prompt": list(range(5, 45)), "max_tokens": 400, "ignore_eos": True, "stream": True}


@dataclass(frozen=True, kw_only=True)
class Drill:
    """A fault of a rank.

    Attributes:
        kind: "kill", "stop" (for good) or "suspend" (for less than its `TIMEOUT_S`).
        moment: "idle" (no request is there), "prefill" (it is in layer 2 of one) or "decode" (tokens come).
    """

    kind: str
    rank: int
    moment: str
    size: int = 2


class Client:
    """A client that reads a stream in a thread. `lines` are those so far; `is_over` once the connection has ended."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(url, body), daemon=True)
        self._thread.start()

    def _read(self, url: str, body: dict[str, Any]) -> None:
        try:
            with (
                httpx2.Client(trust_env=False, timeout=120) as client,
                client.stream("POST", f"{url}/v1/completions", json=body) as response,
            ):
                self.lines += [f"status {response.status_code}"]
                for line in response.iter_lines():
                    self.lines.append(line)
        except httpx2.HTTPError as error:
            self.lines.append(f"lost: {type(error).__name__}")

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def text(self) -> str:
        events = [json.loads(line[6:]) for line in self.lines if line.startswith("data: {")]
        return "".join(event["choices"][0]["text"] for event in events if "choices" in event)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return save_tiny_llama(folder, chat_tokenizer(), max_position_embeddings=POSITIONS)


@contextmanager
def drilled(drill: Drill, model: str, folder: Path) -> Iterator[Job]:
    """A server whose rank will act in a prefill, if that is the moment, once `folder / "armed"` is there."""
    environment = {name: str(folder / name.lower()) for name in ("MOMENT", "ACTED", "ARMED")}
    if drill.moment == "prefill":
        do = "kill" if drill.kind == "kill" else "stop"
        environment["FAULT"] = json.dumps({"rank": drill.rank, "moment": "prefill", "layer": 2, "do": do})
    # A stage that only decodes, and no prefixes: then all ranks compute each prompt, also one as short as these.
    given = options(
        model, f"ranks.timeout_s={TIMEOUT_S[drill.kind]:g}", "serve.decode_ranks=1", "serve.prefix_cache_bytes=0"
    )
    with job(*given, ranks=drill.size, script=FAULTY_SERVE, environment=environment) as server:
        yield server


def strike(drill: Drill, server: Job, folder: Path, body: dict[str, Any]) -> Client | None:
    """Let the fault happen at its moment. Returns the client whose request was there by then."""
    client = None if drill.moment == "idle" else Client(server.url, body)
    if drill.moment == "prefill":
        until(lambda: (folder / "moment").exists())
        return client
    if client is not None:
        until(lambda: len(client.text) > 20)
    os.kill(server.ranks[drill.rank].pid, signal.SIGKILL if drill.kind == "kill" else signal.SIGSTOP)
    return client


def lines_of(server: Job, rank: int) -> list[str]:
    return [line for line in server.ranks[rank].errors.splitlines() if line.startswith("[rank ")]


FAST = (Drill(kind="kill", rank=1, moment="prefill"), Drill(kind="stop", rank=0, moment="decode"))
LOST = [
    Drill(kind=kind, rank=rank, moment=moment)
    for kind in ("kill", "stop")
    for rank in (0, 1)
    for moment in ("idle", "prefill", "decode")
]
# The rank between the first and the last, while tokens keep coming from the last to the first.
LOST += [Drill(kind="stop", rank=1, moment="decode", size=3), Drill(kind="stop", rank=2, moment="idle", size=3)]


def named(drills: list[Drill]) -> list[Any]:
    marks = {True: (), False: pytest.mark.slow}
    return [
        pytest.param(each, marks=marks[each in FAST], id=f"{each.kind} {each.rank}/{each.size}, {each.moment}")
        for each in drills
    ]


@pytest.mark.parametrize("drill", named(LOST))
def test_a_server_that_loses_a_rank_tells_its_client_and_ends(drill: Drill, model: str, tmp_path: Path) -> None:
    with drilled(drill, model, tmp_path) as server:
        whole = None
        if drill.moment == "prefill":  # beside the answer of another request, which is not streamed
            whole = Client(server.url, ENDLESS | {"stream": False})
            until(lambda: server.metric("runahead:generation_tokens_total") > 0)
        (tmp_path / "armed").touch()
        client = strike(drill, server, tmp_path, ENDLESS)
        others = [rank for rank in range(drill.size) if rank != drill.rank]
        until(lambda: all(rank.status is not None for rank in server.ranks), 60.0)
        assert [server.ranks[rank].status for rank in others] == [1] * len(others)
        assert server.ranks[drill.rank].status == -signal.SIGKILL
        for rank in others:
            [line] = lines_of(server, rank)
            # Rank 0 has the rendezvous store here, whose loss may be seen first.
            assert f"rank {drill.rank}" in line or (drill.rank == 0 and "store is lost" in line), line
            assert "Traceback" not in server.ranks[rank].errors
        if client is not None:
            until(lambda: client.is_over)
            assert "data: [DONE]" not in client.lines
            if drill.rank != 0:
                [told] = [line for line in client.lines if "error" in line]
                assert "the server has failed" in told and f"rank {drill.rank}" in told
        if whole is not None and drill.rank != 0:
            until(lambda: whole.is_over)
            assert whole.lines[0] == "status 503"
            assert "the server has failed" in whole.lines[1] and f"rank {drill.rank}" in whole.lines[1]


SUSPENDED = [
    Drill(kind="suspend", rank=rank, moment=moment) for rank in (0, 1) for moment in ("idle", "prefill", "decode")
]


@pytest.mark.parametrize("drill", named(SUSPENDED))
def test_a_server_goes_on_after_a_rank_was_suspended(drill: Drill, model: str, tmp_path: Path) -> None:
    with drilled(drill, model, tmp_path) as server:
        expected = Client(server.url, WHOLE)
        until(lambda: expected.is_over)
        (tmp_path / "armed").touch()
        client = strike(drill, server, tmp_path, WHOLE)
        time.sleep(3)
        os.kill(server.ranks[drill.rank].pid, signal.SIGCONT)
        client = client or Client(server.url, WHOLE)
        until(lambda: client.is_over, 60.0)
        assert "data: [DONE]" in client.lines and client.text == expected.text
        later = Client(server.url, WHOLE)  # nobody comes to another conclusion later
        until(lambda: later.is_over, 60.0)
        assert later.text == expected.text
        assert server.client.get("/ready").status_code == 200
        for rank in server.ranks:
            os.kill(rank.pid, signal.SIGTERM)
        assert [rank.wait(60) for rank in server.ranks] == [0, 0]
