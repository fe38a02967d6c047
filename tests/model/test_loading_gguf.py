"""model=hf with a GGUF file: the weights and tokens in it, and files that would come out wrong are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, dequantize, quantize
from torch import Tensor

from runahead.config import ModelOptions
from runahead.model import loading
from runahead.model.loading import load, load_config, load_tokenizer
from runahead.model.loading.gguf.header import read_header
from tests import families
from tests.model.test_loading_hf import ATTENTION, CPU, load_hf, refusal
from tests.tokenizers_for_tests import byte_level


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNAHEAD_CACHE", str(tmp_path / "cache"))


LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of Q or K in GGUF's order: the two halves of a head's rotary dimensions alternate."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def in_halves(weight: Tensor, num_heads: int) -> Tensor:
    """The inverse of `interleaved`."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


SCALES = {
    **{"Q4_0": {0: 1}, "Q8_0": {0: 1}, "IQ4_NL": {0: 1}, "Q6_K": {208: 1}},
    **{"Q4_K": {0: 1, 2: 7.5}, "Q5_K": {0: 1, 2: 15.5}},
}
"""Places of the half-precision scales in a block of each common type, in bytes; what each is multiplied by, so that
random codes are about as often above zero as below."""


def random_blocks(weight: Any, form: GGMLQuantizationType) -> Any:
    """Random bytes in place of a matrix, but for the scales, by which numbers are about as large as the matrix's.

    The gguf package reads more types than it writes.
    """
    if form.name not in SCALES:
        return quantize(weight, form)
    size, num_bytes = GGML_QUANT_SIZES[form]
    random = np.random.default_rng(crc32(weight.tobytes()))
    blocks = random.integers(256, size=(weight.size // size, num_bytes), dtype=np.uint8)
    of_block = random.uniform(0.5, 1.5, (len(blocks), 1))

    def scaled(factor: float) -> Any:
        for place, of_place in SCALES[form.name].items():
            blocks[:, place : place + 2] = (of_block * (factor * of_place)).astype(np.float16).view(np.uint8)
        return blocks.reshape(len(weight), -1)

    return scaled(2**-8 * weight.std() / dequantize(scaled(2**-8), form).std())


def write_gguf(
    path: Path,
    *,
    tokenizer: bool = True,
    scaling: str | None = None,
    factors: str | None = None,
    form: GGMLQuantizationType = GGMLQuantizationType.F32,
    tied: bool = False,
    more: dict[str, Tensor] | None = None,
    blocks: Callable[[Any, GGMLQuantizationType], Any] = quantize,
    **sizes: int,
) -> Any:
    """A Llama with a byte-level tokenizer, its matrices in `form`, of `blocks`; returns the model that the file holds.

    Its numbers are those of the gguf package, in float32.
    """
    sizes |= {"vocab_size": len(byte_level()), "tie_word_embeddings": tied}
    module = families.build("llama", dtype=torch.float32, **sizes)
    config, writer = module.config, GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    if scaling:
        writer.add_string("llama.rope.scaling.type", scaling)
    if tokenizer:
        parts = json.loads(byte_level().backend_tokenizer.to_str())["model"]
        tokens = sorted(byte_level().get_vocab(), key=byte_level().get_vocab().get)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_merges([" ".join(merge) for merge in parts["merges"]])
        writer.add_token_types([3 if token in byte_level().all_special_tokens else 1 for token in tokens])
        writer.add_bos_token_id(tokens.index("<bos>"))
        writer.add_eos_token_id(tokens.index("<eos>"))
        # what SmolLM2's file has besides
        writer.add_tokenizer_pre("smollm")
        writer.add_unk_token_id(tokens.index("<|end|>"))
        writer.add_pad_token_id(tokens.index("<eos>"))
        writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    weights = module.state_dict()

    def add(name: str, weight: Tensor) -> Tensor:
        stored = form if weight.ndim > 1 else GGMLQuantizationType.F32
        packed = blocks(weight.numpy(), stored)
        writer.add_tensor(name, packed, raw_dtype=stored)
        return torch.from_numpy(dequantize(packed, stored).reshape(weight.shape))

    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"} | ({} if tied else {"lm_head": "output"})
    for ours, theirs in top.items():
        weight = weights[f"{ours}.weight"]
        weight.copy_(add(f"{theirs}.weight", weight))
    for layer in range(config.num_hidden_layers):
        for ours, theirs in LAYER_NAMES.items():
            weight, name = weights[f"model.layers.{layer}.{ours}.weight"], f"blk.{layer}.{theirs}.weight"
            heads = {"attn_q": 4, "attn_k": 2}.get(theirs)
            if heads is None:
                weight.copy_(add(name, weight))
            else:
                weight.copy_(in_halves(add(name, interleaved(weight, heads)), heads))
    if factors:
        add(factors, torch.ones(4))
    for name, weight in (more or {}).items():
        add(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return module


def test_weights_and_tokens_are_those_in_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.gguf"
    saved = write_gguf(path)
    capfd.readouterr()
    loaded = load_hf(path)
    assert capfd.readouterr() == ("", "")
    weights, expected = loaded.module.state_dict(), saved.state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert loaded.dtype == torch.float32
    assert loaded.module.config._attn_implementation == ATTENTION
    assert loaded.module.generation_config.eos_token_id == 1
    assert loaded.tokenizer.decode(loaded.tokenizer("hello world").input_ids) == "hello world"
    options = ModelOptions(name="hf", path=str(path))
    assert load_config(options).max_position_embeddings == saved.config.max_position_embeddings
    assert load_tokenizer(options)("hello world").input_ids == byte_level()("hello world").input_ids


@pytest.mark.parametrize("kind", SCALES)
def test_blocks_are_unpacked_as_the_gguf_package_does(kind: str, tmp_path: Path) -> None:
    """Random bytes but for the scales; another place of these would give other numbers."""
    form, sizes = GGMLQuantizationType[kind], {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    saved = write_gguf(tmp_path / "blocks.gguf", form=form, blocks=random_blocks, **sizes)
    loaded = load_hf(tmp_path / "blocks.gguf")
    assert loaded.stored_as == f"gguf, {kind}"
    weights = loaded.module.state_dict()
    for name, numbers in saved.state_dict().items():
        assert torch.equal(weights[name], numbers), name


@pytest.mark.parametrize(
    ("form", "asked", "expected"),
    [
        ("F32", "auto", torch.float32),
        ("F16", "auto", torch.float16),
        ("BF16", "auto", torch.bfloat16),
        ("F16", "float32", torch.float32),
        ("F32", "bfloat16", torch.bfloat16),
    ],
)
def test_dtype_is_the_asked_one_or_the_files(form: str, asked: str, expected: torch.dtype, tmp_path: Path) -> None:
    saved = write_gguf(tmp_path / "tiny.gguf", form=GGMLQuantizationType[form])
    loaded = load_hf(tmp_path / "tiny.gguf", dtype=asked)
    assert loaded.dtype == expected
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {expected}
    embeddings, expected_embeddings = (m.get_input_embeddings().weight.float() for m in (loaded.module, saved))
    torch.testing.assert_close(embeddings, expected_embeddings, rtol=1e-2, atol=1e-3)  # 8 bits of bfloat16


def test_file_without_tokens_has_no_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tokenizer=False)
    assert load_hf(tmp_path / "tiny.gguf").tokenizer is None


@pytest.mark.parametrize("scaling", [{"scaling": "yarn"}, {"factors": "rope_freqs.weight"}])
def test_rope_scaling_that_transformers_would_drop_is_refused(scaling: dict[str, str], tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", **scaling)
    message = refusal(lambda: load_hf(tmp_path / "tiny.gguf"))
    assert f"uses a RoPE scaling ({next(iter(scaling.values()))})" in message
    assert "safetensors" in message


def test_tensors_that_transformers_would_drop_are_refused(tmp_path: Path) -> None:
    biases = {f"blk.{layer}.attn_{name}.bias": torch.ones(8) for layer in range(3) for name in "qk"}
    write_gguf(tmp_path / "biases.gguf", more=biases)
    message = refusal(lambda: load_hf(tmp_path / "biases.gguf"))
    assert "no place for 6 of the stored tensors, such as blk.0.attn_q.bias" in message


def test_no_rope_scaling_is_no_reason_to_refuse(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", scaling="none")
    assert load_hf(tmp_path / "tiny.gguf").module is not None


@pytest.mark.parametrize("length", [0, 3, 4, 20, 200, 5000, -100])
def test_file_cut_short_is_told(length: int, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:length])
    for call in (load_hf, lambda path: load_tokenizer(ModelOptions(name="hf", path=str(path)))):
        assert "is not a complete GGUF file" in refusal(lambda call=call: call(path))


def test_other_content_is_told(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_text("not a model")
    assert "does not begin like a GGUF file" in refusal(lambda: load_hf(tmp_path / "tiny.gguf"))


def test_header_names_metadata_and_tensors(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", factors="rope_freqs.weight")
    header = read_header(tmp_path / "tiny.gguf")
    assert header.metadata["llama.block_count"] == 3
    assert header.metadata["llama.rope.freq_base"] == 10000.0
    assert header.metadata["tokenizer.ggml.tokens"][:3] == ["<bos>", "<eos>", "<|end|>"]
    assert header.metadata["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    assert header.tensors["token_embd.weight"] == header.tensors["rope_freqs.weight"] == "F32"
    assert len(header.tensors) == 3 + 3 * len(LAYER_NAMES) + 1


@pytest.mark.parametrize(
    ("forms", "asked", "on_cpu", "on_gpu"),
    [
        (["Q8_0", "Q4_K", "F32"], "auto", torch.float32, torch.bfloat16),
        (["Q8_0", "F16"], "auto", torch.float32, torch.bfloat16),
        (["Q8_0"], "float32", torch.float32, torch.float32),
        (["F16", "F32"], "auto", torch.float16, torch.float16),
        (["F32"], "auto", torch.float32, torch.float32),
    ],
)
def test_quantised_weights_become_bfloat16_on_a_gpu(
    forms: list[str], asked: str, on_cpu: torch.dtype, on_gpu: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = SimpleNamespace(tensors=dict(enumerate(forms)))
    monkeypatch.setattr(loading.checkpoints, "read_gguf", lambda checkpoint: header)
    options, checkpoint = ModelOptions(name="hf", path="tiny.gguf", dtype=asked), SimpleNamespace(gguf=True)
    chosen = [loading._dtype(options, None, checkpoint, {}, device) for device in (CPU, torch.device("cuda", 0))]
    assert chosen == [on_cpu, on_gpu]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_blocks_are_unpacked_on_the_gpu(tmp_path: Path) -> None:
    saved = write_gguf(tmp_path / "tiny.gguf")
    options = ModelOptions(name="hf", path=str(tmp_path / "tiny.gguf"), dtype="float32")
    module = load(options, device=torch.device("cuda", 0), attn_implementation=ATTENTION).module
    assert {parameter.device.type for parameter in module.parameters()} == {"cuda"}
    weights = module.state_dict()
    assert all(torch.equal(weights[name].to(CPU), tensor) for name, tensor in saved.state_dict().items())
