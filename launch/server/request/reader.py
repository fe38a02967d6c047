"""Fields of a request's body: each is taken and checked once, and none is ignored without a word."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from launch.server.errors import APIError, shown, wrong

MAX_DEPTH = 60
"""Brackets in brackets: a JSON schema nests."""
WITHOUT_BOUND = 2**31
"""From here on a message names the upper bound only to who is above it."""

NOT_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "top_logprobs": (None, 0),
    "tools": (None, []),  # of a completion
    "tool_choice": (None, "none"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "web_search_options": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "service_tier": (None, "auto", "default"),
    # of vLLM, SGLang and llama.cpp, which change an answer
    "add_generation_prompt": (None, True),
    "add_special_tokens": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "ebnf": (None,),
    "grammar": (None,),
    "length_penalty": (None, 1.0),
    "prompt_logprobs": (None,),
    "regex": (None,),
    "repeat_penalty": (None, 1.0),
    "return_token_ids": (None, False),
    "spaces_between_special_tokens": (None, True),
    "structural_tag": (None,),
    "truncate_prompt_tokens": (None,),
    "typical_p": (None, 1.0),
    "use_beam_search": (None, False),
}
"""Fields of other servers that are not supported where nothing takes them, with the values that ask for nothing."""

COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x78\x01": "deflate",
    b"\x78\x5e": "deflate",
    b"\x78\x9c": "deflate",
    b"\x78\xda": "deflate",
}
"""First bytes of compressed data, for bodies without a header that says so."""

WITHOUT_EFFECT = (
    *("user", "safety_identifier", "prompt_cache_key", "metadata", "parallel_tool_calls"),
    *("store", "verbosity"),
)
"""Fields that are taken and change nothing here: what an answer says has nothing to do with them, or is a hint at most.
"""


def read_json(body: bytes) -> dict[str, Any]:
    """The object in a request's body. Raises: APIError."""
    try:
        value = parsed(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        for start, encoding in COMPRESSED.items():
            if body.startswith(start):
                raise compressed(encoding) from error
        reason = "nested too deep" if isinstance(error, RecursionError) else shown(str(error), 120)
        raise APIError(400, f"the body is not JSON in UTF-8: {reason}") from error
    if not isinstance(value, dict):
        raise APIError(400, "the body must be a JSON object")
    if is_deeper(value, MAX_DEPTH):
        raise APIError(400, f"the body is nested deeper than {MAX_DEPTH} levels")
    return value


def parsed(text: str) -> Any:
    """The value of JSON text, of which all numbers can be JSON again.

    Raises:
        ValueError: it is none, or has a number such as 1e999, which would become Infinity.
        RecursionError: it is nested too deep to be read.
    """
    return json.loads(text, parse_constant=_no_number, parse_float=_finite)


class Fields:
    """Fields of a body, each taken once; `end` looks at those that nobody took."""

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

        def told(bound: float) -> str:
            return str(bound) if whole else f"{bound:g}"

        what, given = "a whole number" if whole else "a number", self._left.get(name)
        bounds = f"above {told(least)}" if above else f"of at least {told(least)}"
        is_above = isinstance(given, int | float) and given > most
        upper = f" and at most {told(most)}" if is_above or most < WITHOUT_BOUND else ""
        value = self.take(name, is_right, f"must be {what} {bounds}{upper}")
        return value if whole or value is None else float(value)

    def has(self, name: str) -> bool:
        """Whether a field that was not taken asks for something."""
        return bool(self._left.get(name))

    def is_zero(self, name: str) -> bool:
        """Whether a field that was not taken is the number 0."""
        value = self._left.get(name)
        return isinstance(value, int) and not isinstance(value, bool) and value == 0

    def flag(self, name: str) -> bool:
        return bool(self.take(name, lambda value: isinstance(value, bool), "must be true or false"))

    def end(self) -> list[str]:
        """Names of the fields that nobody knows. Raises: APIError: a field is known and not supported."""
        strangers = []
        for name, value in self._left.items():
            if name in WITHOUT_EFFECT:
                continue
            if name not in NOT_SUPPORTED:
                strangers.append(name)
                continue
            # True == 1 and False == 0 in Python, and either asks for something else.
            if not any(
                (type(value) is type(idle) and value == idle) or _same(value, idle) for idle in NOT_SUPPORTED[name]
            ):
                raise unsupported(name)
        return strangers


def compressed(encoding: str) -> APIError:
    """The error for a body in an encoding that this server does not read."""
    message = f"the body is compressed ({shown(encoding)}), which this server does not read; send the JSON as it is"
    return APIError(415, message, code="unsupported_media_type", headers={"accept-encoding": "identity"})


def unknown(name: str, param: str | None = None) -> APIError:
    """The error for a field that nobody knows. `param` is the field that holds it, if one does."""
    name = shown(name) if param is None else f"{param}.{shown(name)}"
    message = f"Unrecognized request argument supplied: {name}"
    return APIError(400, message, param=param or name, code="unknown_parameter")


def unsupported(name: str, what: str = "") -> APIError:
    """The error for a field of OpenAI's API, or one of its values, that this server does not support."""
    message = f"'{name}'{f' {what}' if what else ''} is not supported by this server; leave it out"
    return APIError(400, message, param=name, code="unsupported_value" if what else "unsupported_parameter")


def check_unicode(text: str, name: str) -> None:
    """Raises: APIError: a text of the field `name` is no valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise wrong(name, "holds a character that is not valid Unicode") from error


def is_token(value: Any) -> bool:
    """Whether a value may be a token id, as far as one may know without a model."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def is_deeper(value: Any, depth: int) -> bool:
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


def _same(value: Any, idle: Any) -> bool:
    """Whether two numbers are the same, as 0 and 0.0 are."""
    numbers = [each for each in (value, idle) if isinstance(each, int | float) and not isinstance(each, bool)]
    return len(numbers) == 2 and value == idle


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{shown(text)} is too large for a number")
    return number


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")
