"""benchmarks/studies/handover: what vLLM's log says, gaps of a second client, tables, what a check finds wrong."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.harness.lines import Line
from benchmarks.studies import handover
from benchmarks.studies.handover import ALONE, CHECKED, OURS, STUDY, VARIANTS, WITH_OURS, Served, loads, table, verdict
from benchmarks.studies.serving import Reply
from runahead_vllm.asking import Asked
from runahead_vllm.scheduling import Load, Report, SchedulerSide, logger

PLACE = {
    "key": "k",
    "date": "2026-11-28T06:00:00",
    "commit": "abc1234",
    "hardware": {"cpu": "a processor"},
    "threads": 2,
}


def test_the_connectors_lines_are_read(caplog: pytest.LogCaptureFixture) -> None:
    """The reference is what the connector itself says of three prompts."""
    side = SchedulerSide(None, min_tokens=1, look_only=False)  # type: ignore[arg-type]
    asked = Asked(9, began_s=0.0, waited_s=1.5)
    side._asked["a"], side._promised["a"] = asked, Load("a", "", 9, 0, 8, ())
    with caplog.at_level("INFO", logger=logger.name):
        side.reported({"a": [Report(2_500_000, 0.25)]})
        side.received(["a"], [])
        side._say_without_file("given_up", "b", asked, "it is full")
        side._say_alone("c", 9, "it is short")
    said = "\n".join(f"(EngineCore pid=1) INFO 11-28 06:00:00 [scheduling.py:1] {each}" for each in caplog.messages)
    loaded, full, short = loads(f"other words\n{said}\n")
    assert loaded == {"waited_s": 1.5, "load_s": 0.25, "tokens_loaded": 8, "loaded_mb": 2.5}
    assert "it is full" in full["not_loaded"] and "it is short" in short["not_loaded"]


def options(**more: Any) -> Namespace:
    return STUDY.parser().parse_args([f"--{name}={value}" for name, value in more.items()])


def test_gaps_are_those_until_the_first_token_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token a second, then the prompt comes at 41.5 s, and its first token at 45.5 s."""
    events_s = [*map(float, range(1, 43)), 45.0, 47.0]
    second, first = Reply(64, events_s=events_s, began_s=100.0), Reply(4096, events_s=[4.0], began_s=141.5)

    async def beside(servers: Served, name: str, ids: list[int]) -> tuple[Reply, Reply]:
        return second, first

    monkeypatch.setattr(handover, "_beside", beside)
    said = iter(["", "runahead: a: asked for 9 tokens, waited 3.50 s, loaded 8 (2.5 MB in 0.25 s)"])
    found = handover.pauses(
        options(rest=0.0), Served(urls={}, said=lambda: next(said), model=handover.ROOT), ALONE, [1]
    )
    assert found["gaps_s"] == [1.0, 3.0, 2.0] and found["quiet_s"] == 1.0
    assert found["ttft_s"] == 4.0 and found["load_s"] == 0.25


def timed() -> Iterator[Line]:
    for number, server in ((number, server) for number in range(2) for server in VARIANTS):
        more = {"waited_s": 2.0, "load_s": 0.25, "loaded_mb": 47.0} if server == WITH_OURS else {}
        about = {"server": server, "round": number, "length": 1024} | PLACE
        yield about | {"kind": "first token", "ttft_s": 1.0 + number + VARIANTS.index(server)} | more
        if server != OURS:
            gaps_s = [0.01, 0.02, 0.5] if server == ALONE else [0.02, 0.03]
            yield about | {"kind": "beside", "ttft_s": 7.0, "gaps_s": gaps_s, "quiet_s": 0.015}


def test_the_table_has_medians() -> None:
    told = table(list(timed()))
    assert f"| {ALONE} | 1.50 |" in told and f"| {OURS} | 3.50 |" in told
    assert "| of it the copy into vLLM | 0.25 |" in told and "a token took 15 ms" in told
    assert f"| {ALONE}, beside 1,024 tokens | 20 | 500 | 500 | 7.00 s |" in told


def test_lines_of_other_keys_do_not_count() -> None:
    found = list(timed())
    older = [line | {"key": "older", "ttft_s": 9.0} for line in found]
    check = [PLACE | {"key": "c", "checked": 1000, "equal": True, "tokens_loaded": 999}]
    assert table([*older, *found, *check]) == table(found) + "\n" + table(check)


def test_a_run_goes_on_from_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "new_ids", lambda length: [1] * length)
    monkeypatch.setattr(handover, "first_token", lambda options, servers, name, ids: {"ttft_s": len(ids)})
    given, variant = options(), {"kind": "first token", "round": 0, "length": 3}
    servers = Served(urls={}, said=str, model=handover.ROOT, key="k")
    made = list(handover.measure(given, servers, variant))
    assert [line["server"] for line in made] == list(VARIANTS)
    rest = replace(servers, done={handover.place(line) for line in made[:2]})
    assert [line["server"] for line in handover.measure(given, rest, variant)] == [OURS]
    other = replace(rest, key="other")
    assert len(list(handover.measure(given, other, variant))) == len(VARIANTS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({1000: {"not_loaded": "given up"}}, None),
        ({1000: {"tokens_loaded": 998}, 1555: {"not_loaded": "given up"}}, "only 8 of 10 prompts were loaded"),
        ({5995: {"equal": False}}, r"prompts of \[5995\] tokens differ"),
    ],
)
def test_a_check_finds_other_tokens_and_prompts_that_were_computed(change: dict[int, Line], says: str | None) -> None:
    made = list[Line]()
    for length in CHECKED:
        line = PLACE | {"checked": length, "equal": True, "tokens_loaded": length - 1} | change.get(length, {})
        made.append(
            {name: value for name, value in line.items() if name != "tokens_loaded" or "not_loaded" not in line}
        )
    found = verdict(made, STUDY.parser().parse_args(["--check"]))
    assert found is None if says is None else found is not None
    if says is not None and found is not None:
        assert re.search(says, found)
    assert "Of 10 prompts" in table(made)


@pytest.mark.parametrize(("name", "value"), [("lengths", 8192), ("rounds", 0), ("warmup", -1)])
def test_options_out_of_range_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        list(handover.variants(options(**{name: value})))
