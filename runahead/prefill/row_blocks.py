"""When a stage computes the queries, keys and values of a layer twice, since others wait for the keys and values.

A layer in blocks of rows completes its keys and values with the last block, so that the next stage is later by almost a
layer, and so is each after it. If all blocks are run until their keys and values are stored, and then run once more
from the start, these leave as early as without blocks. What comes before attention is then computed twice.
"""

from __future__ import annotations

from typing import Any

from runahead.model.memory import mlp_dim


def share_twice(*, model_dim: int, mlp_dim: int, query_dim: int, kv_dim: int, num_keys: float) -> float:
    """Share of a layer's operations that come before its attention.

    Args:
        query_dim, kv_dim: width of all queries, and of all keys and values together.
        num_keys: mean number of keys that a token attends to.
    """
    before = model_dim * (query_dim + kv_dim)
    return before / (before + model_dim * (query_dim + 3 * mlp_dim) + 2 * query_dim * num_keys)


def projects_twice(share: float, *, num_layers: int, num_stages: int) -> bool:
    """Whether computing this share of a layer twice costs less than what the last stage would be later."""
    return share < (num_stages - 1) / num_layers


def chunk_projects_twice(model: Any, chunk: range, num_stages: int) -> bool:
    """`projects_twice` for a chunk of tokens of a `Model`."""
    if not model.kv_shapes:
        return False
    config, shape = model.config, model.kv_shapes[0]
    share = share_twice(
        model_dim=int(config.hidden_size),
        mlp_dim=mlp_dim(config) // model.num_shards,
        query_dim=model.num_query_heads * shape.key_dim,
        kv_dim=shape.num_kv_heads * (shape.key_dim + shape.value_dim),
        num_keys=(chunk.start + chunk.stop) / 2,
    )
    return projects_twice(share, num_layers=model.num_layers, num_stages=num_stages)
