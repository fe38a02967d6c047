"""Requests of the API as dataclasses. Nothing here knows the model: texts become tokens in launch/server/prompts.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from launch.server.errors import APIError, shown, wrong
from launch.server.generation import read_generation
from launch.server.messages import Message, read_messages, read_tools
from launch.server.reader import Fields, check_unicode
from runahead.config import MAX_SEED, GenerationOptions


@dataclass(frozen=True, kw_only=True)
class Common:
    """The fields that both kinds of requests have.

    Attributes:
        model: the name that the client asked for; None if it named none.
        options: of each of the `n` answers to a prompt, whose seeds count up.
        chose_length, chose_seed: whether the client gave max_tokens, and seed.
        stream: tokens are sent as they come.
        include_usage: a stream ends with its usage.
        return_progress: a stream says how far the prefill is.
    """

    model: str | None
    options: list[GenerationOptions]
    chose_length: bool
    chose_seed: bool
    stream: bool
    include_usage: bool
    return_progress: bool


@dataclass(frozen=True, kw_only=True)
class ChatRequest(Common):
    """Body of /v1/chat/completions."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(Common):
    """Body of /v1/completions. `prompts` are texts or token ids."""

    prompts: list[str | list[int]]


def read_chat(body: Mapping[str, Any], defaults: GenerationOptions) -> ChatRequest:
    """A chat request. Raises: APIError."""
    fields = Fields(body)
    messages, tools = read_messages(fields), read_tools(fields)
    return ChatRequest(messages=messages, tools=tools, **_common(fields, defaults, is_chat=True))


def read_completion(body: Mapping[str, Any], defaults: GenerationOptions) -> CompletionRequest:
    """A completion request. Raises: APIError."""
    fields = Fields(body)
    prompt = fields.take("prompt", lambda value: True, "")
    if prompt is None:
        raise wrong("prompt", "is missing")
    prompts = prompt if isinstance(prompt, list) and prompt and not _is_token(prompt[0]) else [prompt]
    for each in prompts:
        are_tokens = isinstance(each, list) and bool(each) and all(map(_is_token, each))
        if not are_tokens and not (isinstance(each, str) and each):
            raise wrong("prompt", "must be a text, a list of token ids, or a list of such, none of them empty")
        if isinstance(each, str):
            check_unicode(each, "prompt")
    return CompletionRequest(prompts=prompts, **_common(fields, defaults, is_chat=False))


def _common(fields: Fields, defaults: GenerationOptions, *, is_chat: bool) -> dict[str, Any]:
    model = fields.take("model", lambda value: isinstance(value, str), "must be a text")
    stream = fields.flag("stream")
    usage = _stream_options(fields, stream)
    progress = fields.flag("return_progress")
    if progress and not stream:
        raise wrong("return_progress", "is for 'stream': true only")
    options, chose_length, chose_seed = read_generation(fields, defaults, is_chat=is_chat)
    n = fields.number("n", 1, 128, whole=True) or 1
    rows = [replace(options, seed=(options.seed + number) % (MAX_SEED + 1)) for number in range(n)]
    fields.end()
    return {
        "model": model,
        "options": rows,
        "chose_length": chose_length,
        "chose_seed": chose_seed,
        "stream": stream,
        "include_usage": usage,
        "return_progress": progress,
    }


def _stream_options(fields: Fields, stream: bool) -> bool:
    """Whether a stream is to end with its usage."""
    given = fields.take("stream_options", lambda value: isinstance(value, dict), "must be an object")
    if given is None:
        return False
    if not stream:
        raise wrong("stream_options", "is for 'stream': true only")
    for name, value in given.items():
        if name != "include_usage" and not (name == "include_obfuscation" and value in (None, False)):
            raise APIError(
                400, f"Unrecognized request argument supplied: stream_options.{shown(name)}", param="stream_options"
            )
    usage = given.get("include_usage")
    if usage is not None and not isinstance(usage, bool):
        raise wrong("stream_options.include_usage", "must be true or false")
    return bool(usage)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
