"""Changes of a model's config before the model is made, such as YaRN for texts beyond the length it was trained for."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from runahead.config import not_one_of
from runahead.model.loading.quiet import one_line

FIXED = (
    "model_type",
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "transformers_version",
)
"""Entries of a config that are facts about its files, or have an option of their own (`model.dtype`)."""

ANY_TYPE = ("rope_theta", "partial_rotary_factor")
"""Parameters of RoPE that stay if its type changes; the others belong to a type."""

SCALED = ("yarn", "llama3", "longrope")
"""Types of RoPE that scale from a length to `max_position_embeddings`, which by default are the same."""


def overridden(config: Any, overrides: Mapping[str, Any]) -> Any:
    """Make a transformers config with other values.

    Args:
        overrides: values by key. Keys of inner dictionaries are merged; parameters of another type of RoPE replace
            those of the one before.

    Raises:
        ValueError: a key is unknown, a value cannot be used, or nothing changes; without the name of the model.
    """
    before = config.to_dict()
    named = {_name_in(config, key): value for key, value in overrides.items()}
    for key in named:
        if key in FIXED or key.startswith("_"):
            raise ValueError(f"model.overrides.{key} cannot be changed")
        if key not in before and not hasattr(config, key):
            inner = [f"{part}.{key}" for part, values in before.items() if isinstance(values, dict) and key in values]
            close = inner or difflib.get_close_matches(key, before, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"model.overrides.{key} is no key of a {config.model_type} config{hint}")
    after = _merged(before, named)
    _require_types(named)
    _require_lengths(before, after, named)
    with _complaints() as old:
        type(config).from_dict(json.loads(json.dumps(before, default=str)))
    try:
        with _complaints() as new:
            changed = type(config).from_dict(after)
    except Exception as error:  # a family's config may raise anything for values that it does not expect
        # transformers' checks of a class name the check, and the reason is what it raised.
        raise ValueError(f"model.overrides cannot be used: {one_line(error.__cause__ or error)}") from error
    # A factor that is not the ratio of the lengths is used as it is: Qwen3's config has room for answers beside it.
    if found := [each for each in new if each not in old and "implicit factor" not in each]:
        raise ValueError(f"model.overrides cannot be used: {one_line(found[0])}")
    if changed.to_dict() == before:
        raise ValueError("model.overrides changes nothing, since the config has these values; leave it out")
    changed.name_or_path = config.name_or_path
    return changed


def fact(config: Any, overrides: Mapping[str, Any]) -> str:
    """Overrides as one line, which is equal for equal ones; "" for none.

    Args:
        config: the model's, whose other names for an entry count as the entry.
    """
    named = {_name_in(config, key): plain(value) for key, value in overrides.items()}
    return json.dumps(named, sort_keys=True) if named else ""


def plain(value: Any) -> Any:
    """A value in which whole numbers are ints, as 4.0 and 4 are one factor."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _name_in(config: Any, key: str) -> str:
    """The key under which a config has an entry: families name some otherwise, and RoPE had another name once."""
    key = "rope_parameters" if key == "rope_scaling" else key
    return str(type(config).attribute_map.get(key, key))


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in overrides.items():
        held = merged.get(key)
        if not (isinstance(value, Mapping) and isinstance(held, Mapping)):
            merged[key] = value
            continue
        if value.get("rope_type", held.get("rope_type")) != held.get("rope_type"):
            held = {name: held[name] for name in ANY_TYPE if name in held}
        merged[key] = _merged(held, value)
    return merged


def _require_types(overrides: Mapping[str, Any]) -> None:
    """Check that types of RoPE are known: with others a family's code fails while it is built. Raises: ValueError."""
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            _require_types(value)
        elif key == "rope_type" and value not in (known := ("default", *ROPE_INIT_FUNCTIONS)):
            raise ValueError(f"model.overrides: rope_type={value} {not_one_of(value, known)}")


def _require_lengths(before: Mapping[str, Any], after: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Check that scaled positions have the length that they are scaled from, not the new one. Raises: ValueError."""
    for key, inner in overrides.items():
        if key != "rope_parameters" and isinstance(inner, Mapping) and isinstance(before.get(key), dict):
            _require_lengths(before[key], after[key], inner)
    rope, length = after.get("rope_parameters"), before.get("max_position_embeddings")
    if not isinstance(rope, dict) or "max_position_embeddings" not in overrides:
        return
    key = "original_max_position_embeddings"
    for kind in [rope, *(each for each in rope.values() if isinstance(each, dict))]:
        if kind.get("rope_type") in SCALED and kind.get(key) is None and after.get(key) is None:
            raise ValueError(
                f"model.overrides sets max_position_embeddings, and {kind['rope_type']} scales from "
                f"{key}; add it to rope_parameters (the config has {length} positions)"
            )


@contextmanager
def _complaints() -> Iterator[list[str]]:
    """Context manager in which warnings of transformers about parameters of RoPE are collected."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, collector = logging.getLogger("transformers.modeling_rope_utils"), Collector()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(collector)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield found
    finally:
        logger.removeHandler(collector)
        logger.setLevel(level)
        logger.propagate = propagate
