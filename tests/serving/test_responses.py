"""OpenAI's Responses API, by its own client and types; a request means what the chat that says the same means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from launch.server.dialects.responses import Responses
from runahead.failures import PeerFailure
from tests.serving.fakes import TEMPLATE, TOOLS_TEMPLATE, FakeEngine, chat_tokenizer, saying, serving
from tests.serving.test_api import CLIENT
from tests.serving.test_reasoning import SAID, THINKING

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ASKED: dict[str, Any] = {"model": "fake", "input": "the letters of the captain", "max_output_tokens": 200}
SAIL: dict[str, Any] = {
    "type": "function",
    "name": "Sail",
    "description": "Sails.",
    "parameters": {"type": "object", "properties": {"knots": {"type": "integer"}}},
    "strict": False,
}
FUNCTION = {"type": "function", "function": {name: value for name, value in SAIL.items() if name != "type"}}
CALLING = 'I look.\n<tool_call>\n{"name": "Sail", "arguments": {"knots": 7}}\n</tool_call>'


def events_of(client: OpenAI, **asked: Any) -> list[Any]:
    """Events of a stream, each as its type has it: with all fields that it must have."""
    found = [EVENT.validate_python(event.model_dump()) for event in client.responses.create(**asked, stream=True)]
    assert [event.sequence_number for event in found] == list(range(len(found)))
    return found


def told(response: Response) -> dict[str, Any]:
    """What a response says, without its names and times."""
    said = response.model_dump(exclude={"id", "created_at", "completed_at"})
    for item in said["output"]:
        del item["id"]
        item.pop("call_id", None)
    return said


def test_a_text_is_that_of_a_chat_whole_and_streamed() -> None:
    with saying("in the größer ice", TEMPLATE) as (client, _):
        chat = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": ASKED["input"]}])
        whole = client.responses.create(**ASKED)
        assert whole.output_text == chat.choices[0].message.content == "in the größer ice"
        assert (whole.status, whole.incomplete_details, whole.error, whole.store) == ("completed", None, None, False)
        Response.model_validate(whole.model_dump())
        assert (whole.usage.input_tokens, whole.usage.output_tokens, whole.usage.total_tokens) == (
            chat.usage.prompt_tokens,
            chat.usage.completion_tokens,
            chat.usage.total_tokens,
        )
        events = events_of(client, **ASKED)
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert [event.type for event in events if event not in deltas] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert "".join(event.delta for event in deltas) == whole.output_text
        assert told(events[-1].response) == told(whole)
        with client.responses.stream(**ASKED) as stream:  # which puts the events together itself
            assert told(stream.get_final_response())["output"][0]["content"][0]["text"] == whole.output_text


def test_a_text_that_is_cut_off_is_incomplete() -> None:
    with saying("in the ice") as (client, _):
        whole = client.responses.create(**ASKED | {"max_output_tokens": 3})
        assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert whole.output[0].status == "incomplete"
        last = events_of(client, **ASKED | {"max_output_tokens": 3})[-1]
        assert last.type == "response.incomplete" and told(last.response) == told(whole)


def test_a_call_of_a_tool_goes_out_and_its_result_comes_back() -> None:
    with saying(CALLING, tools="hermes") as (client, engine):
        asked = ASKED | {"tools": [SAIL]}
        whole = client.responses.create(**asked)
        text, call = whole.output
        assert (text.content[0].text, call.name, call.arguments) == ("I look.", "Sail", '{"knots": 7}')
        events = events_of(client, **asked)
        assert told(events[-1].response) == told(whole)
        kinds = [event.type.removeprefix("response.") for event in events if event.type.startswith("response.f")]
        assert kinds == ["function_call_arguments.delta", "function_call_arguments.done"]
        messages: list[Any] = [
            {"role": "user", "content": ASKED["input"]},
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [
                    {"id": call.call_id, "type": "function", "function": {"name": "Sail", "arguments": '{"knots": 7}'}}
                ],
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": "no ice"},
        ]
        client.chat.completions.create(model="fake", messages=messages, tools=[FUNCTION], max_tokens=5)
        given: list[Any] = [
            {"role": "user", "content": ASKED["input"]},
            *(item.model_dump() for item in whole.output),
            {"type": "function_call_output", "call_id": call.call_id, "output": "no ice"},
        ]
        client.responses.create(**asked | {"input": given})
        ours, theirs = engine.batches[-1], engine.batches[-2]
        assert ours == theirs and "no ice" in engine.tokenizer.decode(ours[0])


def test_reasoning_is_an_item_of_its_own_and_goes_back_to_the_template() -> None:
    with saying(SAID, THINKING) as (client, engine):
        whole = client.responses.create(**ASKED)
        reasoning, text = whole.output
        assert (reasoning.type, reasoning.content[0].text, text.content[0].text) == ("reasoning", "So, so.", "Yes.")
        assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
        events = events_of(client, **ASKED)
        assert told(events[-1].response) == told(whole)
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == "So, so."
        given: list[Any] = [item.model_dump() for item in whole.output]
        client.responses.create(**ASKED | {"input": [*given, {"role": "user", "content": "So?"}]})
        assert "<think>So, so.</think> Yes." in engine.tokenizer.decode(engine.batches[-1][0])
        client.responses.create(**ASKED, reasoning={"effort": "none", "summary": "auto"})
        assert "<think>\n\n</think>" in engine.tokenizer.decode(engine.batches[-1][0])


def says(role: str, text: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text} | more


def call_of(identity: str) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": "f", "arguments": "{}"}}


PART = {"type": "output_text", "text": "b", "annotations": []}
USED = {"type": "function_call", "id": "fc_1", "status": "completed", "call_id": "1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "z"}]}


@pytest.mark.parametrize(
    ("asked", "messages"),
    [
        ({"input": "a"}, [says("user", "a")]),
        ({"input": "a", "instructions": "s"}, [says("system", "s"), says("user", "a")]),
        ({"input": [says("developer", "s"), says("user", "a")]}, [says("system", "s"), says("user", "a")]),
        (
            {"input": [says("user", "a"), says("assistant", [PART], type="message", id="m", status="completed")]},
            [says("user", "a"), says("assistant", "b")],
        ),
        (
            {"input": [says("user", "a"), says("assistant", "b"), says("assistant", "c"), says("user", "d")]},
            [says("user", "a"), says("assistant", "b"), says("assistant", "c"), says("user", "d")],
        ),
        (
            {"input": [says("user", "a"), USED, says("assistant", [PART]), RESULT]},
            [says("user", "a"), says("assistant", "b", tool_calls=[call_of("1")]), says("tool", "z", tool_call_id="1")],
        ),
        (
            {"input": [says("user", "a"), says("assistant", "b"), USED, says("assistant", "c"), USED, RESULT]},
            [
                says("user", "a"),
                says("assistant", "bc", tool_calls=[call_of("1"), call_of("1")]),
                says("tool", "z", tool_call_id="1"),
            ],
        ),
    ],
)
def test_items_are_the_messages_of_a_chat(asked: dict[str, Any], messages: Sequence[Any]) -> None:
    engine = FakeEngine()
    with serving(engine=engine, tokenizer=chat_tokenizer(TOOLS_TEMPLATE)) as served:
        client = OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
        client.responses.create(model="fake", max_output_tokens=1, **asked)
        client.chat.completions.create(model="fake", max_tokens=1, messages=list(messages))
        assert engine.batches[0] == engine.batches[1]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [1]}, "input[0]", "invalid_value"),
        ({"input": [says("robot", "a")]}, "input[0].role", "invalid_value"),
        (
            {"input": [says("user", "a"), says("user", [{"type": "input_image"}])]},
            "input[1].content[0]",
            "invalid_value",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "invalid_value"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]", "unsupported_value"),
        ({"input": [USED | {"arguments": "[1]"}]}, "input[0].arguments", "invalid_value"),
        ({"input": [USED | {"call_id": 5}]}, "input[0].call_id", "invalid_value"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x", "summary": []}]}, "input[0]", "invalid_value"),
        ({"input": [USED, says("assistant", 5)]}, "input[1].content", "invalid_value"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"conversation": "x"}, "conversation", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "unsupported_value"),
        ({"top_logprobs": 3}, "top_logprobs", "unsupported_parameter"),
        ({"include": ["message.output_text.logprobs"]}, "include", "unsupported_value"),
        ({"messages": [says("user", "a")]}, "messages", "unknown_parameter"),
        ({"max_tokens": 5}, "max_tokens", "unknown_parameter"),
        ({"n": 2}, "n", "unknown_parameter"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "invalid_value"),
        ({"input": "x " * 9000}, "input", "context_length_exceeded"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "unsupported_value"),
        ({"tools": [SAIL | {"name": ""}]}, "tools[0].name", "invalid_value"),
        ({"tools": [SAIL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "invalid_value"),
        ({"tools": [SAIL], "tool_choice": {"type": "mcp"}}, "tool_choice", "unsupported_value"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format", "invalid_value"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "unsupported_value"),
        ({"reasoning": {"depth": 3}}, "reasoning", "unknown_parameter"),
        ({"input": [1] * 10_001}, "input", "invalid_value"),
        ({"metadata": {"a": {"b": "c"}}}, "metadata", "invalid_value"),
        ({"metadata": {"a": "b" * 513}}, "metadata", "invalid_value"),
        ({"metadata": {"a" * 65: "b"}}, "metadata", "invalid_value"),
        ({"metadata": {str(number): "b" for number in range(17)}}, "metadata", "invalid_value"),
        ({"metadata": ["b"]}, "metadata", "invalid_value"),
        ({"user": "a" * 513}, "user", "invalid_value"),
        ({"prompt_cache_key": 5}, "prompt_cache_key", "invalid_value"),
        ({"safety_identifier": {"a": "b"}}, "safety_identifier", "invalid_value"),
        ({"max_tool_calls": "a" * 1000}, "max_tool_calls", "invalid_value"),
        ({"max_tool_calls": True}, "max_tool_calls", "invalid_value"),
        ({"reasoning": {"summary": [1]}}, "reasoning.summary", "invalid_value"),
        ({"text": {"verbosity": "a" * 513}}, "text.verbosity", "invalid_value"),
    ],
)
def test_a_wrong_field_is_named_as_the_client_named_it(body: dict[str, Any], param: str, code: str) -> None:
    with serving() as served:
        client = OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
        with pytest.raises(BadRequestError) as refused:
            client.responses.create(**{"model": "fake", "input": "a"}, extra_body=body)
        assert (refused.value.body["param"], refused.value.body["code"]) == (param, code)
        message = refused.value.body["message"]
        assert param in message or code == "context_length_exceeded" or "max_output_tokens=" in message
        assert not served.engine.batches


def test_what_a_response_repeats_is_what_was_given() -> None:
    given: dict[str, Any] = {
        "metadata": {"a" * 64: "b" * 512} | {str(number): "" for number in range(15)},
        "user": "u" * 512,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "max_tool_calls": 3,
    }
    with saying("in the ice", TEMPLATE) as (client, _):
        response = client.responses.create(**ASKED, **given).model_dump()
        assert {name: response[name] for name in given} == given


def test_a_number_that_would_come_back_as_infinity_is_refused() -> None:
    with serving() as served:
        for path in ("/v1/responses", "/v1/chat/completions"):
            body = b'{"input": "a", "metadata": {"a": 1e999}}'
            refused = CLIENT.post(served.url + path, content=body, headers={"content-type": "application/json"})
            assert refused.status_code == 400 and "1e999" in refused.json()["error"]["message"]


def test_items_of_one_message_are_put_into_one_list() -> None:
    contents = list[Any]()

    class Watched(Responses):
        def _answer(self, place: str, **said: Any) -> None:
            super()._answer(place, **said)
            contents.append(self.messages[-1]["content"])

    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items = [call, *(says("assistant", [PART] if number % 2 else "b") for number in range(50))]
    [message] = Watched().translated({"input": items})["messages"]
    assert [part["text"] for part in message["content"]] == ["b"] * 50
    assert len({id(content) for content in contents}) <= 3, "none, the first text, and a list"


def test_the_tokens_of_a_prompt_are_counted() -> None:
    with saying("in the ice") as (client, engine):
        asked = {"model": "fake", "input": "a", "instructions": "s", "tools": [SAIL]}
        counted = client.responses.input_tokens.count(**asked)
        assert not engine.batches and counted.object == "response.input_tokens"
        assert counted.input_tokens == client.responses.create(**asked).usage.input_tokens


def test_a_stream_that_fails_says_so_in_its_last_event() -> None:
    engine = FakeEngine()
    engine.error = PeerFailure("rank 1 has ended")
    with serving(engine=engine) as served:
        client = OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
        last = list(client.responses.create(**ASKED, stream=True))[-1]
        assert last.type == "response.failed" and last.response.status == "failed" and last.response.error.message
