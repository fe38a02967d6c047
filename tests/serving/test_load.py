"""The load generator, against a server whose engine makes up its tokens."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import accumulate, product

import pytest
import torch

from benchmarks.studies import serving as study
from benchmarks.studies.serving import Reply, Turn, ask, load, percentiles, summary
from runahead import Engine, Ranks
from runahead.config import Device, RanksOptions
from runahead.reuse.prefix_tree import PrefixTree
from runahead.serving.limits import QueueLimits
from tests.ranks.tasks import tiny_model
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


def test_two_servers_are_measured_in_turn_by_what_they_reuse(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(study, "PAUSE_S", 0.05)
    model, lines = tiny_model("llama", torch.float32), tmp_path / "lines.jsonl"
    ranks = Ranks.start(RanksOptions(device=Device.cpu))
    keeping, plain = Engine(model, ranks, tree=PrefixTree(1 << 30)), Engine(model, ranks)
    with serving(engine=keeping) as first, serving(engine=plain) as second:
        common = ["--url", first.url, "--server", "tree", "--lines", str(lines), "--out", str(tmp_path)]
        common += ["--length", "40", "--seconds", "0.4", "--new_tokens", "3", "--vocabulary", "90", "--rates", "10"]
        common += ["--workloads", "turns", "document", "--rounds", "2"]
        with pytest.raises(SystemExit, match="--against tree=http://a must be NAME=http://..., with another name"):
            study.STUDY.main([*common, "--against", "tree=http://a"])
        study.STUDY.main([*common, "--against", f"none={second.url}"])
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    about = [(line["workload"], line["round"], line["server"]) for line in found]
    assert about == list(product(["turns", "document"], [0, 1], ["tree", "none"]))
    for tree, none in zip(found[::2], found[1::2], strict=True):
        assert tree["requests"] == tree["answered"] == none["answered"] > 0
        assert tree["prompt_tokens"] == none["prompt_tokens"] and none["cached_tokens"] == 0
        num = tree["requests"]
        if tree["workload"] == "turns":  # of 10, 20, 30 and 40 tokens
            assert tree["prompt_tokens"] == 25 * num and tree["cached_tokens"] == 60 * (num // 4)
        else:
            assert tree["cached_tokens"] >= 40 * (num - 1)
    assert any(line["requests"] > 1 for line in found if line["workload"] == "document")
    assert study.hits(found[-1]) == "0%" and study.computed(found[-1]) == f"{found[-1]['prompt_tokens']:,}"
    assert len(capsys.readouterr().out.splitlines()) == 9


def test_sessions_begin_at_their_time_and_turns_wait_for_their_answer():
    began: list[tuple[int, float]] = []
    answered: list[tuple[int, float]] = []
    start = time.monotonic()

    async def asking(ids: list[int]) -> Reply:
        began.append((len(ids), time.monotonic() - start))
        while ids == [1] and len(began) < 2:  # the other session begins while this answer is not there
            await asyncio.sleep(0.01)
        answered.append((len(ids), time.monotonic() - start))
        return Reply(len(ids), 200, [0.1], 1)

    outcomes = asyncio.run(load([[Turn([1]), Turn([1, 2], 0.1)], [Turn([1, 2, 3])]], [0.0, 0.05], asking))
    assert [length for length, _ in began] == [1, 3, 2]
    assert began[1][1] >= 0.05 and began[2][1] >= dict(answered)[1] + 0.1
    assert len(outcomes) == 3


def test_refused_and_late_requests_are_not_good():
    outcomes = [
        Reply(10, 200, [0.5, 0.6, 0.9], 3),
        Reply(10, 200, [2.0, 2.1], 2),  # its first token is late
        Reply(10, 200, [0.5, 1.5], 2),  # a gap is too long
        Reply(10, 429),
        Reply(10),
    ]
    line = summary(outcomes, 10.0, **SLO)
    assert (line["requests"], line["answered"], line["refused"]) == (5, 3, 1)
    assert line["goodput"] == pytest.approx(0.1)
    assert line["tpot_s"]["max"] == pytest.approx(1.0)
    assert line["ttft_s"]["p50"] == pytest.approx(0.5)
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None, "max": None}


def test_gaps_beside_a_long_prompt_are_those_in_which_it_waited():
    short = Reply(10, 200, [0.5, 1.0, 2.0, 5.0], 4, began_s=0.0)
    long = Reply(100, 200, [2.5, 9.0], 2, began_s=1.5)  # it waited from 1.5 to 4.0
    assert short.gaps_beside_s([long]) == [1.0, 3.0]
    assert long.gaps_beside_s([long]) == []
    line = summary([short, long], 10.0, longest=100, **SLO)
    assert line["itl_beside_s"]["max"] == 3.0 and line["itl_s"]["max"] == 6.5


def test_99_percent_of_the_gaps_and_the_square_of_the_length_count():
    events = [0.0, *accumulate([0.1] * 19 + [5.0])]
    assert summary([Reply(10, 200, events, 21)], 1.0, **SLO)["goodput"] == 0
    events = [0.0, *accumulate([0.1] * 198 + [5.0])]
    assert summary([Reply(10, 200, events, 200)], 1.0, **SLO)["goodput"] == 1
    late = [Reply(10, 200, [2.0], 1)]
    assert summary(late, 1.0, **SLO)["goodput"] == 0
    assert summary(late, 1.0, ttft_per_square=0.01, **SLO)["goodput"] == 1


def test_a_server_that_is_gone_is_no_answer():
    assert not asyncio.run(ask("http://127.0.0.1:9", [1], 1, None)).is_answered
