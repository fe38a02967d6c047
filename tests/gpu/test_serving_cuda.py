"""A server on a GPU: rows that join and leave answer as alone, prefixes are found, and steps wait for tokens only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from runahead import Engine, GenerationOptions
from runahead.ranks.accelerator import accelerator_for
from runahead.reuse.prefix_tree import PrefixTree
from runahead.serving.executor import Executor
from runahead.serving.items import Inbox, PrefillItem, Tokens
from runahead.serving.limits import QueueLimits
from tests.gpu.models import CUDA, alone, ids, model
from tests.serving.fakes import Served, chat_tokenizer, serving
from tests.waiting import until

NUM_NEW = 8


@pytest.fixture(scope="module")
def engine() -> Engine:
    ranks = alone()
    made = model(ranks.device, vocab_size=len(chat_tokenizer()), initializer_range=0.2, num_hidden_layers=3)
    made.tokenizer = chat_tokenizer()  # finds stop strings
    return Engine(made, ranks, tree=PrefixTree(1 << 30))


@pytest.fixture(scope="module")
def served(engine: Engine) -> Iterator[Served]:
    with serving(engine=engine, tokenizer=chat_tokenizer()) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=served.url, timeout=120, trust_env=False) as made:
        yield made


def asked(prompt: list[int], **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": NUM_NEW, "ignore_eos": True, "temperature": 0} | fields


def said(engine: Engine, prompt: list[int], num_new: int = NUM_NEW) -> str:
    """The text that one GPU makes without a server and without prefixes."""
    options = GenerationOptions(max_new_tokens=num_new, ignore_eos=True)
    [generation] = Engine(engine.model, engine.ranks).generate([prompt], options).generations
    return chat_tokenizer().decode(generation.new_token_ids, skip_special_tokens=True)


def test_two_requests_at_once_get_the_answers_that_they_get_alone(engine: Engine, client: httpx2.Client) -> None:
    prompts = [ids(90, seed=1), ids(40, seed=2)]
    expected = [said(engine, each) for each in prompts]
    with ThreadPoolExecutor() as threads:
        answers = list(threads.map(lambda each: client.post("/v1/completions", json=asked(each)).json(), prompts))
    assert [each["choices"][0]["text"] for each in answers] == expected


def test_a_request_that_is_given_up_in_the_middle_leaves_the_others_alone(
    engine: Engine, served: Served, client: httpx2.Client
) -> None:
    staying, leaving = ids(60, seed=3), ids(70, seed=4)
    expected = said(engine, staying, 20)
    with ThreadPoolExecutor() as threads:
        stream = client.stream("POST", "/v1/completions", json=asked(leaving, max_tokens=2000, stream=True))
        with stream as response:
            events = (line for line in response.iter_lines() if line.startswith("data: {"))
            next(events)
            answer = threads.submit(client.post, "/v1/completions", json=asked(staying, max_tokens=20))
            for _ in range(3):
                assert json.loads(next(events)[6:])["choices"][0]["finish_reason"] is None
    assert answer.result().json()["choices"][0]["text"] == expected
    until(lambda: metric(client, "runahead:num_requests_running") == 0)


def test_a_prefix_is_found_and_changes_no_answer(engine: Engine, client: httpx2.Client) -> None:
    document = ids(120, seed=5)
    for question, expected_cached in ((ids(9, seed=6), 0), (ids(5, seed=7), len(document))):
        answer = client.post("/v1/completions", json=asked(document + question)).json()
        assert answer["choices"][0]["text"] == said(engine, document + question)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == expected_cached


def test_a_stop_string_ends_one_of_two_rows(engine: Engine, client: httpx2.Client) -> None:
    first, second = ids(50, seed=9), ids(30, seed=10)
    whole = said(engine, first, 30)
    stop = next(letter for letter in whole[5:] if letter.isascii() and letter.isalnum())
    with ThreadPoolExecutor() as threads:
        other = threads.submit(client.post, "/v1/completions", json=asked(second, max_tokens=20))
        answer = client.post("/v1/completions", json=asked(first, max_tokens=30, stop=[stop])).json()
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop" and choice["text"] == whole[: whole.index(stop)]
    assert other.result().json()["choices"][0]["text"] == said(engine, second, 20)


def metric(client: httpx2.Client, name: str) -> float:
    lines = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines())
    return float(lines[name])


def test_a_step_of_joined_rows_waits_for_its_tokens_alone(engine: Engine) -> None:
    """Three rows of different lengths, of which one joined later."""
    gpu = accelerator_for(CUDA)
    assert gpu is not None
    tokens: dict[tuple[int, int], list[int]] = {}

    def hear(report: object) -> None:
        if isinstance(report, Tokens):
            for row, token in report.tokens.items():
                tokens.setdefault(row, []).append(token)

    executor = Executor(Engine(engine.model, engine.ranks), Inbox(), hear, QueueLimits(itl_s=1e3))
    prompts = [ids(40, seed=11), ids(25, seed=12), ids(60, seed=13)]
    items = [prompts[:2], prompts[2:]]
    for number, of_item in enumerate(items):
        options = [GenerationOptions(max_new_tokens=NUM_NEW, ignore_eos=True)] * len(of_item)
        boundaries = (0, max(map(len, of_item)))
        executor.carry_out(PrefillItem(number=number, prompts=of_item, options=options, boundaries=boundaries))
        executor._step()  # the first makes what later ones use
    with gpu.noting_waits() as waits:
        executor._step()
    assert len(waits) == 1
    executor.decode_all()
    texts = [chat_tokenizer().decode(each, skip_special_tokens=True) for _, each in sorted(tokens.items())]
    assert texts == [said(engine, each) for each in prompts]
