"""Model folders and GGUF files: config, weights, index, tokenizer, chat template; loaded and asked for two tokens."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from safetensors.torch import load, save

from launch.inputs.options import PromptOptions
from launch.inputs.prompts import read_prompts
from runahead import Engine, Model
from runahead.config import GenerationOptions, ModelOptions
from runahead.model import loading
from runahead.model.loading.position_limit import max_positions
from runahead.prefill.prompt_check import PromptLimits, check_prompts
from tests.fuzz.harness import Outcome, judged
from tests.fuzz.mutations import PLACES, changed_bytes, changed_json, paths_of, with_change
from tests.fuzz.target import Target
from tests.fuzz.tensors import tensor_files
from tests.prompt_cache.serving import one_rank
from tests.tokenizers_for_tests import byte_level

CPU = torch.device("cpu")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
CANARY = "executed"

JINJA = (
    b"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    b"{{ ''.__class__.__mro__ }}",
    b"{{ messages.__class__.__base__.__subclasses__() }}",
    b"{{ cycler.__init__.__globals__.os.system('true') }}",
    b"{% set x = messages.append(1) %}",
    b"{{ raise_exception('line one\nline two') }}",
    b"{% import 'os' as os %}",
    b"{% include 'x' %}",
    b"{{ 1 / 0 }}",
    b"{{ 'a' * 10000000 }}",
    b"{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    b"{{ strftime_now('%Y') }}",
    b"{% generation %}",
    b"{{",
    b"{%",
    b"{% endfor %}",
    b"{% if x %}",
    b"{{ messages[0] }}",
    b"{{ messages[9] }}",
    b"{{ undefined.x.y }}",
    b"\xed\xa0\x80",
)


@dataclass(frozen=True)
class Files:
    """A folder's files by name; None is one that is not there."""

    contents: tuple[tuple[str, bytes | None], ...]

    def changed(self, name: str, content: bytes | None) -> Files:
        return Files(tuple((dict(self.contents) | {name: content}).items()))

    def write(self, folder: Path) -> None:
        for name, content in self.contents:
            if content is not None:
                (folder / name).write_bytes(content)


@cache
def whole() -> Files:
    """A Llama of two layers with a tokenizer and a chat template, as transformers writes it."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(byte_level()),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=[1, 2])
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        byte_level().save_pretrained(folder)
        found = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    return Files(tuple((found | {"chat_template.jinja": TEMPLATE.encode()}).items()))


@cache
def sharded() -> Files:
    """The same with its weights in two files."""
    tensors = load(content_of(whole(), WEIGHTS))
    names = sorted(tensors)
    files, weight_map = whole().changed(WEIGHTS, None), {}
    for shard, part in zip(SHARDS, (names[::2], names[1::2]), strict=True):
        files = files.changed(shard, save({name: tensors[name] for name in part}, metadata={"format": "pt"}))
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    return files.changed(INDEX, json.dumps(index).encode())


@cache
def gguf_file() -> bytes:
    from tests.model.test_loading_gguf import write_gguf

    with tempfile.TemporaryDirectory() as folder:
        write_gguf(Path(folder) / "tiny.gguf")
        return (Path(folder) / "tiny.gguf").read_bytes()


@cache
def tiny_model() -> Path:
    """The folder as a whole, which stays until this process ends."""
    holder = tempfile.TemporaryDirectory(prefix="runahead-fuzz-model-")
    path = Path(holder.name)
    _kept.append(holder)
    whole().write(path)
    return path


_kept: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when this process ends."""


def content_of(files: Files, name: str) -> bytes:
    content = dict(files.contents)[name]
    assert content is not None
    return content


def check_folder(files: Files, folder: Path) -> Outcome:
    path = folder / "model"
    path.mkdir()
    files.write(path)
    return check_model(path, folder)


def check_gguf(content: bytes, folder: Path) -> Outcome:
    path = folder / "tiny.gguf"
    path.write_bytes(content)
    with tempfile.TemporaryDirectory() as cache, patch.dict(os.environ, {"RUNAHEAD_CACHE": cache}):
        return check_model(path, folder)


def check_model(path: Path, folder: Path, *, trusted: bool = False) -> Outcome:
    """Load as a run does: the small files on rank 0, the prompt, the weights, two tokens."""
    options = ModelOptions(name="hf", path=str(path), trust_remote_code=trusted)  # type: ignore[arg-type]

    def read() -> list[int]:
        config = loading.load_decoder_config(options)
        tokenizer = loading.load_tokenizer(options)
        vocab_size = config.vocab_size
        prompt = PromptOptions(random_tokens=5) if tokenizer is None else PromptOptions(text="the letters")
        prompts = read_prompts(prompt, tokenizer=tokenizer, vocab_size=vocab_size)
        check_prompts(prompts.ids, PromptLimits(max_positions=max_positions(config)), num_new=2)
        model = Model.load(options, CPU)
        assert all(type(token) is int for token in model.eos_token_ids), model.eos_token_ids
        [generation] = Engine(model, one_rank()).generate(prompts.ids, GenerationOptions(max_new_tokens=2)).generations
        assert isinstance(generation.text, str) or tokenizer is None
        return [*generation.new_token_ids, vocab_size]

    def use(found: list[int]) -> None:
        *tokens, vocab_size = found
        assert tokens and all(0 <= token < vocab_size for token in tokens)

    told = judged(read, use, names=[f"model.path={path}", "model", "prompt"], folder=folder)
    if any(CANARY in file.name for file in folder.rglob("*")):
        told.problems.append("code from the folder was executed")
    return told


class _Payload:
    """Makes a file where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(CANARY),)


PICKLE = pickle.dumps(_Payload())

CODE = f"""\
from pathlib import Path
Path(__file__).with_name("{CANARY}").touch()
"""


def check_code(files: Files, folder: Path) -> Outcome:
    """Python code and pickles in the folder, none of which may run."""
    return check_folder(files, folder)


@st.composite
def with_code(draw: st.DrawFn) -> Files:
    """A folder that brings code along, in whatever way."""
    files = draw(st.sampled_from([whole(), sharded()]))
    config = json.loads(content_of(files, "config.json"))
    tokenizer = json.loads(content_of(files, "tokenizer_config.json"))
    module = draw(st.sampled_from(["modeling_x", "x.y", "../x", "org/repo--modeling_x", "os", ""]))
    classes = draw(st.sampled_from([f"{module}.X", f"{module}.AutoConfig", module, [f"{module}.X", None], 3, None]))
    kinds = draw(
        st.lists(st.sampled_from(["AutoConfig", "AutoModelForCausalLM", "AutoModel", "AutoTokenizer", "x"]), max_size=4)
    )
    auto_map = dict.fromkeys(kinds, classes)
    if draw(st.booleans()):
        config["model_type"] = draw(st.sampled_from(["llama", "x", "unheard-of"]))
    if draw(st.integers(0, 9)) == 0:
        del config["model_type"]
    config["auto_map"] = draw(st.sampled_from([auto_map, auto_map, classes, []]))
    if draw(st.booleans()):
        tokenizer["auto_map"] = {"AutoTokenizer": classes}
        tokenizer["tokenizer_class"] = draw(st.sampled_from(["X", "LlamaTokenizer", "os.system", ""]))
    for name in ("quantization_config", "custom_pipelines", "transformers_weights", "_attn_implementation"):
        if draw(st.integers(0, 5)) == 0:
            config[name] = draw(
                st.sampled_from(["pytorch_model.bin", "../x", {"quant_method": "x"}, {"a": {"impl": "x.Y"}}])
            )
    for name in (
        "modeling_x.py",
        "x.py",
        "__init__.py",
        "configuration_x.py",
        "tokenization_x.py",
        "os.py",
        "setup.py",
    ):
        files = files.changed(name, CODE.encode())
    files = files.changed("config.json", json.dumps(config).encode())
    files = files.changed("tokenizer_config.json", json.dumps(tokenizer).encode())
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "adapter_model.bin"):
        files = files.changed(name, PICKLE)
    if draw(st.booleans()):
        files = files.changed(WEIGHTS, draw(st.sampled_from([None, PICKLE])))
    if draw(st.integers(0, 4)) == 0:
        files = files.changed("adapter_config.json", json.dumps({"base_model_name_or_path": "org/model"}).encode())
    if draw(st.integers(0, 4)) == 0:
        files = files.changed("pytorch_model.bin.index.json", b'{"weight_map": {"a": "pytorch_model.bin"}}')
    return files


@st.composite
def with_other_file(draw: st.DrawFn, base: Files, name: str, contents: SearchStrategy[bytes]) -> Files:
    """One file changed, or missing now and then."""
    if draw(st.integers(0, 39)) == 0:
        return base.changed(name, None)
    return base.changed(name, draw(contents))


def json_file(base: Files, name: str) -> SearchStrategy[Files]:
    content = content_of(base, name)
    return with_other_file(base, name, changed_json([json.loads(content)]) | changed_bytes([content]))


@st.composite
def other_weights(draw: st.DrawFn) -> Files:
    """Tensors of another shape or dtype, or some that are missing or too many, in a file that is whole."""
    tensors = load(content_of(whole(), WEIGHTS))
    for _ in range(draw(st.integers(1, 3))):
        name = sorted(tensors)[draw(PLACES) % len(tensors)]
        tensor = tensors[name]
        match draw(st.integers(0, 7)):
            case 0:
                del tensors[name]
            case 1:
                tensors[name] = tensor.flatten()
            case 2:
                tensors[name] = tensor[:-1].contiguous()
            case 3:
                tensors[name] = tensor.to(draw(st.sampled_from([torch.int8, torch.float64, torch.bool, torch.float16])))
            case 4:
                tensors[name] = torch.full_like(tensor, draw(st.sampled_from([float("nan"), float("inf"), 0.0, 1e38])))
            case 5:
                tensors["model.layers.7.extra"] = tensor.clone()
            case 6:
                tensors[name] = torch.zeros(0)
            case _:
                tensors[draw(st.sampled_from(["", "x", "model", "☃"]))] = tensor.clone()
        if not tensors:
            break
    return whole().changed(
        WEIGHTS, save(tensors, metadata=draw(st.sampled_from([{"format": "pt"}, {}, {"format": "tf"}])))
    )


@st.composite
def other_index(draw: st.DrawFn) -> Files:
    """The index of a sharded checkpoint with other names in it, or without its shards."""
    files = sharded()
    index = json.loads(content_of(files, INDEX))
    name = draw(st.sampled_from(sorted(index["weight_map"])))
    index["weight_map"][name] = draw(
        st.sampled_from(
            [
                "",
                ".",
                "..",
                "../x",
                "/etc/passwd",
                "none.safetensors",
                "config.json",
                SHARDS[0],
                "a/b",
                "x\0y",
                3,
                None,
                [],
                {},
            ]
        )
    )
    if draw(st.integers(0, 3)) == 0:
        paths = list(paths_of(index))
        index = with_change(index, paths[draw(PLACES) % len(paths)], draw(st.integers(0, 2)), None)
    if draw(st.integers(0, 5)) == 0:
        files = files.changed(draw(st.sampled_from(SHARDS)), draw(st.sampled_from([None, b"", b"x" * 100])))
    return files.changed(INDEX, json.dumps(index).encode())


@st.composite
def chat_templates(draw: st.DrawFn) -> bytes:
    content = draw(changed_bytes([TEMPLATE.encode()], JINJA))
    return draw(st.sampled_from(JINJA)) if draw(st.integers(0, 3)) == 0 else content


def _deferred(make: Any) -> SearchStrategy[Any]:
    """Nothing is built before it is asked for."""
    return st.deferred(make)


def _folder_target(name: str, inputs: SearchStrategy[Files], share: int) -> Target:
    return Target(
        name=f"model folders, {name}", reads="runahead/loading load", inputs=inputs, check=check_folder, share=share
    )


TARGETS = (
    _folder_target("config.json", _deferred(lambda: json_file(whole(), "config.json")), 10),
    _folder_target("generation_config.json", _deferred(lambda: json_file(whole(), "generation_config.json")), 5),
    _folder_target("tokenizer.json", _deferred(lambda: json_file(whole(), "tokenizer.json")), 7),
    _folder_target("tokenizer_config.json", _deferred(lambda: json_file(whole(), "tokenizer_config.json")), 5),
    _folder_target(
        "chat template", _deferred(lambda: with_other_file(whole(), "chat_template.jinja", chat_templates())), 5
    ),
    _folder_target(
        "weights",
        _deferred(
            lambda: other_weights() | with_other_file(whole(), WEIGHTS, tensor_files(content_of(whole(), WEIGHTS)))
        ),
        8,
    ),
    _folder_target("index of shards", _deferred(lambda: other_index() | json_file(sharded(), INDEX)), 5),
    Target(
        name="model folders that bring code along",
        reads="runahead/loading load",
        inputs=_deferred(with_code),
        check=check_code,
        share=5,
    ),
    Target(
        name="GGUF files",
        reads="runahead/loading load",
        inputs=_deferred(lambda: changed_bytes([gguf_file()])),
        check=check_gguf,
        share=6,
    ),
)
