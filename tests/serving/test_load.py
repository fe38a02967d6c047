"""The load generator, against a server whose engine makes up its tokens."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import accumulate

import pytest

from benchmarks.studies import serving as study
from benchmarks.studies.serving import Outcome, Turn, ask, load, percentiles, summary
from runahead.serving.limits import QueueLimits
from tests.serving.fakes import serving

SLO = {"ttft": 1.0, "ttft_per_token": 0.0, "itl": 0.5}


def test_a_sweep_writes_a_line_per_rate_and_a_picture(tmp_path, capsys):
    lines = tmp_path / "lines.jsonl"
    with serving(limits=QueueLimits(batch=1)) as served:
        served.engine.step_s = 0.002
        common = ["--url", served.url, "--lines", str(lines), "--out", str(tmp_path), "--length", "40"]
        common += ["--seconds", "0.5", "--new_tokens", "5", "--vocabulary", "300"]
        study.STUDY.main([*common, "--workloads", "mixed", "document", "--rates", "20"])
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["workload"] for line in found] == ["mixed", "document"]
    for line in found:
        assert line["requests"] == line["answered"] > 0 and line["refused"] == 0
        assert 0 < line["goodput"] <= line["requests"] / line["seconds"]
        assert line["ttft_s"]["p50"] > 0 < line["ttft_over_predicted"]["p50"]
        assert line["rank_s"]["0 prefill"] > 0 < line["rank_s"]["0 decoding"]
    assert (tmp_path / "serving.png").read_bytes().startswith(b"\x89PNG")
    assert "goodput" in capsys.readouterr().out


def test_sessions_begin_at_their_time_and_turns_wait_for_their_answer():
    began: list[tuple[int, float]] = []

    async def asking(ids: list[int]) -> Outcome:
        began.append((len(ids), time.monotonic()))
        await asyncio.sleep(0.2)
        return Outcome(len(ids), 200, [0.1], 1)

    start = time.monotonic()
    outcomes = asyncio.run(load([[Turn([1]), Turn([1, 2], 0.1)], [Turn([1, 2, 3])]], [0.0, 0.05], asking))
    assert [length for length, _ in began] == [1, 3, 2]
    assert began[1][1] - start < 0.2 and began[2][1] - start >= 0.3
    assert len(outcomes) == 3


def test_refused_and_late_requests_are_not_good():
    outcomes = [
        Outcome(10, 200, [0.5, 0.6, 0.9], 3),
        Outcome(10, 200, [2.0, 2.1], 2),  # its first token is late
        Outcome(10, 200, [0.5, 1.5], 2),  # a gap is too long
        Outcome(10, 429),
        Outcome(10),
    ]
    line = summary(outcomes, 10.0, **SLO)
    assert (line["requests"], line["answered"], line["refused"]) == (5, 3, 1)
    assert line["goodput"] == pytest.approx(0.1)
    assert line["tpot_s"]["max"] == pytest.approx(1.0)
    assert line["ttft_s"]["p50"] == pytest.approx(0.5)
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None, "max": None}


def test_gaps_beside_a_long_prompt_are_those_in_which_it_waited():
    short = Outcome(10, 200, [0.5, 1.0, 2.0, 5.0], 4, began_s=0.0)
    long = Outcome(100, 200, [2.5, 9.0], 2, began_s=1.5)  # it waited from 1.5 to 4.0
    assert short.gaps_beside_s([long]) == [1.0, 3.0]
    assert long.gaps_beside_s([long]) == []
    line = summary([short, long], 10.0, longest=100, **SLO)
    assert line["itl_beside_s"]["max"] == 3.0 and line["itl_s"]["max"] == 6.5


def test_99_percent_of_the_gaps_and_the_square_of_the_length_count():
    events = [0.0, *accumulate([0.1] * 19 + [5.0])]
    assert summary([Outcome(10, 200, events, 21)], 1.0, **SLO)["goodput"] == 0
    events = [0.0, *accumulate([0.1] * 198 + [5.0])]
    assert summary([Outcome(10, 200, events, 200)], 1.0, **SLO)["goodput"] == 1
    late = [Outcome(10, 200, [2.0], 1)]
    assert summary(late, 1.0, **SLO)["goodput"] == 0
    assert summary(late, 1.0, ttft_per_square=0.01, **SLO)["goodput"] == 1


def test_a_server_that_is_gone_is_no_answer():
    assert not asyncio.run(ask("http://127.0.0.1:9", [1], 1, None)).is_answered
