"""Words of transformers' configs for layers that hold a state of earlier tokens, or nothing of them."""

STATES_ALONE = ("linear_attention", "conv")
"""Layer types of transformers' configs that hold a state in place of keys and values: of linear attention, state spaces
or a convolution."""

WITH_STATES = (*STATES_ALONE, "hybrid", "hybrid_sliding")
"""All layer types that hold a state, the last two beside attention."""

MARKING = ("dms_window_size", "dmc_window_size")
"""Options of configs of models that mark tokens. With the last one layers hold the mean so far, as a state."""

WITHOUT_CACHE = ("moe", "mlp")
"""Layer types that hold nothing of earlier tokens."""
