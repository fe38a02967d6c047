"""Bodies of requests to the server, as the API reads them: fields, messages, tools, schemas, prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from launch.server.api import API, DIALECTS
from launch.server.dialects.base import Dialect
from launch.server.errors import APIError
from launch.server.keys import Keys
from launch.server.options import ServeOptions
from launch.server.request.fields import ChatRequest, CompletionRequest
from policies.base import GivenPrompt, ids_of
from runahead.config import GenerationOptions
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
    )


def check_body(content: bytes, dialect: Dialect) -> Outcome:
    def read() -> tuple[ChatRequest | CompletionRequest, list[GivenPrompt], list[GenerationOptions]]:
        try:
            found, chat = api()._asked(content, dialect)
            with dialect.renaming():
                if found.options[0].guide is not None:
                    api()._check_options(found)
                return found, *api()._rows(found, chat, "a client")
        except APIError as error:
            assert 400 <= error.status < 500 and "\n" not in str(error), error.body
            json.dumps(dialect.error(error)).encode()
            raise ValueError(str(error)) from error

    def use(found: tuple[ChatRequest | CompletionRequest, list[GivenPrompt], list[GenerationOptions]]) -> None:
        read, prompts, options = found
        assert set(read.parts.tokens) <= set(options[0].kept_tokens)
        assert prompts and all(prompts) and options
        assert all(type(token) is int and 0 <= token < 2**31 for ids in map(ids_of, prompts) for token in ids)
        assert all(token < api()._vocab_size for each in options for token in each.logit_bias)

    return judged(read, use, warning="refuses such requests")  # of a field that nobody knows


def _checked_as(dialect: Callable[[], Dialect]) -> Callable[[bytes, Path], Outcome]:
    return lambda content, folder: check_body(content, dialect())


READER = "launch/server/api.py API._asked"

TARGETS = tuple(
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
    )
)
