"""Command-line arguments to one typed options object. Every rank reads the same arguments by itself."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from textwrap import indent
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launch.program.arguments import FLAGS, checked_override, choices, split_flags, split_verbatim, with_verbatim
from launch.program.launcher import require_one_rank
from launch.program.typed_options import option_kinds, typed
from runahead.failures import first_line

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent.parent
"""The folder that holds the packages: the checkout, or site-packages."""

CONF = ROOT / "conf"
"""The programs' own config files."""

MODEL_OPTIONS = """\
model.path=<folder, hub id or .gguf>   model.config=<folder or json>
model.dtype=auto|float32|bfloat16|float16   model.seed=0   model.layers=<n>
model.overrides={<key of its config>:<value>}   model.revision=<of the hub>
model.fuse=auto|on|off   model.adapter=<folder or hub id, or a list>
model.dequantize=true|false   model.keep_dequantized=false|true
model.weights=full|int8   model.trust_remote_code=false
"""

FLAGS_HELP = """
--cfg job prints the composed options; --help prints this.
--config-dir DIR adds a folder of config files of your own; --config-name NAME takes another primary config.
--multirun runs one job after another for each of the values in name=a,b or name=range(1,4): sweep.ranks=1 ranks each,
reports, answers, logs and a table in the new folder sweep.dir=multirun/<date>/<time>. See docs/command_line.md.
"""
"""The end of every program's help."""


def model_help(column: int = 28) -> str:
    """Lines of a program's help about the options of its model, which begin in this column after the name."""
    return f"  {'model=smollm2|hf|random':{column - 2}}" + indent(MODEL_OPTIONS, " " * column).strip()


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
        require_one_rank(num_ranks, work, f"python -m {self.module}")

    def read(self, args: Sequence[str]) -> CommandLine[T]:
        """Read the arguments after the program's name. The options of a sweep are not composed here.

        Raises:
            ValueError: for unknown flags, unknown options and bad values, in one line.
        """
        flags, overrides = split_flags(args, [flag for flag in FLAGS if self.has_layout or flag != "--layout"])
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
        for_hydra, verbatim = split_verbatim(overrides, kinds)
        has_own_files = not flags.keys().isdisjoint(("--config-dir", "--config-name"))
        groups = self._groups(flags) if has_own_files else _own_groups(self)
        with self.config_loader(flags) as loader:
            checked = [checked_override(text, kinds, groups, loader) for text in for_hydra]
            with _errors_in_one_line(flags):
                composed = compose(self._config_name(flags), [text for text in checked if text is not None])
        # YAML and Hydra read chat=true as a bool, but the schema's enum takes the name.
        chat = OmegaConf.select(composed, "prompt.chat")
        if isinstance(chat, bool):
            composed.prompt.chat = str(chat).lower()
        return with_verbatim(typed(composed, self.options), verbatim)

    def _config_name(self, flags: Mapping[str, str]) -> str:
        return flags.get("--config-name", self.name)

    def _groups(self, flags: Mapping[str, str]) -> dict[str, str | None]:
        """Groups in the defaults list of the primary config, with their choices. Raises: ValueError, as `compose`."""
        with self.config_loader(flags) as loader, _errors_in_one_line(flags):
            defaults = loader.compute_defaults_list(self._config_name(flags), [], RunMode.RUN)
        known = defaults.overrides.known_choices.items()
        return {group: choice for group, choice in known if group.partition("/")[0] != "hydra"}

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
                known = ", ".join(name for name in choices("", loader) if not name.startswith("_"))
                raise ValueError(f"{_where(flags)}there is no config of that name; there are {known}")
            yield loader


@cache
def _own_groups(program: Program[Any]) -> Mapping[str, str | None]:
    """Groups of a program's own primary config: for each job of a sweep they are the same, and Hydra takes its time."""
    return program._groups({})


def _check_folder(folder: Path) -> None:
    """Check that a user's folder of config files exists and has none of the programs' own names."""
    if not folder.is_dir():
        raise ValueError(f"--config-dir {folder} is not a folder; check the path")
    for name in _own_names():
        ours, theirs = CONF / name, folder / name
        if theirs.is_file() and not (ours.is_file() and theirs.samefile(ours)):
            raise ValueError(
                f"--config-dir {folder}: {name} would not be read, since Runahead has one; rename the file"
            )


def _own_names() -> Iterator[str]:
    """Names of the programs' own configs, such as policy/h2o.yaml: files, and choices that Python stores."""
    yield from (path.relative_to(CONF).as_posix() for path in CONF.rglob("*.yaml"))
    groups = ConfigStore.instance().repo
    yield from (f"policy/{choice}" for choice in groups.get("policy", {}))


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


def _names_of_members(options: list[tuple[str, Any]]) -> dict[str, Any]:
    """Options as YAML writes them: members of enums by their names."""
    return {name: value.name if isinstance(value, Enum) else value for name, value in options}
