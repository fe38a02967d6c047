"""The page at /, the state that it shows, and the progress of prefills; the page itself in a headless Chromium."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import torch
from openai import OpenAI

from launch.inputs.options import PartitionOptions
from launch.server.keys import Keys
from launch.server.options import ServeRun
from launch.server.page.files import FILES
from launch.server.page.recent import MOST_RECENT, EndedRequest
from launch.server.page.state import setup_json
from runahead import Engine, Ranks
from runahead.config import CacheOptions, Device, PrefillName, PrefillOptions, RanksOptions
from runahead.reuse.prefix_tree import PrefixTree
from runahead.serving.limits import QueueLimits
from runahead.timeline.trace import TraceSpan
from tests.families import prompt
from tests.needs import missing
from tests.ranks.tasks import tiny_model
from tests.serving.browser import Browser, Tab
from tests.serving.fakes import Served, held, serving
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "launch" / "server" / "page").glob("*.js"))
CLIENT = httpx2.Client(timeout=30, trust_env=False)
KEY = "a-key-of-this-test-only"
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SPANS = [
    TraceSpan(kind="compute", layer=0, start_s=5.0, end_s=5.5),
    TraceSpan(kind="wait", layer=1, start_s=5.5, end_s=5.6),
    TraceSpan(kind="compute", layer=1, start_s=5.6, end_s=6.0),
    TraceSpan(kind="compute", layer=None, start_s=6.0, end_s=6.2),
]


@contextmanager
def slowly_serving(**how: Any) -> Iterator[tuple[Served, threading.Event]]:
    """A server to which every prompt is long. A prefill is at its second layer of three until the event is set."""
    with serving(**how) as served:
        gate = threading.Event()

        def hold() -> None:
            served.engine.meanwhile.after_layer(1, 3)
            gate.wait()

        served.engine.when_prefilling, served.engine.spans = hold, SPANS
        served.scheduler.estimate.alone.learn([1], 100.0)
        try:
            yield served, gate
        finally:
            gate.set()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks report after every layer, and streams look often."""
    monkeypatch.setattr("runahead.serving.executor.PROGRESS_S", 0.0)
    monkeypatch.setattr("launch.server.answer.answering.PROGRESS_S", 0.02)


def state_of(served: Served, key: str = "") -> dict[str, Any]:
    response = CLIENT.get(served.url + "/state", headers={"authorization": f"Bearer {key}"} if key else {})
    assert response.status_code == 200
    return response.json()


def post(served: Served, path: str, body: dict[str, Any]) -> httpx2.Response:
    return CLIENT.post(served.url + path, json=body)


def test_the_page_is_files_of_its_own_and_its_headers_let_a_browser_load_no_others() -> None:
    with serving() as served:
        for path, (name, kind) in FILES.items():
            response = CLIENT.get(served.url + path)
            assert (response.status_code, response.headers["content-type"]) == (200, kind)
            assert response.content == (ROOT / "launch" / "server" / "page" / name).read_bytes()
            policy = response.headers["content-security-policy"].split("; ")
            assert "default-src 'none'" in policy
            assert {source for each in policy for source in each.split()[1:]} == {"'none'", "'self'"}
        page = CLIENT.get(served.url).text
        assert set(re.findall(r'(?:src|href)="([^"]*)"', page)) == {path[1:] for path in FILES if path != "/"}
        for script in SCRIPTS:
            assert {f"/{name}" for name in re.findall(r'from "([^"]*)"', script.read_text())} <= {
                f"/./{path[1:]}" for path in FILES
            }
        assert not re.search(r"<script(?! src=)|<style|\sstyle=|\son\w+=|innerHTML|insertAdjacentHTML", page)
        assert CLIENT.post(served.url, json={}).status_code == 405


def test_the_files_of_the_page_are_in_the_package() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    for name, _ in FILES.values():
        assert any(fnmatch(name, pattern) for pattern in patterns)


def test_the_script_makes_no_html_of_texts() -> None:
    assert len(SCRIPTS) == 3
    for script in SCRIPTS:
        found = re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage|cookie", script.read_text()
        )
        assert not found, script


def test_the_page_needs_no_key_and_the_state_does() -> None:
    with serving(keys=Keys([KEY])) as served:
        assert [CLIENT.get(served.url + path).status_code for path in FILES] == [200] * len(FILES)
        assert CLIENT.get(served.url + "/state").status_code == 401
        assert state_of(served, KEY)["model"] == "fake"


def test_the_state_has_the_queue_the_rows_and_the_prefills_and_no_texts() -> None:
    # Both prompts are long ones: a single prefill changes what is predicted little, however soon it is done.
    limits = QueueLimits(batch=2, max_tokens=3000, itl_s=100.0)
    with slowly_serving(limits=limits) as (served, gate), ThreadPoolExecutor(3) as pool:
        none = state_of(served)
        assert (none["waiting"], none["rows"], none["prefills"], none["last"], none["memory"]) == ([], [], [], None, [])
        assert none["limits"] == {"batch": 2, "max_tokens": 3000, "max_waiting": 64}
        secret = "the letters of the captain"
        first = pool.submit(post, served, TEXT, {"prompt": secret, "max_tokens": 400, "n": 2})
        told = [[{"rank": 0, "layers": 1, "of": 3}]]
        until(lambda: [each["progress"] for each in state_of(served)["prefills"]] == told)
        second = pool.submit(post, served, TEXT, {"prompt": [5] * 7, "max_tokens": 9})
        until(lambda: state_of(served)["waiting"] == [7])
        length = len(served.engine.batches[0][0])
        [running] = state_of(served)["prefills"]
        assert running["lengths"] == [length] and not running["is_short"]
        assert running["done"] == []
        assert running["predicted_s"] == pytest.approx(100 * length)
        assert state_of(served)["num_tokens"] == 2 * (length + 400)

        served.engine.step_s = 0.005
        gate.set()
        until(lambda: len(state_of(served)["rows"]) == 2)
        state = state_of(served)
        assert [row[0] for row in state["rows"]] == [length] * 2 and state["rows"][0][1] >= 1
        assert state["prefills"] == [] and secret not in json.dumps(state)
        served.engine.step_s = 0.0
        assert first.result().status_code == second.result().status_code == 200
        until(lambda: state_of(served)["last"]["lengths"] == [7])
        [part] = state_of(served)["last"]["parts"]
        assert part["spans"] == [
            ["compute", 0, 0.0, 0.5],
            ["wait", 1, 0.5, 0.6],
            ["compute", 1, 0.6, 1.0],
            ["compute", None, 1.0, 1.2],
        ]
        assert [each["rank"] for each in state_of(served)["memory"]] == [0]


def test_a_prompt_that_one_stage_computes_alone_is_recorded_if_it_takes_long() -> None:
    with serving(limits=QueueLimits(itl_s=1e3)) as served:
        served.engine.spans = SPANS
        served.scheduler.estimate.alone.learn([1], 1.0)
        post(served, TEXT, {"prompt": [5, 6, 7], "max_tokens": 2})
        until(lambda: state_of(served)["last"] is not None)
        assert len(state_of(served)["last"]["parts"][0]["spans"]) == len(SPANS)


def test_short_prompts_are_not_the_last_long_one() -> None:
    with serving() as served:
        post(served, TEXT, {"prompt": "a b c", "max_tokens": 2})
        until(lambda: len(state_of(served)["memory"]) == 1)
        assert state_of(served)["last"] is None


def progress_of(events: list[dict[str, Any]]) -> list[tuple[int, int]]:
    found = [each["prompt_progress"] for each in events if "prompt_progress" in each]
    assert all(each["cache"] == 0 for each in found)
    times = [each["time_ms"] for each in found]
    assert times == sorted(times) and times[0] >= 0
    return [(each["processed"], each["total"]) for each in found]


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_stream_tells_the_progress_of_its_prefill_if_it_is_asked_for(path: str) -> None:
    asked = {"prompt": [5] * 30} if path == TEXT else {"messages": [{"role": "user", "content": "hello world"}]}
    body = asked | {"stream": True, "max_tokens": 3}
    with slowly_serving() as (served, gate):
        lines = []
        with CLIENT.stream("POST", served.url + path, json=body | {"return_progress": True}) as response:
            for line in response.iter_lines():
                lines.append(line)
                if '"processed":' in line and '"processed":0' not in line:
                    gate.set()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        total = len(served.engine.batches[0][0])
        told = progress_of(events)
        assert told[-2:] == [(total // 3, total), (total, total)] and len(told) <= 3
        kinds = ["prompt_progress" in each for each in events]
        assert kinds == sorted(kinds, reverse=True), "text comes after all progress"
        assert len({each["object"] for each in events}) == 1
        assert "prompt_progress" not in post(served, path, body).text


def test_the_official_client_takes_progress_for_a_chunk_without_text() -> None:
    with slowly_serving() as (served, gate):
        gate.set()
        client = OpenAI(base_url=served.url + "/v1", api_key="none")
        asked = {"model": "fake", "messages": [{"role": "user", "content": "hello world"}], "max_tokens": 5}
        whole = client.chat.completions.create(**asked).choices[0].message.content
        chunks = list(client.chat.completions.create(**asked, stream=True, extra_body={"return_progress": True}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
        assert chunks[0].prompt_progress["total"] > 0


DOCUMENT = prompt(40)


@contextmanager
def keeping_texts() -> Iterator[Served]:
    """A server with a model and a prefix tree, after a prompt of 40 tokens and one of 43 that begins with these."""
    model = tiny_model("llama", torch.float32)
    engine = Engine(model, Ranks.start(RanksOptions(device=Device.cpu)), tree=PrefixTree(1 << 30))
    with serving(engine=engine) as served:
        for ids in (DOCUMENT, [*DOCUMENT, 3, 4, 5]):
            body = {"prompt": ids, "max_tokens": 4, "ignore_eos": True, "n": 2}
            assert post(served, TEXT, body).status_code == 200
        yield served


def metrics_of(served: Served) -> dict[str, float]:
    lines = CLIENT.get(served.url + "/metrics").text.splitlines()
    found = [line.split() for line in lines if line.startswith("runahead:prefix_cache_")]
    return {name.removeprefix("runahead:prefix_cache_"): float(value) for name, value in found}


def test_what_was_found_of_prompts_is_told_in_progress_metrics_and_state() -> None:
    with keeping_texts() as served:
        until(lambda: metrics_of(served)["hits_total"] == 40 and metrics_of(served)["queries_total"] == 83)
        body = {"prompt": [*DOCUMENT, 3, 4, 7], "max_tokens": 2, "stream": True, "return_progress": True}
        lines = post(served, TEXT, body).text.splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        told = [each["prompt_progress"] for each in events if "prompt_progress" in each]
        assert all((each["total"], each["cache"]) == (43, 42) for each in told)
        assert told[0]["processed"] >= 42 and told[-1]["processed"] == 43
        until(lambda: metrics_of(served)["queries_total"] == 126)
        metrics, state = metrics_of(served), state_of(served)
        assert metrics["hits_total"] == 82
        assert state["prompts"] == {"tokens": 126, "found": 82}
        assert state["stored"]["tokens"] == metrics["tokens"] >= 44
        assert state["stored"]["bytes"] == metrics["bytes"] > 0 and state["stored"]["most_bytes"] == 1 << 30


def test_a_server_that_keeps_no_texts_tells_of_none() -> None:
    with serving() as served:
        metrics = metrics_of(served)
        assert state_of(served)["stored"] is None and set(metrics) == {"hits_total", "queries_total", "limit_bytes"}
        assert metrics["limit_bytes"] == 0


def test_progress_is_for_streams_alone() -> None:
    with serving() as served:
        response = post(served, TEXT, {"prompt": "a", "return_progress": True})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "return_progress")


def test_comments_say_how_far_the_prefill_is() -> None:
    with slowly_serving(ping_s=0.05) as (served, gate):
        with CLIENT.stream("POST", served.url + TEXT, json={"prompt": [5] * 30, "stream": True}) as response:
            for number, line in enumerate(response.iter_lines()):
                assert number < 500
                if line == ": prefill, 33% of the layers":
                    gate.set()
        assert gate.is_set()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for all tests."""
    program = shutil.which("chromium")
    if program is None:
        missing("no command chromium; apt-get install chromium")
    browser = Browser(program, tmp_path_factory.mktemp("chromium"))
    try:
        yield browser
    finally:
        browser.close()


def ask(tab: Tab, question: str) -> None:
    """Type a question and send it, with the keyboard alone."""
    tab.value("document.getElementById('question').focus()")
    tab.type(question)
    tab.press("Tab")
    tab.press("Tab")
    assert tab.value("document.activeElement.id") == "send"
    tab.press("Enter")


def has_ended(tab: Tab) -> bool:
    return tab.text("stage") == "Done"


def test_a_question_is_read_answered_and_drawn(browser: Browser) -> None:
    # The engine answers with the tokens of the prompt from its end, which makes tags of this.
    question = ">b<hello>b/<"
    with slowly_serving() as (served, gate):
        tab = browser.open(served.url)
        tab.until(lambda: tab.text("about").startswith("fake on 1 rank (cpu)"))
        assert tab.text("last").startswith("None yet.")
        ask(tab, question)
        tab.until(lambda: "1 of 3 layers" in tab.text("prefills") and "left by prediction" in tab.text("prefills"))
        total = len(served.engine.batches[0][0])
        tab.until(lambda: tab.text("times").startswith(f"{total // 3} of {total} tokens, "))
        assert tab.text("stage") == "Reading the prompt" and tab.value("document.getElementById('share').value") == (
            pytest.approx(total // 3 / total)
        )
        assert re.search(r", [\d.]+ m?s, about [\d.,]+ s left$", tab.text("times"))
        gate.set()
        tab.until(lambda: has_ended(tab))
        assert "Found of prompts" not in tab.text("facts")
        assert re.fullmatch(r"TTFT [\d.]+ m?s, 256 tokens, [\d.,]+ per s, the most allowed", tab.text("times"))
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 256}
        whole = post(served, CHAT, body).json()["choices"][0]["message"]["content"]
        assert tab.value("document.getElementById('answer').textContent") == whole and "<b>" in whole
        assert tab.value("document.getElementById('answer').childElementCount") == 0

        tab.until(lambda: tab.value("document.querySelectorAll('#skew rect').length") == len(SPANS))
        label = tab.value("document.querySelector('#skew svg').getAttribute('aria-label')")
        assert label.replace("\xa0", " ") == "When each rank was in which of 2 layers: rank 0 from 0 ms to 1.20 s"
        assert "rank 0" in tab.text("parts") and "rank 0" in tab.text("memory")
        assert tab.errors == []
        asked = {url.removeprefix(served.url) for url in tab.requests}
        scripts = {f"/{script.name}" for script in SCRIPTS}
        assert {"/", "/page.css", *scripts, "/state", CHAT} <= asked <= {*FILES, "/state", CHAT}


def test_the_page_shows_how_much_of_prompts_was_found(browser: Browser) -> None:
    with keeping_texts() as served:
        tab = browser.open(served.url)
        tab.until(lambda: "Found of prompts" in tab.text("facts") and "40 of 83 tokens (48%)" in tab.text("facts"))
        tokens = state_of(served)["stored"]["tokens"]
        assert re.search(rf"Stored texts\s+{tokens} tokens, [\d.]+ KiB of at most 1.0 GiB", tab.text("facts"))
        assert tab.errors == []


def test_an_answer_can_be_stopped(browser: Browser) -> None:
    with serving() as served:
        served.engine.step_s = 0.1  # of 256 tokens
        tab = browser.open(served.url)
        ask(tab, "hello world")
        tab.until(lambda: len(tab.text("answer")) > 3)
        tab.value("document.getElementById('stop').click()")
        tab.until(lambda: tab.text("stage") == "Stopped")
        assert tab.text("failure") == "" and "TTFT" in tab.text("times")
        until(lambda: served.scheduler.num_running == 0)
        assert served.engine.steps[0] < 256


def test_the_key_is_asked_for_and_a_wrong_one_is_named(browser: Browser) -> None:
    with serving(keys=Keys([KEY])) as served:
        tab = browser.open(served.url)
        for key in ("wrong", KEY):
            tab.until(lambda: tab.value("document.activeElement.id") == "key")
            tab.type(key)
            tab.press("Enter")
            if key == "wrong":
                tab.until(lambda: tab.text("trouble") == "The server does not know this key.")
        tab.until(lambda: tab.text("about").startswith("fake"))
        assert tab.text("unlock") == "" and tab.text("trouble") == ""
        ask(tab, "hello world")
        tab.until(lambda: has_ended(tab))
        assert all("401" in error for error in tab.errors), tab.errors


RECENT = [
    EndedRequest(
        ended_s=1e9 + number,
        prompt_tokens=10 * prompt,
        cached_tokens=1200 if prompt == 300 else 0,
        new_tokens=9,
        ttft_s=ttft_s,
        tokens_per_s=per_s,
        how=how,
    )
    for number, (prompt, ttft_s, per_s, how) in enumerate(
        [
            (300, 12.5, 2.5, "stop"),
            (5, 0.5, 5.0, "length"),
            (7, None, None, "cancelled"),
            (2, 0.25, None, "length"),
            (9, 1.0, 4.0, "stop"),
        ]
    )
]


def test_the_state_has_version_policy_and_partition_and_no_paths() -> None:
    policy = {"name": "snapkv", "budget": 0.25, "positions": "original"}
    run = ServeRun(
        policy=policy, cache=CacheOptions(bits=4), partition=PartitionOptions(name="ratios", ratios=[0.6, 0.4])
    )
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert setup_json(run) == {
        "version": version,
        "policy": {"name": "snapkv", "options": {"budget": 0.25}, "bits": 4},
        "partition": {"name": "ratios", "ratios": [0.6, 0.4]},
    }
    assert setup_json(ServeRun(policy=policy, prefill=PrefillOptions(name=PrefillName.single)))["partition"] is None
    own = ServeRun(policy={"name": "file", "path": "/srv/someone/own.py"})
    assert "someone" not in json.dumps(setup_json(own))
    with serving() as served:
        assert state_of(served)["version"] == version and state_of(served)["policy"]["name"] == "full"


def test_the_state_has_the_last_requests_with_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes from each event of a request to the next: arrival, start, and each step of its rows."""
    clock = itertools.count(100.0)
    monkeypatch.setattr("launch.server.answer.listener.time", SimpleNamespace(monotonic=lambda: next(clock)))
    with serving() as served:
        usage = post(served, TEXT, {"prompt": "hello world", "max_tokens": 6, "ignore_eos": True}).json()["usage"]
        post(served, TEXT, {"prompt": "hello world", "max_tokens": 6, "ignore_eos": True, "n": 2})
        post(served, TEXT, {"prompt": [5] * 7, "max_tokens": 1})
        with held(served.engine) as gate:
            with CLIENT.stream("POST", served.url + TEXT, json={"prompt": [5] * 9, "stream": True}):
                until(lambda: len(served.engine.batches) == 4)
            until(lambda: len(state_of(served)["recent"]) == 4)
            gate.set()
        assert post(served, TEXT, {"prompt": []}).status_code == 400  # is none of them
        found = state_of(served)["recent"]
    length = usage["prompt_tokens"]
    figures = ("prompt_tokens", "new_tokens", "ttft_s", "tokens_per_s", "how")
    assert [tuple(each[name] for name in figures) for each in found] == [
        (length, 6, 2.0, 1.0, "length"),
        (length, 12, 2.0, 2.0, "length"),
        (7, 1, 2.0, None, "length"),
        (9, 0, None, None, "cancelled"),
    ]
    assert [each["ended_s"] for each in found] == sorted(each["ended_s"] for each in found)


def test_as_many_requests_are_remembered_as_the_plot_has_room_for() -> None:
    with serving() as served:
        served.api.metrics.recent.extend(RECENT * 20)
        assert len(state_of(served)["recent"]) == MOST_RECENT


def test_the_plot_shows_the_requests_of_the_state(browser: Browser) -> None:
    with serving() as served:
        tab = browser.open(served.url)
        tab.until(lambda: tab.text("recent") == "None has ended yet.")
        assert tab.text("as-table") == ""
        served.api.metrics.recent.extend(RECENT)
        tab.until(lambda: tab.value("document.querySelectorAll('#plot rect').length") > 0)
        state = state_of(served)["recent"]
        for field, kind in (("ttft_s", "ttft"), ("tokens_per_s", "pace")):
            known = [each[field] for each in state if each[field] is not None]
            bars = tab.value(
                f"[...document.querySelectorAll('#plot .{kind}')]"
                ".map((bar) => [bar.x, bar.height].map((each) => each.baseVal.value))"
            )
            assert [height / max(each[1] for each in bars) for _, height in bars] == pytest.approx(
                [value / max(known) for value in known],
                abs=0.03,  # a bar is at least 1.5 of 56 pixels tall
            )
            assert [x for x, _ in bars] == sorted(x for x, _ in bars)
            assert len(bars) == len(known)
        assert tab.value("document.querySelectorAll('#plot .none').length") == 1
        label = tab.value("document.querySelector('#plot svg').getAttribute('aria-label')")
        # Medians of 0.25, 0.5, 1 and 12.5 s, and of 2.5, 4 and 5 tokens per second.
        assert label.replace("\xa0", " ") == "5 requests, the newest at the right; medians: TTFT 750 ms, 4 tokens per s"
        tab.value("document.querySelector('#as-table summary').focus()")
        tab.press("Enter")
        tab.until(lambda: "cancelled" in tab.text("as-table"))
        cells = tab.value(
            "[...document.querySelectorAll('#requests tbody tr')]"
            ".map((row) => [...row.cells].slice(1).map((cell) => cell.innerText.replaceAll('\\u00a0', ' ')))"
        )
        assert cells == [
            ["90", "9", "1.00 s", "4", "stop"],
            ["20", "9", "250 ms", "none", "length"],
            ["70", "9", "none", "none", "cancelled"],
            ["50", "9", "500 ms", "5", "length"],
            ["3,000 (1,200)", "9", "12.5 s", "2.5", "stop"],
        ]
        assert tab.errors == []


def test_control_and_enter_ask_from_the_keyboard_and_focus_stays(browser: Browser) -> None:
    with slowly_serving() as (served, gate):
        tab = browser.open(served.url)
        tab.value("document.getElementById('question').focus()")
        tab.press("Enter", control=True)  # without a question
        tab.type("hello world")
        tab.press("Enter", control=True)
        tab.until(lambda: tab.text("stage") == "Reading the prompt")
        assert len(served.engine.batches) == 1
        assert tab.value("document.activeElement.id") == "question"
        assert tab.value("document.getElementById('question').value") == "hello world"
        tab.press("Enter", control=True)  # while it is asked
        reached = []
        for _ in range(3):
            tab.press("Tab")
            reached.append(tab.value("document.activeElement.id"))
        assert reached == ["most", "send", "stop"]
        tab.press("Enter")
        tab.until(lambda: tab.text("stage") == "Stopped")
        assert tab.value("document.activeElement.id") == "stop", "a button that cannot be used keeps the focus"
        gate.set()
        until(lambda: served.scheduler.num_running == 0)
        assert len(served.engine.batches) == 1 and tab.errors == []


def test_errors_are_shown_in_words(browser: Browser) -> None:
    with serving() as served:
        tab = browser.open(served.url)
        tab.until(lambda: tab.text("about").startswith("fake"))
        tab.value("document.getElementById('most').value = 1000000")
        ask(tab, "hello world")
        tab.until(lambda: tab.text("stage") == "Failed")
        body = {"messages": [{"role": "user", "content": "hello world"}], "max_tokens": 1000000}
        message = post(served, CHAT, body).json()["error"]["message"]
        assert tab.text("failure") == f"{message[0].upper()}{message[1:]}."
        tab.value("document.getElementById('most').value = 16; document.getElementById('question').value = ''")
        answers = {
            "new Response('<h1>', {status: 502, statusText: 'Bad'})": "The server answers with status 502 (Bad).",
            "new Response('data: {\"choices\": []}\\n\\n')": "The server has ended the answer before its end.",
            "Promise.reject(new TypeError('Failed to fetch'))": "The connection to the server is lost.",
        }
        for answer, words in answers.items():
            tab.value(f"window.fetch = async () => {answer}")
            ask(tab, "a")
            tab.until(lambda words=words: tab.text("failure") == words)  # type: ignore[misc]
            assert tab.text("stage") == "Failed"


def test_an_engine_that_fails_is_told_in_words(browser: Browser) -> None:
    with serving() as served:
        tab = browser.open(served.url)
        tab.until(lambda: tab.text("about").startswith("fake"))
        served.engine.error = ValueError("the cable is out")
        ask(tab, "hello world")
        tab.until(lambda: tab.text("failure") == "The server has failed: the cable is out.")
        assert tab.text("stage") == "Failed"


CUT_OFF = """[...document.querySelectorAll('body *')].filter((each) => each.checkVisibility())
    .filter((each) => !each.matches('textarea, .many thead, .many thead *, defs, defs *'))
    .filter((each) => innerWidth >= 390 || !each.closest('.wide'))
    .filter((each) => {
        const box = each.getBoundingClientRect(), svg = each.ownerSVGElement?.getBoundingClientRect();
        const panel = each.closest('section');
        const isBlock = !each.ownerSVGElement && getComputedStyle(each).display !== 'inline';
        return isBlock && each.scrollWidth > each.clientWidth + 1 || box.right > innerWidth + 0.5 || box.left < -0.5
            || panel && panel !== each && box.right > panel.getBoundingClientRect().right - 10
            || svg && (box.right > svg.right + 1 || box.left < svg.left - 1);
    })
    .map((each) => `${each.tagName} ${each.id} ${each.textContent.slice(0, 40)}`)"""
"""Elements of the page that do not fit into the window, or into what they are in. Some scroll in narrower windows."""


@pytest.mark.parametrize("width", [320, 390, 1200])
def test_nothing_is_cut_off(browser: Browser, width: int) -> None:
    with slowly_serving() as (served, gate):
        served.api.metrics.recent.extend(RECENT * 8)
        tab = browser.open(served.url)
        tab.look(width)
        tab.until(lambda: tab.text("as-table") != "")
        tab.value("document.getElementById('as-table').open = true")
        ask(tab, "hello world " * 50)
        tab.until(lambda: "1 of 3 layers" in tab.text("prefills") and "12.5 s" in tab.text("requests"))
        tab.until(lambda: tab.value("document.documentElement.scrollWidth") == width)
        assert tab.value(CUT_OFF) == []
        gate.set()
        tab.until(lambda: has_ended(tab) and "rank 0" in tab.text("memory"))
        tab.until(lambda: tab.value("document.querySelector('#skew svg')?.clientWidth ?? 0") > 0)
        assert tab.value(CUT_OFF) == []
        tab.value("document.getElementById('last').style.width = '5000px'")
        assert tab.value(CUT_OFF) != [], "what is cut off is found"


def luminance(colour: str) -> float:
    """As WCAG 2 defines it, of rgb(...)."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_the_primary_button_stand_out(browser: Browser, scheme: str) -> None:
    with slowly_serving() as (served, gate):
        gate.set()
        post(served, TEXT, {"prompt": "a b c", "max_tokens": 2})
        tab = browser.open(served.url)
        tab.look(1200, scheme)
        tab.until(lambda: "rank 0" in tab.text("memory"))

        def contrast(element: str, of: str, on: str, beside: str = "") -> float:
            colours = [
                tab.value(f"getComputedStyle(document.querySelector('{each}')).{what}")
                for each, what in ((element, of), (beside or element, on))
            ]
            dark, light = sorted(map(luminance, colours))
            return (light + 0.05) / (dark + 0.05)

        assert contrast("#send", "color", "backgroundColor") >= 4.5
        assert contrast("#send", "backgroundColor", "backgroundColor", "section") >= 3
        for name in ("#about", "#last", "#facts dt", "#memory th", ".note"):
            assert contrast(name, "color", "backgroundColor", "section") >= 4.5, name
        assert tab.value("getComputedStyle(document.body).backgroundColor") == (
            "rgb(244, 246, 248)" if scheme == "light" else "rgb(17, 22, 27)"
        )
        names = "[...document.querySelectorAll('input, textarea, progress, button')]"
        assert tab.value(f"{names}.every((each) => each.labels.length || each.textContent || each.ariaLabel)")
