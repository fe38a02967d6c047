"""From command-line arguments to one typed options object. Every rank does it, from the same arguments."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Generic, TypeVar, Union, get_origin, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

# Beside the package that this file is in, in a checkout as in site-packages.
CONF = Path(__file__).resolve().parent.parent.parent / "conf"

# What follows the first "=" of these is free text: neither Hydra's grammar nor OmegaConf's ${...} gets to see
# it.
VERBATIM = ("prompt.text", "prompt.question", "generation.stop")

# File names may hold commas, brackets and equals signs too; they are quoted for Hydra, and ${...} works in
# them.
FILE_NAMES = (
    "prompt.file",
    "prompt.ids_file",
    "text.file",
    "model.path",
    "model.config",
    "ranks.fault_report",
    "partition.table",
    "table",
    "policy.schema",
    "policy.store",
    "policy.skew",
    "policy.path",
    "schema",
    "out",
    "report",
    "lines",
    "timeline",
    "sample",
    "bench.results",
    "bench.compute",
)

T = TypeVar("T")


@dataclass(kw_only=True)
class CommandLine(Generic[T]):
    """What the arguments ask for: to print something (`to_print`), or to run with the options `run`."""

    to_print: str | None = None
    run: T | None = None


@dataclass(frozen=True, kw_only=True)
class Program(Generic[T]):
    """A program with a command line.

    Attributes:
        name: conf/<name>.yaml holds the defaults.
        options: dataclass that is their schema. A section that is a dictionary takes any option, which the dataclass
            then checks.
        help: text of --help.
        help_on: text of --help for certain overrides, or None.
    """

    name: str
    options: type[T]
    help: str
    help_on: Callable[[Sequence[str]], str | None] = lambda overrides: None

    @property
    def groups(self) -> list[str]:
        """Folders of conf/ that this program's options are chosen from."""
        defaults = yaml.safe_load((CONF / f"{self.name}.yaml").read_text(encoding="utf-8"))["defaults"]
        return [name for entry in defaults if isinstance(entry, dict) for name in entry]

    def read(self, args: Sequence[str]) -> CommandLine[T]:
        """Read the arguments after the program's name.

        Raises: ValueError, in one line, for unknown flags, unknown options and bad values.
        """
        flags, overrides = _split_flags(args)
        if "--help" in flags:
            return CommandLine(to_print=self.help_on(overrides) or self.help)
        run = self.compose(overrides)
        if "--cfg" in flags:
            plain = _plain(asdict(run))  # type: ignore[call-overload]
            return CommandLine(to_print=yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
        return CommandLine(run=run)

    def compose(self, overrides: Sequence[str]) -> T:
        """The options that `overrides` (name=value) and the files in conf/ lead to.

        Raises: ValueError, in one line.
        """
        for_hydra, verbatim = _split_verbatim(overrides, self.options)
        groups = self.groups
        checked = [_checked_override(text, self.options, groups) for text in for_hydra]
        for_hydra = [text for text in checked if text != "experiment=null"]  # which Hydra takes for no name at all
        try:
            with initialize_config_dir(version_base="1.3", config_dir=str(CONF), job_name=self.name):
                composed = compose(self.name, for_hydra)
        except HydraException as error:
            if found := re.search(r"Could not override '([\w.]+)'", str(error)):
                raise ValueError(f"{found[1]} does not go with the other options; leave it out") from error
            raise ValueError(f"the options do not fit together: {_one_line(error)}") from error
        return _with_verbatim(_typed(composed, self.options), verbatim)


def _split_flags(args: Sequence[str]) -> tuple[set[str], list[str]]:
    flags: set[str] = set()
    overrides: list[str] = []
    rest = iter(args)
    for arg in rest:
        if arg in ("-h", "--help"):
            flags.add("--help")
        elif arg in ("-c", "--cfg") or arg.startswith("--cfg="):
            what = arg.partition("=")[2] if "=" in arg else next(rest, "")
            if what != "job":
                raise ValueError(f"--cfg {what} is unknown; use --cfg job".replace("  ", " "))
            flags.add("--cfg")
        elif arg.startswith("-"):
            raise ValueError(f"unknown flag {arg}; options are written name=value, see --help")
        else:
            overrides.append(arg)
    return flags, overrides


def _split_verbatim(overrides: Sequence[str], options: type) -> tuple[list[str], dict[str, list[str]]]:
    """What Hydra may parse, and the texts it must not: all values of each verbatim option, in order."""
    for_hydra = []
    verbatim: dict[str, list[str]] = {}
    _, known = _option_names(options)
    for override in overrides:
        name, equals, value = override.partition("=")
        name = name.lstrip("+")
        if not (equals and name in VERBATIM and name in known):
            for_hydra.append(override)
            continue
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} is not valid UTF-8; check the terminal's encoding") from error
        verbatim.setdefault(name, []).append(value)
    return for_hydra, verbatim


def _with_verbatim(run: T, verbatim: dict[str, list[str]]) -> T:
    # After OmegaConf's to_object, so that ${x} stays what it is; replace() runs the checks again.
    for name, values in verbatim.items():
        section, _, option = name.partition(".")
        value: Any = values[-1]
        if name == "generation.stop":
            value = [text for each in values for text in _stop_strings(each)]
        inner = replace(getattr(run, section), **{option: value})
        run = replace(run, **{section: inner})  # type: ignore[type-var]
    return run


def _stop_strings(value: str) -> list[str]:
    """A JSON list of strings is that list, anything else is one stop string as it is."""
    try:
        parsed = json.loads(value)
    except ValueError:
        return [value]
    is_list_of_strings = isinstance(parsed, list) and all(isinstance(item, str) for item in parsed)
    return parsed if is_list_of_strings else [value]


def _checked_override(text: str, options: type, groups: Sequence[str]) -> str:
    """The override as Hydra is to get it: an existing option or group, set to one value.

    Hydra's own messages have several lines and speak of configs and structs, so the mistakes are found before
    it sees them.
    """
    shown = _shown(text)
    if "=" not in text:
        raise ValueError(f"cannot read {shown}; options are written name=value, see --help")
    name = text.partition("=")[0].lstrip("+")
    sections, leaves = _option_names(options)
    is_open = re.fullmatch(r"[a-z]\w*(\.\w+)+", name, re.ASCII) and name.partition(".")[0] in _open_sections(options)
    if name not in leaves and name not in groups and not is_open:
        if name in sections:
            members = ", ".join(leaf for leaf in leaves if leaf.startswith(f"{name}."))
            raise ValueError(f"{name} is not one option but several: {members}")
        raise ValueError(f"unknown option {_shown(name)}; {_suggestion(name, [*leaves, *groups])}")
    value = text.partition("=")[2]
    if name in FILE_NAMES and value != "null" and value[:1] not in ("'", '"'):
        value = QuotedString(text=value, quote=Quote.double).with_quotes()
    text = f"{'++' if is_open else ''}{name}={value}"
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ValueError(
            f"cannot read {shown}: not a value that {name} can take; text in quotes is always read"
        ) from error
    except RecursionError as error:
        raise ValueError(f"cannot read {shown}: its brackets are nested too deep") from error
    if override.is_sweep_override():
        raise ValueError(f"{shown} has several values; give one, or a list in brackets")
    if name in groups:
        known = sorted(path.stem for path in (CONF / name).glob("*.yaml"))
        choice = override.value()
        if choice not in known and not (name == "experiment" and choice is None):
            raise ValueError(f"{shown} is not one of {', '.join(known)}")
        return f"{name}={'null' if choice is None else choice}"
    return text


def _open_sections(options: type) -> list[str]:
    """Sections that take any option, since they are dictionaries."""
    return [name for name, kind in get_type_hints(options).items() if get_origin(kind) is dict]


def _option_names(options: type) -> tuple[list[str], list[str]]:
    """The sections of the options (prompt, ...) and the full names of their members (prompt.file, report)."""
    sections, leaves = [], []
    kinds = get_type_hints(options)
    for field in fields(options):
        kind = kinds[field.name]
        if isinstance(kind, type) and is_dataclass(kind):
            inner_sections, inner_leaves = _option_names(kind)
            sections += [field.name, *(f"{field.name}.{inner}" for inner in inner_sections)]
            leaves += [f"{field.name}.{inner}" for inner in inner_leaves]
        else:
            leaves += [field.name]
    return sections, leaves


def _suggestion(name: str, known: list[str]) -> str:
    last_part = name.rpartition(".")[2]
    same_last_part = [option for option in known if option.rpartition(".")[2] == last_part]
    close = same_last_part or difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else "see --help"


def _typed(composed: DictConfig, options: type[T]) -> T:
    # YAML and Hydra read chat=true as a bool, and the schema's enum wants the name.
    if "prompt" in composed and isinstance(composed.prompt.chat, bool):
        composed.prompt.chat = str(composed.prompt.chat).lower()
    return typed(composed, options)


def typed(values: Mapping[str, Any] | DictConfig, options: type[T], section: str = "") -> T:
    """Make an object of the dataclass `options` from `values`.

    Args:
        values: options by name.
        options: dataclass that is their schema.
        section: section of the options, for messages.

    Raises:
        ValueError: in one line, for a value of another type or one that the dataclass refuses.
    """
    merged = merged_into(options, values, section)
    try:
        made = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(_in_our_words(error, values, options, section)) from error
    assert isinstance(made, options), type(made)
    return made


def merged_into(options: type, values: Mapping[str, Any] | DictConfig, section: str = "") -> DictConfig:
    """Defaults of the dataclass `options`, overridden by `values` in its types. Raises: ValueError, as `typed`."""
    try:
        schema = OmegaConf.structured(options)
    except OmegaConfBaseException as error:  # a field has a type that OmegaConf does not support
        raise ValueError(f"{options.__name__} cannot be used: {_one_line(error)}") from error
    try:
        merged = OmegaConf.merge(schema, values)
    except OmegaConfBaseException as error:
        raise ValueError(_in_our_words(error, values, options, section)) from error
    assert isinstance(merged, DictConfig)
    return merged


# How the type of an option is told to a user.
WORDS_FOR_TYPES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    int | float: "a whole number of tokens of at least 1, or a share of the prompt in (0, 1]",
    dict[str, Any]: "a set of options such as {budget:512}",
    list[float]: "a list of numbers such as [0.6,0.4]",
    list[int]: "a list of whole numbers such as [1024,2048]",
    list[str]: "a list of names such as [single,kvr_s]",
}


def _in_our_words(
    error: OmegaConfBaseException, values: Mapping[str, Any] | DictConfig, options: type, section: str
) -> str:
    value: Any = OmegaConf.to_container(values, resolve=False) if isinstance(values, DictConfig) else values
    kinds = get_type_hints(options)
    key = (error.full_key or "").partition("[")[0]
    if not key:  # OmegaConf does not say which section got a single value
        sections = [name for name in value if is_dataclass(kinds.get(name)) and not isinstance(value[name], dict)]
        key = sections[0] if sections else ""
    name = f"{section}.{key}" if section else key
    *outer, option = key.split(".")
    for each in outer:
        kind = kinds.get(each)
        kinds = get_type_hints(kind) if is_dataclass(kind) else {}
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) and part in value else value
    if isinstance(error, ConfigKeyError):
        known = [f"{section}.{leaf}" if section else leaf for leaf in _option_names(options)[1]]
        return f"unknown option {_shown(name)}; {_suggestion(name, known)}"
    if isinstance(error, MissingMandatoryValue):
        return f"{name} is missing; give a value"
    if option not in kinds or (isinstance(value, str) and "${" in value):
        return f"{name}={_shown(str(value))} cannot be used: {_one_line(error)}"
    kind = kinds[option]
    if isinstance(kind, UnionType) and type(None) in kind.__args__:
        kind = Union[tuple(part for part in kind.__args__ if part is not type(None))]  # noqa: UP007 (it is computed)
    if isinstance(kind, type) and issubclass(kind, Enum):
        what = f"one of {', '.join(kind.__members__)}"
    elif is_dataclass(kind):
        what = f"one option but several: {', '.join(f'{name}.{member.name}' for member in fields(kind))}"
    else:
        what = WORDS_FOR_TYPES.get(kind, "a value that it can take")
    return f"{name}={_shown('null' if value is None else str(value))} is not {what}"


def _one_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _shown(text: str) -> str:
    """A user's text as a message can show it: on one line, and not a whole book."""
    line = " ".join(text.splitlines())
    return line if len(line) <= 80 else line[:77] + "..."


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.name if isinstance(value, Enum) else value


def this_rank() -> int:
    """This process's rank as torchrun tells it, before any process group is there."""
    return int(os.environ.get("RANK", "0"))
