"""What is imported when: `--help` no torch, and a run what its options choose and no more."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from launch import infer
from launch.program import lean_imports, run
from launch.program.ahead import Ahead, uncollected
from launch.program.late_names import ALGEBRA, SHARED
from runahead.config import ModelName, PrefillName
from runahead.kv_transfer import EXCHANGES, TRANSFERS
from runahead.kv_transfer.base import KVTransfer
from runahead.model.loading import FINDERS
from runahead.prefill import PREFILLS, Prefill
from tests.warm_program import free_port

ROOT = Path(__file__).resolve().parent.parent

LIBRARIES = {"torch", "transformers", "numpy", "tokenizers", "safetensors", "huggingface_hub", "accelerate"}
"""Packages that take long to import."""

CHOSEN = (
    *("runahead.prefill.tsp", "runahead.prefill.zigzag", "runahead.prefill.exchanging", "runahead.prefill.chunked"),
    *("runahead.kv_transfer.gloo", "runahead.kv_transfer.nccl", "runahead.kv_transfer.nccl_exchange"),
    *("runahead.kv_transfer.copy", "runahead.retrieval", "runahead.cache.host", "runahead.reuse.store"),
    *("runahead.reuse.prefix_tree", "runahead.reuse.prefixes", "runahead.reuse.reuse", "runahead.reuse.blend"),
    *("runahead.reuse.tiers.store", "runahead.decoding.speculative.generated_drafts", "runahead.serving"),
    *("runahead.decoding.speculative.policy_drafts", "runahead.decoding.speculative.retrieving_drafts"),
    *("runahead.model.loading.gguf.cache", "runahead.model.loading.smollm2", "runahead.conversation"),
    *("runahead.model.adapters.alibi", "runahead.model.adapters.falcon", "runahead.model.adapters.gptj"),
    *("partitioner.auto", "partitioner.table", "partitioner.simulation", "partitioner.searches", "launch.server"),
    *("launch.inputs.prompt_cache", "launch.inputs.prefixes", "launch.outputs.answers_file", "benchmarks"),
)
"""Modules and folders that only some options choose."""


def imported(program: str) -> set[str]:
    """The modules that a process has imported at the end of a program."""
    run = f"{program}\nimport json, sys\nprint(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def packages(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def inside(modules: set[str], folders: tuple[str, ...]) -> set[str]:
    return {each for each in modules if any(f"{each}.".startswith(f"{folder}.") for folder in folders)}


def families(modules: set[str]) -> set[str]:
    """Model families whose own code is imported."""
    return {each.split(".")[2] for each in modules if each.startswith("transformers.models.") and ".modeling_" in each}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "config.json"
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 1, "head_dim": 4, "vocab_size": 50}
    path.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | sizes | heads))
    return path


@pytest.mark.parametrize("program", ["infer", "serve", "bench", "evaluate", "doctor"])
def test_help_imports_no_library(program: str) -> None:
    found = imported(f"from launch.{program} import main\nassert main(['--help']) == 0")
    assert not LIBRARIES & packages(found)


def test_importing_a_package_loads_no_library() -> None:
    assert inside(imported("import runahead"), ("runahead",)) == {"runahead"}
    found = imported("import runahead.failures, runahead.model, runahead.ranks, policies")
    assert not LIBRARIES & packages(found)


def test_the_engine_alone_loads_no_prefill_store_or_transfer_that_options_choose() -> None:
    found = imported("import runahead.engine")
    assert not inside(found, CHOSEN)
    assert families(found) <= {"auto"}
    assert not {each for each in found if each.startswith("policies.")} - {
        *("policies.base", "policies.reuse", "policies.retriever", "policies.pool", "policies.row_values"),
        *("policies.budgeted", "policies.layer_view", "policies.options", "policies.precision"),
        "policies.byte_size",
        "policies.gumbel",
    }


def run_of(config: Path, *more: str) -> set[str]:
    """What a run of launch/infer.py imports."""
    given = ["model=random", f"model.config={config}", "prompt.random_tokens=4", "generation.max_new_tokens=2"]
    return imported(f"from launch.infer import main\nassert main({[*given, 'ranks.threads=1', *more]}) == 0")


def test_a_run_imports_what_its_options_choose(config: Path) -> None:
    found = run_of(config)
    assert not inside(found, CHOSEN)
    assert families(found) <= {"auto", "llama"}
    assert {each for each in found if each.startswith("torch._dynamo.")} == {lean_imports.ALONE}
    assert not {"policies.quest", "policies.h2o", "policies.adakv"} & found
    assert not inside(found, (*SHARED, *ALGEBRA))


def test_tables_have_what_their_interfaces_say() -> None:
    assert set(PREFILLS) == set(PrefillName) and set(FINDERS) == set(ModelName)
    assert all(issubclass(PREFILLS[name], Prefill) for name in PREFILLS)
    assert all(issubclass(table[name], KVTransfer) for table in (TRANSFERS, EXCHANGES) for name in table)
    assert all(callable(FINDERS[name]) for name in FINDERS)
    with pytest.raises(KeyError):
        TRANSFERS["mpi"]


def test_packages_export_their_main_class() -> None:
    from runahead import model, ranks
    from runahead.model.model import Model
    from runahead.ranks.ranks import Ranks

    assert (model.Model, ranks.Ranks) == (Model, Ranks)
    for package in (model, ranks):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            package.nothing  # noqa: B018


@pytest.mark.parametrize("beside", [False, True])
def test_an_import_that_fails_is_told_where_it_is_waited_for(beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ahead_and_there", types.ModuleType("ahead_and_there"))
    Ahead("ahead_and_there", beside=beside).wait()
    missing = Ahead("ahead_and_missing", beside=beside)
    with pytest.raises(ModuleNotFoundError, match="ahead_and_missing"):
        missing.wait()


LIBRARY = """
from pathlib import Path
from launch.program.ahead import load_library_of_torch
thread = load_library_of_torch()
thread.join()
assert "libtorch_cpu.so" in Path("/proc/self/maps").read_text()
assert "torch" not in sys.modules
import torch
assert torch.ones(2).sum() == 2 and load_library_of_torch() is None
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems load libraries in other ways")
def test_torch_finds_its_library_loaded() -> None:
    assert "torch" in imported(f"import sys\n{LIBRARY}")


@pytest.mark.parametrize(("flags", "loads"), [(["--help"], 0), (["--cfg", "job"], 0), (["prompt.texts=x"], 1)])
def test_only_a_run_loads_the_library(flags: list[str], loads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(run, "load_library_of_torch", lambda: calls.append("library"))
    infer.main(flags)
    assert len(calls) == loads


READS = """
import sys
from threading import Event, Thread
from launch import infer
from launch.program import run
from launch.program.compose import Program

def load():
    thread = Thread(target=Event().wait)
    thread.start()
    return thread

def interrupted(*_):
    raise KeyboardInterrupt

run.load_library_of_torch = load
if sys.argv[1] == "interrupted":
    Program.read = interrupted
sys.exit(infer.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("option", "status", "said"), [("prompt.fil=x", 2, "prompt.fil"), ("interrupted", 130, "interrupted")]
)
def test_a_program_that_is_not_begun_does_not_wait_for_the_library(option: str, status: int, said: str) -> None:
    """Which may lie on a slow disk; here it is never there."""
    done = subprocess.run([sys.executable, "-c", READS, option], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == status
    assert said in done.stderr.lower() and len(done.stderr.splitlines()) == 1


def test_garbage_is_collected_again_after_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = gc.get_freeze_count()
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() == frozen
    calls: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))

    def imports() -> Any:
        with uncollected():
            monkeypatch.setitem(sys.modules, "imported_now", types.ModuleType("imported_now"))
            raise ImportError("broken")

    with pytest.raises(ImportError, match="broken"):
        imports()
    assert gc.isenabled() and calls == ["freeze"]


JOIN = """
import os, sys, threading
rank = int(sys.argv[1])
os.environ |= {"RANK": sys.argv[1], "LOCAL_RANK": sys.argv[1], "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2]}
from launch.infer import main
from runahead.ranks.ranks import Ranks
join, imports = Ranks.join, []
class Seen:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread().name != "imports":
            imports.append(name)
sys.meta_path.insert(0, Seen())
def joined(ranks, **given):
    imports.clear()
    join(ranks, **given)
    print("JOINED", *imports, flush=True)
    return ranks
Ranks.join = joined
assert main(sys.argv[3:]) == 0
"""


FAIL = """
import os, sys
os.environ |= {"RANK": sys.argv[1], "LOCAL_RANK": sys.argv[1], "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2]}
from launch.infer import main
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "runahead.engine" and sys.argv[1] == "1":
            raise ImportError("libbroken.so is damaged")
sys.meta_path.insert(0, Broken())
sys.exit(main(sys.argv[3:]))
"""


def test_an_import_that_fails_on_one_rank_ends_all_with_its_words(config: Path) -> None:
    given, port = ["model=random", f"model.config={config}", "prompt.random_tokens=4"], str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", FAIL, str(rank), port, *given, "ranks.threads=1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate() for rank in ranks]
    assert all(rank.returncode for rank in ranks)
    assert [out for out, _ in outputs] == ["", ""]
    assert all("libbroken.so is damaged" in err for _, err in outputs)


def test_no_other_thread_imports_while_ranks_meet(config: Path) -> None:
    """Two threads that import modules of one ring may get one of them half made."""
    given, port = ["model=random", f"model.config={config}", "prompt.random_tokens=4"], str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN, str(rank), port, *given, "generation.max_new_tokens=1", "partition=even"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    for output in outputs:
        joined = next(line for line in output.splitlines() if line.startswith("JOINED"))
        assert joined.split() == ["JOINED"]
