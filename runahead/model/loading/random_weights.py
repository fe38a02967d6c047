"""Random weights for any architecture and size, to measure speed without a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from runahead.config import ModelOptions
from runahead.model.loading.checkpoint import Checkpoint, local_path, require_small_files
from runahead.model.loading.hf import build_with_attention
from runahead.model.loading.quiet import one_line, quiet


def find(options: ModelOptions, *, weights: bool, progress: bool) -> Checkpoint:
    assert options.config is not None, options
    label = f"model.config={options.config}"
    path = local_path(options.config, label)
    if path.is_dir():
        require_small_files(path, label)
        path = path / "config.json"
    elif not path.exists():
        raise ValueError(f"{label} does not exist; name a model's folder or a config.json")
    return Checkpoint(folder=path.parent, config_file=path, label=label, cure="restore its files")


def build(
    checkpoint: Checkpoint,
    config: Any,
    options: ModelOptions,
    dtype: torch.dtype,
    device: torch.device,
    attn_implementation: str,
) -> PreTrainedModel:
    """Initialise the weights as the family does, from `options.seed`: the same on every rank.

    Raises:
        ValueError: the model's own code fails.
    """

    def initialised(attn_implementation: str) -> PreTrainedModel:
        # On the device and in the dtype that they are used in, without a float32 copy on the host.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(options.seed)
            return AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation=attn_implementation,
                trust_remote_code=options.trust_remote_code,
            )

    try:
        with quiet():
            return build_with_attention(initialised, attn_implementation)
    except Exception as error:
        message = f"{checkpoint.label}: the model cannot be made ({one_line(error)}); check its sizes"
        raise ValueError(message) from error
