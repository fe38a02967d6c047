"""Requests of the API as dataclasses: every field checked, none ignored silently.

Nothing here knows the model: texts become tokens in launch/server/prompts.py.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from launch.server.errors import APIError, shown, wrong
from runahead.config import MAX_SEED, GenerationOptions

MAX_STOPS, MAX_STOP_CHARACTERS = 16, 1000
MAX_MESSAGES = 10_000
MAX_DEPTH = 20
"""Brackets in brackets. No field that is taken nests deeper than 4."""
MAX_NEW_TOKENS = 2**31
LEAST_TEMPERATURE = 0.01
"""A lower temperature is greedy: logits divided by it might overflow."""

ROLES = ("system", "developer", "user", "assistant")

NOT_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None,),
    "web_search_options": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
}
"""Fields of OpenAI's API that are not supported, with the values that ask for nothing."""

WITHOUT_EFFECT = ("user", "safety_identifier", "prompt_cache_key", "metadata", "parallel_tool_calls")
"""Fields that are taken and change nothing in the answer, neither here nor at OpenAI's."""


@dataclass(frozen=True, kw_only=True)
class Common:
    """What both kinds of requests have.

    Attributes:
        model: the name that the client asked for; None if it named none.
        options: of each of the `n` answers to a prompt, whose seeds count up.
        chose_length, chose_seed: whether the client gave max_tokens, and seed.
        stream: tokens are sent as they come.
        include_usage: a stream ends with its usage.
    """

    model: str | None
    options: list[GenerationOptions]
    chose_length: bool
    chose_seed: bool
    stream: bool
    include_usage: bool


@dataclass(frozen=True, kw_only=True)
class ChatRequest(Common):
    """Body of /v1/chat/completions. `messages` have a role and a content of text."""

    messages: list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(Common):
    """Body of /v1/completions. `prompts` are texts or token ids."""

    prompts: list[str | list[int]]


def read_json(body: bytes) -> dict[str, Any]:
    """The object in a request's body. Raises: APIError."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        reason = "nested too deep" if isinstance(error, RecursionError) else shown(str(error), 120)
        raise APIError(400, f"the body is not JSON in UTF-8: {reason}") from error
    if not isinstance(value, dict):
        raise APIError(400, "the body must be a JSON object")
    if _is_deeper(value, MAX_DEPTH):
        raise APIError(400, f"the body is nested deeper than {MAX_DEPTH} levels")
    return value


def read_chat(body: Mapping[str, Any], defaults: GenerationOptions) -> ChatRequest:
    """A chat request. Raises: APIError."""
    fields = _Fields(body)
    messages = fields.take(
        "messages", lambda value: isinstance(value, list) and bool(value), "must be a list of messages"
    )
    if messages is None:
        raise wrong("messages", "is missing")
    if len(messages) > MAX_MESSAGES:
        raise wrong("messages", f"has {len(messages):,} messages; {MAX_MESSAGES:,} is the most")
    read = [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]
    return ChatRequest(messages=read, **_common(fields, defaults))


def read_completion(body: Mapping[str, Any], defaults: GenerationOptions) -> CompletionRequest:
    """A completion request. Raises: APIError."""
    fields = _Fields(body)
    prompt = fields.take("prompt", lambda value: True, "")
    if prompt is None:
        raise wrong("prompt", "is missing")
    prompts = prompt if isinstance(prompt, list) and prompt and not _is_token(prompt[0]) else [prompt]
    for each in prompts:
        are_tokens = isinstance(each, list) and bool(each) and all(map(_is_token, each))
        if not are_tokens and not (isinstance(each, str) and each):
            raise wrong("prompt", "must be a text, a list of token ids, or a list of such, none of them empty")
        if isinstance(each, str):
            _check_unicode(each, "prompt")
    return CompletionRequest(prompts=prompts, **_common(fields, defaults))


class _Fields:
    """Fields of a body, each taken once; `end` refuses those that nobody took."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = dict(body)

    def take(self, name: str, is_right: Callable[[Any], bool], rule: str) -> Any:
        """The value of a field, None if it is missing or null. Raises: APIError: it is wrong."""
        value = self._left.pop(name, None)
        if value is not None and not is_right(value):
            raise wrong(name, rule)
        return value

    def number(self, name: str, least: float, most: float, *, whole: bool = False, above: bool = False) -> Any:
        """A number from `least` (or above it) to `most`."""

        def is_right(value: Any) -> bool:
            kinds = int if whole else int | float
            is_number = isinstance(value, kinds) and not isinstance(value, bool)
            return is_number and (least < value if above else least <= value) and value <= most

        what = "a whole number" if whole else "a number"
        bounds = f"above {least:g}" if above else f"of at least {least:g}"
        upper = "" if most in (math.inf, MAX_NEW_TOKENS, MAX_SEED) else f" and at most {most:g}"
        return self.take(name, is_right, f"must be {what} {bounds}{upper}")

    def flag(self, name: str) -> bool:
        return bool(self.take(name, lambda value: isinstance(value, bool), "must be true or false"))

    def end(self) -> None:
        """Raises: APIError: a field is unknown, or known and not supported."""
        for name, value in self._left.items():
            if name in WITHOUT_EFFECT:
                continue
            if name not in NOT_SUPPORTED:
                raise APIError(400, f"Unrecognized request argument supplied: {shown(name)}", param=shown(name))
            # True == 1 and False == 0 in Python, and either asks for something else.
            if not any(
                (type(value) is type(idle) and value == idle) or _same(value, idle) for idle in NOT_SUPPORTED[name]
            ):
                raise APIError(
                    400,
                    f"'{name}' is not supported by this server; leave it out",
                    param=name,
                    code="unsupported_parameter",
                )


def _same(value: Any, idle: Any) -> bool:
    """Whether two numbers are the same, as 0 and 0.0 are."""
    numbers = [each for each in (value, idle) if isinstance(each, int | float) and not isinstance(each, bool)]
    return len(numbers) == 2 and value == idle


def _common(fields: _Fields, defaults: GenerationOptions) -> dict[str, Any]:
    model = fields.take("model", lambda value: isinstance(value, str), "must be a text")
    stream = fields.flag("stream")
    usage = _stream_options(fields, stream)
    options, chose_length, chose_seed = _generation(fields, defaults)
    n = fields.number("n", 1, 128, whole=True) or 1
    seed = options.seed
    rows = [replace(options, seed=(seed + number) % (MAX_SEED + 1)) for number in range(n)]
    fields.end()
    return {
        "model": model,
        "options": rows,
        "chose_length": chose_length,
        "chose_seed": chose_seed,
        "stream": stream,
        "include_usage": usage,
    }


def _stream_options(fields: _Fields, stream: bool) -> bool:
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


def _generation(fields: _Fields, defaults: GenerationOptions) -> tuple[GenerationOptions, bool, bool]:
    """Options of one answer, and whether the client gave its length."""
    lengths = {
        name: fields.number(name, 1, MAX_NEW_TOKENS, whole=True) for name in ("max_completion_tokens", "max_tokens")
    }
    given = [value for value in lengths.values() if value is not None]
    if len(set(given)) == 2:
        raise wrong("max_tokens", "and 'max_completion_tokens' differ; give one")
    temperature = fields.number("temperature", 0, 100)
    top_p = fields.number("top_p", 0, 1, above=True)
    top_k = fields.number("top_k", -1, 2**31, whole=True)
    penalty = fields.number("repetition_penalty", 0.1, 10)
    seed = fields.number("seed", 0, MAX_SEED, whole=True)
    stops = _stops(fields)
    samples = defaults.do_sample
    if temperature is not None:
        samples = temperature >= LEAST_TEMPERATURE
    elif top_p is not None or top_k is not None:
        samples = True
    chosen = replace(
        defaults,
        max_new_tokens=given[0] if given else defaults.max_new_tokens,
        do_sample=samples,
        # Settings of sampling are set back where nothing is sampled, so that equal requests are equal.
        temperature=(defaults.temperature if temperature is None else temperature) if samples else 1.0,
        top_p=(top_p or defaults.top_p) if samples else 1.0,
        top_k=(max(0, top_k) if top_k is not None else defaults.top_k) if samples else 0,
        repetition_penalty=penalty or defaults.repetition_penalty,
        seed=seed if seed is not None else secrets.randbelow(2**32) if samples else 0,
        stop=defaults.stop if stops is None else stops,
        ignore_eos=fields.flag("ignore_eos") or defaults.ignore_eos,
    )
    return chosen, bool(given), seed is not None


def _stops(fields: _Fields) -> list[str] | None:
    stop = fields.take("stop", lambda value: isinstance(value, str | list), "must be a text or a list of texts")
    if stop is None:
        return None
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS:
        raise wrong("stop", f"has {len(stops):,} texts; {MAX_STOPS} is the most")
    for each in stops:
        if not isinstance(each, str) or not 1 <= len(each) <= MAX_STOP_CHARACTERS:
            raise wrong("stop", f"must hold texts of 1 to {MAX_STOP_CHARACTERS:,} characters")
        _check_unicode(each, "stop")
    return stops


def _message(message: Any, name: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise wrong(name, "must be an object with 'role' and 'content'")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{name}.role", f"must be one of {', '.join(ROLES)}")
    read = {"role": role, "content": _content(message.get("content"), f"{name}.content")}
    for field, value in message.items():
        if field in ("role", "content") or value is None or value == []:
            continue
        if field == "name" and isinstance(value, str):
            _check_unicode(value, f"{name}.name")
            read["name"] = value
        else:
            raise wrong(f"{name}.{shown(field)}", "is not supported by this server; leave it out")
    return read


def _content(content: Any, name: str) -> str:
    if isinstance(content, str):
        _check_unicode(content, name)
        return content
    if not isinstance(content, list) or not content:
        raise wrong(name, "must be a text, or a list of parts of type text")
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise wrong(f"{name}[{number}]", 'must be {"type": "text", "text": ...}; this server takes text only')
        _check_unicode(part["text"], f"{name}[{number}].text")
        texts.append(part["text"])
    return "".join(texts)


def _check_unicode(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise wrong(name, "holds a character that is not valid Unicode") from error


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects are nested deeper than `depth`."""
    level = [value]
    for _ in range(depth):
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [
            child
            for each in inner
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")
