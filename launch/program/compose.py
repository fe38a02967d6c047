"""Command-line arguments to one typed options object. Every rank reads the same arguments by itself."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Generic, TypeVar, Union, get_origin, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from runahead.failures import first_line

ROOT = Path(__file__).resolve().parent.parent.parent
"""The folder that holds the packages: the checkout, or site-packages."""

CONF = ROOT / "conf"
"""The programs' own config files."""

VERBATIM = ("prompt.text", "prompt.question", "generation.stop", "generation.json_schema")
"""Options whose value is free text, which neither Hydra's grammar nor OmegaConf's ${...} may interpret."""

POLICY_FILES = ("policy.schema", "policy.store", "policy.skew", "policy.heads", "policy.predictor", "policy.path")
"""File names among the options of policies, whose types are not known before a policy is chosen."""

FLAGS_HELP = """
--cfg job prints the composed options; --help prints this.
--config-dir DIR adds a folder of config files of your own; --config-name NAME takes another primary config.
--multirun runs one job after another for each of the values in name=a,b or name=range(1,4): sweep.ranks=1 ranks each,
reports, answers, logs and a table in the new folder sweep.dir=multirun/<date>/<time>. See docs/command_line.md.
"""
"""The end of every program's help."""

T = TypeVar("T")

SHORT_FLAGS = {"-h": "--help", "-c": "--cfg", "-cd": "--config-dir", "-cn": "--config-name", "-m": "--multirun"}
FLAGS_WITH_VALUE = ("--cfg", "--config-dir", "--config-name")
FLAGS = (*SHORT_FLAGS.values(), "--layout")


@dataclass(kw_only=True)
class CommandLine(Generic[T]):
    """Parsed arguments: text to print, or options to run with.

    Attributes:
        to_print: text to print instead of running.
        run: the options to run with.
        flags: the flags that were given, by their long names.
        overrides: the arguments of the form name=value.
    """

    to_print: str | None = None
    run: T | None = None
    flags: dict[str, str] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Program(Generic[T]):
    """A program with a command line.

    Attributes:
        module: its module, for `python -m`. The last part is its name, and conf/<name>.yaml holds its defaults.
        options: the schema of its options, a dataclass. A section that is a dictionary takes any option, and the
            dataclass checks it.
        help: the text that --help prints, before what all programs have in common.
        help_on: returns the text that --help prints in place of `help` for these overrides, if there is one.
        has_layout: whether it takes the flag --layout.
    """

    module: str
    options: type[T]
    help: str
    help_on: Callable[[Sequence[str]], str | None] = lambda overrides: None
    has_layout: bool = False

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]

    def require_one_rank(self, num_ranks: int, work: str) -> None:
        """Check that one rank was started for a program that does its work, such as "maps are fitted", on one.

        Raises: ValueError.
        """
        if num_ranks > 1:
            raise ValueError(f"{work} on one rank but {num_ranks} were started; use python -m {self.module}")

    def read(self, args: Sequence[str]) -> CommandLine[T]:
        """Read the arguments after the program's name. The options of a sweep are not composed here.

        Raises:
            ValueError: for unknown flags, unknown options and bad values, in one line.
        """
        flags, overrides = _split_flags(args, [flag for flag in FLAGS if self.has_layout or flag != "--layout"])
        command: CommandLine[T] = CommandLine(flags=flags, overrides=overrides)
        if "--help" in flags:
            command.to_print = (self.help_on(overrides) or self.help) + FLAGS_HELP
        elif "--multirun" not in flags:
            command.run = self.compose(overrides, flags)
            if "--cfg" in flags:
                plain = asdict(command.run, dict_factory=_names_of_members)  # type: ignore[call-overload]
                command.to_print = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
        elif "--cfg" in flags:
            raise ValueError("--cfg job shows the options of one job; leave --multirun out and give one value each")
        return command

    def compose(self, overrides: Sequence[str], flags: Mapping[str, str] = MappingProxyType({})) -> T:
        """Compose the options from conf/, the user's own files and `overrides` (name=value).

        Args:
            overrides: the arguments of the form name=value.
            flags: --config-dir, a folder of the user's own files, and --config-name, the primary config.

        Raises:
            ValueError: in one line.
        """
        kinds = option_kinds(self.options)
        for_hydra, verbatim = _split_verbatim(overrides, kinds)
        with self.config_loader(flags) as loader:
            name = flags.get("--config-name", self.name)
            with _errors_in_one_line(flags):
                defaults = loader.compute_defaults_list(name, [], RunMode.RUN)
            known = defaults.overrides.known_choices.items()
            groups = {group: choice for group, choice in known if group.partition("/")[0] != "hydra"}
            checked = [_checked_override(text, kinds, groups, loader) for text in for_hydra]
            with _errors_in_one_line(flags):
                composed = compose(name, [text for text in checked if text is not None])
        # YAML and Hydra read chat=true as a bool, but the schema's enum takes the name.
        chat = OmegaConf.select(composed, "prompt.chat")
        if isinstance(chat, bool):
            composed.prompt.chat = str(chat).lower()
        return _with_verbatim(typed(composed, self.options), verbatim)

    @contextmanager
    def config_loader(self, flags: Mapping[str, str]) -> Iterator[ConfigLoaderImpl]:
        """Hydra's loader for conf/ and, after it, the user's folder, as Hydra's own --config-dir has it.

        Raises:
            ValueError: for a folder or a primary config that does not exist, or files that would not be read.
        """
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF), job_name=self.name):
            loader = GlobalHydra.instance().config_loader()
            assert isinstance(loader, ConfigLoaderImpl), type(loader)
            folder, name = flags.get("--config-dir"), flags.get("--config-name")
            if folder is not None:
                _check_folder(Path(folder))
                path = loader.get_search_path()
                path.prepend("command-line", f"file://{os.path.abspath(folder)}", SearchPathQuery(provider="schema"))
                loader.repository.initialize_sources(path)
            if name is not None and not loader.repository.config_exists(name):
                known = ", ".join(name for name in _choices("", loader) if not name.startswith("_"))
                raise ValueError(f"{_where(flags)}there is no config of that name; there are {known}")
            yield loader


def _check_folder(folder: Path) -> None:
    """Check that a user's folder of config files exists and that conf/ hides none of its files."""
    if not folder.is_dir():
        raise ValueError(f"--config-dir {folder} is not a folder; check the path")
    for ours in CONF.rglob("*.yaml"):
        name = ours.relative_to(CONF)
        theirs = folder / name
        if theirs.is_file() and not theirs.samefile(ours):
            raise ValueError(f"--config-dir {folder}: {name} would not be read, since conf/ has one; rename the file")


def _where(flags: Mapping[str, str]) -> str:
    """The user's own config files, at the beginning of a message about them."""
    own = " ".join(f"{flag} {flags[flag]}" for flag in ("--config-dir", "--config-name") if flag in flags)
    return f"{own}: " if own else ""


@contextmanager
def _errors_in_one_line(flags: Mapping[str, str]) -> Iterator[None]:
    """Turn whatever Hydra, OmegaConf and PyYAML raise while they read config files into a ValueError of one line."""
    where = _where(flags)
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f"{mark.name} line {mark.line + 1}: "
        raise ValueError(f"{where}{place}not YAML ({error.problem}); correct the file") from error
    except HydraException as error:
        if found := re.search(r"Could not override '([\w.]+)'", str(error)):
            raise ValueError(f"{found[1]} does not go with the other options; leave it out") from error
        raise ValueError(f"{where}the options do not fit together: {first_line(error)}") from error
    except (OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}a config file cannot be read: {first_line(error)}") from error


def _split_flags(args: Sequence[str], known: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The flags by their long names, with their values, and the overrides."""
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
            raise ValueError(f"unknown flag {_shown(arg)}; options are written name=value, see --help")
        if flag in FLAGS_WITH_VALUE and not equals:
            value = next(rest, "")
        flags[flag] = value
    if flags.get("--cfg", "job") != "job":
        raise ValueError(f"--cfg {flags['--cfg']} is unknown; use --cfg job".replace("  ", " "))
    for flag, what in (("--config-dir", "a folder"), ("--config-name", "the name of a config")):
        if flags.get(flag) == "":
            raise ValueError(f"{flag} needs {what}, as in {flag} <{what.split()[-1]}>")
    return flags, overrides


def _split_verbatim(overrides: Sequence[str], kinds: Mapping[str, Any]) -> tuple[list[str], dict[str, list[str]]]:
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


def _with_verbatim(run: T, verbatim: dict[str, list[str]]) -> T:
    # After OmegaConf's to_object, so that ${x} in a text is not interpolated; replace() runs the checks again.
    for name, values in verbatim.items():
        section, _, option = name.partition(".")
        value: Any = values[-1]
        if name == "generation.stop":
            value = [text for each in values for text in _stop_strings(each)]
        inner = replace(getattr(run, section), **{option: value})
        run = replace(run, **{section: inner})  # type: ignore[type-var]
    return run


def _stop_strings(value: str) -> list[str]:
    """The strings of a JSON list of strings; any other text is one stop string."""
    try:
        parsed = json.loads(value)
    except ValueError:
        return [value]
    is_list_of_strings = isinstance(parsed, list) and all(isinstance(item, str) for item in parsed)
    return parsed if is_list_of_strings else [value]


def _checked_override(
    text: str, kinds: Mapping[str, Any], groups: Mapping[str, str | None], loader: ConfigLoaderImpl
) -> str | None:
    """The override in the form Hydra takes: an existing option or group with one value. None if it changes nothing.

    Hydra's own messages have several lines and name configs and structs, so mistakes are found here first.

    Args:
        kinds: types of the options by their names.
        groups: groups in the defaults list, with their choices. +group=choice adds another group of the search path.
        loader: knows the choices of a group.
    """
    shown = _shown(text)
    if "=" not in text:
        raise ValueError(f"cannot read {shown}; options are written name=value, see --help")
    name = text.partition("=")[0].lstrip("+")
    is_added = text.startswith("+") and name not in groups and bool(_choices(name, loader))
    is_group = is_added or name in groups
    leaves = _leaves(kinds)
    # A section that is a dictionary takes any option.
    is_open = (
        re.fullmatch(r"[a-z]\w*(\.\w+)+", name, re.ASCII) and get_origin(kinds.get(name.partition(".")[0])) is dict
    )
    if name not in leaves and not is_group and not is_open:
        if name in kinds:
            members = ", ".join(leaf for leaf in leaves if leaf.startswith(f"{name}."))
            raise ValueError(f"{name} is not one option but several: {members}")
        if name.startswith("sweep."):
            raise ValueError(f"{_shown(name)} is an option of a sweep; give it with --multirun, or leave it out")
        raise ValueError(f"unknown option {_shown(name)}; {_suggestion(name, [*leaves, *groups])}")
    value = text.partition("=")[2]
    # A file name may contain commas, brackets and equals signs, so it is quoted before Hydra parses it. ${...} works.
    is_file = name in POLICY_FILES or kinds.get(name) is str
    if is_file and value != "null" and value[:1] not in ("'", '"'):
        value = QuotedString(text=value, quote=Quote.double).with_quotes()
    takes_keys = is_open or get_origin(kinds.get(name)) is dict
    text = f"{'++' if takes_keys else ''}{name}={value}"
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ValueError(
            f"cannot read {shown}: not a value that {name} can take; text in quotes is always read"
        ) from error
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
    if not isinstance(choice, str) or last.removesuffix(".yaml") not in _choices(folder, loader):
        raise ValueError(f"{shown} is not one of {', '.join(_choices(name, loader))}")
    return f"{'+' if is_added else ''}{name}={choice}"


def _choices(group: str, loader: ConfigLoaderImpl) -> list[str]:
    is_group = ".." not in group.split("/") and loader.repository.group_exists(group)
    return sorted(loader.get_group_options(group)) if is_group else []


def option_kinds(options: type, section: str = "") -> dict[str, Any]:
    """Types of the options by their full names (prompt.file, report), and of their sections (prompt), without None."""
    kinds: dict[str, Any] = {}
    hints = get_type_hints(options)
    for option in fields(options):
        name, kind = section + option.name, hints[option.name]
        if isinstance(kind, UnionType) and NoneType in kind.__args__:
            kind = Union[tuple(part for part in kind.__args__ if part is not NoneType)]  # noqa: UP007 (it is computed)
        kinds[name] = kind
        if is_dataclass(kind):
            kinds |= option_kinds(kind, f"{name}.")  # type: ignore[arg-type]
    return kinds


def _leaves(kinds: Mapping[str, Any]) -> list[str]:
    return [name for name, kind in kinds.items() if not is_dataclass(kind)]


def _suggestion(name: str, known: list[str]) -> str:
    last_part = name.rpartition(".")[2]
    same_last_part = [option for option in known if option.rpartition(".")[2] == last_part]
    close = same_last_part or difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else "see --help"


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
        raise ValueError(f"{options.__name__} cannot be used: {first_line(error)}") from error
    try:
        merged = OmegaConf.merge(schema, values)
    except OmegaConfBaseException as error:
        raise ValueError(_in_our_words(error, values, options, section)) from error
    assert isinstance(merged, DictConfig)
    return merged


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
    dict[int, float]: "a set of token ids with numbers such as {50:-100}",
}
"""The values of a type, as a message names them."""


def _in_our_words(
    error: OmegaConfBaseException, values: Mapping[str, Any] | DictConfig, options: type, section: str
) -> str:
    value: Any = OmegaConf.to_container(values, resolve=False) if isinstance(values, DictConfig) else values
    kinds = option_kinds(options)
    key = (error.full_key or "").partition("[")[0]
    if not key:  # OmegaConf does not say which section got a single value
        sections = [name for name in value if is_dataclass(kinds.get(name)) and not isinstance(value[name], dict)]
        key = sections[0] if sections else ""
    prefix = f"{section}." if section else ""
    name = prefix + key
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) and part in value else value
    if isinstance(error, ConfigKeyError):
        return f"unknown option {_shown(name)}; {_suggestion(name, [prefix + leaf for leaf in _leaves(kinds)])}"
    if isinstance(error, MissingMandatoryValue):
        return f"{name} is missing; give a value"
    if key not in kinds or (isinstance(value, str) and "${" in value):
        return f"{name}={_shown(str(value))} cannot be used: {first_line(error)}"
    kind = kinds[key]
    if isinstance(kind, type) and issubclass(kind, Enum):
        what = f"one of {', '.join(kind.__members__)}"
    elif is_dataclass(kind):
        what = f"one option but several: {', '.join(f'{name}.{member.name}' for member in fields(kind))}"
    else:
        what = WORDS_FOR_TYPES.get(kind, "a value that it can take")
    return f"{name}={_shown('null' if value is None else str(value))} is not {what}"


def _shown(text: str) -> str:
    """A user's text in a message: on one line, shortened to 80 characters."""
    line = " ".join(text.splitlines())
    return line if len(line) <= 80 else line[:77] + "..."


def _names_of_members(options: list[tuple[str, Any]]) -> dict[str, Any]:
    """Options as YAML writes them: members of enums by their names."""
    return {name: value.name if isinstance(value, Enum) else value for name, value in options}


def this_rank() -> int:
    """This process's rank from torchrun's environment; needs no process group."""
    return int(os.environ.get("RANK", "0"))
