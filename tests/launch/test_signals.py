"""SIGTERM ends a program with what it has to say, wherever its main thread is."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.program import signals
from launch.program.signals import Terminated, ending_signals, first_signal

ROOT = Path(__file__).resolve().parents[2]

# A lock that is taken twice: a call that no signal ends and in which no Python code runs. The
# kernel tells when it has come to that.
STUCK = """
import ctypes, os, signal, threading, time
from launch.program import signals
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background of a script ignores it
signals.GRACE_S = 0.2
def late(error):
    print(type(error).__name__, error, flush=True)
    os._exit(7)
about_to_hang = threading.Event()
lock, take = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
def say_so():
    about_to_hang.wait()
    while hex(ctypes.addressof(lock)) not in open(f"/proc/self/task/{os.getpid()}/syscall").read():
        time.sleep(0.01)
    print("ready", flush=True)
with signals.ending_signals(late):
    threading.Thread(target=say_so, daemon=True).start()
    take(lock)
    about_to_hang.set()
    take(lock)
"""


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGTERM, "Terminated ended by SIGTERM"), (signal.SIGINT, "KeyboardInterrupt")]
)
def test_a_main_thread_that_is_stuck_is_ended(number: signal.Signals, said: str) -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        try:
            assert process.stdout.read().strip() == said
        finally:
            process.kill()  # else leaving the block waits for it
    assert process.returncode == 7


def test_a_main_thread_that_runs_gets_an_exception() -> None:
    late: list[BaseException] = []
    with pytest.raises(Terminated, match="ended by SIGTERM"), ending_signals(late.append):
        signal.raise_signal(signal.SIGTERM)
    assert not late


@pytest.mark.parametrize("is_early", [False, True])
def test_the_second_signal_ends_what_the_first_one_drains_though_blocks_nest(
    is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a server, whose rank 0 asks for the end in one block, and drains in another."""
    monkeypatch.setattr(signals, "SAME_S", -1.0)  # no two signals are one
    called: list[str] = []
    with (
        pytest.raises(Terminated, match="ended by SIGTERM"),
        ending_signals(called.append),  # type: ignore[arg-type]
        first_signal(lambda: called.append("outer"), is_last=True),
    ):
        if is_early:
            signal.raise_signal(signal.SIGTERM)
        with first_signal(lambda: called.append("inner")):
            if not is_early:
                signal.raise_signal(signal.SIGTERM)
            called.append("drains")
            signal.raise_signal(signal.SIGTERM)
            called.append("is never there")
    assert called == (["outer", "drains"] if is_early else ["inner", "outer", "drains"])


def test_signals_that_come_together_are_one_though_blocks_nest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SAME_S", 1e9)
    called: list[str] = []
    with first_signal(lambda: called.append("outer")):
        with first_signal(lambda: called.append("inner")):
            for _ in range(3):
                signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert called == ["inner", "outer"]


def test_signals_are_as_before_behind_the_block() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    with ending_signals(lambda error: None):
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before
