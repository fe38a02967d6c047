"""TOVA (Oren et al., EMNLP 2024, arXiv 2401.06104): keep the tokens that the last query attends to most.

A transformer's cache as the state of an RNN: with every new token the one with the least attention is dropped, be it
old or new. All heads of a layer keep the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from policies.layer_view import LayerView
from policies.scorer import Scorer


@dataclass(kw_only=True)
class TOVA(Scorer, name="tova"):
    """Score: attention probability of the newest token's query, averaged over all heads of the layer.

    Nothing but the budget protects a token: there are no sinks and no recent window unless they are asked for. One
    token is dropped for every new one, as published; a larger `evict_every` copies less.
    """

    scores_attention: ClassVar[bool] = True
    chooses_alike: ClassVar[bool] = True
    votes_over_heads: ClassVar[bool] = True

    evict_every: int = 1

    @property
    def last_queries(self) -> int:
        return 1

    def score(self, view: LayerView) -> Tensor:
        return view.over_heads(view.signals.votes(1))
