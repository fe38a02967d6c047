"""Imports of a starting program: what its work needs, while its ranks meet and before Python looks for garbage."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from threading import Thread


class Ahead:
    """A module that is imported ahead of its use, in a thread where this rank waits for others meanwhile.

    The thread that waits for the module must not import anything before `wait`: two threads that import modules of one
    ring may get one of them half made. A process that ends does not wait for the import.

    Args:
        module: name of the module.
        beside: whether a thread imports it; otherwise `wait` does.
    """

    def __init__(self, module: str, *, beside: bool) -> None:
        self._module = module
        self._error: BaseException | None = None
        self._thread = Thread(target=self._import, name="imports", daemon=True) if beside else None
        if self._thread is not None:
            self._thread.start()

    def wait(self) -> None:
        """Wait until the module is imported. Raises: whatever its import raises."""
        if self._thread is None:
            import_module(self._module)
            return
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _import(self) -> None:
        try:
            import_module(self._module)
        except BaseException as error:
            self._error = error


@contextmanager
def uncollected() -> Iterator[None]:
    """Context manager for imports, in which Python does not look for garbage.

    Torch and transformers make a million objects that stay, and Python would look through them again and again: a
    quarter of the time of their import. Later collections leave them out, too.
    """
    if not gc.isenabled():
        yield
        return
    num_modules = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        gc.enable()
