"""Anthropic's Messages API: what its reference says, by hand; a prompt is that of the chat that says the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from launch.server.answer.pieces import Kind, Piece
from launch.server.answer.usage import Usage
from launch.server.api import COUNTED
from launch.server.dialects.message_form import MessageForm
from launch.server.dialects.messages import Messages
from launch.server.keys import Keys
from runahead.failures import PeerFailure
from tests.serving.fakes import POSITIONS, TOOLS_TEMPLATE, FakeEngine, chat_tokenizer, saying, serving
from tests.serving.test_reasoning import SAID, THINKING
from tests.serving.test_responses import CALLING, FUNCTION, call_of, says

PATH = "/v1/messages"
CLIENT = httpx2.Client(timeout=30, trust_env=False)
ASKED: dict[str, Any] = {"model": "fake", "max_tokens": 200, "messages": [says("user", "the letters")]}
TOOL = {name: value for name, value in FUNCTION["function"].items() if name in ("name", "description")} | {  # type: ignore[attr-defined]
    "input_schema": {"type": "object", "properties": {"knots": {"type": "integer"}}}
}


def post(url: str, body: Any, path: str = PATH, **headers: str) -> httpx2.Response:
    return CLIENT.post(url + path, json=body, headers={"anthropic-version": "2023-06-01"} | headers)


def asked(client: OpenAI, body: Any, path: str = PATH) -> dict[str, Any]:
    """The answer to a body, from the server of a client."""
    response = post(str(client.base_url).removesuffix("/v1/"), body, path)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def streamed(client: OpenAI, body: Any) -> list[dict[str, Any]]:
    """Events of a stream, whose names are their types. All that was said in a block is one delta of its kind."""
    response = post(str(client.base_url).removesuffix("/v1/"), body | {"stream": True})
    events = list[dict[str, Any]]()
    for part in response.text.split("\n\n"):
        if not part or part.startswith(":"):
            continue
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        last = events[-1] if events else {}
        if (
            event["type"] == last.get("type") == "content_block_delta"
            and event["delta"]["type"] == last["delta"]["type"]
        ):
            [said] = event["delta"].keys() - {"type"}
            last["delta"][said] += event["delta"][said]
        else:
            events.append(event)
    return events


def block(index: int, begin: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    """Events of a block."""
    return [
        {"type": "content_block_start", "index": index, "content_block": begin},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def check_stream(events: list[dict[str, Any]], blocks: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    """Compare a stream with its blocks, and the answer that did not stream."""
    first, *middle, last, stop = events
    begun = {"content": [], "stop_reason": None, "stop_sequence": None}
    head = {name: whole[name] for name in ("type", "role", "model")}
    usage = whole["usage"] | {"output_tokens": first["message"]["usage"]["output_tokens"]}
    identity = {"id": first["message"]["id"], "usage": usage}
    assert first == {"type": "message_start", "message": head | begun | identity}
    assert middle == blocks
    reason = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert last == {"type": "message_delta", "delta": reason, "usage": whole["usage"]}
    assert stop == {"type": "message_stop"}


def test_a_text_whole_and_streamed() -> None:
    with saying("in the größer ice") as (client, engine):
        whole = asked(client, ASKED)
        num_prompt = len(engine.batches[-1][0])
        assert whole.pop("id").startswith("msg_")
        num_new = len(engine.tokenizer("in the größer ice", add_special_tokens=False)["input_ids"]) + 1
        assert whole == {
            "type": "message",
            "role": "assistant",
            "model": "fake",
            "content": [{"type": "text", "text": "in the größer ice"}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": num_prompt,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": num_new,
            },
        }
        delta = {"type": "text_delta", "text": "in the größer ice"}
        check_stream(streamed(client, ASKED), block(0, {"type": "text", "text": ""}, delta), whole)


def test_why_an_answer_has_ended() -> None:
    with saying("in the ice of it") as (client, _):
        for more, reason, sequence, text in (
            ({}, "end_turn", None, "in the ice of it"),
            ({"max_tokens": 1}, "max_tokens", None, None),
            ({"stop_sequences": ["x", " of"]}, "stop_sequence", " of", "in the ice"),
        ):
            answer = asked(client, ASKED | more)
            assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
            assert text is None or answer["content"] == [{"type": "text", "text": text}]


def test_a_call_of_a_tool_goes_out_and_its_result_comes_back() -> None:
    with saying(CALLING, tools="hermes") as (client, engine):
        body = ASKED | {"tools": [TOOL]}
        whole = asked(client, body)
        text, call = whole["content"]
        assert text == {"type": "text", "text": "I look."}
        assert call == {"type": "tool_use", "id": call["id"], "name": "Sail", "input": {"knots": 7}}
        assert whole["stop_reason"] == "tool_use"
        events = streamed(client, body)
        begun = events[4]["content_block"]
        blocks = [
            *block(0, {"type": "text", "text": ""}, {"type": "text_delta", "text": "I look."}),
            *block(
                1,
                {"type": "tool_use", "id": begun["id"], "name": "Sail", "input": {}},
                {"type": "input_json_delta", "partial_json": '{"knots": 7}'},
            ),
        ]
        check_stream(events, blocks, whole)
        given = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": "no ice"},
            {"type": "text", "text": "So?"},
        ]
        history = [*ASKED["messages"], says("assistant", whole["content"]), says("user", given)]
        asked(client, body | {"messages": history, "max_tokens": 1})
        function = {"name": "Sail", "arguments": '{"knots": 7}'}
        messages: list[Any] = [
            *ASKED["messages"],
            says("assistant", "I look.", tool_calls=[{"id": call["id"], "type": "function", "function": function}]),
            says("tool", "no ice", tool_call_id=call["id"]),
            says("user", "So?"),
        ]
        tools: list[Any] = [{"type": "function", "function": {"name": "Sail", "description": "Sails."}}]
        tools[0]["function"]["parameters"] = TOOL["input_schema"]
        client.chat.completions.create(model="fake", messages=messages, tools=tools, max_tokens=1)
        assert engine.batches[-1] == engine.batches[-2]


def test_reasoning_is_a_block_of_thinking_and_goes_back_to_the_template() -> None:
    with saying(SAID, THINKING) as (client, engine):
        whole = asked(client, ASKED)
        thinking = {"type": "thinking", "thinking": "So, so.", "signature": ""}
        assert whole["content"] == [thinking, {"type": "text", "text": "Yes."}]
        blocks = [
            *block(
                0,
                {"type": "thinking", "thinking": "", "signature": ""},
                {"type": "thinking_delta", "thinking": "So, so."},
                {"type": "signature_delta", "signature": ""},
            ),
            *block(1, {"type": "text", "text": ""}, {"type": "text_delta", "text": "Yes."}),
        ]
        check_stream(streamed(client, ASKED), blocks, whole)
        history = [*ASKED["messages"], says("assistant", whole["content"]), says("user", "So?")]
        asked(client, ASKED | {"messages": history, "thinking": {"type": "disabled"}})
        prompt = engine.tokenizer.decode(engine.batches[-1][0])
        assert "<think>So, so.</think> Yes." in prompt and prompt.endswith("<think>\n\n</think>\n\n")
        asked(client, ASKED | {"thinking": {"type": "enabled", "budget_tokens": 1024}})
        assert engine.tokenizer.decode(engine.batches[-1][0]).endswith("assistant:")


USED = {"type": "tool_use", "id": "1", "name": "f", "input": {}}


def result(content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "1", "content": content} | more


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        ({"messages": [says("user", [text("a"), text("b")])]}, [says("user", "ab")]),
        ({"system": "s", "messages": [says("user", "a")]}, [says("system", "s"), says("user", "a")]),
        (
            {"system": [text("s"), text("t")], "messages": [says("user", "a")]},
            [says("system", "st"), says("user", "a")],
        ),
        ({"messages": [says("user", "a"), says("assistant", "b")]}, [says("user", "a"), says("assistant", "b")]),
        ({"messages": [says("user", "a"), says("user", "b")]}, [says("user", "a"), says("user", "b")]),
        (
            {"messages": [says("user", "a"), says("assistant", [USED]), says("user", [result([text("z")])])]},
            [says("user", "a"), says("assistant", "", tool_calls=[call_of("1")]), says("tool", "z", tool_call_id="1")],
        ),
        (
            {
                "messages": [
                    says("user", "a"),
                    says("assistant", [text("b"), USED, USED]),
                    says("user", [result("z", is_error=True), result(), text("c"), text("d")]),
                ]
            },
            [
                says("user", "a"),
                says("assistant", "b", tool_calls=[call_of("1"), call_of("1")]),
                says("tool", "Error: z", tool_call_id="1"),
                says("tool", "", tool_call_id="1"),
                says("user", "cd"),
            ],
        ),
    ],
)
def test_blocks_are_the_messages_of_a_chat(body: dict[str, Any], messages: Sequence[Any]) -> None:
    engine = FakeEngine()
    with serving(engine=engine, tokenizer=chat_tokenizer(TOOLS_TEMPLATE)) as served:
        assert post(served.url, ASKED | {"max_tokens": 1} | body).status_code == 200
        client = OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
        client.chat.completions.create(model="fake", max_tokens=1, messages=list(messages))
        assert engine.batches[0] == engine.batches[1]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": None}, "'max_tokens' is missing"),
        ({"max_tokens": 10**6}, "max_tokens="),
        ({"messages": None}, "'messages' is missing"),
        ({"messages": []}, "'messages'"),
        ({"messages": [1]}, "'messages[0].role'"),
        ({"messages": [says("system", "a")]}, "'messages[0].role'"),
        ({"messages": [says("user", [])]}, "'messages[0].content'"),
        (
            {"system": "s", "messages": [says("user", "a"), says("user", [{"type": "image"}])]},
            "'messages[1].content[0]'",
        ),
        ({"messages": [says("user", [USED])]}, "'messages[0].content[0]'"),
        ({"messages": [says("assistant", [USED | {"input": [1]}])]}, "'messages[0].content[0].input'"),
        ({"messages": [says("assistant", [{"type": "redacted_thinking"}])]}, "'messages[0].content[0]'"),
        ({"system": 5}, "'system'"),
        ({"messages": [1] * 10_001}, "'messages' has 10,001 messages; 10,000 is the most"),
        ({"messages": [says("user", [1] * 10_001)]}, "'messages[0].content' has 10,001 blocks"),
        ({"messages": [says("user", [result([1] * 10_001)])]}, "'messages[0].content[0].content' has 10,001 blocks"),
        ({"system": [1] * 10_001}, "'system' has 10,001 blocks"),
        ({"stop_sequences": [""]}, "'stop_sequences'"),
        ({"stop": ["x"]}, "'stop' is no field of /v1/messages; use 'stop_sequences'"),
        ({"n": 2}, "'n'"),
        ({"thinking": {"type": "deep"}}, "'thinking.type'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'tools[0]'"),
        ({"tools": [{"name": "f", "input_schema": 5}]}, "'tools[0].input_schema'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "'tool_choice'"),
        ({"tools": [TOOL], "tool_choice": {"type": "perhaps"}}, "'tool_choice.type'"),
        ({"mcp_servers": [{"url": "x"}]}, "'mcp_servers'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "'output_config.format'"),
        ({"output_config": {"colour": 1}}, "output_config.colour"),
    ],
)
def test_a_wrong_field_is_named_in_anthropics_form(body: dict[str, Any], named: str) -> None:
    with serving() as served:
        refused = post(served.url, ASKED | body)
        assert refused.status_code == 400
        assert set(refused.json()) == {"type", "error"} and refused.json()["type"] == "error"
        assert refused.json()["error"]["type"] == "invalid_request_error"
        assert named in refused.json()["error"]["message"]
        assert not served.engine.batches


class Copied(str):
    """A text that counts the characters of the texts that come of adding it to others."""

    num_characters = 0

    def __radd__(self, before: str) -> str:
        Copied.num_characters += len(before) + len(self)
        return before + str(self)


@pytest.mark.parametrize(
    ("role", "kind", "field", "read"),
    [
        ("user", "text", "text", "content"),
        ("assistant", "text", "text", "content"),
        ("assistant", "thinking", "thinking", "reasoning_content"),
    ],
)
def test_reading_many_blocks_copies_no_text_for_each_block_after_it(
    role: str, kind: str, field: str, read: str
) -> None:
    Copied.num_characters, number = 0, 1000
    blocks = [{"type": kind, field: Copied("ab")} for _ in range(number)]
    [message] = Messages().translated({"max_tokens": 1, "messages": [says(role, blocks)]})["messages"]
    assert message[read] == "ab" * number
    assert Copied.num_characters <= 2 * len(message[read]), "the texts before each block were copied, too"


@pytest.mark.parametrize(
    "arguments", ['{"a": 1e999}', '{"a": NaN}', "[" * 100_000, '{"a":' * 2000, "[1]", '{"a": 1', ""]
)
def test_arguments_that_are_no_object_of_json_are_an_empty_one(arguments: str) -> None:
    row: Any = SimpleNamespace(
        pieces=[Piece(kind=Kind.call, text=arguments, identity="1", name="f")], finish_reason="length", stop=None
    )
    whole = MessageForm("1", "fake").whole([row], Usage(prompt=1))
    assert whole["content"] == [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]
    json.dumps(whole, allow_nan=False)


def test_errors_have_the_types_of_their_status() -> None:
    key = "k" * 16
    with serving(keys=Keys([key]), max_body_bytes=1000) as served:
        for body, headers, status, kind in (
            (ASKED, {}, 401, "authentication_error"),
            (ASKED, {"x-api-key": "x"}, 401, "authentication_error"),
            (ASKED, {"x-api-key": key}, 200, None),
            (ASKED, {"authorization": f"Bearer {key}"}, 200, None),
            (ASKED | {"model": "gpt"}, {"x-api-key": key}, 404, "not_found_error"),
            (ASKED | {"system": "s" * 2000}, {"x-api-key": key}, 413, "request_too_large"),
            (ASKED, {"x-api-key": key, "content-type": "text/plain"}, 415, "invalid_request_error"),
        ):
            response = post(served.url, body, **headers)
            assert response.status_code == status, headers
            assert kind is None or response.json()["error"]["type"] == kind


def test_the_tokens_of_a_prompt_are_counted() -> None:
    with saying("in the ice") as (client, engine):
        body = {name: value for name, value in ASKED.items() if name != "max_tokens"} | {"system": "s", "tools": [TOOL]}
        counted = asked(client, body, f"{PATH}/count_tokens")
        assert not engine.batches
        assert counted == {"input_tokens": asked(client, body | {"max_tokens": 1})["usage"]["input_tokens"]}


def test_the_tokens_of_a_prompt_that_is_too_long_are_counted_up_to_a_bound() -> None:
    with serving() as served:
        letters = "ship " * POSITIONS * 3
        num_tokens = len(served.engine.tokenizer(letters, add_special_tokens=False)["input_ids"])
        for times, status in ((1, 200), (COUNTED, 400)):
            body = {"messages": [says("user", letters * times)]}
            answer = post(served.url, body, f"{PATH}/count_tokens")
            assert answer.status_code == status
            if status == 200:
                assert answer.json()["input_tokens"] == pytest.approx(num_tokens, abs=20) and num_tokens > POSITIONS
            else:
                message = answer.json()["error"]["message"]
                assert f"context length is {served.scheduler.longest_text} tokens" in message
                assert f"more than {COUNTED * served.scheduler.longest_text:,} tokens" in message
        assert post(served.url, body | {"max_tokens": 1}).status_code == 400


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens", f"{PATH}/batches"])
def test_what_is_not_there_is_told_in_the_form_of_its_api(path: str) -> None:
    with serving() as served:
        refused = CLIENT.get(served.url + path).json()
        assert refused["type"] == "error" and "param" not in refused["error"]
        assert "param" in CLIENT.get(served.url + "/v1/messagesque").json()["error"]


def test_a_stream_that_fails_ends_with_an_error() -> None:
    engine = FakeEngine()
    engine.error = PeerFailure("rank 1 has ended")
    with serving(engine=engine) as served:
        name, data = post(served.url, ASKED | {"stream": True}).text.strip().split("\n")[-2:]
        assert name == "event: error" and json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"
