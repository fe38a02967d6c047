"""Sources of a model's weights (`LOADERS`), one file each, and what they share to find, check and load checkpoints.

A source is a module with the three functions of `base.Source`. To add one: a file, a line in `LOADERS`, and a YAML.
"""

from __future__ import annotations

from typing import Any

import torch

from runahead.config import ModelName, ModelOptions
from runahead.model.loading import hf, random_weights, smollm2
from runahead.model.loading.base import LoadedWeights, Source

LOADERS: dict[ModelName, Source] = {ModelName.smollm2: smollm2, ModelName.hf: hf, ModelName.random: random_weights}


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
    return LOADERS[options.name].load(
        options, device=device, attn_implementation=attn_implementation, progress=progress, ranks_on_host=ranks_on_host
    )


def load_config(options: ModelOptions, *, progress: bool = False) -> Any:
    """Load a model's transformers config, without its weights (smollm2 is fetched as a whole on first use).

    Raises:
        ValueError, OSError: as for `load`.
    """
    return LOADERS[options.name].load_config(options, progress=progress)


def load_tokenizer(options: ModelOptions, *, progress: bool = False) -> Any | None:
    """Load a model's tokenizer, without its weights; None if it has none.

    Raises:
        ValueError, OSError: as for `load`, or the tokenizer's files are damaged.
    """
    return LOADERS[options.name].load_tokenizer(options, progress=progress)


__all__ = ["LOADERS", "LoadedWeights", "Source", "load", "load_config", "load_tokenizer"]
