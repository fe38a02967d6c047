"""Models that are not computed are refused in one sentence, by what their config or their calls of attention say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, BartForCausalLM, BartForConditionalGeneration, PreTrainedModel

from benchmarks.families.small import Sizes, small_config, small_model
from partitioner.meshes.model_size import ModelSize
from runahead import Model
from runahead.attention.partial import AttentionTerms
from runahead.config import ModelName, ModelOptions
from runahead.model import seam
from runahead.model.checks.logits_check import LogitsCheck
from runahead.model.layer_kinds import decoder_config, unsupported_calls, unsupported_kinds
from runahead.model.loading import load_config, load_decoder_config

SUPPORTED = (
    "full_attention, sliding_attention, chunked_attention, linear_attention, conv, hybrid, hybrid_sliding, "
    "moe and mlp are"
)


@pytest.mark.parametrize(
    ("model_type", "options", "says"),
    [
        ("deepseek_v32", {"num_hidden_layers": 3}, "3 indexed_attention (chooses keys by an index) of 3"),
        ("qwen4_exp_text", {"num_hidden_layers": 8}, "2 indexed_attention (chooses keys by an index) of 8"),
    ],
)
def test_kinds_of_layers_are_refused_by_the_config(model_type: str, options: dict[str, Any], says: str) -> None:
    why = unsupported_kinds(AutoConfig.for_model(model_type, **options))
    assert why is not None and says in why and why.endswith(f"; {SUPPORTED}") and "\n" not in why


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "llama4_text", "bart", "gpt2", "lfm2", "nemotron_h"])
def test_layers_that_attend_or_hold_states_are_not(model_type: str) -> None:
    assert unsupported_kinds(decoder_config(AutoConfig.for_model(model_type))) is None


def test_a_config_alone_is_refused_before_weights_are_made(tmp_path: Any) -> None:
    AutoConfig.for_model("deepseek_v32", num_hidden_layers=4).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"this deepseek_v32 model has layers that are not supported: 4 indexed"):
        load_config(ModelOptions(name=ModelName.random, config=str(tmp_path)))


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([0, 1, 2, 3], None),
        ([0, 0, 1, 1], "calls attention 4 times in 2 layers"),
        ([0, 2], "has layers that do not call transformers' attention interface (2 of 4)"),
        ([1, 0, 2, 3], "calls attention in another order than that of its layers"),
    ],
)
def test_every_layer_attends_once_and_in_order(layers: list[int], says: str | None) -> None:
    why = unsupported_calls(layers, 4)
    assert why == (None if says is None else f"{says}, which is not supported")


def test_layers_of_a_decoder_are_counted_where_its_encoder_has_more() -> None:
    """distil-whisper's encoder has 32, and its decoder 2."""
    config = small_config("whisper", Sizes(layers=4), decoder_layers=2)
    assert Model(small_model(config)).num_layers == 2


@pytest.mark.parametrize("kind", [BartForConditionalGeneration, BartForCausalLM], ids=["with its encoder", "alone"])
def test_a_decoder_is_planned_by_its_own_layers(kind: type[PreTrainedModel], tmp_path: Path) -> None:
    """The config of a checkpoint of the decoder alone says that there is no encoder."""
    kind(small_config("bart", Sizes(layers=4), decoder_layers=2)).save_pretrained(tmp_path)
    options = ModelOptions(name=ModelName.hf, path=str(tmp_path))
    assert load_decoder_config(options).num_hidden_layers == 2
    assert ModelSize.read(options).shape.num_layers == 2


@pytest.mark.parametrize("model_type", ["falcon_h1", "bamba", "qwen3_next"])
def test_a_hybrid_has_as_many_layers_as_asked_for(model_type: str, tmp_path: Path) -> None:
    """Some configs make the kinds of layers from their number, and refuse to be given them."""
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    options = ModelOptions(name=ModelName.random, config=str(tmp_path / "config.json"), layers=6)
    assert len(decoder_config(load_config(options)).layer_types) == 6


TIED = [("gpt_oss", torch.bfloat16, 5), ("gpt_oss", torch.float16, 1), ("mixtral", torch.bfloat16, 9)]
"""Weights of which rounding exchanges experts, so that logits are others though attention is right."""


@pytest.mark.parametrize(("model_type", "dtype", "seed"), TIED)
def test_experts_that_rounding_exchanges_do_not_refuse_a_model(model_type: str, dtype: torch.dtype, seed: int) -> None:
    Model(small_model(small_config(model_type, Sizes()), seed=seed, dtype=dtype))


@pytest.mark.parametrize(("model_type", "dtype", "seed"), TIED)
def test_attention_that_is_wrong_is_found_beside_them(
    model_type: str, dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(**terms: Any) -> AttentionTerms:
        return AttentionTerms(**terms | {"scaling": 1.5 * terms["scaling"]})

    monkeypatch.setattr(seam, "AttentionTerms", scaled)
    with pytest.raises(ValueError, match=r"gives another output of the attention of layer \d"):
        Model(small_model(small_config(model_type, Sizes()), seed=seed, dtype=dtype))


def test_layers_without_experts_are_compared_whole_in_few_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside attention a forward may be another under our attention, as a family's code may ask which one it has."""
    module = small_model(small_config("llama", Sizes()), dtype=torch.bfloat16)
    plain = type(module.lm_head).forward

    def other(self: Any, x: torch.Tensor) -> torch.Tensor:
        out = plain(self, x)
        return 2 * out if module.config._attn_implementation == seam.ATTENTION_NAME else out

    monkeypatch.setattr(module.lm_head, "forward", other.__get__(module.lm_head))
    with pytest.raises(ValueError, match=r"is not computed right: it gives other logits .* model\.dtype=float32"):
        Model(module)


def test_ranks_that_share_a_model_go_on_to_the_same_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one finds its logits off by a little more than another does, both compare layers."""

    class OfTwo:
        def run(self, call: Any) -> Any:
            return call()

        def gather(self, value: Any) -> list[Any]:
            return [value, "off by 0.21, spread 1"]

    model = Model(small_model(small_config("mixtral", Sizes()), dtype=torch.bfloat16))
    expected, forwards, once = model._logits_check().expected(), [], LogitsCheck._ours
    monkeypatch.setattr(LogitsCheck, "_ours", lambda *args: forwards.append(0) or once(*args))
    model._logits_check().require(*expected, "transformers' own")
    assert len(forwards) == 1
    monkeypatch.setattr(model, "shares", OfTwo())
    model._logits_check().require(*expected, "the whole model")
    assert len(forwards) == 3
