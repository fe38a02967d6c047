"""A model and a text for the programs that learn something about a model and write it into a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runahead import Model
from runahead.config import ModelName, ModelOptions
from tests.families import build
from tests.tokenizers_for_tests import byte_level


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    build("llama", dtype=torch.float32, vocab_size=len(byte_level()), eos_token_id=None).save_pretrained(path)
    byte_level().save_pretrained(path)
    return path


@pytest.fixture
def own(folder: Path) -> Model:
    """The model of the folder."""
    return Model.load(ModelOptions(name=ModelName.hf, path=str(folder)), torch.device("cpu"))


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    path = tmp_path / "sample.txt"
    path.write_text("the letters of the captain to his sister, from the ice. hello world " * 40, encoding="utf-8")
    return path
