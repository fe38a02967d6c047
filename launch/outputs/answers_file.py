"""Answers to several prompts in a file of JSON lines, with which a run that was interrupted goes on."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.outputs.answers import AnswerWriter
from runahead.files import digest_of_path, read_user_file
from runahead.ranks.agreement import digest_of, option_facts

SECTIONS = ("model", "policy", "cache", "generation", "prefill", "decode")
"""Sections of the options that decide on answers."""

OF_SPEED = (
    *(f"generation.{name}" for name in ("logprobs", "speculate", "speculate_tokens", "speculate_match")),
    "generation.speculate_always",
    *(f"prefill.{name}" for name in ("transfer", "carrier", "layers_in_flight", "attention", "exchange")),
)
"""Options of these sections that change no answer."""

WEIGHTS = "weights"
"""Name of the weights' fingerprint among the settings of a line."""

BEGIN = b'{"index": '
"""Beginning of every line of `AnswerWriter`."""


def settings_of(run: Any, defaults: Any, files: Collection[str], *, num_chunks: int | None = None) -> dict[str, str]:
    """The options that answers depend on and that are not their defaults, and digests of the files that they name.

    Prompts are not among them. The number of ranks and the split are only if `num_chunks` is given: without it they
    change no more than rounding.

    Args:
        run, defaults: the options of launch/infer.py, and their defaults.
        files: files and folders that the policies consist of or read.
        num_chunks: chunks of a prompt, one for each stage, if what policies keep (`RankPolicies.by_chunk`) or ranks are
            sent depends on them.
    """
    sections = SECTIONS if num_chunks is None else (*SECTIONS, "partition")
    given, usual = (
        option_facts({section: getattr(options, section) for section in sections}, OF_SPEED)
        for options in (run, defaults)
    )
    changed = {name: value for name, value in given.items() if usual.get(name) != value}
    if num_chunks is not None:
        changed["stages (ranks / ranks.tensor)"] = str(num_chunks)
    return changed | {f"the content of {path}": digest_of_path(Path(path)) for path in files}


def prompt_digest(ids: Sequence[int]) -> str:
    """Digest of a prompt's token ids, by which a line names it."""
    return digest_of(json.dumps(list(ids)).encode())[:16]


@dataclass(kw_only=True)
class AnswersFile:
    """The file of answers=, as it was when it was read.

    Attributes:
        path: as the user gave it.
        settings: `settings_of` this run.
        prompts: `prompt_digest` of each prompt, by its place.
        skipped: for each prompt that cannot be used, by its place, what is wrong with it.
        answered: places of the prompts of either kind that have a line.
        weights: fingerprints of the weights by which these were answered.
    """

    path: str
    settings: dict[str, str]
    prompts: dict[int, str]
    skipped: dict[int, str]
    answered: set[int] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)
    _size: int = 0
    _end: int = 0

    @property
    def name(self) -> str:
        return f"answers={self.path}"

    def read(self) -> None:
        """Read what earlier runs have written, and check that they were asked the same.

        A last line without an end, which a run was writing when it was killed, does not count. A last line that no run
        can have begun is refused, so that no other file loses what it holds.

        Raises:
            ValueError: the file cannot be read, holds something else, or answers to other prompts or settings.
        """
        if not Path(self.path).is_file():  # there is none yet, or a device or a pipe, which is only written to
            return
        try:
            data = read_user_file(self.path)
            self._size, self._end = len(data), data.rfind(b"\n") + 1
            lines = data[: self._end].decode("utf-8").split("\n")[:-1]
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"{self.name} cannot be read: {reason}; name another file") from error
        for number, line in enumerate(lines, start=1):
            entry: Any = None
            with suppress(ValueError, RecursionError):
                entry = json.loads(line)
            self._take(entry, f"{self.name} line {number}")
        cut_off = data[self._end :]
        if not (cut_off.startswith(BEGIN) or BEGIN.startswith(cut_off)):
            raise ValueError(_no_answer(f"{self.name} line {len(lines) + 1}"))

    def _take(self, entry: Any, name: str) -> None:
        """Take a line for what it says. Raises: ValueError, as `read`."""
        place = entry.get("index") if isinstance(entry, dict) else None
        if type(place) is not int:
            raise ValueError(_no_answer(name))
        if "error" in entry:
            if place not in self.skipped:
                raise ValueError(f"{name} says that prompt {place} cannot be used, and now it can; remove the line")
            self.answered.add(place)
            return
        if entry.get("prompt") != self.prompts.get(place):
            raise ValueError(f"{name} answers another prompt {place} than this run has; name another file")
        settings = entry.get("settings")
        if not isinstance(settings, dict):
            raise ValueError(f"{name} does not say by which settings it was made; name another file")
        self.weights.add(str(settings.pop(WEIGHTS, None)))
        different = [each for each in {**self.settings, **settings} if self.settings.get(each) != settings.get(each)]
        if different:
            values = [of.get(different[0], "its default") for of in (settings, self.settings)]
            raise ValueError(
                f"{name} was made with {different[0]}={values[0]} and not {values[1]}; give the options that it was "
                "made with, or name another file"
            )
        self.answered.add(place)

    def missing(self, places: Sequence[int]) -> bool:
        """Whether any of these prompts has no line."""
        return not self.answered.issuperset(places)

    def answers(self, weights: str | None) -> AnswerWriter:
        """Open the file, remove what is left of a line that was cut off, and return what appends to it.

        Args:
            weights: fingerprint of the weights; None if no prompt is left to answer.

        Raises:
            ValueError: other weights have answered before, or another process writes to the file.
            OSError: it cannot be written.
        """
        if weights is not None and self.weights - {weights}:
            raise ValueError(f"{self.name} was made by other weights of the model; name another file")
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_other = Path(self.path).is_file() and os.fstat(descriptor).st_size != self._size
        except BlockingIOError:
            is_other = True
        except OSError:  # a file system without locks
            is_other = False
        if is_other:
            os.close(descriptor)
            raise ValueError(f"{self.name} is being written by another run; name another file, or wait for it")
        if self._end < self._size:
            os.ftruncate(descriptor, self._end)
        about = {WEIGHTS: weights} if weights is not None else {}

        def fields(place: int) -> Mapping[str, Any]:
            return {"prompt": self.prompts[place], "settings": self.settings | about}

        return AnswerWriter(descriptor, self.skipped, name=self.path, done=self.answered, more=fields)


def _no_answer(line: str) -> str:
    return f"{line} is no answer; remove the line, or name another file"
