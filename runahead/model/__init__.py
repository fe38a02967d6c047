"""The model: a transformers causal language model whose attention layers call ours, and how it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runahead.model.model import Model

__all__ = ["Model"]


def __getattr__(name: str) -> Any:
    """Import `Model` on first use, since its module needs torch and transformers."""
    if name == "Model":
        from runahead.model.model import Model

        return Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
