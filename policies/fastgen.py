"""FastGen (Ge et al., ICLR 2024, arXiv 2310.01801): each head keeps what the cheapest rule that suits it keeps.

After the prompt each KV head gets the cheapest of five rules, each of which keeps what the one before it keeps, and
more: special tokens; punctuation; the tokens that receive most attention; the last tokens; all. The cheapest that
recovers a given share of the attention of the prompt's last queries is taken. Generated tokens are all kept.

There is no budget but `recovered`. `frequent` and `local` are 30% of the prompt each as published. A KV head needs the
rule that suits the worst of its query heads; the paper has no such groups. Published profiles count all queries of the
prompt and let the last tokens move along with them. The first `sinks` tokens count as special, since some models have
no special token there. Punctuation is what has only ASCII marks. Which tokens these are, a rank knows of its own chunk
alone; on several ranks those of earlier chunks are kept as any other, and what is recovered holds all the same.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, n stored slots, m kept slots of the longest head.

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from policies.base import Policy, marked_slots
from policies.layer_view import LayerView, PromptPart, TokenKind
from policies.options import Budget, budget_tokens, check_budget, require, require_least


@dataclass(kw_only=True)
class FastGen(Policy, name="fastgen"):
    """Keep in each KV head what the cheapest rule keeps that recovers `recovered` of every query head's attention.

    Attributes:
        recovered: share of the attention that a rule has to recover, on average over the queries that count.
        window: number of last queries of the prompt that count.
        sinks: first tokens that count as special.
        frequent: tokens with most attention: a number, or a share of the prompt.
        local: last tokens: a number, or a share of the prompt.
    """

    keeps_ragged: ClassVar[bool] = True
    while_decoding: ClassVar[bool] = False
    carries_generated: ClassVar[bool] = True
    compares_by_kv_head: ClassVar[bool] = True
    needs_token_kinds: ClassVar[bool] = True

    recovered: float = 0.95
    window: int = 64
    sinks: int = 4
    frequent: Budget = 0.3
    local: Budget = 0.3

    def __post_init__(self) -> None:
        is_share = 0 <= self.recovered <= 1
        require(is_share, "recovered", self.recovered, "must be a share of the attention in [0, 1]")
        require_least(self, window=1, sinks=0)
        check_budget(self.frequent, "frequent")
        check_budget(self.local, "local")

    def of_part(self, part: PromptPart) -> Self:
        other = copy(self)
        other.window = part.share_of(self.window)
        other.frequent, other.local = part.budget_of(self.frequent), part.budget_of(self.local)
        return other

    def carry(self, view: LayerView) -> Tensor:
        """The kind of every token."""
        assert view.new_kinds_BC is not None, "needs_token_kinds"
        return view.with_new(view.new_kinds_BC[:, None].expand(-1, view.num_kv_heads, -1).to(torch.int8))

    def keep(self, view: LayerView) -> Tensor | None:
        votes_BKGn = view.signals.votes(self.window).unflatten(1, (view.num_kv_heads, -1))
        is_token_BKn = view.is_token_BKn().expand(-1, view.num_kv_heads, -1)
        stays_BKn = is_token_BKn
        # What goes to tokens of other ranks is neither recovered nor lost here.
        here_BKG = votes_BKGn.sum(dim=-1) if view.part is not None else 1
        for kept_BKn in reversed(self.rules(view, votes_BKGn.mean(dim=2))):
            lost_BKG = (votes_BKGn * ~kept_BKn[:, :, None]).sum(dim=-1)
            recovers_BK1 = (lost_BKG <= (1 - self.recovered) * here_BKG).all(dim=-1, keepdim=True)
            stays_BKn = torch.where(recovers_BK1, kept_BKn & is_token_BKn, stays_BKn)
        return None if torch.equal(stays_BKn, is_token_BKn) else marked_slots(stays_BKn)

    def rules(self, view: LayerView, votes_BKn: Tensor) -> list[Tensor]:
        """Slots that each rule but the last keeps (B, K, n), the cheapest rule first; the newest token is among them.

        Args:
            votes_BKn: attention that each token receives in a KV head.
        """
        assert view.carried_BKn is not None
        is_first_BKn = ~view.is_token_BKn(after=view.sinks(self.sinks))  # and padding
        special_BKn = is_first_BKn | (view.carried_BKn == TokenKind.special.value)
        special_BKn[..., -1] = True
        punctuation_BKn = special_BKn | (view.carried_BKn == TokenKind.punctuation.value)
        others_BKn = votes_BKn.masked_fill(punctuation_BKn, -1.0)
        best_BKf = others_BKn.sort(dim=-1, descending=True, stable=True).indices
        number = budget_tokens(self.frequent, view.prompt_tokens)
        frequent_BKn = punctuation_BKn.scatter(-1, best_BKf[..., :number], True)
        local_BKn = frequent_BKn.clone()
        local_BKn[..., -budget_tokens(self.local, view.prompt_tokens) :] = True
        return [special_BKn, punctuation_BKn, frequent_BKn, local_BKn]
