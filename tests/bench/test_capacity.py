"""benchmarks/studies/capacity: requests per second of two commits' servers, of the same requests in turn."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import lines
from benchmarks.studies import capacity
from benchmarks.studies.capacity import STUDY, interval, measure, ratio, verdict
from benchmarks.studies.serving import Reply, Session
from runahead.serving.limits import QueueLimits
from tests.serving import fakes


def options_of(*given: str) -> Any:
    return STUDY.parser().parse_args(["--before", "abc", *given])


def servers(before: str, after: str) -> capacity.Servers:
    """Of a commit without kernels, and of one that has them."""
    return capacity.Servers(urls={"before": before, "after": after}, kernels={"before": None, "after": True})


def line(before: list[float], after: list[float]) -> dict[str, Any]:
    about = {"commit": "def", "before": "abc", "after": None, "requests": 12, "length": 2000, "new_tokens": 32}
    return about | {"capacity": {"before": before, "after": after}}


def test_a_capacity_is_requests_over_the_seconds_to_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server before takes 10 s for a round and that after 8 s; the first round, of 100 s each, does not count."""
    now, asked = [0.0], list[tuple[str, list[Session]]]()

    async def loaded(sessions: list[Session], starts_s: list[float], asking: Any) -> list[Reply]:
        [url] = asking.args
        asked.append((url, sessions))
        now[0] += 100.0 if len(asked) <= 2 else {"http://old": 10.0, "http://new": 8.0}[url]
        assert starts_s == [0.0] * 4, "all at once"
        return [Reply(1, 200, [0.1], new_tokens=2) for _ in sessions]

    monkeypatch.setattr(capacity, "load", loaded)
    monkeypatch.setattr(capacity.time, "perf_counter", lambda: now[0])
    given = options_of("--requests", "4", "--rounds", "2", "--length", "64", "--vocabulary", "50")
    [found] = measure(given, servers("http://old", "http://new"), {})
    assert found["capacity"] == {"before": [0.4, 0.4], "after": [0.5, 0.5]}
    assert found["kernels"] == {"before": None, "after": True}
    assert ratio(found | {"commit": "def"}) == pytest.approx((1.25, 1.25, 1.25))
    order = ["http://old", "http://new", "http://new", "http://old", "http://old", "http://new"]
    assert [url for url, _ in asked] == order
    texts = [json.dumps([[turn.ids for turn in session] for session in sessions]) for _, sessions in asked]
    assert texts[::2] == texts[1::2] and len(set(texts)) == 3, "the same for both, and others in each round"


def test_two_servers_are_measured() -> None:
    with fakes.serving() as old, fakes.serving() as new:
        given = options_of(
            "--requests", "5", "--rounds", "2", "--length", "64", "--vocabulary", "90", "--new_tokens", "3"
        )
        [found] = measure(given, servers(old.url, new.url), {})
        assert [len(each) for each in found["capacity"].values()] == [2, 2]
        assert min(found["capacity"]["before"] + found["capacity"]["after"]) > 0
        prompts = [sorted(ids for batch in served.engine.batches for ids in batch) for served in (old, new)]
        assert prompts[0] == prompts[1] and len(prompts[0]) == 15
        assert [each.max_new_tokens for each in old.engine.options] == [3] * 15


def test_requests_that_are_not_answered_are_no_capacity() -> None:
    limits = QueueLimits(batch=1, max_waiting=1)
    with fakes.serving() as old, fakes.serving(limits=limits) as new:
        new.engine.step_s = 0.05
        given = options_of(
            "--requests", "9", "--rounds", "1", "--length", "64", "--vocabulary", "90", "--new_tokens", "9"
        )
        with pytest.raises(SystemExit, match=r"the server after did not answer \d of 9 requests: .+ wait"):
            list(measure(given, servers(old.url, new.url), {}))


def test_the_ratio_is_that_of_the_same_round() -> None:
    """The machine is half as fast in the second round; the medians alone would say 1.0."""
    found = line([1.0, 0.5, 1.0, 0.5, 1.0], [0.9, 0.45, 0.9, 0.45, 0.9])
    assert ratio(found) == pytest.approx((0.9, 0.9, 0.9))
    assert interval(line([1.0] * 6, [0.9, 1.0, 1.0, 1.0, 1.0, 1.1])) != "1.000 to 1.000"


@pytest.mark.parametrize(
    ("after", "most_loss", "fails"),
    [([0.98] * 3, 0.03, False), ([0.96] * 3, 0.03, True), ([0.5] * 3, None, False), ([2.0] * 3, 0.03, False)],
)
def test_it_fails_where_the_last_run_lost_more(after: list[float], most_loss: float | None, fails: bool) -> None:
    given = options_of(*([] if most_loss is None else ["--most-loss", str(most_loss)]))
    words = verdict([line([1.0] * 3, [0.1] * 3), line([1.0] * 3, after)], given)
    assert words == ("the ratio 0.960 (0.960 to 0.960) is below 1 - 0.03 of --most-loss" if fails else None)


def test_lines_are_drawn_and_a_missing_commit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lines.jsonl"
    lines.append(file, [line([1.0, 1.1, 1.2], [1.1, 1.2, 1.3])])
    STUDY.main(["--draw-only", "--lines", str(file), "--out", str(tmp_path)])
    assert "1.100 per s" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--before is missing; name the commit"):
        STUDY.main(["--lines", str(file), "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="there is no commit no-such-commit"):
        STUDY.main(["--before", "no-such-commit", "--lines", str(file), "--out", str(tmp_path)])


def test_each_server_is_of_its_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server whose program only says where it and its packages are."""
    program = (
        "import runahead, sys, time; print(f'serving {runahead.__file__} on http://x', flush=True); time.sleep(60)"
    )

    @contextmanager
    def checkout_of(commit: str | None) -> Iterator[Path]:
        folder = tmp_path / str(commit)
        for package in ("launch", "runahead"):
            (folder / package).mkdir(parents=True)
        (folder / "runahead" / "__init__.py").touch()
        (folder / "launch" / "serve.py").write_text(program)
        yield folder

    monkeypatch.setattr(capacity, "checkout_of", checkout_of)
    said = list[str]()

    class Noted(capacity.Server):
        def __enter__(self) -> Any:
            found = super().__enter__()
            said.append(self.said)
            return found

    monkeypatch.setattr(capacity, "Server", Noted)
    monkeypatch.setattr(capacity, "NUM_RANKS", 1)
    with capacity.servers_of(options_of("--after", "def")) as found:
        assert set(found.urls) == {"before", "after"} and found.kernels == {"before": None, "after": None}
    assert [str(tmp_path / name / "runahead") in text for name, text in zip(("abc", "def"), said, strict=True)] == [
        True
    ] * 2
    assert sys.path[0] != str(tmp_path)


@pytest.mark.slow
def test_two_commits_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This checkout, and the last commit: two ranks each, a tiny random model."""
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    server = ["--server", "model=random", f"model.config={tmp_path / 'config.json'}"]
    load = ["--requests", "3", "--rounds", "1", "--length", "64", "--vocabulary", "100", "--new_tokens", "3"]
    file = tmp_path / "lines.jsonl"
    STUDY.main(["--before", "HEAD", *server, *load, "--lines", str(file), "--out", str(tmp_path)])
    [found] = [json.loads(text) for text in file.read_text().splitlines()]
    assert found["before"] == "HEAD" and min(found["capacity"]["before"] + found["capacity"]["after"]) > 0
    assert "95% interval" in capsys.readouterr().out
