"""A tiny model with a tokenizer, as a folder, and a text for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.evaluation.material import Material, Text
from runahead import Model
from tests.families import build
from tests.tokenizers_for_tests import byte_level

POSITIONS = 512


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_level()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """Folder to load with model=hf."""
    import torch

    path = tmp_path_factory.mktemp("model")
    module = build("llama", dtype=torch.float32, vocab_size=len(tokenizer), eos_token_id=None)
    module.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def model(folder: Path) -> Model:
    import torch

    from runahead.config import ModelName, ModelOptions

    return Model.load(ModelOptions(name=ModelName.hf, path=str(folder)), torch.device("cpu"))


@pytest.fixture(scope="session")
def text() -> str:
    words = ["the ice", "a sister", "his captain", "letters", "a world", "hello to the sea"]
    sentences = [f"{words[i % 6]} and {words[i * 7 % 5]} of {i}." for i in range(90)]
    return " ".join(sentences)


@pytest.fixture(scope="session")
def material(tokenizer: Any, text: str) -> Material:
    return Material(
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
        max_positions=POSITIONS,
        text=Text(name="text.file=sea.txt", content=text),
    )
