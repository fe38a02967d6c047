"""Prompts that were asked for: each by a thread, so that vLLM's scheduler never waits for the server or a file."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from runahead_vllm.prompt_file import PromptFile, file_name
from runahead_vllm.server import Call, Server


@dataclass(frozen=True)
class Ready:
    """The file is there and whole; its checksums are compared when it is read."""

    path: Path


@dataclass(frozen=True)
class GivenUp:
    """vLLM computes the prompt. `why`: in words."""

    why: str


@dataclass
class Asked:
    """A prompt that somebody waits for.

    Attributes:
        began_s: of `time.monotonic`.
        waited_s: until the outcome.
        outcome: None while it is waited for.
    """

    num_tokens: int
    began_s: float
    waited_s: float = 0.0
    outcome: Ready | GivenUp | None = None
    _call: Call = field(default_factory=Call)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self, outcome: Ready | GivenUp) -> None:
        """Take the first outcome; a later one, as of a call that was cancelled, has no effect."""
        with self._lock:
            if self.outcome is None:
                self.waited_s = time.monotonic() - self.began_s
                self.outcome = outcome

    def give_up(self, why: str) -> None:
        """Whatever the outcome was: a file that was ready can turn out to be damaged."""
        with self._lock:
            if self.outcome is None:
                self.waited_s = time.monotonic() - self.began_s
            self.outcome = GivenUp(why)
        self._call.cancel()

    def cancel(self) -> None:
        """Nobody waits any more."""
        self.end(GivenUp("it is no longer wanted"))
        self._call.cancel()


@dataclass(frozen=True, kw_only=True)
class Source:
    """The server and folder that files come from.

    Attributes:
        folder: as this machine sees it; None: as the server says.
        key: the server's word for its model.
        salt: of its files' names, the server's word for who asks.
    """

    server: Server
    folder: Path
    key: str
    salt: str
    num_layers: int


class Asking:
    """Threads that ask for prompts, so many at a time."""

    def __init__(self, source: Source, *, at_once: int, wait_s: float) -> None:
        self._source, self._at_once, self.wait_s = source, at_once, wait_s
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def compute(self, ids: list[int]) -> Asked:
        """Have the server compute a prompt."""

        def answer(asked: Asked) -> str:
            left_s = asked.began_s + self.wait_s - time.monotonic()
            if left_s <= 0:
                raise ValueError(f"it is not there within {self.wait_s:g} s")
            return str(self._source.server.prefill(ids, left_s, asked._call).get("file"))

        return self._ask(ids, answer)

    def look(self, ids: list[int], name: str | None = None) -> Asked:
        """Take a file that should be there.

        Args:
            name: what somebody else says is its name; another one is not taken.
        """
        return self._ask(ids, lambda _: name)

    def close(self) -> None:
        """End the threads once they are idle; they do not keep the process alive."""
        for _ in self._threads:
            self._jobs.put(None)

    def _ask(self, ids: list[int], answer: Callable[[Asked], str | None]) -> Asked:
        asked = Asked(len(ids), time.monotonic())

        def job() -> None:
            if asked.outcome is not None:
                return
            try:
                asked.end(self._found(answer(asked), ids))
            except Exception as error:  # whatever it is: the request must not wait for a thread that has ended
                asked.end(GivenUp(str(error) or type(error).__name__))

        self._jobs.put(job)
        if len(self._threads) < self._at_once:
            thread = threading.Thread(target=self._work, name=f"runahead-ask-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return asked

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _found(self, said: str | None, ids: list[int]) -> Ready | GivenUp:
        """A prompt's file. `said`: its name, as the server or a proxy has it; None: nobody has said one.

        A file knows its tokens by its name alone, so that no other name is opened, whoever says it.
        """
        source = self._source
        name, num_tokens = file_name(source.key, source.salt, ids), len(ids)
        if said not in (None, name):
            return GivenUp(
                f"the file {str(said)[:80]!r} is not that of these {num_tokens} tokens: the prompt, its chat template, "
                "the model or the key of serve.keys was another one"
            )
        path = source.folder / name
        try:
            with PromptFile(path) as file:
                file.require(num_tokens=num_tokens, num_layers=source.num_layers, model=source.key)
        except FileNotFoundError:
            return GivenUp(f"its file is not in {source.folder}")
        except (OSError, ValueError) as error:
            return GivenUp(f"its file is damaged: {error}")
        return Ready(path)
