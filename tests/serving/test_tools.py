"""Calls of tools, by OpenAI's own client: answers that have to call one, and what models write of themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from launch.server.answer.calls import ToolForm
from launch.server.answer.pieces import Kind, Piece
from launch.server.answer.row_text import RowText
from launch.server.errors import APIError
from launch.server.request.chats import Chats
from launch.server.request.fields import read_chat
from runahead import Engine, Model, ModelOptions, Ranks, RanksOptions
from runahead.config import Device, DType, GenerationOptions, Guide, ModelName
from runahead.model.grammars import Grammars
from tests.families import save_tiny_llama
from tests.serving.fakes import TEMPLATE, TOOLS_TEMPLATE, chat_tokenizer, saying, serving

ASKED: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "the letters of the captain"}]}


class Place(BaseModel):
    """A class in a class, which pydantic writes as a reference into the arguments' own schema."""

    north: bool
    ice: str = Field(max_length=6)


class Find(BaseModel):
    ship: Literal["Terror", "Erebus"]
    places: list[Place] = Field(max_length=2)


class Sail(BaseModel):
    knots: int = Field(ge=0, le=99)


CLASSES = {"Find": Find, "Sail": Sail}
FIND, SAIL = pydantic_function_tool(Find), pydantic_function_tool(Sail)
NAMED: Any = {"type": "function", "function": {"name": "Sail"}}
SYSTEM_REFUSED = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """Of a server with a tiny random model, whose chat template knows no tools."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("model"), chat_tokenizer(), max_position_embeddings=4096)
    model = Model.load(ModelOptions(name=ModelName.hf, path=folder, dtype=DType.float32), torch.device("cpu"))
    with (
        Ranks.start(RanksOptions(device=Device.cpu)) as ranks,
        serving(engine=Engine(model, ranks), tokenizer=chat_tokenizer()) as served,
    ):
        yield OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)


def streamed(client: OpenAI, **asked: Any) -> tuple[str, list[dict[str, Any]], str | None]:
    """Content, calls and finish reason of a stream, put together as OpenAI's documentation does it."""
    content, calls, reason = "", list[dict[str, Any]](), None
    for chunk in client.chat.completions.create(**asked, stream=True):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                assert call.type == "function"
                calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    return content, calls, reason


@pytest.mark.parametrize(("choice", "names"), [("required", {"Find", "Sail"}), (NAMED, {"Sail"})])
def test_an_answer_that_has_to_call_a_tool_calls_one_with_its_arguments(
    client: OpenAI, choice: Any, names: set[str]
) -> None:
    found = set()
    for seed in range(4):
        asked = ASKED | {"tools": [FIND, SAIL], "tool_choice": choice, "temperature": 1.0, "seed": seed}
        whole = client.chat.completions.create(**asked, max_tokens=500).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.content is None
        [call] = whole.message.tool_calls
        CLASSES[call.function.name].model_validate_json(call.function.arguments)
        found.add(call.function.name)
        content, calls, reason = streamed(client, **asked, max_tokens=500)
        assert (content, reason) == ("", "tool_calls")
        assert calls == [{"id": calls[0]["id"], "name": call.function.name, "arguments": call.function.arguments}]
    assert found <= names


def test_several_calls_are_a_list_of_them(client: OpenAI) -> None:
    numbers = set()
    for seed in range(6):
        asked = ASKED | {"tools": [SAIL], "tool_choice": "required", "temperature": 1.0, "seed": seed}
        message = client.chat.completions.create(**asked, parallel_tool_calls=True, max_tokens=500).choices[0].message
        for call in message.tool_calls:
            Sail.model_validate_json(call.function.arguments)
        assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
        numbers.add(len(message.tool_calls))
    assert max(numbers) > 1


def test_calls_that_are_cut_off_are_not_taken_for_whole_ones(client: OpenAI) -> None:
    asked = ASKED | {"tools": [FIND], "tool_choice": "required"}
    for max_tokens in (3, 20):
        assert client.chat.completions.create(**asked, max_tokens=max_tokens).choices[0].finish_reason == "length"
        assert streamed(client, **asked, max_tokens=max_tokens)[2] == "length"


def test_the_helper_of_the_client_parses_arguments(client: OpenAI) -> None:
    asked = ASKED | {"tools": [FIND, SAIL], "tool_choice": NAMED, "max_tokens": 500}
    [call] = client.chat.completions.parse(**asked).choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Sail)


HERMES = 'I look.\n<tool_call>\n{"name": "Sail", "arguments": {"knots": 7}}\n</tool_call>'
LLAMA = '{"name": "Sail", "parameters": {"knots": 7}}'
MISTRAL = '[TOOL_CALLS][{"name": "Sail", "arguments": {"knots": 7}}]'


@pytest.mark.parametrize(
    ("form", "text", "content"), [("hermes", HERMES, "I look."), ("llama3", LLAMA, None), ("mistral", MISTRAL, None)]
)
def test_calls_that_a_model_writes_are_calls(form: str, text: str, content: str | None) -> None:
    with saying(text, tools=form) as (client, _):
        asked = ASKED | {"tools": [FIND, SAIL], "max_tokens": 200}
        whole = client.chat.completions.create(**asked).choices[0]
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", content)
        [call] = whole.message.tool_calls
        assert (call.type, call.function.name, call.function.arguments) == ("function", "Sail", '{"knots": 7}')
        said, [call], reason = streamed(client, **asked)
        assert (said or None, call["name"], call["arguments"]) == (content, "Sail", '{"knots": 7}')
        assert reason == "tool_calls"
        # Without tools, or where none may be called, all is content.
        for more in ({"tools": []}, {"tool_choice": "none"}):
            plain = client.chat.completions.create(**(asked | more)).choices[0]
            assert (plain.finish_reason, plain.message.content, plain.message.tool_calls) == ("stop", text, None)


def test_a_server_may_leave_calls_in_the_content() -> None:
    with saying(HERMES, tools="none") as (client, _):
        answer = client.chat.completions.create(**ASKED, tools=[SAIL], max_tokens=200).choices[0]
        assert (answer.finish_reason, answer.message.content) == ("stop", HERMES)


def test_one_call_alone_where_several_are_not_wanted() -> None:
    call = '<tool_call>{"name": "Sail", "arguments": {"knots": 7}}</tool_call>'
    with saying(call * 2, tools="hermes") as (client, _):
        for several, number in ((None, 2), (True, 2), (False, 1)):
            more = {} if several is None else {"parallel_tool_calls": several}
            asked = ASKED | {"tools": [SAIL], "max_tokens": 200} | more
            answer = client.chat.completions.create(**asked).choices[0].message
            assert len(answer.tool_calls or ()) == number


def test_special_tokens_that_mark_calls_are_seen_by_the_parser_alone() -> None:
    tokenizer = chat_tokenizer(TOOLS_TEMPLATE)
    tokenizer.add_tokens(["[TOOL_CALLS]", "<other>"], special_tokens=True)
    ids = tokenizer('<other>a[TOOL_CALLS][{"name": "Sail", "arguments": {}}]', add_special_tokens=False)["input_ids"]
    fields = {"messages": ASKED["messages"], "tools": [SAIL]}
    _, parts = Chats(tokenizer, tools=ToolForm.mistral).prompt(read_chat(fields, GenerationOptions()))
    options = GenerationOptions(max_new_tokens=len(ids), kept_tokens=parts.tokens)
    row = RowText(tokenizer, set(), options, parts)
    pieces = [piece for token in ids for piece in row.add(token)]
    assert "".join(piece.text for piece in pieces) == "a{}"
    content, call = row.pieces
    assert content == Piece(kind=Kind.content, text="a")
    assert (call.kind, call.name, call.text, row.finish_reason) == (Kind.call, "Sail", "{}", "length")
    unseen = RowText(tokenizer, set(), GenerationOptions(max_new_tokens=len(ids)), parts)
    assert not any(piece.kind is Kind.call for token in ids for piece in unseen.add(token))


HISTORY: list[Any] = [
    {"role": "user", "content": "Where?"},
    {
        "role": "assistant",
        "content": "I ask.",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "Find", "arguments": '{"ship": "Terror"}'}},
            {"id": "2", "type": "function", "function": {"name": "Sail", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "in the ice"},
    {"role": "tool", "tool_call_id": "2", "content": "no"},
    {"role": "user", "content": "So?"},
]
TOLD = (
    "assistant: I ask.\n"
    '<tool_call>\n{"name": "Find", "arguments": {"ship": "Terror"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "Sail", "arguments": {}}\n</tool_call>\n'
    "user: <tool_response>\nin the ice\n</tool_response>\n<tool_response>\nno\n</tool_response>\nSo?\n"
    "assistant:"
)


def prompt_of(template: str, form: ToolForm = ToolForm.auto, **fields: Any) -> str:
    chats = Chats(chat_tokenizer(template), tools=form)
    return chats.prompt(read_chat(fields, GenerationOptions()))[0]


def test_a_template_that_knows_no_tools_has_them_as_text() -> None:
    told = prompt_of(TEMPLATE, messages=HISTORY, tools=[FIND, SAIL])
    system, _, rest = told.partition("\nuser: Where?\n")
    assert rest == TOLD
    assert system.startswith("system: You may call these functions") and system.count('{"name": ') == 3
    for tool in (FIND, SAIL):
        assert json.dumps(tool["function"], ensure_ascii=False) in system
    # What the system says comes first; without tools the history is text all the same.
    first = {"role": "system", "content": "You sail."}
    told = prompt_of(TEMPLATE, messages=[first, *HISTORY], tools=[FIND, SAIL])
    assert told == "system: You sail.\n\n" + system.removeprefix("system: ") + "\nuser: Where?\n" + TOLD
    assert prompt_of(TEMPLATE, messages=HISTORY) == "user: Where?\n" + TOLD
    # Where a template refuses a system, the first user says it.
    told = prompt_of(SYSTEM_REFUSED, messages=HISTORY, tools=[FIND, SAIL])
    assert told == "user: " + system.removeprefix("system: ") + "\n\nWhere?\n" + TOLD


def test_a_template_that_knows_tools_has_them_in_its_own_way() -> None:
    told = prompt_of(TOOLS_TEMPLATE, messages=HISTORY, tools=[FIND])
    assert told.startswith("<tool>") and "You may call" not in told and "tool: in the ice1" in told
    assert "<call>1 Find Terror" in told


def test_tools_without_a_place_are_refused_where_calls_are_not_parsed() -> None:
    with pytest.raises(APIError, match="'tools' are not in this model's chat template"):
        prompt_of(TEMPLATE, ToolForm.none, messages=HISTORY, tools=[SAIL])
    assert "tool: in the ice" in prompt_of(TEMPLATE, ToolForm.none, messages=HISTORY)


def test_a_result_goes_back_and_the_next_answer_is_text() -> None:
    with saying("in the ice") as (client, engine):
        answer = client.chat.completions.create(model="fake", messages=HISTORY, tools=[FIND], max_tokens=50).choices[0]
        assert (answer.message.content, answer.finish_reason) == ("in the ice", "stop")
        assert "tool: in the ice1" in engine.tokenizer.decode(engine.batches[-1][0])


def test_where_a_format_is_asked_for_there_are_no_calls() -> None:
    """The answer of a format may look like a call."""
    chats = Chats(chat_tokenizer(TOOLS_TEMPLATE), tools=ToolForm.hermes)
    for more, calls in (
        ({}, True),
        ({"response_format": {"type": "text"}}, True),
        ({"response_format": {"type": "json_object"}}, False),
        ({"guided_regex": ".*"}, False),
        ({"guided_regex": ".*", "tool_choice": "required"}, True),
    ):
        read = read_chat({"messages": HISTORY, "tools": [SAIL]} | more, GenerationOptions())
        assert (chats.prompt(read)[1].calls is not None) == calls, more


def follows(grammars: Grammars, grammar: str, text: str) -> bool:
    """Whether a whole text follows a grammar, each of its tokens being allowed where it stands."""
    tokenizer = chat_tokenizer()
    constraint = grammars.constraint(Guide(text=grammar, is_schema=False))
    for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]:
        if not constraint.allowed(torch.device("cpu"))[token]:
            return False
        constraint.add(token)
    return True


@pytest.mark.parametrize(
    ("parameters", "right", "wrong"),
    [
        (None, ["{}"], ['{"a": 1}']),
        ({"type": "object", "properties": {}}, ["{}"], ['{"a": 1}']),
        ({"type": "object"}, ["{}", '{"a": 1}'], ["5"]),
        ({"type": ["object", "null"], "properties": {"a": {}}}, ['{"a": 1}'], ["null", '{"b": 1}']),
        (
            {"properties": {"a": {}}, "required": ["b"]},
            ['{"a": 1, "b": 2}', '{"b": "x"}'],
            ['{"a": 1}', '{"b": 1, "c": 2}'],
        ),
    ],
)
def test_a_call_has_the_arguments_that_its_schema_has(parameters: Any, right: list[str], wrong: list[str]) -> None:
    function = {"name": "f"} | ({} if parameters is None else {"parameters": parameters})
    tools = read_chat(
        {"messages": HISTORY, "tools": [{"function": function}], "tool_choice": "required"}, GenerationOptions()
    )
    tokenizer = chat_tokenizer()
    compiled = Grammars(tokenizer, len(tokenizer), {tokenizer.eos_token_id})
    for arguments in (*right, *wrong):
        text = f'{{"name": "f", "arguments": {arguments}}}'
        assert follows(compiled, tools.tools.grammar, text) == (arguments in right), arguments


def test_arguments_of_no_property_are_not_made_up(client: OpenAI) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    for more, is_open in (({}, False), ({"additionalProperties": {"enum": [5]}}, True)):
        tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema | more}}
        asked = ASKED | {"tools": [tool], "tool_choice": "required", "max_tokens": 60, "temperature": 1.0}
        answers = [client.chat.completions.create(**asked, seed=seed).choices[0] for seed in range(4)]
        arguments = [choice.message.tool_calls[0].function.arguments for choice in answers]
        assert all(re.fullmatch(r'\{"a": ?[12]\}', each) for each in arguments) != is_open


def test_keywords_that_cannot_be_followed_are_refused_of_strict_tools_alone(client: OpenAI) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 3}}}}
    function = {"name": "f", "parameters": parameters}
    asked = ASKED | {"tool_choice": "required", "max_tokens": 100}
    loose: Any = {"type": "function", "function": function}
    assert client.chat.completions.create(**asked, tools=[loose]).choices
    strict: Any = {"type": "function", "function": function | {"strict": True}}
    with pytest.raises(BadRequestError, match="not") as refused:
        client.chat.completions.create(**asked, tools=[strict])
    assert refused.value.body["param"] == "tools"
