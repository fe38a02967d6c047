"""The replay of sessions that pause: what is found with room for all, and with room for some under each policy."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import pytest

from benchmarks.studies.prefixes.sessions import POLICIES, STUDY, Session, needed_bytes, replay, trace


def test_with_room_for_all_sessions_everything_is_found_and_ttft_is_the_least() -> None:
    sessions = trace(30, 4.0, 0.9, 20.0, seed=1)
    found = {policy: replay(sessions, policy, inf, 16) for policy in POLICIES}
    for each, ttft_s in found.values():
        assert each.found == each.asked > 0 and each.whole == each.turns > 0
        assert ttft_s == found["LRU"][1]
    assert replay(sessions, "LRU", 0, 16)[1] > found["LRU"][1]


def test_needed_is_the_most_that_sessions_which_go_on_have_at_a_time() -> None:
    first = Session(arrives_s=0.0, turns=[(10, 1), (5, 1), (1, 1)], pauses_s=[100.0, 50.0])
    second = Session(arrives_s=1000.0, turns=[(7, 3), (1, 1)], pauses_s=[1.0])
    assert needed_bytes([first]) == 17 and needed_bytes([first, second]) == 17
    overlapping = Session(arrives_s=120.0, turns=second.turns, pauses_s=[500.0])
    assert needed_bytes([first, overlapping]) == 27


@pytest.mark.parametrize("seed", [0, 1])
def test_who_knows_the_queue_finds_more(seed: int) -> None:
    sessions = trace(60, 5.0, 0.95, 20.0, seed)
    found = {policy: replay(sessions, policy, needed_bytes(sessions) / 3, 16)[0] for policy in POLICIES}
    asked = {each.asked for each in found.values()}
    assert len(asked) == 1  # the same trace, whatever was found
    assert found["look-ahead"].found > found["LRU"].found


def test_the_study_writes_a_line_for_each_policy_and_tells_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "sessions.jsonl"
    args = ["--sessions", "12", "--seeds", "0", "--shares", "0.3", "--lines", str(lines), "--out", str(tmp_path)]
    STUDY.main(args)
    told = [json.loads(text) for text in lines.read_text().splitlines()]
    assert [line["policy"] for line in told] == list(POLICIES)
    assert all(0 <= line["whole_rate"] <= 1 and 0 <= line["hit_rate"] <= 1 for line in told)
    assert "30% of" in capsys.readouterr().out
