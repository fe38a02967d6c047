"""Imports go one way: edge -> the packages; partitioner -> runahead; runahead -> what a policy is.

The edge is launch/ and the command-line modules named in EDGE_MODULES. It alone knows Hydra and argparse,
nothing but the edge imports the edge, and the runtime (runahead/) does not print.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("runahead", "partitioner", "policies", "launch")
EDGE_MODULES = ("partitioner.search", "partitioner.show", "policies.prompt_cache.encode", "policies.skew")
EDGE_ONLY = ("hydra", "omegaconf", "argparse")
MAY_IMPORT = {
    "runahead": ("runahead", "policies.base", "policies.retriever", "policies.pool"),
    "partitioner": ("partitioner", "runahead"),
    "policies": ("policies",),
}


def violations(source: str, path: str) -> list[str]:
    """What is wrong with the module at `path` (relative to the root, with slashes), one sentence each."""
    module, is_package = module_name(path)
    package = module.split(".")[0]
    tree = ast.parse(source, filename=path)
    found = []
    if package == "runahead":
        found += [f"{path}:{line}: {package} prints" for line in prints(tree)]
    if is_edge(module):
        return found
    for line, candidates in imports(tree, module, is_package):
        wrong = refusal(candidates, package)
        if wrong is not None:
            found.append(f"{path}:{line}: {package} imports {wrong}")
    return found


def refusal(candidates: list[str], package: str) -> str | None:
    """The module that may not be imported, or None. `candidates`: names of one import, the longest first."""
    for name in candidates:
        top = name.split(".")[0]
        if top in EDGE_ONLY:
            return name
        if top not in PACKAGES:
            continue
        if is_edge(name):
            return name
        if any(is_inside(name, allowed) for allowed in MAY_IMPORT[package]):
            return None
    ours = [name for name in candidates if name.split(".")[0] in PACKAGES]
    return ours[0] if ours else None


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, list[str]]]:
    """Line and imported name of every import, those in functions and under TYPE_CHECKING too.

    `from a import b` may import the module a.b or a name of a, so both are given, the longer first.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, [alias.name]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + int(is_package)]
                base = ".".join([*parts, base] if base else parts)
            yield from ((node.lineno, [f"{base}.{alias.name}", base]) for alias in node.names)
        elif isinstance(node, ast.Call) and called_name(node) in ("import_module", "__import__"):
            constants = [part for part in ast.walk(node) if isinstance(part, ast.Constant)]
            yield from ((node.lineno, [part.value]) for part in constants if isinstance(part.value, str))


def prints(tree: ast.AST) -> list[int]:
    """Lines that call something named print."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if called_name(call) == "print"]


def called_name(call: ast.Call) -> str | None:
    """The last part of the name of what is called: "print" of builtins.print()."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else None


def is_edge(module: str) -> bool:
    return is_inside(module, "launch") or any(is_inside(module, edge) for edge in EDGE_MODULES)


def is_inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(outer + ".")


def module_name(path: str) -> tuple[str, bool]:
    """Dotted name of a file, and whether it is a package's __init__.py."""
    parts = list(Path(path).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    return ".".join(parts[:-1] if is_package else parts), is_package


def project_files() -> list[str]:
    return sorted(
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        if (ROOT / package).is_dir()
        for path in (ROOT / package).rglob("*.py")
    )


def test_imports_go_one_way() -> None:
    files = project_files()
    assert any(path.startswith("runahead/") for path in files), "no file of runahead/ was found"
    found = [wrong for path in files for wrong in violations((ROOT / path).read_text(encoding="utf-8"), path)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("runahead/engine.py", "import hydra"),
        ("runahead/engine.py", "from omegaconf import OmegaConf"),
        ("runahead/engine.py", "def late():\n    import argparse"),
        ("runahead/engine.py", "from partitioner.grid import search"),
        ("runahead/engine.py", "import policies"),
        ("runahead/engine.py", "from policies import POLICIES"),
        ("runahead/engine.py", "from policies.h2o import H2O"),
        ("runahead/engine.py", "from policies import base, h2o"),
        ("runahead/engine.py", "from launch import compose"),
        ("runahead/engine.py", "import importlib\nimportlib.import_module('policies.h2o')"),
        ("runahead/engine.py", "print('done')"),
        ("runahead/prefill/single.py", "from ...partitioner import grid"),
        ("partitioner/grid.py", "from policies.base import Policy"),
        ("partitioner/grid.py", "from .search import main"),
        ("partitioner/grid.py", "from hydra import compose"),
        ("partitioner/__init__.py", "from . import show"),
        ("policies/h2o.py", "from runahead.cache.slabs import KVCache"),
        ("policies/__init__.py", "from .skew import main"),
    ],
)
def test_a_wrong_import_is_found(path: str, source: str) -> None:
    assert len(violations(source, path)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("runahead/engine.py", "import torch\nfrom runahead.context import even\nfrom . import model"),
        ("runahead/engine.py", "from policies.base import Policy"),
        ("runahead/engine.py", "from policies import base"),
        ("runahead/prefill/__init__.py", "from . import single\nfrom ..context import ContextPartition"),
        ("runahead/engine.py", "text = 'print(1), import hydra'"),
        ("partitioner/grid.py", "from runahead.context import ContextPartition\nprint(1)"),
        ("partitioner/search.py", "import hydra\nfrom policies import POLICIES\nfrom launch import compose"),
        ("policies/h2o.py", "from .base import Policy\nimport torch"),
        ("policies/skew.py", "from omegaconf import OmegaConf\nfrom runahead import Engine"),
        ("launch/infer.py", "from hydra import compose\nimport runahead, partitioner, policies\nprint(1)"),
    ],
)
def test_a_right_import_is_accepted(path: str, source: str) -> None:
    assert violations(source, path) == []
