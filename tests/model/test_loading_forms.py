"""model=hf: weights that a model would not take as they are stored are refused; what it can do without is told."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BartConfig, BartForConditionalGeneration, WhisperConfig, WhisperForConditionalGeneration

from runahead.config import ModelOptions
from runahead.model.loading import load, load_config
from tests import families
from tests.model.test_loading_hf import ATTENTION, CPU, edit_config, edit_weights, load_hf, refusal

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
FP8_TOLERANCE = 2.0**-4
"""Half of the distance between numbers with three bits behind the point, relative to them."""


def saved(folder: Path, family: str = "llama", **changes: Any) -> dict[str, Tensor]:
    """Save a model in float32, and return its weights."""
    module = families.build(family, dtype=torch.float32, **changes)
    module.save_pretrained(folder)
    return module.state_dict()


def to_fp8(folder: Path, scale: str, but: str = "") -> None:
    """Store projections in 8 bits, with their scale behind `scale`, but for one that has none."""

    def change(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if name.endswith(("proj.weight", "w1.weight", "w2.weight", "w3.weight"))]:
            factor = weights[name].abs().max() / 448
            weights[name] = (weights[name] / factor).to(torch.float8_e4m3fn)
            if name != but:
                weights[name + scale] = factor.reshape(1, 1)

    edit_weights(folder, change)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_fp8_with_inverse_scales_is_unpacked(family: str, tmp_path: Path) -> None:
    expected = saved(tmp_path, family)
    to_fp8(tmp_path, "_scale_inv")
    edit_config(tmp_path, quantization_config=FP8)
    module = load_hf(tmp_path).module
    for name, weight in module.state_dict().items():
        assert weight.dtype == torch.float32
        error = (weight - expected[name]).abs()
        assert (error <= FP8_TOLERANCE * expected[name].abs() + 1e-3).all(), name


def to_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Store experts as 4-bit codes of 1 and scales of 2^-7, and return these weights."""
    expected = {}

    def change(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if name.endswith(("experts.down_proj", "experts.gate_up_proj"))]:
            weight = weights.pop(name).transpose(1, 2)
            num_blocks = weight.shape[-1] // 32
            weights[f"{name}_blocks"] = torch.full((*weight.shape[:2], num_blocks, 16), 0x22, dtype=torch.uint8)
            weights[f"{name}_scales"] = torch.full((*weight.shape[:2], num_blocks), 120, dtype=torch.uint8)
            expected[name] = torch.full_like(weight, 2.0**-7).transpose(1, 2)

    edit_weights(folder, change)
    return expected


def test_mxfp4_is_unpacked(tmp_path: Path) -> None:
    saved(tmp_path, "gpt_oss", hidden_size=32, intermediate_size=32)
    expected = to_mxfp4(tmp_path)
    edit_config(tmp_path, quantization_config=MXFP4)
    weights = load_hf(tmp_path).module.state_dict()
    assert expected
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_packed_weights_without_their_scales_are_refused(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    saved(tmp_path / "fp8")
    to_fp8(tmp_path / "fp8", "_scale_inv", but=name)
    edit_config(tmp_path / "fp8", quantization_config=FP8)
    assert f"{name} is stored in 8 bits without its scale" in refusal(lambda: load_hf(tmp_path / "fp8"))
    saved(tmp_path / "fp4", "gpt_oss", hidden_size=32, intermediate_size=32)
    to_mxfp4(tmp_path / "fp4")
    edit_config(tmp_path / "fp4", quantization_config=MXFP4)
    edit_weights(tmp_path / "fp4", lambda weights: weights.pop("model.layers.1.mlp.experts.down_proj_scales"))
    name = "model.layers.1.mlp.experts.down_proj"
    assert f"{name}_blocks is stored without {name}_scales" in refusal(lambda: load_hf(tmp_path / "fp4"))


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        (None, "of its weights are stored as F8_E4M3, such as model.layers.0."),
        ({"quant_method": "fp8"}, "is stored in 8 bits without its scale"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_scales_of_another_form_are_not_left_out(family: str, quantization: Any, words: str, tmp_path: Path) -> None:
    """ModelOpt's weight_scale, also where nothing but the tensors says so, and where config.json says another thing."""
    saved(tmp_path, family)
    to_fp8(tmp_path, "_scale")
    edit_config(tmp_path, quantization_config=quantization)
    assert words in refusal(lambda: load_hf(tmp_path))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool, torch.float8_e5m2])
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_integers_are_not_taken_for_weights(dtype: torch.dtype, prefix: str, tmp_path: Path) -> None:
    saved(tmp_path)

    def change(weights: dict[str, Tensor]) -> None:
        name = "layers.2.self_attn.o_proj.weight"
        weights[prefix + name] = weights.pop(f"model.{name}").to(dtype)

    edit_weights(tmp_path, change)
    assert f"such as {prefix}layers.2.self_attn.o_proj.weight" in refusal(lambda: load_hf(tmp_path))


MODELOPT = {"producer": {"name": "modelopt", "version": "0.29"}, "quantization": {"quant_algo": "NVFP4"}}


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", {"quant_method": "hqq", "quant_config": {}}, "hqq"),
        ("config.json", {"quant_method": "auto-round", "bits": 4}, "auto-round, 4 bits"),
        ("config.json", {"quant_method": "torchao", "quant_type": {"default": {}}}, "torchao"),
        ("config.json", {"quant_method": "exl3", "bits": 3}, "exl3, 3 bits"),
        ("config.json", {"bits": 4}, "4 bits"),
        ("config.json", "int4", "int4"),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "4 bits"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128}, "4 bits"),
        ("quanto_qmap.json", {"model.layers.0.mlp.up_proj": {"weights": "qint8"}}, "a form that it does not name"),
    ],
)
def test_quantisation_that_is_not_read_is_named_before_the_weights(
    file: str, content: Any, words: str, tmp_path: Path
) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    if file == "config.json":
        edit_config(tmp_path, quantization_config=content)
    else:
        (tmp_path / file).write_text(json.dumps(content))
    message = refusal(lambda: load_config(ModelOptions(name="hf", path=str(tmp_path))))
    assert f"{file} says that its weights are quantised ({words})" in message
    assert "use the model's 16-bit checkpoint" in message and "copy or download" not in message


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", {"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt, FP8"),
        ("config.json", {"quant_method": "awq", "bits": 4, "group_size": 128}, "awq, 4 bits"),
        ("config.json", {"quant_method": "gptq", "bits": 8}, "gptq, 8 bits"),
        ("config.json", {"load_in_8bit": True}, "bitsandbytes"),
        ("hf_quant_config.json", MODELOPT, "modelopt, NVFP4"),
    ],
)
def test_weights_that_may_not_be_dequantised_are_refused(file: str, content: Any, words: str, tmp_path: Path) -> None:
    saved(tmp_path)
    if file == "config.json":
        edit_config(tmp_path, quantization_config=content)
    else:
        (tmp_path / file).write_text(json.dumps(content))
    options = ModelOptions(name="hf", path=str(tmp_path))
    load_config(options)
    options.dequantize = False
    message = refusal(lambda: load_config(options))
    assert f"its weights are quantised ({words})" in message and "leave model.dequantize=false out" in message


def test_two_descriptions_of_a_quantisation_must_agree(tmp_path: Path) -> None:
    """Tools write a file of their own beside config.json, in some cases without the method's name."""
    saved(tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    options = ModelOptions(name="hf", path=str(tmp_path))
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 128}))
    load_config(options)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    assert "hf_quant_config.json says that its weights are quantised (modelopt" in refusal(lambda: load_config(options))


@pytest.mark.parametrize("key", ["compression_config", "quantization"])
def test_quantisation_under_other_keys_of_the_config(key: str, tmp_path: Path) -> None:
    saved(tmp_path)
    edit_config(tmp_path, **{key: {"bits": 4, "group_size": 64}})
    assert "quantised (4 bits)" in refusal(lambda: load_hf(tmp_path))


def test_quantisation_of_keys_and_values_alone_leaves_weights_as_they_are(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    about = MODELOPT | {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(about))
    weights = load_hf(tmp_path).module.state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_config_for_random_weights_may_say_that_others_are_quantised(tmp_path: Path) -> None:
    saved(tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    load(ModelOptions(name="random", config=str(tmp_path)), device=CPU, attn_implementation=ATTENTION)


def test_adapter_is_not_left_out(tmp_path: Path) -> None:
    saved(tmp_path)
    about = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    beside = refusal(lambda: load_hf(tmp_path))
    (tmp_path / "config.json").unlink()
    alone = refusal(lambda: load_hf(tmp_path))
    for message in (beside, alone):
        assert "holds an adapter (LORA for org/base)" in message and "with model.adapter" in message
    assert "remove adapter_config.json" in beside
    assert "remove adapter_config.json" not in alone


# ---------------------------------------------------------------- tensors that have no place in the model


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.update({f"model.layers.{i}.self_attn.{p}_proj.bias": torch.ones(4) for i in (0, 1) for p in "qkv"}),  # noqa: E501
         ["6 of the stored tensors", "model.layers.0.self_attn.k_proj.bias", "of the same model"]),
        (lambda w: w.update({name.replace(".2.", ".3."): each.clone() for name, each in w.items() if ".2." in name}),
         ["9 of the stored tensors", "model.layers.3.input_layernorm.weight"]),
        (lambda w: w.update({"model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(2, 2)}),
         ["1 of the stored tensors", "they are an adapter's", "merge_and_unload()"]),
        (lambda w: w.update({"model.layers.0.mlp.up_proj.qweight": torch.ones(2, 2, dtype=torch.int32)}),
         ["they belong to quantised weights", "16-bit checkpoint"]),
        (lambda w: w.update({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}),
         ["they belong to quantised weights"]),
        (lambda w: w.update({"v_head.summary.weight": torch.ones(1)}), ["v_head.summary.weight"]),
    ],
)  # fmt: skip
def test_tensors_without_a_place_are_refused_by_name_and_number(
    change: Callable[[dict[str, Tensor]], Any], words: list[str], tmp_path: Path
) -> None:
    saved(tmp_path)
    edit_weights(tmp_path, change)
    message = refusal(lambda: load_hf(tmp_path))
    for word in ["the model that its config describes has no place for", *words]:
        assert word in message
    assert "copy or download" not in message


def told(folder: Path) -> list[str]:
    """Sentence about tensors that are not used."""
    options = ModelOptions(name="hf", path=str(folder))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(options, device=CPU, attn_implementation=ATTENTION, progress=True)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("family", "spare", "words"),
    [
        ("gpt2", {"transformer.h.0.attn.bias": torch.ones(4, 4).bool()}, "1 of what GPT2LMHeadModel leaves out"),
        ("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, "LlamaForCausalLM leaves out"),
        ("gptj", {"transformer.h.0.attn.bias": torch.ones(4, 4).bool()}, "1 of causal masks"),
        ("gptj", {"transformer.h.0.attn.masked_bias": torch.tensor(-1e9)}, "1 of causal masks"),
        ("llama", {"mtp.layers.0.mlp.up_proj.weight": torch.ones(4)}, "1 of multi-token prediction"),
        ("llama", {"model.layers.3.eh_proj.weight": torch.ones(4), "model.layers.3.mlp.up_proj.weight": torch.ones(4)},
         "2 of multi-token prediction"),
        ("llama", {"vision_tower.patch.weight": torch.ones(4), "model.image_newline": torch.ones(4)},
         "2 of images and sound"),
        ("llama", {"model.vision_tower.layers.7.mlp.fc1.weight": torch.ones(4)}, "1 of images and sound"),
    ],
)  # fmt: skip
def test_what_a_text_model_can_do_without_is_told_in_one_line(
    family: str, spare: dict[str, Tensor], words: str, tmp_path: Path
) -> None:
    expected = saved(tmp_path, family)
    assert told(tmp_path) == []
    edit_weights(tmp_path, lambda weights: weights.update(spare))
    (line,) = told(tmp_path)
    words = words.replace("causal masks", "what GPTJForCausalLM leaves out") if "leaves out" in line else words  # 5.24
    assert words in line and min(spare) in line and "\n" not in line
    weights = load_hf(tmp_path).module.state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


SMALL_HALVES = {
    **{f"{half}_{size}": 2 for half in ("encoder", "decoder") for size in ("layers", "attention_heads")},
    **{"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 64, "num_mel_bins": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}


def test_the_encoder_of_a_checkpoint_is_told_and_left_out(tmp_path: Path) -> None:
    module = WhisperForConditionalGeneration(WhisperConfig(**SMALL_HALVES))
    module.save_pretrained(tmp_path)
    (line,) = told(tmp_path)
    assert "37 of the encoder, such as model.encoder.conv1.bias" in line and "\n" not in line
    weights, expected = load_hf(tmp_path).module.state_dict(), module.state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in weights if name != "proj_out.weight")
    edit_weights(tmp_path, lambda weights: weights.update({"model.decoder.layers.2.fc1.bias": torch.ones(48)}))
    assert "no place for 1 of the stored tensors, such as model.decoder.layers.2.fc1.bias" in refusal(
        lambda: load_hf(tmp_path)
    )


@pytest.mark.parametrize("is_stored_twice", [False, True])
def test_a_decoder_has_the_embeddings_that_its_encoder_shares(tmp_path: Path, is_stored_twice: bool) -> None:
    """transformers stores BART's once, by a name that the decoder alone does not know."""
    module = BartForConditionalGeneration(BartConfig(**SMALL_HALVES))
    module.save_pretrained(tmp_path)
    embeddings = module.model.shared.weight.data
    if is_stored_twice:
        twice = {"model.decoder.embed_tokens.weight": embeddings.clone()}
        edit_weights(tmp_path, lambda weights: weights.update(twice))
    (line,) = told(tmp_path)
    assert "1 of a bias that a decoder alone does not add, such as final_logits_bias" in line
    weights = load_hf(tmp_path).module.state_dict()
    assert torch.equal(weights["model.decoder.embed_tokens.weight"], embeddings)
    assert torch.equal(weights["lm_head.weight"], embeddings)


def test_a_second_copy_of_a_tied_head_is_no_reason_to_refuse(tmp_path: Path) -> None:
    saved(tmp_path, tie_word_embeddings=True)
    weights = load_file(tmp_path / "model.safetensors")
    for name in ("lm_head.weight", "language_model.lm_head.weight"):
        weights[name] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        module = load_hf(tmp_path).module
        assert module.get_output_embeddings().weight is module.get_input_embeddings().weight


# ---------------------------------------------------------------- files that git-lfs has not fetched

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json", "model.gguf"])
def test_pointers_of_git_lfs_are_named(file: str, tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / file).write_text(POINTER)
    path = tmp_path / file if file.endswith("gguf") else tmp_path
    message = refusal(lambda: load_hf(path))
    assert f"{file} is a pointer of git-lfs" in message and f"run `git lfs pull` in {tmp_path}" in message
