"""Worker thread for calls that may block for ever, so that the thread that submits them need not."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class SubmittedCall:
    """A submitted call. Once `done` is set, `result` or `error` holds its outcome."""

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
    """Daemon thread that runs calls in order. A call that never returns does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[SubmittedCall | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def ident(self) -> int:
        """`threading.get_ident` of the thread."""
        assert self._thread.ident is not None
        return self._thread.ident

    def submit(self, call: Callable[[], Any]) -> SubmittedCall:
        """Queue a call."""
        job = SubmittedCall(call)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job  # and what its call refers to, though no other one comes for long
