"""Lengths at which a model's positions end or change, by its config."""

from __future__ import annotations

from typing import Any


def max_positions(config: Any) -> int | None:
    """Longest sequence in tokens that a model supports, if its config says so."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return int(value * _dynamic_factor(config))
    return None


def longrope_threshold(config: Any) -> int | None:
    """Length in tokens above which LongRoPE uses other tables; None for other models."""
    thresholds = (
        kind["original_max_position_embeddings"] for kind in _rope_kinds(config) if kind.get("rope_type") == "longrope"
    )
    return next(map(int, thresholds), None)


def _dynamic_factor(config: Any) -> float:
    """Factor by which dynamic NTK scaling extends the length in a model's config."""
    kinds = _rope_kinds(config)
    return max(float(kind.get("factor") or 1.0) if kind.get("rope_type") == "dynamic" else 1.0 for kind in kinds)


def _rope_kinds(config: Any) -> list[dict[str, Any]]:
    """Parameters of RoPE: one for all layers, or by layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
