"""Imports go one way: between packages, between the folders of a package, and between files.

The order of the packages is policies, runahead, partitioner, launch, benchmarks: a package imports those before it. Two
kinds of modules are exempt. The command modules (EDGE_MODULES) may import launch/ as well, and nothing of the library
imports them or launch/; the doors of the benchmarks (DOORS) alone may import benchmarks/. Only launch/ and the command
modules know Hydra, only they and benchmarks/ know argparse, and the runtime (runahead/) does not print.

ROOMS is the order within a package. Imports in functions and under TYPE_CHECKING count as any other.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from math import inf
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("policies", "runahead", "partitioner", "launch", "benchmarks")
EDGE_MODULES = (
    "partitioner.plan",
    "partitioner.search",
    "partitioner.show",
    "policies.duo_gates",
    "policies.fit_kvzap",
    "policies.prompt_cache.encode",
    "policies.retrieval_heads",
    "policies.skew",
)
DOORS = ("launch.bench", "launch.doctor", "launch.evaluate", "launch.first_day")
HYDRA = ("hydra", "omegaconf")
EXPERIMENTS = "policies.experiments"
"""Policies that may import what the runtime has, and that nothing imports: they are found by name."""
MAY_IMPORT = {
    "policies": ("policies",),
    EXPERIMENTS: ("policies", "runahead"),
    "runahead": (
        "runahead",
        "policies.base",
        "policies.gumbel",
        "policies.layer_view",
        "policies.options",
        "policies.reuse",
        "policies.pool",
        "policies.precision",
        "policies.retriever",
        "policies.row_values",
    ),
    "partitioner": ("partitioner", "runahead", "policies.byte_size"),
    "launch": ("launch", "policies", "runahead", "partitioner"),
    "benchmarks": PACKAGES,
}
ROOMS = {
    "runahead": (
        ("failures", "config", "features", "context", "rotary", "files", "picture_style"),
        ("place",),
        ("kernels",),
        ("ranks", "timeline", "attention"),
        ("report",),
        ("cache",),
        ("kv_transfer", "model"),
        ("retrieval", "reuse", "dynamic_cache"),
        ("thinning",),
        ("prefill", "decoding"),
        ("prompt_draft", "pipeline"),
        ("engine",),
        ("conversation",),
        ("serving",),
        ("__init__",),
    ),
    "partitioner": (
        ("cost", "options"),
        ("simulation", "measure"),
        ("table",),
        ("calibration",),
        ("searches",),
        ("auto", "meshes", "pictures"),
        ("plan", "search", "show"),
        ("__init__",),
    ),
    "launch": (
        ("program",),
        ("inputs", "outputs", "exact"),
        ("server",),
        ("infer", "serve", "combinations", "kernels", *(door.split(".")[1] for door in DOORS)),
        ("duo_gates", "encode", "exact_layers", "fit_kvzap", "retrieval_heads", "skew"),
        ("__init__",),
    ),
    "benchmarks": (
        ("harness", "network"),
        ("families", "ttft"),
        ("doctor", "evaluation"),
        ("first_day", "studies"),
        ("__init__",),
    ),
}
"""Folders and files of a package by level, lowest first. A room may import its own level and those below it."""

MOST_FILES = 16
"""Python files of a folder at most."""

OTHER_LIMITS = {"runahead": 10, "policies": inf}
"""policies/ has one file per method."""


def violations(source: str, path: str) -> list[str]:
    """Faults of the module at `path` (relative to the root, with slashes), one sentence each."""
    module, is_package = module_name(path)
    package = module.split(".")[0]
    tree = ast.parse(source, filename=path)
    found = []
    if package == "runahead":
        found += [f"{path}:{line}: {package} prints" for line in prints(tree)]
    for line, candidates in imports(tree, module, is_package):
        wrong = refusal(candidates, module)
        if wrong is not None:
            found.append(f"{path}:{line}: {module} imports {wrong}")
    return found


def refusal(candidates: list[str], module: str) -> str | None:
    """The module that `module` may not import, or None. `candidates`: names of one import, the longest first."""
    package, name = module.split(".")[0], candidates[0]
    if name.split(".")[0] in (*HYDRA, "argparse"):
        knows = is_edge(module) or (package == "benchmarks" and not is_inside_any(name, HYDRA))
        return None if knows else name
    if name.split(".")[0] not in PACKAGES:
        return None
    if is_inside(name, EXPERIMENTS) and not is_inside(module, EXPERIMENTS):
        return name
    if is_inside(module, "launch") or is_inside_any(module, EDGE_MODULES):
        allowed = PACKAGES if module in DOORS else MAY_IMPORT["launch"]
    else:
        allowed = MAY_IMPORT[EXPERIMENTS if is_inside(module, EXPERIMENTS) else package]
        if package != "benchmarks" and any(map(is_edge, candidates)):
            return name
    if not any(is_inside_any(candidate, allowed) for candidate in candidates):
        return name
    return name if is_inside(name, package) and level(name) > level(module) else None


def level(module: str) -> int:
    """The level of a module's room, or of a name that a room gives; 0 in a package that has no levels."""
    package, *rest = module.split(".")
    levels = ROOMS.get(package, ())
    rooms = {room: number for number, rooms in enumerate(levels) for room in rooms}
    return rooms.get((*rest, "")[0], rooms.get("__init__", 0))


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
    return is_inside(module, "launch") or is_inside_any(module, EDGE_MODULES)


def is_inside_any(name: str, outer: Iterable[str]) -> bool:
    return any(is_inside(name, each) for each in outer)


def is_inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(outer + ".")


def prefixes(name: str) -> list[str]:
    """A dotted name and all that contain it, the longest first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def module_name(path: str) -> tuple[str, bool]:
    """Dotted name of a file, and whether it is a package's __init__.py."""
    parts = list(Path(path).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    return ".".join(parts[:-1] if is_package else parts), is_package


def cycle(sources: Mapping[str, str]) -> list[str] | None:
    """Modules that import each other in a ring, or rooms of a package; None if there is no such ring.

    Args:
        sources: by path.
    """
    files = {module_name(path): source for path, source in sources.items()}
    modules = {module for module, _ in files}
    by_module: dict[str, set[str]] = {module: set() for module in modules}
    for (module, is_package), source in files.items():
        for _, candidates in imports(ast.parse(source), module, is_package):
            found = next((name for name in prefixes(candidates[0]) if name in modules), module)
            by_module[module] |= {found} - {module}
    by_room: dict[str, set[str]] = {}
    for module, imported in by_module.items():
        if not is_inside_any(module, EDGE_MODULES):
            own = {room(name) for name in imported if is_inside(name, module.split(".")[0])}
            by_room.setdefault(room(module), set()).update(own - {room(module)})
    for graph in (by_module, by_room):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            return list(error.args[1])
    return None


def room(module: str) -> str:
    """The folder or file below a package that a module belongs to."""
    package, *rest = module.split(".")
    return f"{package}.{rest[0] if rest else '__init__'}"


def project_sources() -> dict[str, str]:
    """Library code by path."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    found = project_sources()
    assert any(path.startswith("runahead/") for path in found), "no file of runahead/ was found"
    return found


def test_imports_go_one_way(sources: dict[str, str]) -> None:
    found = [wrong for path, source in sources.items() for wrong in violations(source, path)]
    assert not found, "\n" + "\n".join(found)


def test_no_files_and_no_folders_import_each_other_in_a_ring(sources: dict[str, str]) -> None:
    assert cycle(sources) is None


def test_every_room_has_a_level(sources: dict[str, str]) -> None:
    found = {room(module_name(path)[0]) for path in sources if path.split("/")[0] in ROOMS}
    assert found == {f"{package}.{name}" for package, levels in ROOMS.items() for rooms in levels for name in rooms}


def test_no_folder_has_too_many_files(sources: dict[str, str]) -> None:
    counts = Counter(path.rpartition("/")[0] for path in sources)
    assert not {folder: n for folder, n in counts.items() if n > OTHER_LIMITS.get(folder, MOST_FILES)}


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
        ("runahead/engine.py", "from launch.program import compose"),
        ("runahead/engine.py", "import importlib\nimportlib.import_module('policies.h2o')"),
        ("runahead/engine.py", "print('done')"),
        ("runahead/prefill/single.py", "from ...partitioner import grid"),
        ("runahead/attention/partial.py", "from ..cache.slabs import KVCache"),
        ("runahead/ranks/ranks.py", "if TYPE_CHECKING:\n    from runahead.model.model import Model"),
        ("runahead/context.py", "from runahead.ranks import devices"),
        ("runahead/report.py", "from runahead import Engine"),
        ("runahead/thinning/steps.py", "import runahead.prefill.base"),
        ("partitioner/table/entry.py", "from ..searches.grid import search"),
        ("partitioner/grid.py", "from policies.base import Policy"),
        ("partitioner/grid.py", "from .search import main"),
        ("partitioner/grid.py", "from hydra import compose"),
        ("partitioner/search.py", "from benchmarks.harness import lines"),
        ("partitioner/__init__.py", "from . import show"),
        ("policies/h2o.py", "from runahead.cache.slabs import KVCache"),
        ("policies/__init__.py", "from .skew import main"),
        ("policies/snapkv.py", "from policies.experiments.minicache import MiniCache"),
        ("launch/infer.py", "from policies import experiments"),
        ("policies/experiments/dms.py", "from launch.program import compose"),
        ("launch/infer.py", "from benchmarks.harness import lines"),
        ("launch/inputs/prompts.py", "from benchmarks import ttft"),
        ("launch/program/run.py", "from ..inputs import prompts"),
        ("benchmarks/studies/offloading.py", "import omegaconf"),
        ("benchmarks/harness/lines.py", "from benchmarks.ttft import record"),
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
        ("runahead/prefill/single.py", "from ..decoding import decode"),
        ("runahead/engine.py", "text = 'print(1), import hydra'"),
        ("partitioner/grid.py", "from runahead.context import ContextPartition\nprint(1)"),
        ("partitioner/search.py", "import hydra\nfrom policies import POLICIES\nfrom launch.program import compose"),
        ("policies/h2o.py", "from .base import Policy\nimport torch"),
        ("policies/skew.py", "from omegaconf import OmegaConf\nfrom runahead import Engine"),
        ("policies/experiments/dms.py", "from policies.base import Policy\nfrom runahead.cache.base import KVStore"),
        ("launch/infer.py", "from hydra import compose\nimport runahead, partitioner, policies\nprint(1)"),
        ("launch/bench.py", "from benchmarks.ttft import record"),
        ("launch/doctor.py", "from benchmarks.doctor import findings"),
        ("benchmarks/ttft/plot.py", "import argparse\nfrom launch.inputs import prompts\nimport partitioner.search"),
    ],
)
def test_a_right_import_is_accepted(path: str, source: str) -> None:
    assert violations(source, path) == []


@pytest.mark.parametrize(
    "sources",
    [
        {"policies/a.py": "from policies import b", "policies/b.py": "def late():\n    from .a import A"},
        {"policies/a.py": "from .b import B", "policies/b.py": "from . import c", "policies/c.py": "import policies.a"},
        {"policies/__init__.py": "from .a import A", "policies/a.py": "from policies import POLICIES"},
        {  # no ring of files
            "runahead/ranks/a.py": "from runahead.cache import b",
            "runahead/cache/b.py": "",
            "runahead/cache/c.py": "if TYPE_CHECKING:\n    from ..ranks.d import D",
            "runahead/ranks/d.py": "",
        },
    ],
)
def test_a_ring_is_found(sources: dict[str, str]) -> None:
    assert cycle(sources) is not None


def test_a_chain_is_no_ring() -> None:
    assert cycle({"policies/a.py": "from .b import B", "policies/b.py": "from . import c", "policies/c.py": ""}) is None
