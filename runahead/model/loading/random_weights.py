"""Random weights for any architecture and size, to measure speed without a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from runahead.config import DType, ModelOptions
from runahead.model.loading import checkpoint as checkpoints
from runahead.model.loading import hf
from runahead.model.loading.base import LoadedWeights
from runahead.model.loading.checkpoint import Checkpoint
from runahead.model.loading.memory import Footprint, require_room
from runahead.model.loading.quiet import one_line, quiet


def load(
    options: ModelOptions, *, device: torch.device, attn_implementation: str, progress: bool, ranks_on_host: int
) -> LoadedWeights:
    """Initialise the weights as the family does, from `options.seed`: the same on every rank."""
    label, path = f"model.config={options.config}", _config_file(options)
    config, tokenizer = load_config(options, progress=progress), load_tokenizer(options, progress=progress)
    if options.dtype is not DType.auto:
        dtype = hf.torch_dtype(options.dtype)
    else:
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    empty = hf.empty_model(config, dtype, options, label=label)
    require_room(Footprint(copied=hf.parameter_bytes(empty)), device, label=label, ranks_on_host=ranks_on_host)

    def build(attn_implementation: str) -> PreTrainedModel:
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
            module = hf.build_with_attention(build, attn_implementation)
    except Exception as error:  # the model's own code
        raise ValueError(f"{label}: the model cannot be made ({one_line(error)}); check its sizes") from error
    module.config._attn_implementation = attn_implementation
    module = module.eval().requires_grad_(False)
    name = f"random {config.model_type}"
    return LoadedWeights(module=module, tokenizer=tokenizer, name=name, dtype=dtype, path=str(path))


def load_config(options: ModelOptions, *, progress: bool) -> Any:
    path, label = _config_file(options), f"model.config={options.config}"
    checkpoints.read_config_file(path, label)
    # transformers finds a model's own code beside its config only if the folder is named. Other files have any name.
    place = path.parent if path.name == "config.json" else path
    config = hf.read_transformers_config(
        {"pretrained_model_name_or_path": str(place), "local_files_only": True}, options, label=label
    )
    if options.layers is not None:
        text = config.get_text_config(decoder=True)
        if getattr(text, "layer_types", None):
            text.layer_types = [text.layer_types[layer % len(text.layer_types)] for layer in range(options.layers)]
        text.num_hidden_layers = options.layers
    return config


def load_tokenizer(options: ModelOptions, *, progress: bool) -> Any | None:
    label = f"model.config={options.config}"
    folder = _config_file(options).parent
    return hf.checkpoint_tokenizer(Checkpoint(folder=folder, label=label, cure="restore its files"), options)


def _config_file(options: ModelOptions) -> Path:
    assert options.config is not None, options
    try:
        path = Path(options.config).expanduser()
    except RuntimeError as error:  # ~name of an unknown user
        raise ValueError(f"model.config={options.config} cannot be found: {error}; write the whole path") from error
    if path.is_dir():
        checkpoints.require_small_files(path, f"model.config={options.config}")
    if not path.exists():
        raise ValueError(f"model.config={options.config} does not exist; name a model's folder or a config.json")
    return path / "config.json" if path.is_dir() else path
