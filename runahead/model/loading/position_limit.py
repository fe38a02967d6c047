"""Longest text of a model, by its config."""

from __future__ import annotations

from typing import Any


def max_positions(config: Any) -> int | None:
    """Longest sequence in tokens that a model supports, if its config says so."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return int(value * _dynamic_factor(config))
    return None


def _dynamic_factor(config: Any) -> float:
    """Factor by which dynamic NTK scaling extends the length in a model's config."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # one for all layers, or by layer type
    return max(float(kind.get("factor") or 1.0) if kind.get("rope_type") == "dynamic" else 1.0 for kind in kinds)
