"""Ada-KV (Feng et al., NeurIPS 2025, arXiv 2407.11550): heads that spread their attention keep more tokens.

A wrapper around a policy that scores tokens. The heads of a layer share one budget: those that the best scores of all
heads together fall on get more of it, down to a least share for each. Memory is that of the tokens that are kept, head
by head. Generated tokens are all kept, as in the paper, and their queries do not count.
"""

# Legend: B batch, K kv heads, n stored slots, m kept slots of the longest head, X = K * n.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from policies.base import LayerView, Phase, require
from policies.kept_slots import first_slots
from policies.wrapper import Wrapper


@dataclass(kw_only=True)
class AdaKV(Wrapper):
    """Share out the budget of a layer over its KV heads.

    Attributes:
        scorer: as of `Wrapper`. Scores of different heads have to be comparable, as shares of attention are.
        alpha: share of the budget that all heads get alike.
    """

    keeps_ragged: ClassVar[bool] = True
    while_decoding: ClassVar[bool] = False
    compares_by_kv_head: ClassVar[bool] = True

    alpha: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.alpha <= 1, "alpha", self.alpha, "must be a share of the budget in [0, 1]")
        if self.scorer.keeps_ragged:
            raise ValueError(
                f"policy.scorer={type(self.scorer).__name__} shares out its budget over heads by itself; use it alone"
            )

    def most_slots(self, num_layers: int, phase: Phase) -> int | None:
        """The scorer's bound, on average over the KV heads of a layer."""
        return None if phase is Phase.decode else self.scorer.most_slots(num_layers, phase)

    def keep(self, view: LayerView) -> Tensor | None:
        m = self.scorer.slots(view)
        if view.num_slots <= m and view.num_shares == 1:  # the heads of another share may have more
            return None
        sinks = [min(num, m) for num in view.sinks(self.scorer.sinks)]
        recent = min(self.scorer.recent_of(m), m - max(sinks))
        scores_BKn = self.scorer.score(view).float().expand(-1, view.num_kv_heads, -1).clone()
        scores_BKn[..., view.num_slots - recent :] = math.inf
        scores_BKn.masked_fill_(~view.is_token_BKn(after=sinks), math.inf)
        scores_BKn.masked_fill_(~view.is_token_BKn(), -math.inf)
        # A stable sort keeps the earlier of two equal scores, as the policy itself does.
        best_BKn, slots_BKn = scores_BKn.sort(dim=-1, descending=True, stable=True)
        best_BKn = view.joined_over_shares(best_BKn)
        certain_BK: list[list[int]] = best_BKn.isposinf().sum(dim=-1).tolist()
        tokens_BK: list[list[int]] = (~best_BKn.isneginf()).sum(dim=-1).tolist()
        rows = zip(best_BKn, certain_BK, tokens_BK, strict=True)
        kept_BK = [self._share_out(m, best_Kn, certain, tokens)[view.own_heads] for best_Kn, certain, tokens in rows]
        tokens_BK = [tokens[view.own_heads] for tokens in tokens_BK]
        return None if kept_BK == tokens_BK else first_slots(slots_BKn, kept_BK, tokens_BK)

    def _share_out(self, budget: int, best_Kn: Tensor, certain: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Number of tokens that each KV head of a row keeps: `budget` on average, if the row has so many.

        Args:
            best_Kn: scores in descending order; infinite ones are kept, those of padding are minus infinity.
            certain: number of infinite scores of each head.
            tokens: number of tokens of each head.
        """
        total = min(budget * len(tokens), sum(tokens)) - sum(certain)
        equal = equal_shares([num - sure for num, sure in zip(tokens, certain, strict=True)], total)
        compared_X = best_Kn.masked_fill(best_Kn.isposinf(), -math.inf).flatten()
        best_X = compared_X.sort(descending=True, stable=True).indices[:total]
        counts: list[int] = torch.bincount(best_X // best_Kn.shape[1], minlength=len(tokens)).tolist()
        wanted = [(1 - self.alpha) * count + self.alpha * each for count, each in zip(counts, equal, strict=True)]
        # Rounded so that their sum stays: the largest remainders are rounded up. Each number stays between those of the
        # two ways to share out, so no head loses more of its scores than another one gains.
        least = [math.floor(number) for number in wanted]
        by_remainder = sorted(range(len(tokens)), key=lambda head: least[head] - wanted[head])
        up = by_remainder[: total - sum(least)]
        return [sure + number + (head in up) for head, (sure, number) in enumerate(zip(certain, least, strict=True))]


def equal_shares(room: Sequence[int], total: int) -> list[int]:
    """Share out a number over heads alike, as far as each has room; what some have none for goes to the others."""
    shares = [0] * len(room)
    for place, head in enumerate(sorted(range(len(room)), key=room.__getitem__)):
        shares[head] = min(room[head], total // (len(room) - place))
        total -= shares[head]
    return shares
