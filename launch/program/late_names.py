"""Names that a module imports, and whose own modules are imported when something first uses them."""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Sequence
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

ALGEBRA = ("sympy", "torch.fx.experimental.symbolic_shapes")
"""torch's algebra of sizes that are not known, as in compiled models, which it asks when it makes a model."""

KNOWN: dict[str, tuple[type, Callable[..., bool]]] = {
    **dict.fromkeys(
        ("expect_true", "guard_or_true", "guard_or_false", "statically_known_true", "sym_and"),
        (bool, lambda *all_of: all(all_of)),
    ),
    "sym_or": (bool, lambda *any_of: any(any_of)),
    "sym_eq": (int, lambda one, other: one == other),
    "is_nested_int": (int, lambda number: False),
}
"""Results of its functions for plain numbers of a type, and tuples of them, for which they need no algebra."""

LATE = {
    "torch": ALGEBRA,
    "torch._decomp.decompositions": ALGEBRA,
    "torch._meta_registrations": ALGEBRA,
    "torch._prims": ALGEBRA,
    "torch._prims_common": ALGEBRA,
    "torch._refs": ALGEBRA,
    "transformers.distributed.": SHARED,
    "transformers.generation.utils": SHARED,
    "transformers.integrations.accelerate": SHARED,
    "transformers.integrations.peft": SHARED,
    "transformers.loss.": SHARED,
    "transformers.modeling_utils": SHARED,
}
"""Packages whose names come late to a module, or to all modules of a package."""


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
        sources = next(
            (LATE[each] for each in LATE if fullname == each or (each[-1] == "." and fullname.startswith(each))), None
        )
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
    is_late = source not in sys.modules and _is_within(source, sources)
    if is_late and fromlist and "*" not in fromlist:
        return SimpleNamespace(**{each: LateName(source, each) for each in fromlist})
    if is_late and not fromlist and "." not in source:
        return _LateModule(source)
    return builtins.__import__(name, globals, locals, fromlist or (), level)


def _are_all(kind: type, values: tuple[Any, ...]) -> bool:
    return all(_are_all(kind, each) if isinstance(each, tuple) else type(each) is kind for each in values)


class _LateModule:
    """A module, of which each name is late."""

    def __init__(self, name: str) -> None:
        self.__name = name

    def __getattr__(self, name: str) -> Any:
        return LateName(self.__name, name)


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
        kind, known = KNOWN.get(self.__name, (object, None))
        if known is not None and not kwargs and _are_all(kind, args):
            return known(*args)
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
