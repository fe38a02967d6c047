"""Requests of the API as dataclasses. Nothing here knows the model: `prompts.py` makes tokens of texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from launch.server.answer.parser import NO_PARTS, Parts
from launch.server.errors import missing, wrong
from launch.server.request.generation import read_generation
from launch.server.request.messages import Message, read_messages
from launch.server.request.reader import Fields, check_unicode, is_token, unknown
from launch.server.request.template_variables import read_variables
from launch.server.request.tools import Tools, read_tools
from runahead.config import MAX_SEED, GenerationOptions

MOST_SALT = 1024
"""Longest `cache_salt` in characters."""


@dataclass(frozen=True, kw_only=True)
class PromptCacheFields:
    """The field `prompt_cache`: a Prompt Cache prompt, and its schema if the request brings it, both as XML."""

    prompt: str
    schema: str | None = None


class HandoverWay(Enum):
    """How a request asks for its prompt to be handed over to another engine."""

    prefill = "prompt"  # POST /v1/prefill
    params = "kv_transfer_params"  # by the proxy of an engine that goes on, which needs the answer's parameters
    threshold = "cache_hit_threshold"  # by one that looks for the file itself

    @property
    def field(self) -> str:
        """The field that is wrong where it cannot be."""
        return self.value


@dataclass(frozen=True, kw_only=True)
class Common:
    """The fields that both kinds of requests have.

    Attributes:
        model: the name that the client asked for; None if it named none.
        options: of each of the `n` answers to a prompt, whose seeds count up.
        length_field: the field in which the client gave the length of answers; None if it gave none.
        chose_seed: whether it gave a seed.
        stream: tokens are sent as they come.
        include_usage: a stream ends with its usage.
        continuous_usage: every event of a stream has the usage so far.
        return_progress: a stream says how far the prefill is.
        prompt_cache: modules that stand before the messages or the prompt; None if there are none.
        guided_by: the field by which answers are JSON, follow a grammar, or call a tool; None if none says so.
        parts: what its answers may consist of beside content, which is known when its prompt is.
        handover: how it asks for its prompt to be handed over; None: it does not.
        gives_token: the answer has the first token, where that is not all that there is to it.
        cache_salt: prompts of other salts share no prefixes with this one's; None if the client gave none.
        unknown: names of fields that nobody knows.
    """

    model: str | None
    options: list[GenerationOptions]
    length_field: str | None
    chose_seed: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_progress: bool
    prompt_cache: PromptCacheFields | None
    guided_by: str | None
    cache_salt: str | None
    handover: HandoverWay | None
    gives_token: bool = True
    parts: Parts = NO_PARTS
    unknown: list[str]

    @property
    def counts_tokens(self) -> bool:
        """Whether new tokens are part of the answer, and so of the usage and of metrics."""
        return self.gives_token


@dataclass(frozen=True, kw_only=True)
class ChatRequest(Common):
    """Body of /v1/chat/completions.

    Attributes:
        variables: of the chat template.
        effort: of reasoning; None if the client named none.
    """

    messages: list[Message]
    tools: Tools
    variables: dict[str, Any]
    effort: str | None


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(Common):
    """Body of /v1/completions.

    Attributes:
        prompts: texts or token ids.
        echo: the prompt stands before its answer.
        is_answered: False: the client wants no new tokens.
    """

    prompts: list[str | list[int]]
    echo: bool = False
    is_answered: bool = True

    @property
    def counts_tokens(self) -> bool:
        return self.gives_token and self.is_answered

    @property
    def scores(self) -> int | None:
        """Number of most likely tokens to be given with the log-probabilities of prompts; None: without any."""
        return self.options[0].logprobs if self.echo else None


def read_chat(body: Mapping[str, Any], defaults: GenerationOptions) -> ChatRequest:
    """A chat request. Raises: APIError."""
    fields = Fields(body)
    prompt_cache = _prompt_cache(fields)
    messages, tools = read_messages(fields, may_be_empty=prompt_cache is not None), read_tools(fields)
    variables, effort = read_variables(fields)
    common = _common(fields, defaults, tools=tools)
    return ChatRequest(
        messages=messages, tools=tools, variables=variables, effort=effort, prompt_cache=prompt_cache, **common
    )


def read_completion(body: Mapping[str, Any], defaults: GenerationOptions) -> CompletionRequest:
    """A completion request. Raises: APIError."""
    fields = Fields(body)
    prompt_cache, echo = _prompt_cache(fields), fields.flag("echo")
    for name, is_there in (("stream", fields.has("stream")), ("prompt_cache", prompt_cache is not None)):
        if echo and is_there:
            raise wrong("echo", f"does not go with '{name}'")
    is_answered = not (echo and any(fields.is_zero(name) for name in ("max_tokens", "max_completion_tokens")))
    prompt = fields.take("prompt", lambda value: True, "")
    if prompt in (None, "") and prompt_cache is not None:
        return CompletionRequest(prompts=[""], prompt_cache=prompt_cache, **_common(fields, defaults))
    if prompt is None:
        raise missing("prompt")
    prompts = prompt if isinstance(prompt, list) and prompt and not is_token(prompt[0]) else [prompt]
    for each in prompts:
        are_tokens = isinstance(each, list) and bool(each) and all(map(is_token, each))
        if not are_tokens and not (isinstance(each, str) and each):
            raise wrong("prompt", "must be a text, a list of token ids, or a list of such, none of them empty")
        if isinstance(each, str):
            check_unicode(each, "prompt")
    common = _common(fields, defaults, least_new=0 if echo else 1)
    if common["handover"] is not None and (echo or len(prompts) > 1):
        raise wrong(common["handover"].field, "is for one prompt, without 'echo'")
    return CompletionRequest(prompts=prompts, echo=echo, is_answered=is_answered, prompt_cache=prompt_cache, **common)


def _common(
    fields: Fields, defaults: GenerationOptions, *, tools: Tools | None = None, least_new: int = 1
) -> dict[str, Any]:
    """Fields of both kinds of requests, by name; `tools` are those of a chat."""
    model = fields.take("model", lambda value: isinstance(value, str), "must be a text")
    stream = fields.flag("stream")
    include_usage, continuous_usage = _stream_options(fields, stream)
    progress = fields.flag("return_progress")
    if progress and not stream:
        raise wrong("return_progress", "is for 'stream': true only")
    options, length_field, chose_seed, guided_by = read_generation(fields, defaults, tools=tools, least_new=least_new)
    n = fields.number("n", 1, 128, whole=True) or 1
    handover = _handover(fields, has_one_token=options.max_new_tokens == 1)
    if handover is not None and (stream or n > 1):
        raise wrong(handover.field, "is for one answer that does not stream")
    rows = [replace(options, seed=(options.seed + number) % (MAX_SEED + 1)) for number in range(n)]
    return {
        "model": model,
        "options": rows,
        "length_field": length_field,
        "chose_seed": chose_seed,
        "guided_by": guided_by,
        "stream": stream,
        "include_usage": include_usage,
        "continuous_usage": continuous_usage,
        "return_progress": progress,
        "handover": handover,
        "cache_salt": fields.take("cache_salt", _is_salt, f"must be a text of 1 to {MOST_SALT} characters"),
        "unknown": fields.end(),
    }


def _handover(fields: Fields, *, has_one_token: bool) -> HandoverWay | None:
    """How a proxy between a prefill engine and another one asks for a prompt alone. Raises: APIError."""
    params = fields.take("kv_transfer_params", lambda value: isinstance(value, dict), "must be an object") or {}
    threshold = fields.number("cache_hit_threshold", 0, 1)
    if params.get("do_remote_prefill"):
        rule = "has 'do_remote_prefill', and this server goes on with no prompt that another engine has computed"
        raise wrong("kv_transfer_params", rule, code="unsupported_value")
    if threshold:
        rule = "must be 0, with which a proxy asks for a prompt alone: this server computes what it lacks"
        raise wrong("cache_hit_threshold", rule, code="unsupported_value")
    if params.get("do_remote_decode"):
        return HandoverWay.params
    return HandoverWay.threshold if threshold is not None and has_one_token else None


def _prompt_cache(fields: Fields) -> PromptCacheFields | None:
    given = fields.take("prompt_cache", lambda value: isinstance(value, dict), "must be an object with 'prompt'")
    if given is None:
        return None
    for name in given:
        if name not in ("prompt", "schema"):
            raise unknown(name, "prompt_cache")
    for name, begins in (("prompt", '<prompt schema="...">'), ("schema", '<schema name="...">')):
        xml = given.get(name)
        if name == "schema" and xml is None:
            continue
        if not isinstance(xml, str) or not xml.lstrip().startswith("<"):
            raise wrong(f"prompt_cache.{name}", f"must be XML that begins with {begins}")
        check_unicode(xml, f"prompt_cache.{name}")
    return PromptCacheFields(prompt=given["prompt"], schema=given.get("schema"))


_USAGE = ("include_usage", "continuous_usage_stats")


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """Whether a stream is to end with its usage, and whether every event is to have the usage so far."""
    given = fields.take("stream_options", lambda value: isinstance(value, dict), "must be an object")
    if given is None:
        return False, False
    if not stream:
        raise wrong("stream_options", "is for 'stream': true only")
    for name, value in given.items():
        if name not in _USAGE and not (name == "include_obfuscation" and value in (None, False)):
            raise unknown(name, "stream_options")
    for name in _USAGE:
        if not isinstance(given.get(name), bool | None):
            raise wrong(f"stream_options.{name}", "must be true or false")
    include, continuous = (bool(given.get(name)) for name in _USAGE)
    return include, continuous


def _is_salt(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MOST_SALT
