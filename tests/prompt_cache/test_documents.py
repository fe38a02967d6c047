"""What the documents show runs: the README's example, and the prompt program of docs/prompt_cache.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from runahead import Model, ModelOptions

ROOT = Path(__file__).resolve().parents[2]


def code_with(page: str, name: str) -> str:
    """The page's Python block that uses a name."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    [block] = [block for block in blocks if name in block]
    return block


def test_the_example_of_the_readme(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    exec(compile(code_with("README.md", "PromptCache("), "README.md", "exec"), names)
    batch = names["batch"]
    reuse = batch.ranks[0].reuse  # type: ignore[attr-defined]
    assert reuse.cached_tokens > 2 * reuse.computed_tokens
    assert batch.generations[0].text in capsys.readouterr().out  # type: ignore[attr-defined]


def test_the_prompt_program_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "shown.py"
    source, _, call = code_with("docs/prompt_cache.md", "prompt_program").partition("cache = ")
    module.write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    import shown  # type: ignore[import-not-found]

    names = vars(shown) | {"model": Model.load(ModelOptions(), torch.device("cpu"))}
    exec("cache = " + call, names)
    tokenizer = names["model"].tokenizer
    assert tokenizer.decode(names["prompt"].ids) == (
        "Plan a trip of 3 days. One of the travellers is allergic to nuts. Miami is a city by the sea. "
        "Where can I surf?"
    )
