"""A thread for calls that may block for ever, so that the one that needs them can go on without them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class Job:
    """A call, and once `done` is set its result or error."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.done = call, threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.call()
        except Exception as error:
            self.error = error
        self.done.set()


class Worker:
    """A daemon thread that runs blocking calls in order; one that never returns does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def ident(self) -> int:
        """As of `threading.get_ident`."""
        assert self._thread.ident is not None
        return self._thread.ident

    def submit(self, call: Callable[[], Any]) -> Job:
        job = Job(call)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
