"""model.overrides: entries of a model's config in place of its own, as transformers has them; mistakes in one line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from transformers import AutoConfig, AutoModelForCausalLM

from partitioner.table.fingerprint import Fingerprint
from partitioner.table.format import parse_table, table_json
from runahead import Model, ModelOptions
from runahead.config import PrefillOptions
from runahead.model.layer_kinds import decoder_config
from runahead.model.loading import load_config
from runahead.model.loading.overrides import overridden
from runahead.reuse.store import model_key
from tests import families
from tests.model.test_loading_gguf import write_gguf
from tests.model.test_loading_hf import CPU, load_hf, refusal

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGER = {"rope_parameters": YARN, "max_position_embeddings": 256}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    families.build("qwen3", dtype=torch.float32, max_position_embeddings=64).save_pretrained(tmp_path)
    return tmp_path


def expected_config(folder: Path) -> Any:
    """The config that a user of transformers would write."""
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = config["rope_parameters"] | YARN
    config["max_position_embeddings"] = 256
    changed = folder / "changed"
    changed.mkdir()
    (changed / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(changed)


@pytest.mark.parametrize("rope", ["rope_parameters", "rope_scaling"])
def test_the_config_is_the_one_that_a_changed_file_gives(rope: str, folder: Path) -> None:
    options = ModelOptions(name="hf", path=str(folder), overrides={rope: YARN, "max_position_embeddings": 256})
    ours, theirs = load_config(options), expected_config(folder)
    assert ours.name_or_path == str(folder)
    assert ours.to_dict() == theirs.to_dict() | {"_name_or_path": str(folder)}


def test_logits_beyond_the_stored_length_are_those_of_transformers(folder: Path) -> None:
    module = load_hf(folder, overrides=LONGER).module
    theirs = AutoModelForCausalLM.from_pretrained(folder, config=expected_config(folder), dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids_1S = torch.tensor([families.prompt(200)])
    with torch.inference_mode():
        ours_1SV, theirs_1SV, plain_1SV = (model(ids_1S).logits for model in (module, theirs, plain))
    assert torch.allclose(ours_1SV, theirs_1SV, atol=1e-5)
    assert not torch.allclose(plain_1SV, theirs_1SV, atol=1e-2)


@pytest.mark.parametrize("family", list(families.FAMILIES))
def test_configs_of_all_families_can_be_changed(family: str) -> None:
    config = families.build(family).config
    changed = overridden(config, {"bos_token_id": 5})
    assert changed.to_dict() == config.to_dict() | {"bos_token_id": 5}
    assert decoder_config(changed).bos_token_id == 5 or changed.bos_token_id == 5


def test_keys_that_a_family_names_otherwise_are_found() -> None:
    assert overridden(families.build("gpt2").config, {"max_position_embeddings": 4096}).n_positions == 4096


def test_a_factor_need_not_be_the_ratio_of_the_lengths() -> None:
    config = families.build("qwen3", max_position_embeddings=80).config
    assert overridden(config, {"rope_parameters": YARN}).rope_parameters["factor"] == 4.0


def test_another_kind_of_rope_keeps_the_base_alone() -> None:
    config = families.build("llama_dynamic_ntk").config
    changed = overridden(config, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}})
    assert changed.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"max_positions_embeddings": 256}, "max_positions_embeddings is no key of a qwen3 config; did you mean"),
        ({"rope_theta": 1e6}, "did you mean rope_parameters.rope_theta?"),
        ({"model_type": "llama"}, "model.overrides.model_type cannot be changed"),
        ({"_name_or_path": "x"}, "cannot be changed"),
        ({"max_position_embeddings": "long"}, "model.overrides cannot be used"),
        ({"rope_parameters": YARN | {"facter": 2.0}}, "Unrecognized keys"),
        ({"rope_parameters": YARN | {"rope_type": "yarm"}}, "rope_type=yarm is not one of default, linear"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "model.overrides cannot be used"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 256},
         "yarn scales from original_max_position_embeddings; add it to rope_parameters (the config has 64 positions)"),
        ({"max_position_embeddings": 64}, "changes nothing"),
        ({"rope_parameters": {"rope_type": "default"}}, "changes nothing"),
        ({"hidden_size": 64}, "has shape [97, 32] where the config makes it [97, 64]"),
        ({"num_hidden_layers": 2}, "must be equal to the number of `layer_types`"),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, "no place for 11 of the stored tensors"),
    ],
)  # fmt: skip
def test_overrides_that_cannot_be_meant_are_refused(overrides: dict[str, Any], words: str, folder: Path) -> None:
    message = refusal(lambda: load_hf(folder, overrides=overrides))
    assert f"model.path={folder}" in message and words in message


def test_a_gguf_file_is_converted_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf")
    path = tmp_path / "tiny.gguf"
    longer = load_hf(path, overrides={"max_position_embeddings": 4096}).module.config.max_position_embeddings
    assert (longer, load_hf(path).module.config.max_position_embeddings) == (4096, 512)


def test_fingerprints_of_a_model_and_of_tables_tell_overrides_apart(folder: Path) -> None:
    otherwise = {"max_position_embeddings": 256, "rope_scaling": YARN | {"factor": 4}}
    plain, longer, same = (
        Model.load(ModelOptions(name="hf", path=str(folder), overrides=each), CPU) for each in ({}, LONGER, otherwise)
    )
    for key in (lambda model: model.fingerprint, model_key):  # of files for a model, of prefixes and segments
        assert key(longer) == key(same) != key(plain)
    of_table = [
        Fingerprint.of_model(model, device=CPU, backend="gloo", prefill=PrefillOptions())
        for model in (plain, longer, same)
    ]
    assert of_table[1].differences(of_table[2]) == [] and of_table[1].key() == of_table[2].key()
    (difference,) = of_table[0].differences(of_table[1])
    assert difference.startswith("model.overrides=nothing, not {")
    (word,) = shlex.split(" ".join(of_table[0].search_options(of_table[1])))
    assert OverridesParser.create().parse_override(word).value() == json.loads(of_table[1].overrides)
    assert of_table[1].search_options(of_table[0]) == []
    assert of_table[0].key() != of_table[1].key()
    for each in of_table:
        assert parse_table(table_json(each, []).encode())[0] == each
    assert "overrides" not in table_json(of_table[0], [])
