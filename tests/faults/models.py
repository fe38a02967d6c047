"""Tiny models to drill with: `python -m tests.faults.models <folder>` makes one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PROMPT_IDS = range(10, 74)


def obtain(folder: Path) -> Path:
    """The model's folder, made first if it is not there."""
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [sys.executable, "-m", "tests.faults.models", str(folder)], cwd=ROOT, check=True, capture_output=True
        )
    return folder


def spoil(model: Path, folder: Path, choice: float) -> str:
    """A copy with one NaN in its weights.

    Args:
        choice: which of its tensors, from 0 to 1. In the embedding it is a token of the prompt.

    Returns: the tensor's name.
    """
    from safetensors.numpy import load_file, save_file

    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    name = sorted(tensors)[int(choice * len(tensors))]
    tensor = tensors[name].copy()
    tensor[PROMPT_IDS[len(PROMPT_IDS) // 2] if "embed" in name else tuple(n // 2 for n in tensor.shape)] = np.nan
    save_file(tensors | {name: tensor}, folder / "model.safetensors", metadata={"format": "pt"})
    return name


def make(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.faults.drills import LAYERS
    from tests.tokenizers_for_tests import byte_level

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(byte_level()),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    LlamaForCausalLM(config).save_pretrained(part)
    byte_level().save_pretrained(part)
    part.rename(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
