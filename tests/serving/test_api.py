"""The API over a real socket, with an engine that makes up its tokens: what it takes, refuses, limits and cancels."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from openai import APIStatusError, OpenAI

from launch.server.http import HTTPServer
from launch.server.key_file import KeyFile
from launch.server.keys import Keys
from launch.server.options import ServeOptions
from launch.server.request.reader import NOT_SUPPORTED
from runahead.failures import PeerFailure
from runahead.serving.limits import QueueLimits
from tests.examples import examples
from tests.serving.fakes import POSITIONS, TOOLS_TEMPLATE, FakeEngine, Served, chat_tokenizer, held, serving
from tests.waiting import until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KEY = "a-key-of-this-test-only"
CLIENT = httpx2.Client(timeout=30, trust_env=False)
HELLO = {"messages": [{"role": "user", "content": "hello world"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
LEFT_OUT = object()
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def calling(arguments: Any = LEFT_OUT, *, name: Any = "f", **call: Any) -> dict[str, Any]:
    """A message of the assistant that calls a tool. What is `LEFT_OUT` is not in it."""
    function = {"name": name, "arguments": arguments}
    function = {key: value for key, value in function.items() if value is not LEFT_OUT}
    said = {key: value for key, value in (CALL | {"function": function} | call).items() if value is not LEFT_OUT}
    return {"role": "assistant", "content": None, "tool_calls": [said]}


def tool_of(parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool with these arguments."""
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def schema(inner: dict[str, Any] | None) -> dict[str, Any]:
    """A response format."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": inner}}


@pytest.fixture(scope="module")
def served():
    with serving(max_body_bytes=200_000) as running:
        yield running


def post(served: Served, path: str, body: Any, **how: Any) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | how.pop("headers", {})
    return CLIENT.post(served.url + path, content=content, headers=headers, **how)


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """The error of a response, which must have OpenAI's shape and no traceback."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text and "\n" not in body["error"]["message"]
    return body["error"]


def events_of(response: httpx2.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_official_client_gets_whole_answers_and_streams(served):
    client = OpenAI(base_url=served.url + "/v1", api_key="none")
    asked = {"model": "fake", "messages": HELLO["messages"], "max_tokens": 5}
    whole = client.chat.completions.create(**asked, n=2)
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    assert whole.usage.completion_tokens == 10
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens
        for chunk in client.chat.completions.create(**asked, stream=True, stream_options=options)
    ]
    assert counts == sorted(counts) and len(set(counts)) > 1 and counts[-2:] == [5, 5]
    [model] = client.models.list()
    assert (model.id, model.to_dict()["adapters"]) == ("fake", ["poems"])
    by_value = client.chat.completions.create(**(asked | {"model": "smollm2"}))
    assert (by_value.model, by_value.choices[0].message) == ("fake", whole.choices[0].message)
    with pytest.raises(APIStatusError) as refused:
        client.chat.completions.create(**asked, reasoning_effort="high")
    assert (refused.value.status_code, refused.value.body["param"]) == (400, "reasoning_effort")


def test_a_stream_says_what_the_whole_answer_says(served):
    body = {"prompt": ["größer, naïve", "hello world"], "max_tokens": 40}
    whole = post(served, TEXT, body).json()
    events = events_of(post(served, TEXT, body | {"stream": True}))
    for choice in whole["choices"]:
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"] == "length"


def test_a_stop_string_ends_a_row_and_is_not_part_of_it(served):
    text = post(served, TEXT, {"prompt": "hello world", "max_tokens": 9}).json()["choices"][0]["text"]
    stopped = post(served, TEXT, {"prompt": "hello world", "max_tokens": 9, "stop": text[2:4]}).json()
    assert stopped["choices"][0]["text"] == text[: text.index(text[2:4])]
    assert stopped["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        (HELLO | {"temperature": "hot"}, "temperature"),
        (HELLO | {"temperature": True}, "temperature"),
        (HELLO | {"temperature": -1}, "temperature"),
        (HELLO | {"top_p": 0}, "top_p"),
        (HELLO | {"top_k": 1.5}, "top_k"),
        (HELLO | {"repetition_penalty": 0}, "repetition_penalty"),
        (HELLO | {"n": 0}, "n"),
        (HELLO | {"n": 9}, "n"),
        (HELLO | {"max_tokens": 0}, "max_tokens"),
        (HELLO | {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        (HELLO | {"max_tokens": POSITIONS + 1}, "max_tokens"),
        (HELLO | {"max_completion_tokens": POSITIONS + 1}, "max_completion_tokens"),
        (HELLO | {"seed": 2**63}, "seed"),
        (HELLO | {"stop": ["x"] * 17}, "stop"),
        (HELLO | {"stop": [""]}, "stop"),
        (HELLO | {"stop": 3}, "stop"),
        (HELLO | {"stream": 1}, "stream"),
        (HELLO | {"stream_options": {}}, "stream_options"),
        (
            HELLO | {"stream": True, "stream_options": {"continuous_usage_stats": 1}},
            "stream_options.continuous_usage_stats",
        ),
        (HELLO | {"logprobs": 1}, "logprobs"),
        (HELLO | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (HELLO | {"top_logprobs": 2}, "top_logprobs"),
        (HELLO | {"min_p": 1.5}, "min_p"),
        (HELLO | {"presence_penalty": -2.1}, "presence_penalty"),
        (HELLO | {"frequency_penalty": False}, "frequency_penalty"),
        (HELLO | {"logit_bias": [5]}, "logit_bias"),
        (HELLO | {"logit_bias": {"a": 1}}, "logit_bias"),
        (HELLO | {"logit_bias": {"-1": 1}}, "logit_bias"),
        (HELLO | {"logit_bias": {"5": 101}}, "logit_bias"),
        (HELLO | {"logit_bias": {"5": True}}, "logit_bias"),
        (HELLO | {"logit_bias": {"999999": 1}}, "logit_bias"),
        (HELLO | {"logit_bias": {str(token): 1 for token in range(2000)}}, "logit_bias"),
        (HELLO | {"response_format": "json"}, "response_format"),
        (HELLO | {"response_format": {}}, "response_format.type"),
        (HELLO | {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (HELLO | {"response_format": schema(None)}, "response_format.json_schema"),
        (HELLO | {"response_format": schema({"type": "robot"})}, "response_format"),
        (HELLO | {"response_format": schema({"type": "object", "not": {}})}, "response_format"),
        (HELLO | {"response_format": schema({"enum": ["x" * 120_000]})}, "response_format.json_schema.schema"),
        (HELLO | {"response_format": {"type": "json_object"}, "ignore_eos": True}, "response_format"),
        (HELLO | {"tools": {}}, "tools"),
        (HELLO | {"tools": [{"type": "function"}]}, "tools[0]"),
        (HELLO | {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (HELLO | {"tools": [{"type": "function", "function": {"name": "f" * 257}}]}, "tools[0].function.name"),
        (HELLO | {"tools": [tool_of([])], "tool_choice": "required"}, "tools[0].function.parameters"),
        (HELLO | {"tools": [TOOL] * 129}, "tools"),
        (HELLO | {"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
        (HELLO | {"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        (HELLO | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        (HELLO | {"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice"),
        (HELLO | {"tools": [TOOL], "tool_choice": "required", "ignore_eos": True}, "tools"),
        (HELLO | {"tools": [tool_of({"enum": ["x" * 120_000]})], "tool_choice": "required"}, "tools"),
        (HELLO | {"tools": [tool_of({"type": "robot"})], "tool_choice": "required"}, "tools"),
        (HELLO | {"tools": [tool_of({"type": ["null", "string"]})], "tool_choice": "required"}, "tools"),
        (HELLO | {"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        (HELLO | {"tool_choice": "required"}, "tool_choice"),
        (HELLO | {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        (HELLO | {"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        (HELLO | {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        (HELLO | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (HELLO | {"chat_template_kwargs": {"\ud800": 1}}, "chat_template_kwargs"),
        (HELLO | {"chat_template_kwargs": {"a": {"b": ["\ud800"]}}}, "chat_template_kwargs"),
        (HELLO | {"reasoning_effort": "some"}, "reasoning_effort"),
        (HELLO | {"reasoning_effort": "high"}, "reasoning_effort"),
        ({"messages": [{"role": "assistant", "content": "x", "reasoning": 1}]}, "messages[0].reasoning_content"),
        ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}, "messages[0].reasoning_content"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 1}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "tool", "content": {"ship": "x"}}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [calling(name=None)]}, "messages[0].tool_calls[0].function.name"),
        ({"messages": [calling("{}", type="custom")]}, "messages[0].tool_calls[0]"),
        ({"messages": [calling("{")]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [calling("[1]")]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [calling(["x"])]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [calling("[" * 5000)]}, "messages[0].tool_calls[0].function.arguments"),
        (HELLO | {"model": "gpt"}, "model"),
    ],
)
def test_a_wrong_field_is_named(served, body, param):
    num_batches = len(served.engine.batches)
    response = post(served, CHAT, body)
    assert response.status_code == (404 if param == "model" else 400)
    assert error_of(response)["param"] == param
    assert len(served.engine.batches) == num_batches


def test_fields_that_ask_for_nothing_are_taken(served):
    idle = {name: values[-1] for name, values in NOT_SUPPORTED.items()} | {"user": "me"}
    idle |= {
        "store": True,
        "verbosity": "low",
        "presence_penalty": 0.0,
        "logprobs": False,
        "logit_bias": {},
        "response_format": {"type": "text"},
    }
    assert post(served, CHAT, HELLO | idle).status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"no json", 400),
        (b"[1]", 400),
        (b"\xff\xfe{}", 400),
        (b'{"n": NaN, "prompt": "x"}', 400),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 1000 + b"1" + b"}" * 1000, 400),
        (b'{"prompt": "x", "stop": [' + b",".join([b'"x"'] * 40_000) + b"]}", 400),
        (b'{"prompt": "' + b"x" * 250_000 + b'"}', 413),
    ],
    ids=["empty", "text", "list", "bytes", "nan", "digits", "brackets", "nested", "stops", "large"],
)
def test_a_body_that_is_no_request_is_refused(served, body, status):
    response = post(served, TEXT, body)
    assert response.status_code == status
    error_of(response)


def test_a_body_without_a_declared_length_is_limited_too(served):
    response = CLIENT.post(
        served.url + TEXT, content=(b"x" * 10_000 for _ in range(40)), headers={"content-type": "application/json"}
    )
    assert response.status_code == 413
    error_of(response)


def test_what_is_no_api_call_is_refused_in_the_same_shape(served):
    assert error_of(CLIENT.get(served.url + "/nope"))["type"] == "invalid_request_error"
    assert CLIENT.get(served.url + CHAT).status_code == 405
    assert "Content-Type" in error_of(post(served, CHAT, HELLO, headers={"content-type": "text/plain"}))["message"]
    for raw in (b"\x00\x01garbage\r\n\r\n", b"GET / HTTP/1.1\r\nA: " + b"x" * 40_000 + b"\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
            connection.sendall(raw)
            head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
        assert b" 400 " in head.split(b"\r\n")[0] and set(json.loads(body)) == {"error"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [
        "n",
        "seed",
        "stop",
        "stream",
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "prompt",
        "messages",
        "model",
        "user",
        "stream_options",
        "logit_bias",
        "repetition_penalty",
        "max_completion_tokens",
        "response_format",
        "logprobs",
        "top_logprobs",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "chat_template_kwargs",
        "reasoning_effort",
        "ignore_eos",
        "x",
    ]
)


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(is_chat=st.booleans(), changes=st.dictionaries(FIELDS, JSON, max_size=3))
def test_any_body_gets_an_answer_or_an_error_in_openais_shape(served, is_chat, changes):
    body = ({"messages": HELLO["messages"]} if is_chat else {"prompt": "hello"}) | {"max_tokens": 2} | changes
    response = post(served, CHAT if is_chat else TEXT, body)
    assert response.status_code in (200, 400, 404)
    if response.status_code == 200:
        assert "choices" in response.text
    else:
        error_of(response)


FULL: dict[str, Any] = {
    "messages": [
        *HELLO["messages"],
        calling('{"ship": ["Terror"]}'),
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "response_format": schema({"type": "object", "properties": {"a": {"enum": [1, None]}}, "required": ["a"]}),
    "logit_bias": {"5": -100, "6": 0.5},
    "logprobs": True,
    "top_logprobs": 2,
    "min_p": 0.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 2,
    "max_tokens": 2,
}
"""A request with all that may nest."""


@st.composite
def changed_somewhere(draw: st.DrawFn) -> dict[str, Any]:
    """The full request, but for one value in it."""
    body = deepcopy(FULL)
    place: Any = body
    while True:
        key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or draw(st.integers(0, 3)) == 0:
            place[key] = draw(JSON)
            return body
        place = place[key]


@pytest.fixture(scope="module")
def with_tools():
    with serving(tokenizer=chat_tokenizer(TOOLS_TEMPLATE)) as running:
        yield running


SAID = {"role": "assistant", "content": "aye"}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "x"}


@pytest.mark.parametrize(
    ("history", "as_if"),
    [
        ([calling("")], [calling("{}")]),
        ([calling(" ")], [calling("{}")]),
        ([calling("null")], [calling("{}")]),
        ([calling(None)], [calling("{}")]),
        ([calling()], [calling("{}")]),
        ([calling({"ship": "Terror"})], [calling('{"ship": "Terror"}')]),
        ([calling("{}", type=LEFT_OUT)], [calling("{}")]),
        ([calling("{}", type=None, index=0)], [calling("{}")]),
        ([calling("{}", id=None)], [calling("{}", id="")]),
        ([calling("{}", id=LEFT_OUT)], [calling("{}", id="")]),
        ([calling("{}") | {"content": []}], [calling("{}")]),
        ([calling("{}") | {"content": ""}], [calling("{}")]),
        ([SAID | {"content": None}], [SAID | {"content": ""}]),
        ([{"role": "assistant"}], [SAID | {"content": ""}]),
        ([SAID | {"content": None, "refusal": "never"}], [SAID | {"content": "never"}]),
        ([SAID | {"content": [{"type": "refusal", "refusal": "never"}]}], [SAID | {"content": "never"}]),
        ([SAID | {"content": [{"type": "output_text", "text": "aye"}]}], [SAID]),
        (
            [SAID | {"tool_calls": None, "refusal": None, "annotations": [], "audio": None, "function_call": None}],
            [SAID],
        ),
        (
            [RESULT | {"content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}],
            [RESULT | {"content": "xy"}],
        ),
        ([RESULT | {"content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}], [RESULT]),
        ([RESULT | {"content": None}], [RESULT | {"content": ""}]),
        ([RESULT | {"content": []}], [RESULT | {"content": ""}]),
        ([{"role": "tool", "tool_call_id": "1"}], [RESULT | {"content": ""}]),
        ([{"role": "tool", "content": "x"}], [RESULT | {"tool_call_id": ""}]),
        ([RESULT | {"name": "f"}], [RESULT]),
    ],
)
def test_a_history_that_other_servers_take_is_the_prompt_that_it_means(with_tools, history, as_if):
    asked = {"max_tokens": 1, "tools": [TOOL]}
    for messages in (history, as_if):
        body = asked | {"messages": [*HELLO["messages"], *messages, *HELLO["messages"]]}
        response = post(with_tools, CHAT, body)
        assert response.status_code == 200, response.text
    one, other = with_tools.engine.batches[-2:]
    assert one == other


def test_a_tool_without_a_type_is_a_function(with_tools):
    for tool in (TOOL, {"function": TOOL["function"], "type": None}, {"function": TOOL["function"]}):
        assert post(with_tools, CHAT, HELLO | {"tools": [tool]}).status_code == 200
    assert len({str(batch) for batch in with_tools.engine.batches[-2:]}) == 1


def test_a_request_with_all_fields_is_answered(with_tools):
    [choice] = post(with_tools, CHAT, FULL).json()["choices"]
    assert [len(each["top_logprobs"]) for each in choice["logprobs"]["content"]] == [2, 2]


@examples(80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=changed_somewhere())
def test_any_value_in_a_field_gets_an_answer_or_an_error_in_openais_shape(with_tools, body):
    response = post(with_tools, CHAT, body)
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        error_of(response)


def test_keys_are_asked_for(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# ours\n{KEY}\n\n{KEY}2\n")
    path.chmod(0o600)
    KeyFile(str(path), keys := Keys())
    with serving(keys=keys) as served:
        for header in (None, "Bearer wrong", KEY, "Bearer", "Bearer \xff"):
            headers = {} if header is None else {"authorization": header.encode("latin-1")}
            response = post(served, CHAT, HELLO, headers=headers)
            assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
        for key in (KEY, KEY + "2"):
            assert post(served, CHAT, HELLO, headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert CLIENT.get(served.url + "/health").status_code == 200
        assert CLIENT.get(served.url + "/metrics").status_code == 401


@pytest.mark.parametrize("content", ["", "# none\n", "short\n"])
def test_a_file_without_good_keys_is_refused(tmp_path, content):
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(ValueError, match="serve.api_key_file="):
        KeyFile(str(path), Keys())


def test_a_full_queue_is_a_429_that_says_when_to_come_back():
    with serving(limits=QueueLimits(batch=1, max_waiting=1, max_per_client=9)) as served:
        gate = threading.Event()
        served.engine.when_prefilling = gate.wait
        served.scheduler.estimate.alone.learn([100], 100.0)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(post, served, TEXT, {"prompt": "a b c", "max_tokens": 2})
            until(lambda: served.scheduler.num_running == 1)
            second = pool.submit(post, served, TEXT, {"prompt": "a b c", "max_tokens": 2})
            until(lambda: served.scheduler.num_waiting == 1)
            refused = post(served, TEXT, {"prompt": "a b c", "max_tokens": 2})
            assert refused.status_code == 429 and error_of(refused)["code"] == "rate_limit_exceeded"
            # Until two prompts of a second per token each have their first tokens, of which one has begun.
            num_tokens = len(served.engine.batches[0][0])
            assert num_tokens <= int(refused.headers["retry-after"]) <= 2 * num_tokens + 1
            gate.set()
            assert first.result().status_code == second.result().status_code == 200


def test_a_client_may_have_so_many_requests_and_no_more():
    with serving(limits=QueueLimits(batch=1, max_per_client=1)) as served:
        gate = threading.Event()
        served.engine.when_prefilling = gate.wait
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(post, served, TEXT, {"prompt": "a b c"})
            until(lambda: served.scheduler.num_running == 1)
            assert post(served, TEXT, {"prompt": "a b c"}).status_code == 429
            gate.set()
            assert first.result().status_code == 200


def test_a_late_first_token_is_refused_where_that_is_asked_for():
    with serving(limits=QueueLimits(max_ttft_s=5.0)) as served:
        served.scheduler.estimate.alone.learn([10], 100.0)
        assert post(served, TEXT, {"prompt": "the letters of the captain"}).status_code == 429


def test_requests_of_similar_length_that_wait_share_a_batch():
    with serving(limits=QueueLimits(batch=4, batch_tokens=60)) as served:
        gate = threading.Event()
        served.engine.when_prefilling = gate.wait
        ids = {"first": [5], "a": [5] * 10, "b": [6] * 9, "long": [7] * 40, "c": [8] * 8}
        with ThreadPoolExecutor(5) as pool:
            made = []
            for number, prompt in enumerate(ids.values()):
                made.append(pool.submit(post, served, TEXT, {"prompt": prompt, "max_tokens": 2 + number}))
                until(lambda: served.scheduler.num_running + served.scheduler.num_waiting == len(made))
            gate.set()
            assert [each.result().json()["usage"]["completion_tokens"] for each in made] == [2, 3, 4, 5, 6]
        assert served.engine.batches == [[ids["first"]], [ids["a"], ids["b"], ids["c"]], [ids["long"]]]


def test_requests_that_come_later_are_decoded_with_the_others():
    with serving(batch=3) as served:
        served.engine.step_s = 0.005
        with connection_of(served, {"prompt": "a", "max_tokens": 4000, "stream": True}) as first:
            read_until(first, b"data: ")
            for _ in range(3):  # each is answered while the first goes on
                answer = post(served, TEXT, {"prompt": "hello world", "max_tokens": 5, "n": 2}).json()
                assert answer["usage"]["completion_tokens"] == 10
            assert served.scheduler.num_running == 1
        until(lambda: served.scheduler.num_running == 0)
        assert [len(batch) for batch in served.engine.batches] == [1, 1, 1, 1]  # two answers share a prompt


def test_a_request_waits_for_room_and_no_later_one_takes_it():
    limits = QueueLimits(batch=8, max_tokens=1000)
    with serving(limits=limits) as served, ThreadPoolExecutor(3) as pool, held(served.engine) as gate:
        made = {}
        for number, new in enumerate((300, 900, 5)):
            made[new] = pool.submit(post, served, TEXT, {"prompt": [number + 5] * 9, "max_tokens": new})
            until(lambda: served.scheduler.num_running + served.scheduler.num_waiting == number + 1)  # noqa: B023
        gate.set()
        for new, each in made.items():
            assert each.result().json()["usage"]["completion_tokens"] == new
        assert [prompts[0][0] for prompts in served.engine.batches] == [5, 6, 7]


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_while_it_waits_is_forgotten(streams):
    with serving(batch=1, ping_s=0.05) as served:
        gate = threading.Event()
        served.engine.when_prefilling = gate.wait
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(post, served, TEXT, {"prompt": "a b c", "max_tokens": 2})
            until(lambda: served.scheduler.num_running == 1)
            with connection_of(served, {"prompt": "a", "stream": streams}) as second:
                until(lambda: served.scheduler.num_waiting == 1)
                if streams:
                    read_until(second, b": waiting, 0 requests before it")
            until(lambda: served.scheduler.num_waiting == 0)
            gate.set()
            assert first.result().status_code == 200
        assert len(served.engine.batches) == 1


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("in_prefill", [False, True])
def test_a_client_that_goes_while_it_is_answered_ends_its_rows(streams, in_prefill):
    with serving(ping_s=0.05) as served:
        gate = threading.Event()
        served.engine.when_prefilling, served.engine.step_s = gate.wait, 0.005
        with connection_of(served, {"prompt": "a", "max_tokens": 4000, "stream": streams}) as connection:
            until(lambda: served.scheduler.num_running == 1)
            if streams:
                read_until(connection, b": prefill")
            if not in_prefill:
                gate.set()
                until(lambda: served.engine.steps and served.engine.steps[-1] > 3)
        if in_prefill:
            time.sleep(0.1)
            gate.set()
        until(lambda: served.scheduler.num_running == 0)
        assert served.engine.steps[-1] < 1000
        assert post(served, TEXT, {"prompt": "a", "max_tokens": 3}).status_code == 200


def test_a_slow_reader_is_given_up_and_holds_up_nobody():
    body = {"prompt": "a" * 50, "max_tokens": 3000, "stream": True, "n": 8}
    with serving(write_timeout_s=0.5) as served, connection_of(served, body, receive_bytes=4096):
        served.engine.step_s = 0.003  # an event per token: what is slower is sent in fewer
        until(lambda: served.scheduler.num_running == 1)
        assert post(served, TEXT, {"prompt": "hello world", "max_tokens": 5}).status_code == 200
        until(lambda: 'ended="cancelled"} 1' in CLIENT.get(served.url + "/metrics").text)
        assert served.engine.steps[0] < 3000


def test_a_header_that_does_not_come_ends_its_connection():
    with serving(read_timeout_s=0.3) as served:
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
            connection.sendall(b"GET /health HT")
            assert ended(connection)
        body = b'{"prompt": "x"}'
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
            connection.sendall(request_of(body)[:-5])
            assert b" 408 " in connection.recv(100)


def test_more_connections_than_allowed_are_refused_and_the_others_served():
    with serving(max_connections=20) as served:
        opened = [socket.create_connection(("127.0.0.1", served.port), timeout=10) for _ in range(40)]
        try:
            with opened[0] as first:
                first.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                assert first.recv(100).startswith(b"HTTP/1.1 200")
            assert all(b" 503 " in each.recv(100) for each in opened[20:-2])
        finally:
            for connection in opened:
                connection.close()
        until(lambda: CLIENT.get(served.url + "/health").status_code == 200)


def test_a_drained_server_finishes_what_it_took_and_refuses_the_rest():
    with serving(batch=1) as served:
        gate = threading.Event()
        served.engine.when_prefilling = gate.wait
        with ThreadPoolExecutor(2) as pool:
            made = [pool.submit(post, served, TEXT, {"prompt": "a b c", "max_tokens": 2}) for _ in range(2)]
            until(lambda: served.scheduler.num_running + served.scheduler.num_waiting == 2)
            served.scheduler.drain()
            assert post(served, TEXT, {"prompt": "a b c"}).status_code == 503
            assert CLIENT.get(served.url + "/ready").status_code == 503
            gate.set()
            assert [each.result().status_code for each in made] == [200, 200]
        served.thread.join(10)
        assert served.ended is None and not served.thread.is_alive()


@pytest.mark.parametrize("streams", [False, True])
def test_a_failure_is_told_to_all_who_wait(streams):
    with serving(batch=1) as served:
        gate = threading.Event()
        served.engine.when_prefilling = gate.wait
        with ThreadPoolExecutor(2) as pool:
            body = {"prompt": "a b c", "stream": streams}
            made = [pool.submit(post, served, TEXT, body) for _ in range(2)]
            until(lambda: served.scheduler.num_running + served.scheduler.num_waiting == 2)
            served.engine.error = PeerFailure("rank 1 has ended\nTraceback")
            gate.set()
            for each in made:
                text = each.result().text
                assert "rank 1 has ended" in text and "Traceback" not in text and "[DONE]" not in text
                assert each.result().status_code == (200 if streams else 503)
        until(lambda: served.ended is served.engine.error)
        assert post(served, TEXT, {"prompt": "a b c"}).status_code == 503


def test_a_server_whose_http_thread_ends_fails(monkeypatch):
    async def fail(self: HTTPServer) -> None:
        raise OSError("address in use")

    monkeypatch.setattr(HTTPServer, "_serve", fail)
    served = Served(FakeEngine(), ServeOptions(log=False, port=0), QueueLimits(), Keys(), chat_tokenizer(), 0)
    served.thread.start()
    served.http.start()
    served.thread.join(20)
    assert isinstance(served.ended, OSError)
    assert str(served.ended) == "the HTTP server has ended: OSError: address in use"


def test_metrics_count_what_was_served():
    with serving() as served:
        post(served, TEXT, {"prompt": [5, 6, 7], "max_tokens": 4})
        lines = dict(line.rsplit(" ", 1) for line in CLIENT.get(served.url + "/metrics").text.splitlines())
        assert lines["runahead:prompt_tokens_total"] == "3"
        assert lines["runahead:generation_tokens_total"] == "4"
        assert lines['runahead:requests_total{ended="length"}'] == "1"
        assert lines["runahead:time_to_first_token_seconds_count"] == "1"
        assert lines["runahead:inter_token_latency_seconds_count"] == "3"


def request_of(body: bytes, headers: dict[str, str] | None = None) -> bytes:
    lines = [f"POST {TEXT} HTTP/1.1", "host: localhost", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


def connection_of(
    served: Served, body: dict[str, Any], receive_bytes: int | None = None, headers: dict[str, str] | None = None
) -> socket.socket:
    """A connection on which a request was sent."""
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", served.port))
    connection.sendall(request_of(json.dumps(body).encode(), headers))
    return connection


def read_until(connection: socket.socket, wanted: bytes) -> None:
    read = b""
    while wanted not in read:
        part = connection.recv(4096)
        assert part, read
        read += part


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True
