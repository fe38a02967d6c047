"""Start of a program without torch's compiler, which comes when it is asked for, and without all models' sources."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import Any

import pytest
from transformers.utils import import_utils

from launch.program import lean_imports as lean
from launch.program.lean_imports import Later, kept, lean_imports
from tests.test_lazy_imports import ROOT

SOURCE = Path(import_utils.__file__)
MODELS = SOURCE.parents[1] / "models"
READS = import_utils.create_import_structure_from_path

PROGRAM = """
import json, sys, torch
from launch.program.lean_imports import lean_imports
if sys.argv[1] == "lean":
    with lean_imports():
        from transformers import LlamaForCausalLM
else:
    from transformers import LlamaForCausalLM
import transformers
from transformers.integrations import deepgemm
was_loaded = "torch._dynamo.convert_frame" in sys.modules
names = sorted(dir(transformers.models)), sorted(dir(transformers))
torch.manual_seed(0)
x, calls = torch.rand(4), []

def backend(graph, given):
    calls.append(sorted(getattr(node.target, "__name__", "") for node in graph.graph.nodes if node.op != "output"))
    return graph.forward

compiled = torch.compile(lambda x: torch.sin(PART(x)) + 1, backend=backend)
PART = torch.compiler.disable(torch.cos)
found = compiled(x).tolist()
import torch._dynamo
constant = [name for name in vars(deepgemm) if getattr(vars(deepgemm)[name], "_dynamo_marked_constant", False)]
allowed = sum(id(each) in torch._dynamo.trace_rules._allowed_callable_ids for each in vars(deepgemm).values())
print(json.dumps([was_loaded, constant, allowed, names, found, calls]))
"""


def result_of(way: str) -> list[Any]:
    """Names, marks and graphs of a process that imports transformers in a way and compiles a function afterwards."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, cwd=ROOT, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_the_compiler_comes_when_it_is_asked_for_and_is_the_same() -> None:
    (loaded, *expected), (lean_loaded, *found) = result_of("plain"), result_of("lean")
    assert loaded and not lean_loaded
    assert found == expected
    assert all(expected)


class Reading:
    """The function that reads a folder of modules, and how often it did."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> dict[Any, Any]:
        self.calls += 1
        return READS(folder)


def test_the_names_of_all_models_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path))
    reading, expected = Reading(), READS(MODELS)
    assert kept(MODELS, SOURCE, reading) == kept(MODELS, SOURCE, reading) == expected
    assert reading.calls == 1
    [path] = (tmp_path / "imports").iterdir()
    for damage in (b"", b"[]", b"[{}]", b"{", b"\xff", json.dumps([{}, [["torch", 1]]]).encode()):
        path.write_bytes(damage)
        assert kept(MODELS, SOURCE, reading) == expected
    assert reading.calls == 7


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two models."""
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path / "cache"))
    for name in ("one", "two"):
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / f"modeling_{name}.py").write_text(f'__all__ = ["{name.title()}Model"]\n')
    (tmp_path / "reader.py").write_text("")
    return tmp_path / "models"


def test_changed_models_and_readers_are_read_again(models: Path) -> None:
    reading, source = Reading(), models.parent / "reader.py"
    for change in ("", "new model", "new name", "no model", "new reader"):
        if change == "new model":
            (models / "two" / "modeling_three.py").write_text('__all__ = ["Three"]\n')
        elif change == "new name":
            (models / "one" / "modeling_one.py").write_text('__all__ = ["Other"]\n')
        elif change == "no model":
            (models / "two" / "modeling_two.py").unlink()
        elif change == "new reader":
            source.write_text("# new")
        READS.cache_clear()
        expected = READS(models)
        READS.cache_clear()
        before = reading.calls
        assert kept(models, source, reading) == kept(models, source, reading) == expected
        assert reading.calls == before + 1, change


def test_without_a_folder_for_it_a_start_reads_the_models(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (models.parent / "file").write_text("")
    monkeypatch.setenv("RUNAHEAD_CACHE", str(models.parent / "file"))
    reading = Reading()
    assert kept(models, models.parent / "reader.py", reading) == READS(models)
    (models / "one" / "modeling_gone.txt").symlink_to(models / "nowhere")  # as editors leave them
    monkeypatch.setenv("RUNAHEAD_CACHE", str(models.parent / "cache"))
    assert kept(models, models.parent / "reader.py", reading) == READS(models)
    assert reading.calls == 2


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The source of a module that takes the compiler's place."""
    monkeypatch.setattr(lean, "COMPILER", "compiler_of_a_test")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "compiler_of_a_test.py"
    sys.modules.pop("compiler_of_a_test", None)


def imported() -> Any:
    with lean_imports():
        return importlib.import_module("compiler_of_a_test")


def test_threads_wait_until_the_code_has_run(compiler: Path) -> None:
    compiler.write_text("import time\nRUNS = [1]\ntime.sleep(0.2)\nend = 3\nassert RUNS == [1]\n")
    module, met, found = imported(), Barrier(3), list[int]()
    assert isinstance(module, Later) and "RUNS" not in vars(module) and not hasattr(module, "__wrapped__")

    def ask() -> None:
        met.wait()
        found.append(module.end)

    threads = [Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [3, 3, 3]
    with pytest.raises(AttributeError, match="has no attribute 'more'"):
        module.more  # noqa: B018


def test_threads_that_wait_for_each_other_go_on(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean, "WAIT_S", 0.1)
    folder = compiler.with_suffix("")
    folder.mkdir()
    (folder / "__init__.py").write_text("STEPS.append('runs')\nOTHER.wait()\nimport compiler_of_a_test.part\nend = 1\n")
    (folder / "part.py").write_text("number = 4\n")
    module, other = imported(), Event()
    module.STEPS, module.OTHER = list[str](), other  # type: ignore[attr-defined]
    rest = vars(module)["__later__"]
    run = rest.run

    def run_once_the_other_has_the_lock(wait_s: float = -1) -> None:
        if wait_s >= 0:
            other.set()  # this thread holds the lock of part.py
        run(wait_s)

    monkeypatch.setattr(rest, "run", run_once_the_other_has_the_lock)
    threads = [Thread(target=lambda: module.end, daemon=True)]
    threads[0].start()
    while not module.STEPS:
        pass
    threads.append(Thread(target=importlib.import_module, args=["compiler_of_a_test.part"], daemon=True))
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert module.end == 1 and sys.modules.pop("compiler_of_a_test.part").number == 4


def test_an_error_of_the_code_is_told_to_who_asks(compiler: Path) -> None:
    compiler.write_text("from nowhere_at_all import nothing\n")
    module = imported()
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
            module.disabled  # noqa: B018
    compiler.write_text("disabled = 5\n")
    importlib.invalidate_caches()
    assert module.disabled == 5


def test_another_file_of_the_package_comes_after_its_code_and_once(compiler: Path) -> None:
    folder = compiler.with_suffix("")
    folder.mkdir()
    (folder / "__init__.py").write_text("RUNS = []\nfrom compiler_of_a_test import part, trace_rules\n")
    (folder / "part.py").write_text(
        "import sys\nfrom types import ModuleType\nfrom compiler_of_a_test import RUNS\nRUNS.append(1)\n"
        "class Options(ModuleType):\n    def __setattr__(self, name, value): raise AttributeError(name)\n"
        "sys.modules[__name__].__class__ = Options\n"  # as torch's
    )
    (folder / "other.py").write_text("from compiler_of_a_test import RUNS\nRUNS.append(2)\n")
    (folder / "trace_rules.py").write_text("CLEARED = []\nlimit = 8\ndef clear_lru_cache(): CLEARED.append(1)\n")
    package = imported()
    rules = package.trace_rules
    rules.clear_lru_cache()
    assert "RUNS" not in vars(package)
    part = importlib.import_module("compiler_of_a_test.part")
    other = importlib.import_module("compiler_of_a_test.other")
    assert package.RUNS == [1, 2] and (package.part, package.other) == (part, other)
    assert "SourceFileLoader" in type(part.__spec__.loader).__name__  # type: ignore[union-attr]
    rules.clear_lru_cache()
    assert rules.limit == 8 and rules.CLEARED == [1]
    for each in (part, other, package.trace_rules):
        del sys.modules[each.__name__]


def test_marks_are_made_up_for_and_functions_are_disabled_from_then_on(compiler: Path) -> None:
    compiler.write_text(
        "def disable(fn, recursive=True):\n    return lambda *given: ('disabled', recursive, fn(*given))\n"
        "def allow_in_graph(fn):\n    fn.is_allowed = True\n    return fn\nlast = 1\n"
    )
    module = imported()

    def fn(number: int) -> int:
        return number + 1

    assert module.allow_in_graph(fn) is fn and not hasattr(fn, "is_allowed")
    plain, with_arguments = module.disable(fn), module.disable(recursive=False)(fn)
    assert (plain(1), with_arguments(1), plain.__name__) == (2, 2, "fn")
    assert module.last == 1 and fn.is_allowed  # type: ignore[attr-defined]
    assert (plain(1), with_arguments(1)) == (("disabled", True, 2), ("disabled", False, 2))


def test_modules_that_are_not_as_they_are_known_are_imported_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lean, "STRUCTURES", "structures_of_a_test")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "structures_of_a_test.py").write_text("value = 7\n")
    with lean_imports():
        module = importlib.import_module("structures_of_a_test")
    assert module.value == 7 and "SourceFileLoader" in type(module.__spec__.loader).__name__
    del sys.modules["structures_of_a_test"]
