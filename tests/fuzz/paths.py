"""Paths that lead to no file: every reader is given each of them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st

from benchmarks.evaluation import summary
from benchmarks.harness import lines
from benchmarks.ttft import comparison
from benchmarks.ttft.bounds import read_compute
from launch.inputs.options import PromptOptions
from launch.inputs.prompt_cache import read_prompt_cache
from launch.inputs.prompts import read_prompts
from partitioner.calibration import read_measured
from partitioner.searches.points import Points
from partitioner.table.lookup_table import LookupTable
from policies.head_scores import HeadScores
from policies.prompt_cache.prompt_cache import PromptCacheOptions
from policies.score_maps import ScoreMaps
from policies.skewing import Skew
from runahead.config import ModelOptions
from runahead.files import ensure_writable
from runahead.model import loading
from tests.fuzz.harness import Outcome, judged
from tests.fuzz.models import whole
from tests.fuzz.prompts import VOCAB_SIZE
from tests.fuzz.target import Target
from tests.tokenizers_for_tests import byte_level


def _prompt(**source: str) -> object:
    return read_prompts(PromptOptions(**source), tokenizer=byte_level(), vocab_size=VOCAB_SIZE)  # type: ignore[arg-type]


def _schema(path: str) -> object:
    return read_prompt_cache(PromptCacheOptions(schema=path), byte_level(), object())


def _model(path: str) -> object:
    options = ModelOptions(name="hf", path=path)  # type: ignore[arg-type]
    loading.load_config(options)
    return loading.load_tokenizer(options)


def _random(path: str) -> object:
    options = ModelOptions(name="random", config=path)  # type: ignore[arg-type]
    loading.load_config(options)
    return loading.load_tokenizer(options)


READERS: dict[str, Callable[[str], object]] = {
    "prompt.file": lambda path: _prompt(file=path),
    "prompt.ids_file": lambda path: _prompt(ids_file=path),
    "partition.table": LookupTable.load,
    "policy.schema": _schema,
    "policy.skew": Skew.load,
    "policy.heads": HeadScores.load,
    "policy.predictor": ScoreMaps.load,
    "bench.compute": read_compute,
    "bench.results": comparison.read,
    "lines": lambda path: summary.read(Path(path)),
    "points": lambda path: Points(Path(path), {}).read(),
    "compute": lambda path: read_measured(Path(path), "x"),
    "model.path": _model,
    "model.config": _random,
    "report": lambda path: ensure_writable(path, option="report"),
}
WAITING = ("prompt.file", "prompt.ids_file")
"""Readers that wait for what others write into a pipe."""

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
)


def _folder(path: Path, stack: ExitStack) -> str:
    path.mkdir()
    return str(path)


def _pipe(path: Path, stack: ExitStack) -> str:
    os.mkfifo(path)
    return str(path)


def _filled_pipe(path: Path, stack: ExitStack) -> str:
    """A pipe as a shell makes it of <(...)."""
    reading, writing = os.pipe()
    os.write(writing, b"some \xff content")
    os.close(writing)
    stack.callback(os.close, reading)
    return f"/dev/fd/{reading}"


def _loop(path: Path, stack: ExitStack) -> str:
    path.symlink_to(path.name)
    return str(path)


def _dangling(path: Path, stack: ExitStack) -> str:
    path.symlink_to("nothing")
    return str(path)


def _socket(path: Path, stack: ExitStack) -> str:
    os.mknod(path, stat.S_IFSOCK | 0o600)
    return str(path)


def _locked(path: Path, stack: ExitStack) -> str:
    path.write_text("text")
    path.chmod(0)
    return str(path)


def _sparse(path: Path, stack: ExitStack) -> str:
    with path.open("wb") as file:
        file.truncate(2**31)
    return str(path)


def _inside_a_file(path: Path, stack: ExitStack) -> str:
    path.write_text("text")
    return str(path / "x")


KINDS: dict[str, Callable[[Path, ExitStack], str]] = {
    "nothing": lambda path, stack: str(path),
    "an empty name": lambda path, stack: "",
    "an empty file": lambda path, stack: [path.touch(), str(path)][1],
    "a folder": _folder,
    "a pipe": _pipe,
    "a filled pipe": _filled_pipe,
    "a symlink loop": _loop,
    "a dangling symlink": _dangling,
    "a socket": _socket,
    "an unreadable file": _locked,
    "2 GiB of zeros": _sparse,
    "inside a file": _inside_a_file,
    "/dev/null": lambda path, stack: "/dev/null",
    "/dev/zero": lambda path, stack: "/dev/zero",
    "/dev/full": lambda path, stack: "/dev/full",
    "/dev/tty": lambda path, stack: "/dev/tty",
    "/proc/self/mem": lambda path, stack: "/proc/self/mem",
    "a NUL": lambda path, stack: f"{path}\0x",
    "a line break": lambda path, stack: f"{path}\nx",
    "half a character": lambda path, stack: f"{path}\udcff",
    "a long name": lambda path, stack: f"{path}{'x' * 300}",
    "a long path": lambda path, stack: f"{path}{'/x' * 2100}",
    "a home of nobody": lambda path, stack: "~no-such-user/x",
    "a URL": lambda path, stack: "https://localhost/x",
}
ENDINGS = ("", ".txt", ".jsonl", ".json", ".xml", ".safetensors", ".gguf")


def check_path(given: tuple[str, str, str], folder: Path) -> Outcome:
    """A reader, a kind, and how the name ends."""
    reader, kind, ending = given
    with ExitStack() as stack:
        path = KINDS[kind](folder / f"given{ending}", stack)
        shown = " ".join(path.split("\n"))[:60].partition("\0")[0].partition("\udcff")[0]
        with patch.object(lines, "say"):  # which tells of a last line that was cut off, and does not count
            return judged(lambda: READERS[reader](path), names=[shown, reader], folder=folder)


def check_file_of_model(given: tuple[str, str], folder: Path) -> Outcome:
    """A model's folder in which one file is something else."""
    name, kind = given
    path = folder / "model"
    path.mkdir()
    whole().write(path)
    (path / name).unlink()
    with ExitStack() as stack:
        made = KINDS[kind](path / name, stack)
        if made != str(path / name) and not (path / name).exists():
            (path / name).symlink_to(made.replace("\0", "")[:200] or "x")

        def read() -> Any:
            options = ModelOptions(name="hf", path=str(path))  # type: ignore[arg-type]
            loading.load_config(options)
            tokenizer = loading.load_tokenizer(options)
            loading.load(options, device=loading.torch.device("cpu"), attn_implementation="eager")
            return tokenizer

        return judged(read, names=[f"model.path={path}"], folder=folder)


def _hangs(given: tuple[str, str, str]) -> bool:
    """Wait as it should: somebody may still write into the pipe."""
    return given[0] in WAITING and given[1] == "a pipe"


TARGETS = (
    Target(
        name="paths that lead to no file",
        reads="all readers of files",
        inputs=st.tuples(st.sampled_from(list(READERS)), st.sampled_from(list(KINDS)), st.sampled_from(ENDINGS)).filter(
            lambda given: not _hangs(given)
        ),
        check=check_path,
        share=8,
    ),
    Target(
        name="model folders, files that are none",
        reads="runahead/loading load",
        inputs=st.tuples(st.sampled_from(MODEL_FILES), st.sampled_from([kind for kind in KINDS if kind != "a URL"])),
        check=check_file_of_model,
        share=3,
    ),
)
