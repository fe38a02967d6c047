"""Code of the pages and of the tutorial runs, their commands select tests, their paths are ones that are read."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import runahead
from runahead import Model, ModelOptions
from runahead.model.loading.checkpoint import HUB_GGUF, HUB_ID
from runahead.model.loading.quantised import FORMATS
from runahead.report import GenerationBatch
from tests.families import save_tiny_llama
from tests.tokenizers_for_tests import byte_level
from tests.warm_program import run_warm

ROOT = Path(__file__).resolve().parents[1]


def code_with(page: str, name: str) -> str:
    """The page's Python block that uses a name."""
    [block] = [block for block in code_of(page) if name in block]
    return block


def code_of(page: str) -> list[str]:
    """The page's Python blocks."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


Shown = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load(ModelOptions(), torch.device("cpu"))


@pytest.fixture
def shown(model: Model, monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Runs blocks one after the other in the repository's folder, with the model loaded once; returns their names."""

    def load(options: ModelOptions, device: torch.device) -> Model:
        assert (options, device) == (ModelOptions(), model.device)
        return model

    def run(*blocks: str) -> dict[str, Any]:
        names: dict[str, Any] = {}
        for block in blocks:
            exec(compile(block, "a page", "exec"), names)
        return names

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(Model, "load", load)
    return run


def test_the_example_of_the_readme(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    names = shown(code_with("README.md", "Engine("))
    batch: GenerationBatch = names["batch"]
    assert 0 < len(batch.generations[0].new_token_ids) <= 16
    assert batch.ranks[0].kept_tokens == [round(len(names["prompt"]) / 4)] * 30
    assert capsys.readouterr().out == f"{batch.generations[0].text} {batch.ttft_s}\n"


def test_the_page_for_library_users_runs_from_its_first_block_to_its_last(
    shown: Shown, capsys: pytest.CaptureFixture[str]
) -> None:
    names = shown(*(block for block in code_of("docs/library.md") if "sys.argv" not in block))
    prompt, batch, logits, positions = (names[name] for name in ("prompt", "batch", "logits", "positions"))
    assert batch.ranks[0].kept_tokens == [round(len(prompt) / 4)] * 30
    assert logits.shape == (1, len(prompt), names["model"].vocab_size)
    assert len(positions) == 30 and {tuple(each.shape) for each in positions} == {(1, 3, 64)}
    assert all(int(each.min()) >= 0 and int(each.max()) < len(prompt) for each in positions)
    assert 1 < names["loss"].exp() < 20
    assert 0 < len(names["answer"].rows[0].new_ids) <= 16
    assert len(capsys.readouterr().out.splitlines()) >= 5


def test_the_page_for_library_users_names_all_that_runahead_exports() -> None:
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    assert [name for name in runahead.__all__ if not re.search(rf"\b{name}\b", page)] == []


def test_the_script_for_several_ranks_runs_on_them(tmp_path: Path) -> None:
    """Its ranks then meet a second time in the same processes, as the page says that they may."""
    block = code_with("docs/library.md", "sys.argv")
    script = tmp_path / "read.py"
    script.write_text(block + "\n" + block, encoding="utf-8")
    model = save_tiny_llama(tmp_path / "model", byte_level())
    given = [str(model), "Once upon a time " * 10]
    printed = run_warm(script, given, environment={"RUNAHEAD_CACHE": str(tmp_path / "cache")}).stdout
    chunks = re.findall(r"(\d+) \+ (\d+) tokens$", printed, flags=re.MULTILINE)
    assert len(chunks) == 2 and all(int(first) + int(second) == 160 for first, second in chunks), printed


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_tutorial_shows_a_chain_of_uneven_chunks_with_exact_logits(num_ranks: int) -> None:
    script = ROOT / "examples" / "tiny_runahead.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 150
    printed = run_warm(script, [], size=num_ranks).stdout
    split, _, *layers, bits, error, chain, one_pass = printed.splitlines()
    chunks = [int(length) for length in re.findall(r"\d+", split.partition("of")[2])]
    assert sum(chunks) == 1000 and len(chunks) == num_ranks and chunks == sorted(set(chunks), reverse=True)
    assert len(layers) == 6 and all(line.count("|") == num_ranks - 1 for line in layers)
    assert bits.endswith("True") and 0 < float(error.split()[-1]) < 1e-12  # sums in another order: 5e-15 is seen
    tokens = [re.findall(r"\d+", line) for line in (chain, one_pass)]
    assert tokens[0] == tokens[1] and len(set(tokens[0])) > 4


def test_the_tutorial_imports_torch_alone() -> None:
    tree = ast.parse((ROOT / "examples" / "tiny_runahead.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {
        name.partition(".")[0]
        for node in imports
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    assert names - set(sys.stdlib_module_names) == {"torch"}


def test_the_commands_of_the_page_for_developers_select_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/development.md").read_text(encoding="utf-8")
    commands = re.findall(r"^ +python (-m pytest .*?) *(?:#.*)?$", page, flags=re.MULTILINE)
    assert len(commands) >= 2
    for command in commands:
        _, _, *args = shlex.split(command)
        assert pytest.main([*args, "--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider"]) == 0, command


@pytest.mark.slow
def test_the_example_of_the_page(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    batch: GenerationBatch = shown(code_with("docs/prompt_cache.md", "Schema.from_xml("))["batch"]
    reuse = batch.ranks[0].reuse
    assert reuse is not None and reuse.cached_tokens > 2 * reuse.computed_tokens
    assert batch.generations[0].text in capsys.readouterr().out


def test_the_prompt_program_of_the_page(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "shown.py"
    source, _, call = code_with("docs/prompt_cache.md", "prompt_program").partition("cache = ")
    module.write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    import shown  # type: ignore[import-not-found]

    names = vars(shown) | {"model": model}
    exec("cache = " + call, names)
    assert model.tokenizer.decode(names["prompt"].ids) == (
        "Plan a trip of 3 days. One of the travellers is allergic to nuts. Miami is a city by the sea. "
        "Where can I surf?"
    )


def test_the_page_has_an_example_of_each_quantised_format() -> None:
    """In the table of docs/models.md: each is a path that `model.path` takes for one of the hub's."""
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8").partition("## Quantised checkpoints\n")[2]
    rows = [line.split(" | ") for line in page.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    assert [cell.strip("| ") for cell in rows[0][:3]] == ["`quant_method`", "forms", "`model.path`, such as"]
    *formats, gguf = rows[1:]
    assert sorted(name for row in formats for name in re.findall(r"`([\w-]+)`", row[0])) == sorted(FORMATS)
    assert all(HUB_ID.fullmatch(row[2].strip("`")) for row in formats)
    assert HUB_GGUF.fullmatch(gguf[2].strip("`")) and gguf[0] == "| a `.gguf` file"
