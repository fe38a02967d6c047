"""LagKV (Liang et al., 2025, arXiv 2504.04704): keep the tokens that stand out from the tokens that follow them.

A text is cut into partitions of `lag` tokens. Each channel of a partition's keys and values is scaled to the range that
the next partition has there, and the tokens with the largest standard deviation over their channels stay. No attention
is computed: a choice needs the stored keys and values alone, after the prompt and while decoding.

It ranks as published. The budget is a number of tokens here and a share of each partition there, so here the partitions
are cut back again as the text grows, and a text shorter than two of them too, to its newest tokens. A channel in which
the next partition is constant is left out; the published code divides by zero there. Sixteen sinks and partitions of
128 tokens are the authors' defaults (kvpress has four sinks).
"""

# Legend: K kv heads, P partitions, L tokens of a partition, n stored slots, H key or value dim.

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from policies.layer_view import LayerView, PromptPart
from policies.options import require_least
from policies.precision import widened
from policies.scorer import Scorer


@dataclass(kw_only=True)
class LagKV(Scorer, name="lagkv"):
    """Score: rank in its partition, so that each partition keeps the same share.

    The last whole partition, which no other follows, and the tokens after it stay, or the newest of them if the budget
    is smaller.

    Attributes:
        lag: tokens of a partition.
    """

    sinks: int = 16
    evict_every: int = 128
    lag: int = 128

    def __post_init__(self) -> None:
        require_least(self, lag=2)
        super().__post_init__()

    @property
    def last_queries(self) -> int:
        return 0

    def of_part(self, part: PromptPart) -> Self:
        other = super().of_part(part)
        other.lag = max(2, part.share_of(self.lag))
        return other

    def score(self, view: LayerView) -> Tensor:
        n = view.num_slots
        scores_BKn = torch.arange(1.0, n + 1, device=view.k_BKnH.device).repeat(len(view.pads), view.num_kv_heads, 1)
        # Partitions start at the first token of a row, or head, wherever padding has moved it.
        num_sinks = view.sinks(self.sinks)
        for row, heads, pad in view.heads_by_pad():
            first = pad + num_sinks[row]
            partitions = (n - first) // self.lag
            if partitions < 2:
                continue
            end = first + partitions * self.lag
            parts = [x[row, heads, first:end].unflatten(1, (partitions, self.lag)) for x in (view.k_BKnH, view.v_BKnV)]
            deviation_KPL = sum((deviations(part_KPLH) for part_KPLH in parts), start=torch.zeros(()))
            best_first_KPL = deviation_KPL.sort(dim=-1, descending=True, stable=True).indices
            place_KPL = best_first_KPL.argsort(dim=-1)
            scores_BKn[row, heads, first : end - self.lag] = (1 - (place_KPL + 1) / self.lag).flatten(1)
        return scores_BKn


def deviations(x_KPLH: Tensor) -> Tensor:
    """Standard deviation over the channels, as softmax over each partition but the last (K, P - 1, L).

    A channel in which the next partition is constant has no range to be scaled to, and is left out.
    """
    x_KPLH = widened(x_KPLH)
    next_KPLH = x_KPLH[:, 1:]
    low_KP1H, high_KP1H = next_KPLH.amin(dim=2, keepdim=True), next_KPLH.amax(dim=2, keepdim=True)
    range_KP1H = high_KP1H - low_KP1H
    rounding_KP1H = torch.finfo(x_KPLH.dtype).eps * torch.maximum(low_KP1H.abs(), high_KP1H.abs())
    varies_KP1H = range_KP1H > rounding_KP1H
    channels_KP11 = varies_KP1H.sum(dim=-1, keepdim=True)
    scaled_KPLH = torch.where(varies_KP1H, (x_KPLH[:, :-1] - low_KP1H) / range_KP1H, 0.0)
    mean_KPL1 = scaled_KPLH.sum(dim=-1, keepdim=True) / channels_KP11.clamp_min(1)
    squares_KPL = torch.where(varies_KP1H, (scaled_KPLH - mean_KPL1) ** 2, 0.0).sum(dim=-1)
    return (squares_KPL / (channels_KP11[..., 0] - 1).clamp_min(1)).sqrt().softmax(dim=-1)
