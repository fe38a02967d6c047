"""The endurance study: what it counts, what it would notice, and a small run of it."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies import endurance as study
from benchmarks.studies.endurance import STUDY, Seen, arrivals, end_of, endure, send, summary
from benchmarks.studies.serving import Reply
from tests.families import save_tiny_llama
from tests.serving.fakes import Served, chat_tokenizer, held, serving
from tests.waiting import until

NOTHING = {"running": 0.0, "waiting": 0.0}
SAMPLE = {"rss_mib": 100.0, "pss_mib": 50.0, "threads": 9.0, "files": 20.0}


class Running:
    """A server of this process, as the study sees one."""

    def __init__(self, served: Served, *, is_running: bool = True) -> None:
        self.url, self.processes, self.is_running = served.url, [os.getpid()], is_running


def options(*args: str) -> Any:
    common = ["--seconds", "0.5", "--rate", "40", "--lengths", "3", "30", "--new_tokens", "2", "9", "--slow_every", "0"]
    common += ["--vocabulary", "200", "--sample_s", "0.05", "--within_s", "0.05"]
    return STUDY.parser().parse_args([*common, *args])


def test_a_client_closes_its_connection_in_the_state_that_was_drawn():
    with serving(batch=1, ping_s=0.02) as served, held(served.engine) as gate:

        async def several() -> list[tuple[Reply, str]]:
            first = asyncio.create_task(send(served.url, [5] * 9, 8, None, 60.0))
            while not served.scheduler.num_running:
                await asyncio.sleep(0.01)
            waiting = await send(served.url, [5] * 9, 2000, ("waiting", 0.0), 60.0)
            gate.set()
            answered = await first
            gate.clear()
            prefilled = await send(served.url, [5] * 9, 2000, ("prefill", 0.0), 60.0)
            gate.set()
            return [answered, waiting, prefilled]

        (first, how), *others = asyncio.run(several())
        assert (how, first.new_tokens, first.status) == ("answered", 8, 200)
        assert [(outcome.state, how) for outcome, how in others] == [("waiting", "closed"), ("prefill", "closed")]
        until(lambda: served.scheduler.num_running == served.scheduler.num_waiting == 0)


def test_a_request_without_an_end_is_hanging():
    with serving() as served:
        served.engine.step_s = 0.05
        _, how = asyncio.run(send(served.url, [5] * 9, 2000, None, 0.3))
    assert how == "hanging after 0.3 s"


@pytest.mark.parametrize(
    ("outcome", "end"),
    [
        (Reply(1, 200, [0.1], 5), "answered"),
        (Reply(1, 200, [0.1], 4), "answered with another number of tokens"),
        (Reply(1, 200, [0.1]), "lost, with no word"),
        (Reply(1), "lost, with no word"),
        (Reply(1, 429, reason="too many"), "refused"),
        (Reply(1, 429), "lost, with no word"),
        (Reply(1, 503, reason="the server has failed"), "failed"),
        (Reply(1, 0, [0.1], reason="the server has failed"), "failed"),
        (Reply(1, 500, reason="a mistake"), "status 500: a mistake"),
    ],
)
def test_every_end_of_a_request_is_told_apart(outcome, end):
    assert end_of(outcome, 5) == end


def seen(*ends: str, sent: int | None = None) -> Seen:
    samples = [(float(number), number, [SAMPLE | {"rss_mib": 100.0 + number}]) for number in range(len(ends) + 1)]
    outcomes = [Reply(1, 200, [0.1], 5) for _ in ends]
    return Seen(sent=len(ends) if sent is None else sent, ends=list(ends), outcomes=outcomes, samples=samples)


def test_a_run_in_which_all_is_told_has_no_problem():
    line = summary(seen(*["answered"] * 97, "closed", "refused", "failed"), 10.0, NOTHING, 0, "")
    assert line["problems"] == [] and line["closed"] == {"sent": 1}
    assert line["growth"][0]["rss_mib"] == [115.0, 195.0, pytest.approx(195 / 115)]
    assert line["growth"][0]["threads"] == [9, 9, 1]


@pytest.mark.parametrize(
    ("ran", "left", "status", "problem"),
    [
        (seen("answered", "lost, with no word"), NOTHING, 0, "1 requests: lost, with no word"),
        (seen("answered", sent=3), NOTHING, 0, "2 requests had not ended"),
        (seen("answered"), {"running": 1.0, "waiting": 0.0}, 0, "left at the end: {'running': 1.0"),
        (seen("answered"), {}, 0, "left at the end: not known"),
        (seen("answered"), NOTHING, 1, "exit status 1: [rank 0/2] it failed"),
        (seen("answered"), NOTHING, None, "exit status None"),
    ],
)
def test_what_is_missing_is_a_problem(ran, left, status, problem):
    [found] = summary(ran, 10.0, left, status, "[rank 0/2] it failed")["problems"]
    assert found.startswith(problem)


def test_requests_come_for_the_time_and_in_the_number_that_were_asked_for():
    draw = study.random.Random(1)
    starts_s = arrivals(draw, 10.0, 5.0, 0)
    assert 25 <= len(starts_s) <= 90 and max(starts_s) < 5.0 and starts_s == sorted(starts_s)
    assert len(arrivals(draw, 10.0, 0.1, 50)) == 50


def test_a_load_is_endured_and_drawn():
    with serving(ping_s=0.02) as served:
        served.engine.step_s = 0.002
        found = asyncio.run(endure(Running(served), options("--cancelled", "0.4")))
        until(lambda: served.scheduler.num_running == served.scheduler.num_waiting == 0)
    line = {"server": "fake", "ranks": 1} | summary(found, 0.5, NOTHING, 0, "")
    assert line["problems"] == []
    assert {"answered"} <= line["outcomes"].keys() <= {"answered", "closed"}
    assert line["requests"] == sum(line["outcomes"].values()) > 5
    assert line["samples"]
    assert study.picture([line]).startswith(b"\x89PNG")
    assert "every request was answered or told why not" in study.table([line])
    json.dumps(line, allow_nan=False)


def test_a_server_that_ends_ends_the_run(monkeypatch):
    monkeypatch.setattr(study, "LAST_S", 0.2)
    with serving() as served:
        running = Running(served, is_running=False)
    found = asyncio.run(endure(running, options("--seconds", "20")))
    line = summary(found, 1.0, {}, 1, "")
    assert found.sent < 100 and len(line["problems"]) >= 2
    assert "not as it should be" in study.table([{"server": "fake", "ranks": 1} | line])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--server", "model=none"], "--server model=none: "),
        (["--server", "ranks.timeout_s=5"], "--slow_s 5 must be at most half of ranks.timeout_s=5"),
        (["--lengths", "5", "4"], "--lengths 5 4 must be two numbers"),
        (["--cancelled", "2"], "--cancelled 2 must be a share"),
        (["--rate", "0"], "--rate 0 must be above 0"),
    ],
)
def test_wrong_options_are_refused_before_a_server_starts(tmp_path, args, message):
    with pytest.raises(SystemExit, match=message):
        STUDY.main(["--lines", str(tmp_path / "lines.jsonl"), "--out", str(tmp_path), *args])


@pytest.mark.slow
def test_two_ranks_endure_closed_connections_and_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny_llama(tmp_path / "model", chat_tokenizer(), max_position_embeddings=1024)
    server = ["--server", "model=hf", f"model.path={model}", "ranks.threads=1", "partition=even"]
    lines = tmp_path / "lines.jsonl"
    load = ["--seconds", "8", "--rate", "8", "--requests", "50", "--cancelled", "0.4", "--within_s", "0.2"]
    load += ["--lengths", "3", "300", "--new_tokens", "2", "400", "--vocabulary", "200"]
    load += ["--slow_every", "2", "--slow_s", "0.7", "--sample_s", "0.3"]
    STUDY.main([*server, *load, "--lines", str(lines), "--out", str(tmp_path)])
    line = json.loads(lines.read_text())
    assert line["requests"] >= 50 and line["outcomes"]["answered"] > 5 and line["outcomes"]["closed"] > 1
    assert line["stops"] >= 2 and len(line["growth"]) == 2 and line["left"] == {"running": 0, "waiting": 0}
    assert "exit status 0" in capsys.readouterr().out
    assert (tmp_path / "endurance.png").read_bytes().startswith(b"\x89PNG")
