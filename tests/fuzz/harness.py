"""One input at a reader, judged as a program's user would: taken and usable, or refused in one line, within limits."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar
from unittest.mock import patch

from launch.program.ending import end_with
from policies.prompt_cache import PMLError
from policies.reuse import PromptTooLong

LIMIT_S = 20.0
"""Seconds for one input. All take milliseconds but those that load a model; a machine may be busy."""

GROWTH_BYTES = 2**29
"""Bytes by which one input may raise the process's peak of memory."""

LONGEST_LINE = 5000
"""Characters; paths and values of users are in it."""

FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "socket.getaddrinfo")
"""Audit events that no file may cause. And unpickling: whatever looks up a class by a name in a file."""

T = TypeVar("T")


class TookTooLong(BaseException):
    """An input's time is over. As with KeyboardInterrupt, nothing that handles errors should swallow it."""


class Ended(BaseException):
    """The program would have ended here with this status."""

    def __init__(self, status: int) -> None:
        self.status = status


@dataclass(kw_only=True)
class Outcome:
    """Outcome of one input.

    Attributes:
        line: what its user was told; "" if it was taken.
        problems: sentences; none if it is as it has to be.
    """

    accepted: bool
    line: str = ""
    problems: list[str] = field(default_factory=list)


def judged(
    read: Callable[[], T],
    use: Callable[[T], object] = lambda value: None,
    *,
    names: Sequence[str] = (),
    folder: Path | None = None,
    warning: str = "",
    limit_s: float = LIMIT_S,
) -> Outcome:
    """Read an input, and use what was read.

    Args:
        read: may raise what a user's mistake raises.
        use: may raise nothing.
        names: one of these has to be in the line that refuses the input: the file, or the option.
        folder: that has to be the same afterwards where the input is refused.
        warning: end of lines that may be printed whatever becomes of the input; none if empty.
        limit_s: for both.
    """
    before = None if folder is None else listing(folder)
    told = Outcome(accepted=False)
    with watched() as watch, time_limit(limit_s), printed() as output:
        try:
            value = read()
        except (TookTooLong, KeyboardInterrupt):
            raise
        except BaseException as error:
            told = _told(error, names)
        else:
            told = Outcome(accepted=True)
            try:
                use(value)
            except (TookTooLong, KeyboardInterrupt):
                raise
            except BaseException as error:
                told.problems.append(f"taken, but not usable: {_where(error)}")
    if watch.too_long:
        return Outcome(accepted=False, problems=watch.problems)
    told.problems += watch.problems
    lines = [line for line in output.text.split("\n")[:-1] if not (warning and line.endswith(warning))]
    if lines != ([] if told.accepted else [told.line]):
        told.problems.append(f"printed {output.text[-300:]!r}{'' if told.accepted else ' beside its line'}")
    if folder is not None and not told.accepted and listing(folder) != before:
        told.problems.append("files changed")
    return told


def run_main(
    main: Callable[[list[str]], int],
    args: list[str],
    *,
    folder: Path,
    names: Sequence[str] = (),
    limit_s: float = 3 * LIMIT_S,
) -> Outcome:
    """A whole program in a folder, from its arguments to its exit status.

    Args:
        folder: as in `judged`.
        names: of which the line that refuses the arguments, its only one, has to have one.
    """
    before, status = listing(folder), 0
    with watched() as watch, time_limit(limit_s), printed() as output, patch("os._exit", _end), chdir(folder):
        try:
            status = main(args)
        except Ended as ended:
            status = ended.status
    told = Outcome(accepted=status == 0, problems=watch.problems)
    lines = [line for line in output.text.splitlines() if not line.startswith("warning: ")]
    if told.accepted:
        return told
    told.line = lines[-1] if lines else ""
    if status not in (1, 2) or len(lines) != 1:
        told.problems.append(f"status {status} with {len(lines)} lines: {output.text[-300:]!r}")
    told.problems += _wording(told.line, names)
    if listing(folder) != before:
        told.problems.append("files changed")
    return told


def _told(error: BaseException, names: Sequence[str]) -> Outcome:
    """The last line of a program that ended, and its faults."""
    line = _end_of_program(error)
    told = Outcome(accepted=False, line=line)
    if type(error) not in (ValueError, PMLError, PromptTooLong) and not isinstance(error, OSError):
        told.problems.append(f"raised {_where(error)}")
    told.problems += _wording(line, names)
    return told


def _wording(line: str, names: Sequence[str]) -> list[str]:
    found = []
    if len(line) > LONGEST_LINE:
        found.append(f"told in {len(line)} characters: {line[:200]!r}")
    if names and not any(name in line for name in names):
        found.append(f"does not name {' or '.join(names)}: {line!r}")
    if "Traceback" in line or "Error:" in line.partition("(")[0]:
        found.append(f"tells of an error of Python: {line!r}")
    return found


def _end_of_program(error: BaseException) -> str:
    """The lines of launch/program/ending.py, which goes on to standard error."""
    with printed() as output, patch("os._exit", _end), suppress(Ended):
        end_with(error, None)
    sys.stderr.write(output.text)
    sys.stderr.flush()
    return output.text.removesuffix("\n")


def _end(status: int) -> None:
    raise Ended(status)


def _where(error: BaseException) -> str:
    """Type, text, and the line of ours that it comes from."""
    root = str(Path(__file__).resolve().parents[2]) + os.sep
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(root)]
    ours = [frame for frame in frames if "tests" + os.sep not in frame.filename[len(root) :]] or frames
    place = f" at {ours[-1].filename[len(root) :]}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__}: {str(error)[:300]}{place}"


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Files below a folder, with size and time."""
    found = {}
    for at, folders, files in os.walk(folder):
        for name in (*folders, *files):
            about = os.lstat(os.path.join(at, name))
            found[os.path.join(at, name)] = (about.st_size, about.st_mtime_ns)
        found |= {at: (0, 0)}
    return found


# Limits.


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TookTooLong` in this block once it has taken so long; another timer goes on behind it."""

    def over(number: int, frame: FrameType | None) -> None:
        raise TookTooLong(f"more than {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, over)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


@dataclass
class Watch:
    """Events that no file may cause, seen while one is read."""

    problems: list[str] = field(default_factory=list)
    too_long: bool = False


@contextmanager
def watched() -> Iterator[Watch]:
    """Notice in this block what is executed, unpickled or fetched, an endless wait, and memory that is taken."""
    watch, hook = Watch(), _hook()
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory is what there is now
    before = _peak_bytes()
    hook.watches.append(watch)
    try:
        yield watch
    except TookTooLong as error:
        watch.too_long = True
        watch.problems.append(f"did not end: {_where(error)}")
    finally:
        hook.watches.pop()
    grown = _peak_bytes() - before
    if grown > GROWTH_BYTES:
        watch.problems.append(f"took {grown / 2**20:,.0f} MiB")


class _Hook:
    """Python's audit hook, which stays for good."""

    def __init__(self) -> None:
        self.watches: list[Watch] = []
        sys.addaudithook(self.see)

    def see(self, event: str, args: tuple[Any, ...]) -> None:
        if self.watches and (event in FORBIDDEN or event == "pickle.find_class"):
            self.watches[-1].problems.append(f"{event}{args!r:.200}")


@cache
def _hook() -> _Hook:
    return _Hook()


def _peak_bytes() -> int:
    [kib] = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM:" in line]
    return int(kib) * 1024


@dataclass
class Output:
    text: str = ""


@contextmanager
def printed() -> Iterator[Output]:
    """Catch standard error in this block, also from libraries that are not in Python; stdout goes nowhere."""
    output = Output()
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file, open(os.devnull, "wb") as nowhere:
        kept = os.dup(1), os.dup(2)
        os.dup2(nowhere.fileno(), 1)
        os.dup2(file.fileno(), 2)
        stream = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")
        quiet = os.fdopen(os.dup(1), "w", encoding="utf-8")
        try:
            with patch("sys.stderr", stream), patch("sys.stdout", quiet):
                yield output
        finally:
            stream.close()
            quiet.close()
            for number, descriptor in enumerate(kept, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            file.seek(0)
            output.text = file.read().decode("utf-8", errors="replace")
