"""PyramidInfer (Yang et al., ACL Findings 2024, arXiv 2405.12532): deeper layers compute and keep fewer tokens.

Deeper layers need less of the context, and recent tokens agree on which part. So after each layer of the prefill the
recent tokens vote by their attention, and the context tokens with the fewest votes are dropped: deeper layers do not
compute their hidden states, keys or values. While decoding, every layer keeps as many tokens as it had after the
prompt, chosen by votes that are updated with every new token.

With a budget every layer l has a fixed length N_l, whatever the length of the text. No tokens are dropped while a layer
has fewer; then every chunk is narrowed, and each layer is cut back to the N_l tokens with the most votes so far.

Where it differs from the paper, and the paper from its code: the tokens that go on are those with the most votes,
`mean_keep` of them on average over layers, by `schedule=power` (paper: top-p of the votes, `select=top_p`, with p
falling by a factor per layer above a least number; code: a cosine schedule that compounds, `schedule=cosine`). The
newest 128 of the recent 20% vote (paper: all recent tokens, 40% of the input, `voters=null recent_ratio=0.4`; code:
20%). Votes are the same weighted mean of the attention to the context, newer queries weighing more (1.0 to 1.2),
without the whole attention matrix. As in the code a layer has at least 64 tokens (`min_tokens`), and the first 4 stay
(`sinks`). While decoding tokens are chosen anew every `evict_every` tokens, by votes that fade with each new token
(paper: in a sliding window). Padding is dropped before votes (code: it counts). On several ranks every rank narrows its
own chunk by the votes of its own last tokens. How to choose the schedule and the recent ratio is measured in
docs/studies/pyramid_relations.md.
"""

# Legend: B batch, K kv heads, N chunk tokens, n stored tokens, R recent ones, i a layer of L.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import ClassVar, Self

import torch
from torch import Tensor

from policies.base import Policy
from policies.kept_slots import best_slots, kept_by_row
from policies.layer_view import LayerView, Phase, PromptPart
from policies.options import Budget, choice, require, require_default, require_least


class KeepSchedule(Enum):
    """Schedule by which the context shrinks with depth.

    `cosine` is the authors' code. The others reach `mean_keep` by dropping a share h s(x) of the context; depth x
    goes from 0 to 1, and s(x) is x^2 (`power`: less at first, the paper's choice), x (`uniform`) or 1 - (1 - x)^2
    (`more` at first). If that is all of the context, recent tokens and sinks are left.
    """

    cosine = "cosine"
    power = "power"
    uniform = "uniform"
    more = "more"


class Select(Enum):
    """Rule for the number of tokens that go on to the next layer: the schedule, or a share `top_p` of the votes."""

    top_k = "top_k"
    top_p = "top_p"


@dataclass(kw_only=True)
class PyramidInfer(Policy, name="pyramidinfer"):
    """Compute and keep fewer tokens with every layer.

    Attributes:
        schedule: shape in which the context shrinks with depth.
        mean_keep: share of the chunk that is kept, on average over layers (not with schedule=cosine).
        budget: number of tokens kept, on average over layers, whatever the length of the text: the N_l are the lengths
            that the schedule gives to a text of budget / mean_keep tokens. None: only shares count.
        recent_ratio: share of the chunk that votes and stays in every layer.
        voters: largest number of recent tokens that vote, the newest ones; None: all of them. Votes of 20% of a long
            prompt cost as much time as narrowing saves.
        newest_weight: weight of the newest vote; the oldest has weight 1.
        sinks: first tokens of the prompt, which always stay.
        min_tokens: smallest number of tokens of a layer.
        cosine_start: r of the cosine schedule.
        select: whether the schedule (top_k) or the votes (top_p) decide how many tokens go on.
        top_p: share of the votes to keep after the first layer, for select=top_p.
        decay: factor of top_p from layer to layer.
        evict_every: while decoding, number of tokens by which a layer may exceed its length before it is cut back.

    Raises:
        ValueError: a share is outside its range, or the mean leaves no room for the recent tokens.
    """

    schedule: KeepSchedule = KeepSchedule.power
    mean_keep: float = 0.6
    budget: Budget | None = None
    recent_ratio: float = 0.2
    voters: int | None = 128
    newest_weight: float = 1.2
    sinks: int = 4
    min_tokens: int = 64
    cosine_start: float = 0.9
    select: Select = Select.top_k
    top_p: float = 0.95
    decay: float = 0.99
    evict_every: int = 16

    narrows: ClassVar[bool] = True
    chooses_alike: ClassVar[bool] = True
    votes_over_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.schedule = choice("schedule", KeepSchedule, self.schedule)
        self.select = choice("select", Select, self.select)
        for name in ("mean_keep", "recent_ratio", "cosine_start", "top_p", "decay"):
            require(0 < getattr(self, name) <= 1, name, getattr(self, name), "must be a share in (0, 1]")
        require_least(self, sinks=0, min_tokens=1, evict_every=1)
        if self.budget is not None:
            is_whole = isinstance(self.budget, int) and not isinstance(self.budget, bool)
            rule = "must be a whole number of tokens for pyramidinfer; shares of the prompt are policy.mean_keep"
            require(is_whole, "budget", self.budget, rule)
            require(self.budget >= 1, "budget", self.budget, "must be at least 1 token")
        if self.voters is not None:
            require(self.voters >= 1, "voters", self.voters, "must be at least 1 token, or null for all recent ones")
        require(0 < self.newest_weight < math.inf, "newest_weight", self.newest_weight, "must be above 0")
        rule = "without policy.select=top_p; leave it out"
        require_default(self, "top_p", "decay", given=self.select is not Select.top_p, rule=rule)
        is_cosine = self.schedule is KeepSchedule.cosine
        rule = "with policy.schedule=cosine, whose shape is policy.cosine_start; leave it out"
        require_default(self, "mean_keep", given=is_cosine, rule=rule)
        rule = "without policy.schedule=cosine; leave it out"
        require_default(self, "cosine_start", given=not is_cosine, rule=rule)
        if not is_cosine:
            rule = f"must be above policy.recent_ratio={self.recent_ratio}, which every layer keeps"
            require(self.mean_keep > self.recent_ratio, "mean_keep", self.mean_keep, rule)

    def of_part(self, part: PromptPart) -> Self:
        budget = None if self.budget is None else part.share_of(int(self.budget))
        floor, evict_every = part.share_of(self.min_tokens), part.share_of(self.evict_every)
        return replace(self, budget=budget, min_tokens=floor, evict_every=evict_every)

    def layer_tokens(self, num_tokens: int, num_layers: int, before: Sequence[int]) -> list[int]:
        if self.select is Select.top_p:
            raise ValueError(
                "policy.select=top_p keeps as many tokens as the votes say, which other ranks cannot know ahead; "
                "use policy.select=top_k, or one rank"
            )
        left = [num_tokens]
        for layer in range(num_layers - 1):
            left.append(min(left[-1], self._going_on(layer, num_layers, num_tokens, left[-1], before[layer])))
        return left

    def lengths(self, num_tokens: int, num_layers: int) -> list[int]:
        """Number of tokens of a chunk that each layer computes by the schedule alone."""
        recent = self.recent(num_tokens)
        least = min(num_tokens, max(self.min_tokens, recent + self.sinks))
        return list(_lengths(self.schedule, self.mean_keep, self.cosine_start, recent, least, num_tokens, num_layers))

    def fixed_lengths(self, num_layers: int) -> list[int] | None:
        """N_l of every layer, or None without a budget."""
        if self.budget is None:
            return None
        mean_keep = self.mean_keep
        if self.schedule is KeepSchedule.cosine:  # whose mean follows from its shape
            mean_keep = sum(self.lengths(LONG_TEXT, num_layers)) / (LONG_TEXT * num_layers)
        return self.lengths(round(self.budget / mean_keep), num_layers)

    def recent(self, num_tokens: int) -> int:
        """Number of recent tokens of a chunk, including the last one."""
        return min(num_tokens, int(self.recent_ratio * num_tokens) + 1)

    def narrow(self, view: LayerView) -> Tensor | None:
        if view.layer == view.num_layers - 1:
            return None
        recent = self.recent(view.chunk_tokens)
        # New tokens are in the same slots of all heads, whatever these have kept of those before.
        votes_BC = view.mean_over_heads(self._votes(view, recent))[:, -view.num_new :].clone()
        positions_BC = view.new_positions_BC
        votes_BC.masked_fill_(positions_BC < 0, -math.inf)
        votes_BC.masked_fill_((positions_BC >= 0) & (positions_BC < self.sinks), math.inf)
        votes_BC[:, -recent:] = math.inf
        best_first = votes_BC.sort(dim=-1, descending=True, stable=True)
        share = None
        if self.select is Select.top_p:
            share = max(min(view.num_new, self.min_tokens), self._with_share(best_first.values, view.layer))
        before = view.num_slots - view.num_new
        going_on = self._going_on(view.layer, view.num_layers, view.chunk_tokens, view.num_new, before, share)
        if going_on >= view.num_new:
            return None
        return best_first.indices[:, :going_on].sort(dim=-1).values

    def _going_on(
        self, layer: int, num_layers: int, chunk_tokens: int, num_new: int, before: int, share: int | None = None
    ) -> int:
        """Number of tokens that the next layer computes.

        Args:
            layer, num_layers: index of this layer, and number of layers.
            chunk_tokens: length of the chunk.
            num_new: number of its tokens that this layer computes.
            before: slots of earlier chunks in this layer.
            share: number of tokens by the votes; None: by the schedule.
        """
        share = self.lengths(chunk_tokens, num_layers)[layer + 1] if share is None else share
        fixed = self.fixed_lengths(num_layers)
        room = 0 if fixed is None else fixed[layer + 1] - before
        return max(share, min(num_new, room))

    def _kept(self, view: LayerView) -> tuple[int, int]:
        """Number of tokens that a layer keeps, and number of recent ones among them."""
        fixed = self.fixed_lengths(view.num_layers)
        lengths = self.lengths(view.prompt_tokens, view.num_layers) if fixed is None else fixed
        return lengths[view.layer], self.recent(lengths[0])

    def most_slots(self, num_layers: int, phase: Phase) -> int | None:
        fixed = self.fixed_lengths(num_layers)
        if fixed is None:
            return None
        return max(fixed) + phase.spare(self.evict_every)

    def carry(self, view: LayerView) -> Tensor | None:
        """Votes so far (B, K, n): of the recent tokens during prefill, then of each new token; older votes decay."""
        _, recent = self._kept(view)
        votes_BKn = view.over_heads(self._votes(view, recent if view.phase is Phase.prefill else view.num_new))
        fading = (1 - 1 / recent) ** view.chunk_tokens
        if view.carried_BKn is None:
            return votes_BKn.expand(-1, view.num_kv_heads, -1)
        return fading * view.carried_BKn + (1 - fading) * votes_BKn

    def keep(self, view: LayerView) -> Tensor | None:
        """Keep N_l tokens with a budget; else, while decoding, as many as the layer had after the prompt."""
        if view.phase is Phase.prefill and self.budget is None:
            return None
        kept_B, (_, recent) = self.tokens_after(view), self._kept(view)
        if kept_B is None or view.carried_BKn is None:
            return None
        sinks = view.sinks(self.sinks)
        votes_BKn = view.carried_BKn[:, :1] if view.alike else view.carried_BKn
        return best_slots(votes_BKn, kept_B, view, sinks=sinks, recent=recent)

    def tokens_after(self, view: LayerView) -> list[int] | None:
        m, _ = self._kept(view)
        return kept_by_row(view, m, m + view.phase.spare(self.evict_every))

    def _votes(self, view: LayerView, recent: int) -> Tensor:
        """Votes (B, N, n) of the last `recent` queries, or of fewer."""
        return view.signals.votes(recent if self.voters is None else min(recent, self.voters), self.newest_weight)

    def _with_share(self, best_first_BC: Tensor, layer: int) -> int:
        """Number of tokens that have this layer's share of the votes; the maximum over rows."""
        certain_B = best_first_BC.isposinf().sum(dim=-1)
        votes_BC = best_first_BC.masked_fill(best_first_BC.isinf(), 0.0)
        share = self.top_p * self.decay**layer
        enough_BC = votes_BC.cumsum(dim=-1) >= share * votes_BC.sum(dim=-1, keepdim=True)
        needed_B = torch.maximum(certain_B, enough_BC.int().argmax(dim=-1) + 1)
        return int(needed_B.max())


@lru_cache(maxsize=256)  # called in every layer of every step
def _lengths(
    schedule: KeepSchedule,
    mean_keep: float,
    cosine_start: float,
    recent: int,
    least: int,
    num_tokens: int,
    num_layers: int,
) -> tuple[int, ...]:
    """Number of tokens per layer; `recent` of them always stay, and at least `least` are kept."""
    if schedule is KeepSchedule.cosine:
        r, lengths = cosine_start, [num_tokens]
        for i in range(num_layers - 1):
            rho = r + (1 - r) * (math.cos(math.pi * i / num_layers) + 1) / 2
            lengths.append(max(least, int((lengths[-1] - recent) * rho) + recent))
        return tuple(lengths)
    context = num_tokens - recent
    shape = [_DROP[schedule](i / max(1, num_layers - 1)) for i in range(num_layers)]

    def dropping(h: float) -> tuple[int, ...]:
        return tuple(max(least, round(recent + context * max(0.0, 1 - h * drop))) for drop in shape)

    # The mean falls with h: the first layer keeps all tokens, and with the largest h the others keep the minimum.
    low, high = 0.0, 4.0 * num_layers**2
    for _ in range(BISECTIONS):
        h = (low + high) / 2
        low, high = (h, high) if sum(dropping(h)) > mean_keep * num_tokens * num_layers else (low, h)
    return dropping(low)


_DROP = {
    KeepSchedule.power: lambda x: x**2,
    KeepSchedule.uniform: lambda x: x,
    KeepSchedule.more: lambda x: 1 - (1 - x) ** 2,
}
BISECTIONS = 60
LONG_TEXT = 100_000
"""Length of a text for which rounding of shares is negligible."""
