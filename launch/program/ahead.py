"""Imports of a starting program: what its work needs, beside other things and before Python looks for garbage."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL, RTLD_GLOBAL, RTLD_LOCAL, c_char_p, c_int, c_void_p
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
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


def load_library_of_torch() -> Thread | None:
    """Load torch's library of machine code, which takes 0.15 s without Python's lock, in a thread.

    An import of torch finds it there. Python does not end before the thread has.
    """
    spec = find_spec("torch") if sys.platform == "linux" and "torch" not in sys.modules else None
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = os.fsencode(Path(spec.submodule_search_locations[0]) / "lib")
    try:
        load_library = CDLL(None).dlopen  # which CDLL calls, too, but until Python 3.12 with the lock
    except (OSError, AttributeError):
        return None
    load_library.restype, load_library.argtypes = c_void_p, (c_char_p, c_int)

    def load() -> None:
        # In torch's order and way: its own dependencies are for all libraries. If any is wrong, the import tells.
        for name, mode in ((b"libtorch_global_deps.so", RTLD_GLOBAL), (b"libtorch.so", RTLD_LOCAL)):
            if load_library(os.path.join(folder, name), mode | os.RTLD_NOW) is None:
                return

    thread = Thread(target=load, name="library of torch")
    thread.start()
    return thread


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
