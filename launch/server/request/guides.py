"""Fields of a request that say what its answers follow: a JSON schema, a regular expression, a choice, a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from launch.server.errors import shown, wrong
from launch.server.request.reader import MAX_DEPTH, Fields, check_unicode, is_deeper, parsed, unsupported
from launch.server.request.tools import Tools
from runahead.config import GenerationOptions

MAX_CHARACTERS = 100_000
MAX_CHOICES = 1000
ANY_OBJECT = '{"type": "object"}'
"""Schema of `{"type": "json_object"}`."""


@dataclass(frozen=True, kw_only=True)
class Guided:
    """The guide of answers as generation options, and the field that sets it; None: any text."""

    json_schema: str | None = None
    grammar: str | None = None
    field: str | None = None


def read_guide(fields: Fields, defaults: GenerationOptions, tools: Tools | None) -> Guided:
    """The guide of answers. A chat that has to call a tool takes no other. Raises: APIError."""
    found = [each for each in (_response_format(fields), _structured(fields), *_of_vllm(fields)) if each is not None]
    asked = [each for each in found if each.field is not None]
    if len(asked) > 1:
        raise wrong(str(asked[1].field), f"and '{asked[0].field}' do not go together; give one")
    if tools is not None and tools.to_call:
        return Guided(grammar=tools.grammar, field="tools")
    if found:
        return (asked or found)[0]
    field = None if defaults.guide is None else "response_format"
    return Guided(json_schema=defaults.json_schema, grammar=defaults.grammar, field=field)


def _response_format(fields: Fields) -> Guided | None:
    field = "response_format"
    given = fields.take(field, lambda value: isinstance(value, dict), "must be an object with 'type'")
    if given is None:
        return None
    kind = given.get("type")
    if kind == "text":
        return Guided()
    if kind == "json_object":
        return Guided(json_schema=ANY_OBJECT, field=field)
    if kind != "json_schema":
        raise wrong("response_format.type", "must be text, json_object or json_schema")
    named = given.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise wrong("response_format.json_schema", "must be an object with 'schema', a JSON schema")
    return Guided(json_schema=_text(json.dumps(schema), "response_format.json_schema.schema"), field=field)


def _structured(fields: Fields) -> Guided | None:
    """The field `structured_outputs` of vLLM."""
    field = "structured_outputs"
    given = fields.take(field, lambda value: isinstance(value, dict), "must be an object")
    asked = {name: value for name, value in (given or {}).items() if value is not None and value is not False}
    if not asked:
        return None
    for name in asked:
        if name not in KINDS:
            raise unsupported(f"{field}.{shown(name)}")
    if len(asked) > 1:
        raise wrong(field, f"has {' and '.join(asked)}; give one")
    [(name, value)] = asked.items()
    return KINDS[name](value, f"{field}.{name}")


def _of_vllm(fields: Fields) -> list[Guided]:
    """The fields `guided_json` and so on, as vLLM had them before."""
    given = {name: fields.take(f"guided_{name}", lambda value: True, "") for name in KINDS if name != "json_object"}
    return [KINDS[name](value, f"guided_{name}") for name, value in given.items() if value is not None]


def _json(value: Any, name: str) -> Guided:
    schema = value
    if isinstance(value, str):
        try:
            schema = parsed(_text(value, name))
        except (ValueError, RecursionError):
            schema = None
    if not isinstance(schema, dict):
        raise wrong(name, "must be a JSON schema, or one as JSON text")
    if is_deeper(schema, MAX_DEPTH):
        raise wrong(name, f"is nested deeper than {MAX_DEPTH} levels")
    return Guided(json_schema=_text(json.dumps(schema), name), field=name)


def _json_object(value: Any, name: str) -> Guided:
    if value is not True:
        raise wrong(name, "must be true or false")
    return Guided(json_schema=ANY_OBJECT, field=name)


def _regex(value: Any, name: str) -> Guided:
    if not isinstance(value, str) or not value:
        raise wrong(name, "must be a regular expression")
    # In Lark an expression stands between slashes, in one line.
    body = re.sub(r"\\.|/|\n", _in_lark, _text(value, name), flags=re.DOTALL)
    return Guided(grammar=f"start: /{body}/", field=name)


def _in_lark(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])


def _choice(value: Any, name: str) -> Guided:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise wrong(name, f"must be a list of 1 to {MAX_CHOICES:,} texts")
    for each in value:
        if not isinstance(each, str) or not each:
            raise wrong(name, "must hold texts that are not empty")
        check_unicode(each, name)
    choices = " | ".join(json.dumps(each, ensure_ascii=False) for each in value)
    return Guided(grammar=_text(f"start: {choices}", name), field=name)


def _grammar(value: Any, name: str) -> Guided:
    if not isinstance(value, str):
        raise wrong(name, "must be a grammar in llguidance's form of Lark")
    return Guided(grammar=_text(value, name), field=name)


KINDS: Mapping[str, Callable[[Any, str], Guided]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
"""Reader of each kind of guide, given its value and the name of its field."""


def _text(text: str, name: str) -> str:
    """A text of the field `name`, which may not be too long."""
    check_unicode(text, name)
    if len(text) > MAX_CHARACTERS:
        raise wrong(name, f"has {len(text):,} characters; {MAX_CHARACTERS:,} is the most")
    return text
