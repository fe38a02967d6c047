"""model=random: any architecture from its config alone, with the same weights on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from runahead.config import ModelOptions
from runahead.model.loading import LoadedWeights, load, load_config, load_tokenizer
from tests import families
from tests.model.test_loading_hf import ATTENTION, CPU, edit_config, refusal
from tests.tokenizers_for_tests import byte_level


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A lone JSON file, under a name of the user's."""
    return write_config(tmp_path / "tiny.json", "llama")


def write_config(path: Path, family: str, **changes: Any) -> Path:
    settings = families.FAMILIES[family]
    config = AutoConfig.for_model(settings.model_type, **{**families.SHARED, **settings.config}).to_dict() | changes
    path.write_text(json.dumps(config))
    return path


def load_random(path: Path | str, **options: Any) -> LoadedWeights:
    model = ModelOptions(name="random", config=str(path), **options)
    return load(model, device=CPU, attn_implementation=ATTENTION)


def weights(loaded: LoadedWeights) -> torch.Tensor:
    return torch.cat([parameter.flatten() for parameter in loaded.module.parameters()])


def test_same_seed_gives_the_same_weights(config: Path) -> None:
    first = weights(load_random(config, seed=3))
    torch.rand(5)  # whatever a rank has drawn before
    assert torch.equal(first, weights(load_random(config, seed=3)))
    assert not torch.equal(first, weights(load_random(config, seed=4)))


def test_callers_random_numbers_are_left_alone(config: Path) -> None:
    torch.manual_seed(0)
    expected = torch.rand(5)
    torch.manual_seed(0)
    load_random(config, seed=3)
    assert torch.equal(torch.rand(5), expected)


def test_weights_are_drawn_as_the_family_draws_them(config: Path) -> None:
    module = load_random(config).module
    torch.manual_seed(0)
    expected = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config)).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("family", ["llama", "phi3_longrope", "gpt2", "mixtral", "falcon", "mpt", "bloom"])
def test_families_are_ready_to_run(family: str, tmp_path: Path) -> None:
    loaded = load_random(write_config(tmp_path / "config.json", family))
    module = loaded.module
    assert loaded.name == f"random {families.FAMILIES[family].model_type}"
    assert module.config._attn_implementation == ATTENTION
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("written", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("asked", ["auto", "float32", "bfloat16"])
def test_dtype_is_the_asked_one_or_the_configs(written: str | None, asked: str, tmp_path: Path) -> None:
    loaded = load_random(write_config(tmp_path / "config.json", "llama", dtype=written), dtype=asked)
    expected = getattr(torch, (written or "float32") if asked == "auto" else asked)
    assert loaded.dtype == expected
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {expected}


def test_folder_gives_its_tokenizer_too(tmp_path: Path) -> None:
    write_config(tmp_path / "config.json", "llama")
    options = ModelOptions(name="random", config=str(tmp_path))
    assert load_tokenizer(options) is None
    assert load_random(tmp_path).tokenizer is None
    byte_level().save_pretrained(tmp_path)
    assert len(load_random(tmp_path).tokenizer) == len(load_tokenizer(options)) == len(byte_level())
    assert load_config(options).model_type == "llama"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": None}, 'no "model_type"'),
        ({"model_type": "perceptron"}, "model_type 'perceptron' is unknown to transformers 5."),
        ({"model_type": "vit"}, "vit is no causal language model"),
        ({"num_attention_heads": 5}, "5"),
        ({"hidden_act": "sneeze"}, "sneeze"),
    ],
)
def test_wrong_config_is_told_in_one_line(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_config(tmp_path / "config.json", "llama")
    edit_config(tmp_path, **changes)
    message = refusal(lambda: load_random(tmp_path))
    assert f"model.config={tmp_path}" in message
    assert words in message


def test_what_is_no_config_is_told(tmp_path: Path) -> None:
    assert "does not exist" in refusal(lambda: load_random(tmp_path / "nothing"))
    assert "no config.json" in refusal(lambda: load_random(tmp_path))
    (tmp_path / "text.json").write_text("a story")
    assert "text.json cannot be read as JSON" in refusal(lambda: load_random(tmp_path / "text.json"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_are_drawn_on_the_gpu(config: Path) -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    options = ModelOptions(name="random", config=str(config), dtype="bfloat16")
    state = torch.cuda.get_rng_state(device)
    first, second = (load(options, device=device, attn_implementation=ATTENTION) for _ in range(2))
    assert {tensor.device for tensor in [*first.module.parameters(), *first.module.buffers()]} == {device}
    assert torch.equal(weights(first), weights(second))
    assert torch.equal(torch.cuda.get_rng_state(device), state)
