"""Work items and reports as JSON, in which ranks send them: what arrives can name these classes and nothing else.

Lists and what JSON knows are as they are; all else is an object with one name, that of its kind. (A pickle can name
any function, and calls it.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from policies.reuse import ReusingPrompt, Segment, SegmentUse
from runahead.config import GenerationOptions, Speculate
from runahead.decoding.scored_tokens import ScoredToken
from runahead.report import (
    MemoryReport,
    PromptLogprobs,
    RankReport,
    RetrievalReport,
    ReuseReport,
    SparseReport,
    SpeculationReport,
    TokenLogprobs,
)
from runahead.reuse.prefix_tree import Dropped, Stored
from runahead.serving.items import (
    Alive,
    Cancel,
    Check,
    End,
    Generate,
    Handed,
    Part,
    PrefillItem,
    Progress,
    Stop,
    Stopping,
    Tokens,
)
from runahead.timeline.trace import TraceSpan

CLASSES: Mapping[str, type] = {
    each.__name__: each
    for each in (
        *(PrefillItem, Generate, Cancel, Stop, Check, End),
        *(Tokens, Part, Progress, Handed, Stored, Dropped, Alive, Stopping),
        *(GenerationOptions, Speculate, ReusingPrompt, SegmentUse, Segment, TraceSpan),
        *(RankReport, RetrievalReport, ReuseReport, SparseReport, SpeculationReport, MemoryReport),
        *(TokenLogprobs, PromptLogprobs),
    )
}
"""What messages are made of: dataclasses and enums, by name."""

PLAIN = {bool, int, float, str, type(None)}


def to_bytes(message: object) -> bytes:
    """A message as it is sent. Raises: TypeError: something in it has no form."""
    return json.dumps(_form(message), separators=(",", ":")).encode()


def from_bytes(data: bytes) -> Any:
    """The message that was sent. Raises: ValueError: it cannot be read, or names what messages are not made of."""
    try:
        return _value(json.loads(data))
    except (AttributeError, KeyError, RecursionError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"a message of another rank cannot be read: {error}") from error


def _form(value: Any) -> Any:
    kind = type(value)
    if CLASSES.get(kind.__name__) is kind:
        if isinstance(value, Enum):
            return {kind.__name__: value.name}
        return {kind.__name__: {each.name: _form(getattr(value, each.name)) for each in fields(value)}}
    if kind in PLAIN:
        return value
    if isinstance(value, float):  # of NumPy
        return float(value)
    if isinstance(value, ScoredToken):
        return {"ScoredToken": [int(value), _form(value.logprobs)]}
    if isinstance(value, list):  # token ids are many
        return value if _is_plain(value) else [_form(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": _form(list(value))}
    if isinstance(value, dict):
        return {"dict": [[_form(key), _form(each)] for key, each in value.items()]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    raise TypeError(f"{kind.__name__} has no form in which ranks send it")


def _is_plain(values: list[Any]) -> bool:
    return set(map(type, values)) <= PLAIN


def _value(form: Any) -> Any:
    if isinstance(form, list):
        return form if _is_plain(form) else [_value(each) for each in form]
    if not isinstance(form, dict):
        return form
    [(name, content)] = form.items()  # a ValueError, unless it is one
    if name == "tuple":
        return tuple(_value(content))
    if name == "dict":
        return {_value(key): _value(each) for key, each in content}
    if name == "range":
        return range(*content)
    if name == "ScoredToken":
        return ScoredToken(content[0], _value(content[1]))
    cls = CLASSES[name]
    if is_dataclass(cls):
        return cls(**{field: _value(each) for field, each in content.items()})
    return cls[content]  # type: ignore[index]
