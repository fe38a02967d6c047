"""KVzap with maps that are made up, for whatever model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import ModelFacts
from policies.kvzap import KVzap
from policies.layer_view import LayerView
from policies.scorer import Scorer


@dataclass(kw_only=True)
class MadeUpKVzap(KVzap):
    """KVzap without a file."""

    def __post_init__(self) -> None:
        Scorer.__post_init__(self)

    def require(self, model: ModelFacts) -> None:
        """Any model will do."""

    def predicted(self, view: LayerView) -> Tensor:
        assert view.input_BCD is not None
        return made_up_scores(view.layer, view.num_kv_heads, view.input_BCD)


def made_up_scores(layer: int, num_kv_heads: int, x_BCD: Tensor) -> Tensor:
    """Scores (B, K, C)."""
    draw = torch.Generator().manual_seed(layer)
    weight_KD = torch.randn(num_kv_heads, x_BCD.shape[2], generator=draw).to(x_BCD)
    return (x_BCD @ weight_KD.T).transpose(1, 2)
