"""Types of layers in transformers' configs: which hold a state, store keys and values, or attend to all of them."""

from __future__ import annotations

from typing import Any

STATES_ALONE = ("linear_attention", "conv")
"""Layer types of transformers' configs that hold a state in place of keys and values: of linear attention, state spaces
or a convolution."""

WITH_STATES = (*STATES_ALONE, "hybrid", "hybrid_sliding")
"""All layer types that hold a state, the last two beside attention."""

MARKING = ("dms_window_size", "dmc_window_size")
"""Options of configs of models that mark tokens. With the last one layers hold the mean so far, as a state."""

WITHOUT_CACHE = ("moe", "mlp")
"""Layer types that hold nothing of earlier tokens."""


def attending_to_all(config: Any) -> list[int]:
    """Layers that store keys and values and attend to all of them, as transformers' own cache has them by a config.

    Args:
        config: transformers' config of the text model.
    """
    from transformers import DynamicCache  # imports torch, as who has a config has done
    from transformers.cache_utils import DynamicLayer

    layers = enumerate(DynamicCache(config=config).layers)
    return [number for number, layer in layers if isinstance(layer, DynamicLayer) and not layer.is_sliding]
