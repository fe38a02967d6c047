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

from policies.kept_slots import first_slots
from policies.layer_view import LayerView, Phase
from policies.options import require, require_default
from policies.wrapper import Wrapper


@dataclass(kw_only=True)
class AdaKV(Wrapper, name="adakv"):
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
                f"policy.scorer={self.scorer.label} shares out its budget over heads by itself; use it alone"
            )
        rule = "with adakv, which keeps all generated tokens; leave it out"
        require_default(self.scorer, "evict_every", rule=rule, prefix="scorer.")

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
        counts = self._counts(m, best_BKn)
        kept_BK = [self._share_out(m, *of_row)[view.own_heads] for of_row in zip(*counts, strict=True)]
        tokens_BK = [tokens[view.own_heads] for tokens in counts[2]]
        return None if kept_BK == tokens_BK else first_slots(slots_BKn, kept_BK, tokens_BK)

    def _counts(self, budget: int, best_BKn: Tensor) -> list[list[list[int]]]:
        """Numbers (B, K) of tokens in this order: `best`, `certain`, `tokens` of `_share_out`. The host waits once.

        Args:
            best_BKn: scores in descending order; infinite ones are kept, those of padding are minus infinity.
        """
        num_heads, num_slots = best_BKn.shape[1:]
        is_certain_BKn = best_BKn.isposinf()
        certain_BK, tokens_BK = is_certain_BKn.sum(dim=-1), (~best_BKn.isneginf()).sum(dim=-1)
        total_B = tokens_BK.sum(dim=-1).clamp_max(budget * num_heads) - certain_BK.sum(dim=-1)
        compared_BX = best_BKn.masked_fill(is_certain_BKn, -math.inf).flatten(1)
        best_BX = compared_BX.sort(dim=-1, descending=True, stable=True).indices
        is_best_BX = torch.arange(best_BX.shape[1], device=best_BX.device) < total_B[:, None]
        best_BK = torch.zeros_like(tokens_BK).scatter_add_(1, best_BX // num_slots, is_best_BX.long())
        counts: list[list[list[int]]] = torch.stack([best_BK, certain_BK, tokens_BK]).tolist()
        return counts

    def _share_out(self, budget: int, best: Sequence[int], certain: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Number of tokens that each KV head of a row keeps: `budget` on average, if the row has so many.

        Args:
            best: number of the best scores of all heads that are those of each head, without `certain`.
            certain: number of infinite scores of each head.
            tokens: number of tokens of each head.
        """
        total = min(budget * len(tokens), sum(tokens)) - sum(certain)
        equal = equal_shares([num - sure for num, sure in zip(tokens, certain, strict=True)], total)
        wanted = [(1 - self.alpha) * count + self.alpha * each for count, each in zip(best, equal, strict=True)]
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
