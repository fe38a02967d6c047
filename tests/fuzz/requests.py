"""What the server reads: bodies of requests, as the API does, and texts of models, which become answers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from launch.server.answer.calls import CALL_FORMS, GUIDED
from launch.server.answer.form import Form
from launch.server.answer.parser import AnswerParser, Parts
from launch.server.answer.pieces import Piece, joined
from launch.server.answer.usage import Usage
from launch.server.api import API, DIALECTS
from launch.server.dialects.base import Dialect
from launch.server.dialects.message_form import MessageForm
from launch.server.dialects.prefill import Prefills
from launch.server.dialects.response_form import ResponseForm
from launch.server.errors import APIError, dumps
from launch.server.handover import PromptFiles
from launch.server.keys import Keys
from launch.server.options import ServeOptions
from launch.server.request.fields import ChatRequest, CompletionRequest, HandoverWay
from launch.server.request.reader import MAX_DEPTH, is_deeper
from policies.reuse import GivenPrompt, ids_of
from runahead.config import GenerationOptions
from runahead.reuse.handover import HandoverPlace
from tests.fuzz.harness import Outcome, judged
from tests.fuzz.mutations import changed_bytes, changed_json
from tests.fuzz.target import Target
from tests.serving.fakes import TOOLS_TEMPLATE, chat_tokenizer

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"ship": ["Terror"]}'}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, None]}}, "required": ["a"]}
GENERATION = {
    "model": "fake",
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
    "n": 2,
    "stop": ["x", "yz"],
    "presence_penalty": -0.5,
    "frequency_penalty": 2,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": -100, "6": 0.5},
    "max_tokens": 4,
    "stream": True,
    "stream_options": {"include_usage": True},
    "user": "me",
}
MESSAGES = [
    {"role": "system", "content": "You are a ship's clerk."},
    {"role": "user", "content": [{"type": "text", "text": "größer, 中文"}, {"type": "text", "text": "x"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "x"},
]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
CHATS = (
    {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto", "response_format": FORMAT, "logprobs": True},
    {"messages": MESSAGES[1:2], "top_logprobs": 2, "logprobs": True} | GENERATION,
    {"messages": MESSAGES[:2]},
    {"messages": MESSAGES[:2], "chat_template_kwargs": {"a": [1]}, "reasoning_effort": "none"},
    {"messages": MESSAGES, "tools": [TOOL, TOOL], "tool_choice": "required", "parallel_tool_calls": True},
    {"messages": MESSAGES[:2], "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
)
COMPLETIONS = (
    {"prompt": "the letters of the captain", "logprobs": 2} | GENERATION,
    {"prompt": [[5, 6, 7], [8]], "response_format": FORMAT},
    {"prompt": ["a", "b"], "ignore_eos": True},
    {"prompt": [5, 6], "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}},
    {"prompt": "a", "max_tokens": 1, "cache_hit_threshold": 0, "n": 1},
)
PREFILLS = (
    {"prompt": [5, 6, 7], "model": "fake", "max_tokens": 1, "cache_salt": "a", "temperature": 0.5},
    {"prompt": "the letters of the captain", "first_token": True, "n": 1, "seed": 7, "stop": ["x"]},
    {"messages": MESSAGES, "first_token": False, "chat_template_kwargs": {"a": [1]}, "user": "me"},
)
RESPONSES = (
    {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "größer, 中文"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "So."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "1", "output": "in the ice"},
        ],
        "instructions": "You are a ship's clerk.",
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}],
        "tool_choice": {"type": "function", "name": "f"},
        "max_output_tokens": 4,
    },
    {
        "input": "the letters of the captain",
        "model": "fake",
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}, "verbosity": "low"},
        "reasoning": {"effort": "none", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "temperature": 0.5,
        "truncation": "disabled",
        "stream": True,
    },
)
BLOCKS = (
    {
        "max_tokens": 4,
        "system": [{"type": "text", "text": "You sail.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "größer, 中文"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "So.", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x"}]},
                    {"type": "text", "text": "So?"},
                ],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "stop_sequences": ["x", "yz"],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    },
    {
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "a"}],
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        "temperature": 0.5,
        "top_k": 5,
        "stream": True,
    },
)


@cache
def api() -> API:
    """An API whose scheduler takes everything."""
    tokenizer = chat_tokenizer(TOOLS_TEMPLATE)
    scheduler: Any = SimpleNamespace(
        fitting=lambda prompts, wanted, is_chosen: wanted,
        longest_text=None,
        check=lambda prompts, options: None,
        check_scores=lambda: None,
    )
    return API(
        scheduler,
        tokenizer=tokenizer,
        eos_ids={tokenizer.eos_token_id},
        vocab_size=len(tokenizer),
        names=["fake"],
        options=ServeOptions(),
        defaults=GenerationOptions(max_new_tokens=16),
        keys=Keys(),
        files=PromptFiles(
            key="the model",
            folder=None,
            place=HandoverPlace(path="/nowhere", host="here", limit_bytes=1 << 30),
            layers=[(4, None), (4, 300)],
            about={},
        ),
    )


def check_body(content: bytes, dialect: Dialect) -> Outcome:
    def read() -> tuple[ChatRequest | CompletionRequest, list[GivenPrompt], list[GenerationOptions]]:
        try:
            found, chat = api()._asked(content, dialect)
            with dialect.renaming():
                if found.options[0].guide is not None:
                    api()._check_options(found)
                prompts, options = api()._rows(found, chat, "a client")
                if found.handover is not None:
                    api()._handing.checked(found.handover, prompts[0])
                return found, prompts, options
        except APIError as error:
            assert 400 <= error.status < 500 and "\n" not in str(error), error.body
            json.dumps(dialect.error(error)).encode()
            raise ValueError(str(error)) from error

    def use(found: tuple[ChatRequest | CompletionRequest, list[GivenPrompt], list[GenerationOptions]]) -> None:
        read, prompts, options = found
        assert set(read.parts.tokens) <= set(options[0].kept_tokens)
        assert prompts and all(prompts) and options
        if read.handover is not None:  # one prompt, and all that is asked for is known when its file is there
            assert len(prompts) == 1 and not read.stream
            assert (read.handover is HandoverWay.prefill) == isinstance(dialect, Prefills)
        assert all(type(token) is int and 0 <= token < 2**31 for ids in map(ids_of, prompts) for token in ids)
        assert all(token < api()._vocab_size for each in options for token in each.logit_bias)

    return judged(read, use, warning="refuses such requests")  # of a field that nobody knows


def _checked_as(dialect: Callable[[], Dialect]) -> Callable[[bytes, Path], Outcome]:
    return lambda content, folder: check_body(content, dialect())


SAID = (
    'I look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1.5, "b": ["größer", {}]}}\n</tool_call>',
    '<think>So.</think>\n<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call> <tool_call>{"name": "g"}',
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]',
    '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
    '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {"a": null}}',
    '{"name": "f", "arguments": {"a": {"a": [1, 2]}}}',
    '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"a": "中"}}]',
    '{"name": "f", "arguments": {"a": 1e999, "b": -1}}',
    '{"name": "f", "arguments": {"a": ' + "[" * 10_000 + "]" * 10_000 + "}}",
)
FORMS_OF_CALLS = (*CALL_FORMS.values(), GUIDED, None)
USAGE = Usage(prompt=3, new=2)


def check_said(content: bytes, folder: Path) -> Outcome:
    """Stream what a model says, in every form of calls and of answers; together the events are the whole answer."""
    text = content.decode(errors="replace")
    size = max(1 + len(text) % 7, len(text) // 200)

    def read() -> list[list[Piece]]:
        streams = list[list[Piece]]()
        for calls in FORMS_OF_CALLS:
            parser = AnswerParser(Parts(calls=calls, known=("f", "g"), reasons=len(text) % 2 == 0))
            pieces = [piece for at in range(0, len(text), size) for piece in parser.add(text[at : at + size])]
            streams.append(pieces + parser.finish())
        return streams

    def use(streams: list[list[Piece]]) -> None:
        for pieces in streams:
            row: Any = SimpleNamespace(pieces=joined(pieces), finish_reason="length", stop=None)
            check_blocks(_sent(MessageForm("1", "fake"), row, pieces), _told(MessageForm("1", "fake"), row))
            check_items(_sent(ResponseForm("1", "fake", {}), row, pieces), _told(ResponseForm("1", "fake", {}), row))

    return judged(read, use)


def check_blocks(events: list[Any], whole: Any) -> None:
    """Compare the events of a message with the whole one."""
    blocks = list[Any]()
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"partial_json": ""})
        elif event["type"] == "content_block_delta":
            [name] = event["delta"].keys() - {"type"}
            blocks[event["index"]][name] += event["delta"][name]
    for block in blocks:
        given = block.pop("partial_json")
        if block["type"] == "tool_use":
            block["input"] = _object_in(given)
    assert blocks == whole["content"], (blocks, whole["content"])


def check_items(events: list[Any], whole: Any) -> None:
    """Compare the events of a response with the whole one."""
    deltas = Counter[int]()
    for event in events:
        deltas[event.get("output_index", -1)] += len(event.get("delta", ""))
    assert events[-1]["response"]["output"] == whole["output"]
    for number, item in enumerate(whole["output"]):
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert deltas[number] == len(text)


def _sent(form: Form, row: Any, pieces: list[Piece]) -> list[Any]:
    """Events of a stream, as a client reads them."""
    events = [*form.opened(), *form.begin(0, USAGE)]
    for piece in pieces:
        events += form.piece(0, piece, (), USAGE)
    events += [*form.end(0, row, (), USAGE), *form.closed(USAGE)]
    return [_strictly(form.encoded(event).partition(b"data: ")[2].decode()) for event in events]


def _told(form: Form, row: Any) -> Any:
    return _strictly(dumps(form.whole([row], USAGE)).decode())


def _object_in(text: str) -> Any:
    """The object in JSON text; an empty one if there is none that a server repeats."""
    try:
        value = _strictly(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and not is_deeper(value, MAX_DEPTH) else {}


def _strictly(text: str) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


READER = "launch/server/api.py API._asked"

TARGETS = (
    *(
        Target(
            name=name,
            reads=READER,
            inputs=changed_json(bodies) | changed_bytes([json.dumps(body).encode() for body in bodies]),
            check=_checked_as(DIALECTS[path]),
            share=8,
        )
        for name, bodies, path in (
            ("requests, chats", CHATS, "/v1/chat/completions"),
            ("requests, completions", COMPLETIONS, "/v1/completions"),
            ("requests, responses", RESPONSES, "/v1/responses"),
            ("requests, messages", BLOCKS, "/v1/messages"),
            ("requests, prefills", PREFILLS, "/v1/prefill"),
        )
    ),
    Target(
        name="answers",
        reads="launch/server/answer/parser.py AnswerParser.add",
        inputs=changed_bytes([said.encode() for said in SAID]),
        check=check_said,
        share=8,
    ),
)
