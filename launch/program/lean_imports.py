"""Import of transformers without torch's compiler, and without reading the sources of all its models at every start."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from threading import RLock, get_ident
from types import ModuleType
from typing import Any, TypeVar

from launch.program.late_names import LateNames
from runahead.files import cache_folder, write_whole

COMPILER = "torch._dynamo"
"""All of torch.compile. transformers imports one small class from a file of this package, and marks some functions."""
ALONE = f"{COMPILER}._trace_wrapped_higher_order_op"
"""The file, which needs nothing of its package."""
MARKS = ("assume_constant_result", "allow_in_graph")
"""Functions of the package that mark others."""
WAIT_S = 10.0
"""Longest wait of a thread that imports one of its files for another thread that runs the package's code."""
STRUCTURES = "transformers.utils.import_utils"
READS = "create_import_structure_from_path"
"""Its function that reads the 2,000 sources of all models, twice, for the names that they export."""

T = TypeVar("T")
Structure = dict[Any, Any]
"""A folder has structures by the names of its folders, and names by module by the packages that they need."""


@contextmanager
def lean_imports() -> Iterator[None]:
    """Context manager in which an import of transformers takes about half of its time.

    The package torch._dynamo is there at once, and its code runs when something first asks for a name in it. Names that
    the models' modules export are read from the cache folder, while the modules are as they were when these were kept.
    Names that only models on several devices or ranks need come late, also after it (`LateNames`). Where torch or
    transformers is not as this file knows it, it is imported as ever.
    """
    LateNames.come()
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for undo in finder.changed:
            undo()


class _Finder(MetaPathFinder):
    """Finds the two modules, if they are not imported yet, with loaders that do as `lean_imports` says.

    Attributes:
        changed: functions that undo what was changed in modules.
    """

    def __init__(self) -> None:
        self.changed: list[Callable[[], None]] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in (COMPILER, STRUCTURES):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader) if fullname == COMPILER else _Changed(spec.loader, self.changed)
        return spec


class _Later(Loader):
    """Leaves the compiler's code for later, for the loader in whose place it is."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Later(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        _give_back(module, self._loader)


class Later(ModuleType):
    """The compiler, whose code runs when something first asks for a name in it. Threads wait for one another.

    Some of its functions are there before. `disable` keeps a function from being compiled: while there is no compiler
    it is called as it is. `assume_constant_result` and `allow_in_graph` note something of a function, and return it:
    these calls are made up for when the code has run. `trace_rules.clear_lru_cache`, which torch calls as a job's ranks
    meet if the compiler is there, has nothing to clear.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__dict__["__later__"] = _Rest(self)

    def __getattr__(self, name: str) -> Any:
        rest: _Rest | None = self.__dict__.get("__later__")
        if rest is None or (name.startswith("__") and name.endswith("__")):  # those are asked of every module
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if rest.thread is None and name == "disable":
            return partial(_disabled, self)
        if rest.thread is None and name in MARKS:
            return partial(rest.note, name)
        if rest.thread is None and name == "trace_rules":
            return _Rules(self)
        rest.run()
        return ModuleType.__getattribute__(self, name)


class _Rest(MetaPathFinder):
    """The rest of an import, which is made up for before any other file of the package is imported.

    Attributes:
        lock: held while the package's code runs.
        thread: in which it runs now.
    """

    def __init__(self, module: ModuleType) -> None:
        self.lock = RLock()
        self.thread: int | None = None
        self._module = module
        self._noted: list[tuple[str, Any]] = []
        sys.meta_path.insert(0, self)

    def note(self, mark: str, fn: T) -> T:
        self._noted.append((mark, fn))
        return fn

    def run(self, wait_s: float = -1) -> None:
        """Run the package's code, unless it runs in this thread or has run.

        Args:
            wait_s: how long to wait for another thread in which it runs; -1 is until it has.

        Raises: whatever it raises; who asks next tries again.
        """
        if not self.lock.acquire(timeout=wait_s):
            return
        try:
            if self.thread is not None or self not in sys.meta_path:
                return
            module = self._module
            assert module.__spec__ is not None and module.__spec__.loader is not None
            self.thread = get_ident()
            try:
                module.__spec__.loader.exec_module(module)
            finally:
                self.thread = None
            sys.meta_path.remove(self)
            del module.__dict__["__later__"]
        finally:
            self.lock.release()
        for mark, fn in self._noted:
            getattr(module, mark)(fn)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.rpartition(".")[0] == self._module.__name__ and fullname != ALONE and self.thread != get_ident():
            self.run(WAIT_S)  # this thread holds the lock of a file, for which the other thread may wait
            if fullname in sys.modules:  # Python is about to import it once more
                return _There.spec(sys.modules[fullname])
        return None


class _There(Loader):
    """Loads a module that is there."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    @classmethod
    def spec(cls, module: ModuleType) -> ModuleSpec:
        """The spec with which Python imports it, also that of the module until then, which it takes for newer."""
        spec = ModuleSpec(module.__name__, cls(module))
        vars(module)["__spec__"] = spec  # torch's modules of options take no attribute but these
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__spec__"] = self._spec


class _Rules:
    """The file trace_rules of the compiler."""

    def __init__(self, later: Later) -> None:
        self._later = later

    def clear_lru_cache(self) -> None:
        if "__later__" not in self._later.__dict__:
            self._later.trace_rules.clear_lru_cache()

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{self._later.__name__}.trace_rules"), name)


def _disabled(later: Later, fn: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`fn`, called as it is until the compiler's code has run, and then as `disable` makes it."""
    if fn is None:  # a decorator with arguments
        return lambda decorated: _disabled(later, decorated, *args, **kwargs)
    made: list[Any] = []

    @wraps(fn)
    def called(*given: Any, **named: Any) -> Any:
        if "__later__" in later.__dict__:
            return fn(*given, **named)
        if not made:
            made.append(later.disable(fn, *args, **kwargs))
        return made[0](*given, **named)

    return called


class _Changed(Loader):
    """Runs the module, for the loader in whose place it is; then its function has the models' folder from the cache."""

    def __init__(self, loader: Loader, changed: list[Callable[[], None]]) -> None:
        self._loader, self._changed = loader, changed

    def exec_module(self, module: ModuleType) -> None:
        _give_back(module, self._loader)
        self._loader.exec_module(module)
        reads = getattr(module, READS, None)
        if reads is None or module.__file__ is None:
            return
        source = Path(module.__file__)
        models = source.parents[1] / "models"
        of_models = cache(lambda: kept(models, source, reads))

        def read(module_path: Any) -> Structure:
            path = Path(module_path)
            return of_models() if models == (path.parent if path.suffix else path) else reads(module_path)

        self._changed.append(_replaced(module, READS, read))


def _give_back(module: ModuleType, loader: Loader) -> None:
    assert module.__spec__ is not None
    module.__spec__.loader = module.__loader__ = loader


def _replaced(module: ModuleType, name: str, value: object) -> Callable[[], None]:
    before = getattr(module, name)
    setattr(module, name, value)
    return lambda: setattr(module, name, before)


def kept(folder: Path, source: Path, reads: Callable[[Path], Structure]) -> Structure:
    """The structure that `reads` finds of a folder: from the cache folder, if it was kept there of the same files.

    Args:
        source: the file of `reads`.
    """
    path: Path | None = None
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):  # none, or damaged
        path = cache_folder() / "imports" / f"{_digest(folder, source)}.json"
        return _decoded(json.loads(path.read_text()))
    found = reads(folder)
    if path is not None:
        with suppress(OSError):  # without room it is read again by the next start
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(_encoded(found)))
    return found


def _digest(folder: Path, source: Path) -> str:
    """Digest of the names, sizes and times of a file and of all files in a folder."""
    paths = [source.as_posix()]
    for root, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if each != "__pycache__"]
        paths += [os.path.join(root, name) for name in names]
    digest = hashlib.sha256()
    for path in sorted(paths):
        about = os.stat(path)
        digest.update(f"{path}\0{about.st_size}\0{about.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:20]


def _encoded(structure: Structure) -> list[Any]:
    folders = {key: _encoded(value) for key, value in structure.items() if isinstance(key, str)}
    modules = [
        [sorted(key), {module: sorted(names) for module, names in value.items()}]
        for key, value in structure.items()
        if not isinstance(key, str)
    ]
    return [folders, modules]


def _decoded(found: list[Any]) -> Structure:
    folders, modules = found
    structure: Structure = {key: _decoded(value) for key, value in folders.items()}
    return structure | {
        frozenset(packages): {module: set(names) for module, names in of_modules.items()}
        for packages, of_modules in modules
    }
