"""Where a model's weights come from: one file per source, one table.

A source is a module with the three functions of `base.Source`. Adding one is a file, a line in `LOADERS`, and a YAML.
"""

from __future__ import annotations

from typing import Any

import torch

from runahead.config import ModelName, ModelOptions
from runahead.model.loading import hf, random_weights, smollm2
from runahead.model.loading.base import LoadedWeights, Source

LOADERS: dict[ModelName, Source] = {
    ModelName.smollm2: smollm2,
    ModelName.hf: hf,
    ModelName.random: random_weights,
}


def load(
    options: ModelOptions,
    *,
    device: torch.device,
    attn_implementation: str,
    progress: bool = False,
    ranks_on_host: int = 1,
) -> LoadedWeights:
    """The model's weights on `device`, in eval mode and without gradients, and its tokenizer if it has one.

    Args:
        attn_implementation: a name that transformers' AttentionInterface knows. Families that choose among their own
            attention classes are built with "eager" and carry the name in their config.
        progress: progress bars on standard error; without it nothing is written there.
        ranks_on_host: processes of this host that load the same model; weights that cannot be mapped from the file are
            needed once per process.

    Raises: ValueError, OSError: one line that names the path and the remedy.
    """
    return LOADERS[options.name].load(
        options,
        device=device,
        attn_implementation=attn_implementation,
        progress=progress,
        ranks_on_host=ranks_on_host,
    )


def load_config(options: ModelOptions, *, progress: bool = False) -> Any:
    """The model's transformers config, without its weights (those of smollm2 are fetched if they are not there yet).

    Raises: ValueError, OSError: as `load`.
    """
    return LOADERS[options.name].load_config(options, progress=progress)


def load_tokenizer(options: ModelOptions, *, progress: bool = False) -> Any | None:
    """The model's tokenizer, or None if it has none; as cheap as `load_config`.

    Raises: ValueError, OSError: as `load`; also for a tokenizer that is there and broken.
    """
    return LOADERS[options.name].load_tokenizer(options, progress=progress)


__all__ = ["LOADERS", "LoadedWeights", "Source", "load", "load_config", "load_tokenizer"]
