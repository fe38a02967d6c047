"""ZigZagKV (Zhong et al., COLING 2025, arXiv 2412.09036): layers that spread their attention keep more tokens.

The prompt's last `window` queries vote as in SnapKV. How many tokens a head needs is the fewest that hold a given share
of its votes. Beside a least number for each, the budget of all layers is shared out in proportion to that, over layers
and over the KV heads of each. Generated tokens are all kept, and their queries do not count.

Votes are averaged over a KV head's query heads. The paper divides by layer and then by head, which comes to the same;
it gives no value for the least share (`least_share`), 20% is from later code. A conversation is cut back once, and
several ranks give the answer of one if the window is within the last chunk.
"""

# Legend: B batch, K kv heads, n stored slots, m kept slots of the longest head.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from policies.kept_slots import best_first, first_slots
from policies.layer_view import LayerView
from policies.options import budget_tokens, require
from policies.snapkv import SnapKV


@dataclass(kw_only=True)
class ZigZagKV(SnapKV, name="zigzagkv"):
    """SnapKV with a budget per layer and KV head, decided once all layers have voted.

    Attributes:
        mass: share of the votes; the fewest tokens that hold it are what a head needs (MBA in the paper).
        least_share: share of the budget that every head gets whatever it needs (B_min).
    """

    keeps_ragged: ClassVar[bool] = True
    scores_attention: ClassVar[bool] = False  # a wrapper would take the scores without the budgets
    decides_on_all: ClassVar[bool] = True

    mass: float = 0.9
    least_share: float = 0.2

    def __post_init__(self) -> None:
        require(0 < self.mass <= 1, "mass", self.mass, "must be a share of the attention in (0, 1]")
        require(0 <= self.least_share <= 1, "least_share", self.least_share, "must be a share of the budget in [0, 1]")
        super().__post_init__()

    def carry(self, view: LayerView) -> Tensor | None:
        """Votes of the window, not pooled."""
        return view.by_kv_head(view.signals.votes(self.window)) if self.drops_of(view.prompt_tokens) else None

    def keep_in_all(self, scores: Sequence[Tensor], prompt_tokens: int) -> list[Tensor]:
        m = budget_tokens(self.budget, prompt_tokens)
        sinks = min(self.sinks, m)
        recent = min(self.recent_of(m), m - sinks)
        heads = [votes_BKn.shape[1] for votes_BKn in scores]
        tokens_B: list[int] = (~scores[0][:, 0].isneginf()).sum(dim=-1).tolist()
        needs = [self._needed(votes_BKn) for votes_BKn in scores]
        kept: list[list[list[int]]] = [[] for _ in scores]
        for row, tokens in enumerate(tokens_B):
            budget = min(m, tokens)
            least = min(budget, max(sinks + recent, round(self.least_share * m)))
            # One division over all heads of all layers is what the paper does in two steps, by layer and by head.
            of_heads = [need for needs_BK in needs for need in needs_BK[row]]
            counts = proportional_shares(of_heads, budget * len(of_heads), least=least, most=tokens)
            for layer, num_heads in enumerate(heads):
                first = sum(heads[:layer])
                kept[layer].append(counts[first : first + num_heads])
        return [
            first_slots(self._best_first(votes_BKn, sinks, recent), kept_BK, [[t] * num for t in tokens_B])
            for votes_BKn, kept_BK, num in zip(scores, kept, heads, strict=True)
        ]

    def _best_first(self, votes_BKn: Tensor, sinks: int, recent: int) -> Tensor:
        """Slots in the order in which they are kept, by pooled votes."""
        pooled_BKn = self.pooled(votes_BKn.clamp_min(0)).masked_fill(votes_BKn.isneginf(), -math.inf)
        return best_first(pooled_BKn, sinks=sinks, recent=recent)[1]

    def _needed(self, votes_BKn: Tensor) -> list[list[int]]:
        """Fewest tokens of each row and KV head that hold `mass` of its votes."""
        best_BKn = votes_BKn.double().clamp_min(0).sort(dim=-1, descending=True).values
        held_BKn = best_BKn.cumsum(dim=-1)
        needed: list[list[int]] = ((held_BKn < self.mass * held_BKn[..., -1:]).sum(dim=-1) + 1).tolist()
        return needed


def proportional_shares(weights: Sequence[float], total: int, *, least: int, most: int) -> list[int]:
    """Share out a number in proportion to weights, beside what all get alike. The shares add up to it.

    Args:
        weights: above 0.
        total: at most `most` for each.
        least: what each gets whatever its weight.
        most: what none gets more than; the others share the rest.
    """
    room, left = most - least, total - least * len(weights)
    shares = limited_shares(weights, left, room)
    whole = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(weights)), key=lambda each: whole[each] - shares[each])
    up = set(by_remainder[: left - sum(whole)])
    return [least + number + (each in up) for each, number in enumerate(whole)]


def limited_shares(weights: Sequence[float], total: float, most: float) -> list[float]:
    """Shares of a number in proportion to weights above 0, none more than `most`; the others share what is over."""
    assert 0 <= total <= most * len(weights), (total, most, len(weights))
    shares = [0.0] * len(weights)
    heaviest_first = sorted(range(len(weights)), key=lambda each: -weights[each])
    remaining, weight = float(total), float(sum(weights))
    for each in heaviest_first:  # who reaches the limit has the largest weight of those that are left
        shares[each] = min(most, remaining * weights[each] / weight)
        remaining, weight = remaining - shares[each], weight - weights[each]
    return shares
