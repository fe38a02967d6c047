"""A program's arguments: flags, options whose value is free text, and overrides in the form that Hydra takes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar, get_origin

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from launch.program.typed_options import leaf_names, shortened, suggestion
from runahead.config import not_one_of

T = TypeVar("T")

VERBATIM = ("prompt.text", "prompt.question", "generation.stop", "generation.json_schema", "generation.grammar")
"""Options whose value is free text, which neither Hydra's grammar nor OmegaConf's ${...} may interpret."""

OPEN = dict[str, Any]
"""Type of a section that takes any option, such as policy."""

NULL = "null"
"""Value that leaves an option unset, but for prompts and questions, where it is a text."""

POLICY_FILES = ("policy.schema", "policy.store", "policy.skew", "policy.heads", "policy.predictor", "policy.path")
"""File names among the options of policies, whose types are not known before a policy is chosen."""

SHORT_FLAGS = {"-h": "--help", "-c": "--cfg", "-cd": "--config-dir", "-cn": "--config-name", "-m": "--multirun"}
FLAGS_WITH_VALUE = ("--cfg", "--config-dir", "--config-name")
FLAGS = (*SHORT_FLAGS.values(), "--layout")


def split_flags(args: Sequence[str], known: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The flags by their long names, with their values, and the overrides.

    Raises:
        ValueError: a flag is unknown, or lacks its value.
    """
    flags: dict[str, str] = {}
    overrides: list[str] = []
    rest = iter(args)
    for arg in rest:
        if not arg.startswith("-"):
            overrides.append(arg)
            continue
        flag, equals, value = arg.partition("=")
        flag = SHORT_FLAGS.get(flag, flag)
        if flag not in known or (equals and flag not in FLAGS_WITH_VALUE):
            raise ValueError(f"unknown flag {shortened(arg)}; options are written name=value, see --help")
        if flag in FLAGS_WITH_VALUE and not equals:
            value = next(rest, "")
        flags[flag] = value
    if flags.get("--cfg", "job") != "job":
        raise ValueError(f"--cfg {flags['--cfg']} is unknown; use --cfg job".replace("  ", " "))
    for flag, what in (("--config-dir", "a folder"), ("--config-name", "the name of a config")):
        if flags.get(flag) == "":
            raise ValueError(f"{flag} needs {what}, as in {flag} <{what.split()[-1]}>")
    return flags, overrides


def split_verbatim(overrides: Sequence[str], kinds: Mapping[str, Any]) -> tuple[list[str], dict[str, list[str]]]:
    """The overrides that Hydra may parse, and all values of each verbatim option in order."""
    for_hydra = []
    verbatim: dict[str, list[str]] = {}
    for override in overrides:
        name, equals, value = override.partition("=")
        name = name.lstrip("+")
        if not (equals and name in VERBATIM and name in kinds):
            for_hydra.append(override)
            continue
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} is not valid UTF-8; check the terminal's encoding") from error
        verbatim.setdefault(name, []).append(value)
    return for_hydra, verbatim


def with_verbatim(run: T, verbatim: dict[str, list[str]]) -> T:
    """The options with the last value of each verbatim option, and all stop strings; they are checked again."""
    # After OmegaConf's to_object, so that ${x} in a text is not interpolated; replace() runs the checks again.
    for name, values in verbatim.items():
        section, _, option = name.partition(".")
        value: Any = values[-1]
        if name == "generation.stop":
            value = _stop_strings(values)
        elif name in ("generation.json_schema", "generation.grammar") and value == NULL:
            value = None
        inner = replace(getattr(run, section), **{option: value})
        run = replace(run, **{section: inner})  # type: ignore[type-var]
    return run


def _stop_strings(values: Sequence[str]) -> list[str]:
    """Stop strings of all values in order; null takes back those before it. Raises: ValueError, as `_texts_of`."""
    stops: list[str] = []
    for value in values:
        stops = [] if value == NULL else [*stops, *_texts_of(value)]
    return stops


def _texts_of(value: str) -> list[str]:
    """The strings of a list in JSON or, as a shell leaves it without quotes, in Hydra's grammar; else the one string.

    Raises:
        ValueError: the value is in brackets, and no list of strings.
    """
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = value
    if isinstance(parsed, list) and all(isinstance(item, str) for item in parsed):
        return parsed
    if not (value.startswith("[") and value.endswith("]")):
        return [value]
    with suppress(HydraException, RecursionError, ValueError):
        parsed = OverridesParser.create().parse_override(f"stop={value}").value()
        if isinstance(parsed, list) and all(isinstance(item, str) for item in parsed):
            return parsed
    one = shortened(json.dumps([value], ensure_ascii=False))
    raise ValueError(
        f"generation.stop={shortened(value)} is not a list of strings; write a list as "
        f"generation.stop='[\"a\",\"b\"]', and a stop string in brackets as generation.stop='{one}'"
    )


def checked_override(
    text: str, kinds: Mapping[str, Any], groups: Mapping[str, str | None], loader: ConfigLoaderImpl
) -> str | None:
    """The override in the form Hydra takes: an existing option or group with one value. None if it changes nothing.

    Hydra's own messages have several lines and name configs and structs, so mistakes are found here first.

    Args:
        kinds: types of the options by their names.
        groups: groups in the defaults list, with their choices. +group=choice adds another group of the search path.
        loader: knows the choices of a group.
    """
    shown = shortened(text)
    if "=" not in text:
        raise ValueError(f"cannot read {shown}; options are written name=value, see --help")
    name = text.partition("=")[0].lstrip("+")
    is_added = text.startswith("+") and name not in groups and bool(choices(name, loader))
    is_group = is_added or name in groups
    leaves = leaf_names(kinds)
    # A section that is a dictionary takes any option.
    sections = accumulate(name.split(".")[:-1], lambda section, part: f"{section}.{part}")
    is_open = re.fullmatch(r"[a-z]\w*(\.\w+)+", name, re.ASCII) and any(kinds.get(each) == OPEN for each in sections)
    if name not in leaves and not is_group and not is_open:
        if name in kinds:
            members = ", ".join(leaf for leaf in leaves if leaf.startswith(f"{name}."))
            raise ValueError(f"{name} is not one option but several: {members}")
        if name.startswith("sweep."):
            raise ValueError(f"{shortened(name)} is an option of a sweep; give it with --multirun, or leave it out")
        raise ValueError(f"unknown option {shortened(name)}; {suggestion(name, [*leaves, *groups])}")
    value = text.partition("=")[2]
    # A file name may contain commas, brackets and equals signs, so it is quoted before Hydra parses it. ${...} works.
    is_file = name in POLICY_FILES or kinds.get(name) is str
    if is_file and value != NULL and value[:1] not in ("'", '"'):
        value = QuotedString(text=value, quote=Quote.double).with_quotes()
    takes_keys = is_open or get_origin(kinds.get(name)) is dict
    text = f"{'++' if takes_keys else ''}{name}={value}"
    try:
        override = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError) as error:  # the second for whole numbers of thousands of digits
        of_group = f"give a name, and options one by one as {name}.<option>=<value>"
        remedy = of_group if is_group else "text in quotes is always read"
        raise ValueError(f"cannot read {shown}: not a value that {name} can take; {remedy}") from error
    except RecursionError as error:
        raise ValueError(f"cannot read {shown}: its brackets are nested too deep") from error
    if override.is_sweep_override():
        raise ValueError(f"{shown} has several values; give one, or a list in brackets, or run each with --multirun")
    if not is_group:
        return text
    choice = override.value()
    if choice is None and not is_added and groups[name] is None:
        return None  # Hydra would look for a file "null"
    folder, _, last = f"{name}/{choice}".rpartition("/")
    if not isinstance(choice, str) or last.removesuffix(".yaml") not in choices(folder, loader):
        raise ValueError(f"{shown} {not_one_of(choice, choices(name, loader))}")
    return f"{'+' if is_added else ''}{name}={choice}"


def choices(group: str, loader: ConfigLoaderImpl) -> list[str]:
    """Names of the config files of a group, sorted; none if there is no such group."""
    is_group = ".." not in group.split("/") and loader.repository.group_exists(group)
    return sorted(loader.get_group_options(group)) if is_group else []
