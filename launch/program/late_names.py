"""Names that a module imports, and whose own modules are imported when something first uses them."""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from types import ModuleType, SimpleNamespace
from typing import Any

SHARED = (
    *("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed._composable"),
    *("torch.distributed.checkpoint", "accelerate"),
    *("transformers.distributed.tensor_parallel", "transformers.distributed.expert_parallel"),
)
"""Modules, and packages of modules, that a model needs where devices or ranks share it: a quarter of a second."""

LATE = {
    "transformers.distributed": SHARED,
    "transformers.generation.utils": SHARED,
    "transformers.integrations.accelerate": SHARED,
    "transformers.integrations.peft": SHARED,
    "transformers.loss": SHARED,
    "transformers.modeling_utils": SHARED,
}
"""What comes late to a module, or to all of a package."""


class LateNames(MetaPathFinder):
    """Finds the importers that are not imported yet. It stays: some come with a model's family."""

    @classmethod
    def come(cls) -> None:
        """Let names come late from now on."""
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.insert(0, cls())

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        sources = next((LATE[each] for each in LATE if _is_within(fullname, (each,))), None)
        spec = None if sources is None else PathFinder.find_spec(fullname, path, target)
        if sources is not None and spec is not None and spec.loader is not None:
            spec.loader = _Importer(spec.loader, sources)
        return spec


def _is_within(module: str, packages: Sequence[str]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


class _Importer(Loader):
    """Loads a module, for the loader in whose place it is, with late names for all that it takes `from` the sources.

    Python asks a module's own `__import__` for what it and its functions import.
    """

    def __init__(self, loader: Loader, sources: Sequence[str]) -> None:
        self._loader, self._sources = loader, sources

    def create_module(self, spec: Any) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        module.__dict__["__builtins__"] = vars(builtins) | {"__import__": partial(_late_import, self._sources)}
        self._loader.exec_module(module)


def _late_import(
    sources: Sequence[str],
    name: str,
    globals: Any = None,
    locals: Any = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    source = resolve_name("." * level + name, globals["__package__"]) if level else name
    if fromlist and "*" not in fromlist and source not in sys.modules and _is_within(source, sources):
        return SimpleNamespace(**{each: LateName(source, each) for each in fromlist})
    return builtins.__import__(name, globals, locals, fromlist or (), level)


class LateName:
    """A function or class of a module that is imported when it is called, inherited from or asked for an attribute.

    Before anything has imported the module there is no instance and no subclass of its classes, and nobody imports it
    to hear so.
    """

    def __init__(self, module: str, name: str) -> None:
        self.__module, self.__name = module, name

    def __value(self) -> Any:
        return getattr(import_module(self.__module), self.__name)

    def __kind(self) -> Any:
        return getattr(sys.modules.get(self.__module), self.__name, ())

    def __reduce__(self) -> tuple[Any, ...]:
        return LateName, (self.__module, self.__name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__value()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__value(), name)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__value())

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self.__kind())

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self.__kind())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.__value(),)

    def __or__(self, other: Any) -> Any:
        return self.__value() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.__value()
