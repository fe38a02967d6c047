"""Random weights for any architecture and size, to measure speed without a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from runahead.config import ModelOptions
from runahead.model.loading.checkpoint import Checkpoint, local_path, require_small_files
from runahead.model.loading.hf import ModelMaker, build_with_attention
from runahead.model.loading.quiet import one_line, quiet
from runahead.model.loading.recipes import NotRepeatable, Recorder


def find(options: ModelOptions, *, weights: bool, progress: bool) -> Checkpoint:
    assert options.config is not None, options
    label = f"model.config={options.config}"
    path = local_path(options.config, label)
    if path.is_dir():
        require_small_files(path, label)
        path = path / "config.json"
    elif not path.exists():
        raise ValueError(f"{label} does not exist; name a model's folder or a config.json")
    return Checkpoint(folder=path.parent, config_file=path, label=label, remedy="restore its files")


def build(make: ModelMaker) -> PreTrainedModel:
    """Initialise the weights as the family does, from the seed: the same on every rank.

    Raises:
        ValueError: the model's own code fails.
    """

    def initialised(attn_implementation: str) -> PreTrainedModel:
        # On the device and in the dtype that they are used in, without a float32 copy on the host.
        device = make.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(make.options.seed)
            return AutoModelForCausalLM.from_config(
                make.config,
                dtype=make.dtype,
                attn_implementation=attn_implementation,
                trust_remote_code=make.options.trust_remote_code,
            )

    try:
        with quiet():
            return build_with_attention(initialised, make.attn_implementation)
    except NotRepeatable:
        raise
    except Exception as error:
        message = f"{make.checkpoint.label}: the model cannot be made ({one_line(error)}); check its sizes"
        raise ValueError(message) from error


def parts(make: ModelMaker) -> dict[str, Any]:
    """The weights that `build` makes, by name; each large one is made when a part of it is asked for.

    Raises:
        ValueError: as for `build`, or the family does not make its weights one by one.
    """
    recorder = Recorder(make.device)
    try:
        with recorder:
            module = build(make)
    except NotRepeatable as error:
        raise ValueError(
            f"{make.checkpoint.label}: {make.config.model_type} does not make its random weights one by one "
            f"({one_line(error)}), so it cannot be loaded in shares; use one share"
        ) from error
    return {name: recorder.recipe(weight) or weight for name, weight in module.state_dict().items()}
