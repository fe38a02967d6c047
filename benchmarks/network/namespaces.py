"""Network namespaces named after the process that owns them, so that those left by a killed run can be found.

Names contain the checkout, too, so that namespaces of another checkout's runs are not touched.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import time
import zlib
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/run/netns")  # where ip keeps named namespaces: ip-netns(8)
CHECKOUT = f"{zlib.crc32(str(Path(__file__).resolve()).encode()):08x}"
NAME = re.compile(rf"runahead-{CHECKOUT}-(?P<pid>\d+)-(?P<start>\d+)-.+")
GRACE_S = 10.0


class CommandFailed(Exception):
    """Failure of a system tool; the text is the command and the first line of its output."""


def system(*command: str) -> str:
    """Standard output of `command`, run in a session of its own so that Ctrl-C does not stop it half way.

    Raises: CommandFailed.
    """
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise CommandFailed(f"{' '.join(command)}: {said[0]}")
    return done.stdout


def owned_name(suffix: str) -> str:
    """Unique name with this process's id and start time, since ids are reused."""
    return f"runahead-{CHECKOUT}-{os.getpid()}-{_start_time(os.getpid())}-{suffix}"


def create(name: str) -> None:
    system("ip", "netns", "add", name)
    system("ip", "-n", name, "link", "set", "lo", "up")


def remove(name: str) -> None:
    """End the processes in namespace `name` and remove it with its interfaces. Does nothing if it is gone already."""
    if not (FOLDER / name).exists():
        return
    try:
        end_processes([name])
        system("ip", "netns", "delete", name)
    except CommandFailed:
        if (FOLDER / name).exists():  # else another process removed the same leftover first
            raise


def leftovers() -> list[str]:
    """Namespaces of this tool whose owner no longer runs."""
    if not FOLDER.is_dir():
        return []
    found = [match for path in FOLDER.iterdir() if (match := NAME.fullmatch(path.name))]
    return sorted(match[0] for match in found if _start_time(int(match["pid"])) != int(match["start"]))


def processes(name: str) -> list[int]:
    return [int(pid) for pid in system("ip", "netns", "pids", name).split()]


def end_processes(names: list[str], *, grace_s: float = GRACE_S) -> None:
    """Terminate every process in these namespaces; kill those that still run after `grace_s` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in itertools.chain(*map(processes, names)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + grace_s
        while any(map(processes, names)) and time.monotonic() < deadline:
            time.sleep(0.05)


def _start_time(pid: int) -> int | None:
    """Start time of process `pid` in clock ticks since boot; None if there is none. Field 22 of proc_pid_stat(5)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])
