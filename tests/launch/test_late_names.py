"""Names that come late: what a module imports of others, which are imported when something uses a name."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import pickle
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec, resolve_name
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental import symbolic_shapes

from launch.program import late_names
from launch.program.late_names import KNOWN, LateName, LateNames

SOURCE = """
from dataclasses import dataclass

def double(number, *, more=0):
    "Twice a number."
    return 2 * number + more

@dataclass
class Place:
    dim: int = 0
    size = 8

class Wide(Place):
    pass
"""

USER = """
from source_of_a_test.inner import Place, double as twice
import plain_of_a_test
from .neighbour import beside

def is_place(value):
    from source_of_a_test.inner import Place
    return isinstance(value, (Place, int)), issubclass(type(value), Place)

def late_import():
    import source_of_a_test.inner as inner
    return inner.double(4)
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of a package that takes names from a package of which they come late, and from others."""
    for folder, files in {
        "source_of_a_test": {"__init__": "", "inner": SOURCE},
        "users_of_a_test": {"__init__": "", "user": USER, "neighbour": "beside = 5\nfrom plain_of_a_test import value"},
    }.items():
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / f"{name}.py").write_text(text)
    (tmp_path / "plain_of_a_test.py").write_text("import source_of_a_test\nvalue = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, LateNames)])
    late = {"users_of_a_test.": ("source_of_a_test.inner",), "other_of_a_test": ("source_of_a_test",)}
    monkeypatch.setattr(late_names, "LATE", late)
    LateNames.come()
    LateNames.come()
    assert sum(isinstance(each, LateNames) for each in sys.meta_path) == 1
    yield importlib.import_module("users_of_a_test.user")
    for name in [each for each in sys.modules if each.partition(".")[0].endswith("_of_a_test")]:
        del sys.modules[name]


def is_there() -> bool:
    return "source_of_a_test.inner" in sys.modules


def test_a_call_imports_the_module(user: Any) -> None:
    assert isinstance(user.twice, LateName) and not is_there()
    assert user.twice(3, more=1) == 7 and is_there()
    assert "more" in inspect.signature(user.twice).parameters
    assert copy.deepcopy(user.twice)(2) == pickle.loads(pickle.dumps(user.twice))(2) == 4


def test_without_the_module_nothing_is_an_instance(user: Any) -> None:
    assert user.is_place("text") == (False, False) and user.is_place(3) == (True, False)
    assert not is_there()
    wide = importlib.import_module("source_of_a_test.inner").Wide
    assert user.is_place(wide()) == (True, True)
    assert isinstance(wide(), user.Place) and issubclass(wide, user.Place) and not isinstance(3, user.Place)


@pytest.mark.parametrize("use", ["made", "attribute", "inherited", "union", "from the right"])
def test_classes_come_when_they_are_used(user: Any, use: str) -> None:
    place = user.Place
    if use == "made":
        assert place(dim=2).dim == 2
    elif use == "attribute":
        assert place.size == 8 and not hasattr(place, "nothing")
    elif use == "inherited":

        class Own(place):  # type: ignore[misc]
            pass

        assert Own(3).dim == 3 and isinstance(Own(), place)
    elif use == "union":
        assert isinstance(place(), place | None)
    else:
        assert isinstance(place(), None | place)
    assert is_there()


def test_other_imports_are_as_ever(user: Any) -> None:
    assert user.plain_of_a_test.value == user.beside // 5 == 1 and not isinstance(user.beside, LateName)
    assert user.late_import() == 8 and is_there()
    assert user.__spec__.loader.__class__.__name__ == user.__loader__.__class__.__name__ == "SourceFileLoader"


def test_a_module_s_own_names_come_late(user: Any, tmp_path: Path) -> None:
    del sys.modules["source_of_a_test"]
    (tmp_path / "other_of_a_test.py").write_text("import source_of_a_test as late\n")
    (tmp_path / "source_of_a_test" / "__init__.py").write_text("from .inner import Place\n")
    late = importlib.import_module("other_of_a_test").late
    assert not isinstance(3, late.Place) and not is_there()
    assert late.Place().size == 8 and is_there()


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_without_torch_s_algebra_is_what_it_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = getattr(symbolic_shapes, name)
    late = LateName(symbolic_shapes.__name__, name)
    monkeypatch.delitem(sys.modules, symbolic_shapes.__name__)
    monkeypatch.setattr(late_names, "import_module", lambda name: pytest.fail("imported"))
    values: tuple[Any, ...] = (True, False) if KNOWN[name][0] is bool else (0, 1, 2)
    counts = {"sym_and": (1, 2, 3), "sym_or": (1, 2, 3), "sym_eq": (2,)}.get(name, (1,))
    for args in chain(*(product(values, repeat=count) for count in counts)):
        assert late(*args) is function(*args), args
    if name == "sym_eq":
        sizes = [(), (1,), (1, 2), (2, 1), torch.Size([1, 2])]
        assert all(late(*pair) == function(*pair) for pair in product(sizes, repeat=2))


@pytest.mark.parametrize("args", [(3,), (None,), ([True],), (True, "x")])
def test_what_is_not_a_plain_number_is_asked_of_torch(args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    there = SimpleNamespace(expect_true=lambda *given: given)
    monkeypatch.setattr(late_names, "import_module", lambda name: asked.append(name) or there)
    assert LateName(symbolic_shapes.__name__, "expect_true")(*args) == args
    assert asked == [symbolic_shapes.__name__]


class Misuses(ast.NodeVisitor):
    """Finds where a module's source uses late names in ways in which only a class itself would be right.

    Args:
        package: of the module, from which relative imports start.
        sources: packages whose names come late.
    """

    def __init__(self, package: str, sources: Sequence[str]) -> None:
        self._package, self._sources = package, sources
        self._late, self._modules = set[str](), set[str]()
        self.found: list[str] = []

    def of(self, text: str) -> list[str]:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                name = "." * node.level + (node.module or "")
                source = resolve_name(name, self._package) if node.level else name
                if late_names._is_within(source, self._sources):
                    self._late |= {each.asname or each.name for each in node.names}
            elif isinstance(node, ast.Import):
                self._modules |= {each.asname or each.name for each in node.names if each.name in self._sources}
        self.visit(tree)
        return self.found

    def _note(self, *nodes: ast.AST | None) -> None:
        for node in nodes:
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                self._note(*node.elts)
            elif isinstance(node, ast.Name | ast.Attribute):
                module = node.value.id if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else ""
                if module in self._modules or (isinstance(node, ast.Name) and node.id in self._late):
                    self.found.append(f"{node.lineno} {ast.unparse(node)}")

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._note(node.type)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if any(isinstance(each, ast.Is | ast.IsNot | ast.Eq | ast.NotEq | ast.In | ast.NotIn) for each in node.ops):
            self._note(node.left, *node.comparators)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        self._note(*node.keys)
        self.generic_visit(node)

    def visit_Set(self, node: ast.Set) -> None:
        self._note(node)
        self.generic_visit(node)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        self._note(node.cls)
        self.generic_visit(node)


def importers() -> Iterator[tuple[str, Path, Sequence[str]]]:
    """The modules to which names come late: package, file and where the names are from."""
    for name, sources in late_names.LATE.items():
        spec = find_spec(name.removesuffix("."))
        assert spec is not None and spec.origin is not None, f"{name} is no module of this version"
        file = Path(spec.origin)
        if not name.endswith("."):
            yield name if file.name == "__init__.py" else name.rpartition(".")[0], file, sources
            continue
        for each in file.parent.rglob("*.py"):
            yield ".".join((name[:-1], *each.relative_to(file.parent).parts[:-1])), each, sources


def test_importers_use_late_names_as_these_can_be_used() -> None:
    """A late name is no class: it cannot be caught, and is not the class that an instance names as its own."""
    found = {str(file): Misuses(package, sources).of(file.read_text()) for package, file, sources in importers()}
    assert len(found) > 20
    assert {file: uses for file, uses in found.items() if uses} == {}


@pytest.mark.parametrize(
    ("use", "is_found"),
    [
        ("try: pass\nexcept (ValueError, Late): pass", True),
        ("type(x) is Late", True),
        ("x.__class__ not in (int, Late)", True),
        ("Late == x", True),
        ("found = {Late: 1}", True),
        ("found = {int, Late}", True),
        ("match x:\n    case Late(): pass", True),
        ("def f():\n    from .near import Other as Near\n    return x is Near", True),
        ("import source\ntype(x) is source.Late", True),
        ("isinstance(x, Late) and x == 3", False),
        ("def f(x: Late | None) -> Late: return Late(x)", False),
        ("type(x) is int", False),
    ],
)
def test_what_a_late_name_cannot_be_used_for_is_seen(use: str, is_found: bool) -> None:
    text = f"from source.inner import Late, Other\n{use}\n"
    assert bool(Misuses("source", ("source",)).of(text)) == is_found


def test_a_name_that_is_not_there_is_told_when_it_is_used(user: Any) -> None:
    missing = LateName("source_of_a_test.inner", "missing")
    with pytest.raises(AttributeError, match="missing"):
        missing()
    assert not isinstance(3, missing)  # type: ignore[arg-type]
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        LateName("nowhere_at_all", "name")()
