"""Loading of a model: its source finds a checkpoint (`FINDERS`), which is checked and then read.

To add a source: a file with a function that finds its checkpoint, a line in `FINDERS`, and a YAML.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from runahead.config import DType, ModelName, ModelOptions
from runahead.model.loading import checkpoint as checkpoints
from runahead.model.loading import hf, random_weights, smollm2
from runahead.model.loading.checkpoint import Checkpoint, StoredTensor
from runahead.model.loading.memory import Footprint, available_bytes, require_room

LONG_LOAD_BYTES = 2**28
"""Least bytes to copy for which a progress bar is shown."""

PAGE_BYTES = 4096


@dataclass(kw_only=True)
class LoadedWeights:
    """A loaded model: `module` is in eval mode, on its device, without gradients; `path` is where it came from."""

    module: PreTrainedModel
    tokenizer: Any | None
    name: str
    dtype: torch.dtype
    path: str


FINDERS: dict[ModelName, Callable[..., Checkpoint]] = {
    ModelName.smollm2: smollm2.find,
    ModelName.hf: checkpoints.find,
    ModelName.random: random_weights.find,
}
"""By source: the function that finds a checkpoint, and downloads it if necessary.

With `weights=False` only config and tokenizer need be there. Raises a ValueError or an OSError of one line with the
remedy if there is none.
"""


def load(
    options: ModelOptions,
    *,
    device: torch.device,
    attn_implementation: str,
    progress: bool = False,
    ranks_on_host: int = 1,
) -> LoadedWeights:
    """Load a model's weights to `device`, in eval mode and without gradients, and its tokenizer if it has one.

    Args:
        attn_implementation: a name registered with transformers' AttentionInterface. Families that choose among their
            own attention classes are built with "eager", and only their config gets the name.
        progress: show progress bars on standard error; otherwise nothing is written there.
        ranks_on_host: processes on this host that load the same model. Weights that cannot be mapped from the file
            need memory once per process.

    Raises:
        ValueError, OSError: the model cannot be loaded; one line that names the path and the remedy.
    """
    checkpoint = FINDERS[options.name](options, weights=True, progress=progress)
    config, tokenizer = hf.read_config(checkpoint, options), hf.read_tokenizer(checkpoint, options)
    is_random = checkpoint.config_file is not None
    stored = {} if checkpoint.gguf or is_random else checkpoints.stored_tensors(checkpoint)
    dtype = _dtype(options, config, checkpoint, stored, device)
    empty = hf.empty_model(config, dtype, options, label=checkpoint.label)
    footprint = _footprint(empty, stored, dtype, device)
    require_room(footprint, device, label=checkpoint.label, ranks_on_host=ranks_on_host)
    if is_random:
        module = random_weights.build(checkpoint, config, options, dtype, device, attn_implementation)
    else:
        bars = progress and footprint.copied > LONG_LOAD_BYTES
        module = hf.build(checkpoint, config, options, dtype, device, attn_implementation, bars=bars)
    module.config._attn_implementation = attn_implementation
    module = module.eval().requires_grad_(False)
    if 0 < footprint.mapped < available_bytes():
        _read_in(module)
    name = checkpoint.name or f"random {config.model_type}"
    return LoadedWeights(module=module, tokenizer=tokenizer, name=name, dtype=dtype, path=str(checkpoint.path))


def load_config(options: ModelOptions, *, progress: bool = False) -> Any:
    """Load a model's transformers config, without its weights (smollm2 is fetched as a whole on first use).

    Raises:
        ValueError, OSError: as for `load`.
    """
    return hf.read_config(FINDERS[options.name](options, weights=False, progress=progress), options)


def load_tokenizer(options: ModelOptions) -> Any | None:
    """Load a model's tokenizer, without its weights; None if it has none.

    Raises:
        ValueError, OSError: as for `load`, or the tokenizer's files are damaged.
    """
    return hf.read_tokenizer(FINDERS[options.name](options, weights=False, progress=False), options)


def _dtype(
    options: ModelOptions, config: Any, checkpoint: Checkpoint, stored: dict[str, StoredTensor], device: torch.device
) -> torch.dtype:
    """The dtype asked for; for auto the config's, else that of the first tensor.

    Quantised GGUF files have none: float32 on a CPU; bfloat16 on a GPU, where float32 is about ten times slower.
    """
    if options.dtype is not DType.auto:
        chosen: torch.dtype = getattr(torch, options.dtype.name)
        return chosen
    if checkpoint.gguf:
        # Norms are in float32 in every GGUF file.
        forms = set(checkpoints.read_gguf(checkpoint).tensors.values()) - {"F32"}
        halves = {"F16": torch.float16, "BF16": torch.bfloat16}
        if forms and not forms <= set(halves) and device.type != "cpu":
            return torch.bfloat16
        return halves.get(forms.pop(), torch.float32) if len(forms) == 1 else torch.float32
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    return next((tensor.dtype for tensor in stored.values() if tensor.dtype), torch.float32)


def _footprint(
    empty: PreTrainedModel, stored: dict[str, StoredTensor], dtype: torch.dtype, device: torch.device
) -> Footprint:
    """Bytes that loading takes. A stored tensor is mapped if it is a parameter of the model in the same dtype."""
    if device.type != "cpu" or not stored:
        return Footprint(copied=sum(parameter.numel() * parameter.element_size() for parameter in empty.parameters()))
    parameters, prefix = empty.state_dict(), empty.base_model_prefix
    footprint = Footprint(copied=0)
    for name, tensor in stored.items():
        # Checkpoints of the model without its head lack the prefix, and the other way round.
        names = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
        parameter = next((parameters[name] for name in names if name in parameters), None)
        if parameter is not None and parameter.dtype == tensor.dtype:
            footprint.mapped += tensor.num_elements * parameter.element_size()
        else:
            footprint.copied += tensor.num_elements * (parameter.dtype if parameter is not None else dtype).itemsize
    return footprint


def _read_in(module: PreTrainedModel) -> None:
    """Touch every page of the mapped weights, so that the file is read now rather than during the first prompt."""
    for parameter in module.parameters():
        parameter.detach().flatten().view(torch.uint8)[::PAGE_BYTES].sum()
