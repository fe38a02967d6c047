"""The Python that README.md and docs/prompt_cache.md show runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runahead import Model, ModelOptions
from runahead.report import GenerationBatch

ROOT = Path(__file__).resolve().parents[2]


def code_with(page: str, name: str) -> str:
    """The page's Python block that uses a name."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    [block] = [block for block in blocks if name in block]
    return block


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load(ModelOptions(), torch.device("cpu"))


@pytest.fixture
def shown(model: Model, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], GenerationBatch]:
    """Runs a page's block in the repository's folder, with the model loaded once for all; returns what it generated."""

    def load(options: ModelOptions, device: torch.device) -> Model:
        assert (options, device) == (ModelOptions(), model.device)
        return model

    def run(page: str, name: str) -> GenerationBatch:
        names: dict[str, GenerationBatch] = {}
        exec(compile(code_with(page, name), page, "exec"), names)
        return names["batch"]

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(Model, "load", load)
    return run


def test_the_example_of_the_readme(
    shown: Callable[[str, str], GenerationBatch], capsys: pytest.CaptureFixture[str]
) -> None:
    batch = shown("README.md", "Engine(")
    assert 0 < len(batch.generations[0].new_token_ids) <= 16
    assert capsys.readouterr().out == f"{batch.generations[0].text} {batch.ttft_s}\n"


@pytest.mark.slow
def test_the_example_of_the_page(
    shown: Callable[[str, str], GenerationBatch], capsys: pytest.CaptureFixture[str]
) -> None:
    batch = shown("docs/prompt_cache.md", "Schema.from_xml(")
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
