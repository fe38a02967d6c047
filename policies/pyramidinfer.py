"""PyramidInfer (Yang et al., ACL Findings 2024, arXiv 2405.12532): deeper layers compute and keep fewer tokens.

What a layer needs of the context becomes less with depth, and recent tokens agree on what that is. So behind each layer
of the prefill the recent tokens vote by their attention, and the context tokens with the fewest votes are dropped: no
deeper layer computes their hidden states, keys or values. While decoding, every layer keeps as many tokens as it had
behind the prompt, chosen anew by the votes of the tokens that were recent then.
"""

# Legend: B batch, K kv heads, N chunk tokens, n stored tokens, R recent ones, i a layer of L.

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from policies.base import LayerView, Phase, Policy, best_slots, choice


class Schedule(Enum):
    """How the context shrinks with depth.

    `cosine` as the authors coded it. The others reach `mean_keep` by dropping a share h s(x) of the context; depth x
    goes from 0 to 1, and s(x) is x^2 (`power`: less at first, the paper's choice), x (`uniform`) or 1 - (1 - x)^2
    (`more` at first). Where that is all of the context, recent tokens and sinks are left.
    """

    cosine = "cosine"
    power = "power"
    uniform = "uniform"
    more = "more"


class Select(Enum):
    """How many tokens go on: as many as the schedule says, or those with a share `top_p` of the votes."""

    top_k = "top_k"
    top_p = "top_p"


@dataclass(kw_only=True)
class PyramidInfer(Policy):
    """Fewer tokens with every layer.

    Attributes:
        mean_keep: tokens kept, on average over layers, as a share of the chunk (not with `cosine`).
        recent_ratio: share of the chunk that votes, and stays in every layer.
        voters: at most so many of the recent tokens vote, the newest; null: all of them. Votes cost time.
        newest_weight: weight of the newest vote, the oldest one's being 1.
        sinks: first tokens of the prompt, which stay.
        min_tokens: no layer has fewer.
        cosine_start: r of the cosine schedule.
        top_p, decay: share of the votes to keep behind the first layer, and its factor from layer to layer.
        evict_every: as in `Scorer`.

    Raises:
        ValueError: a share outside its range, or a mean that leaves no room for the recent tokens.
    """

    schedule: Schedule = Schedule.power
    mean_keep: float = 0.6
    recent_ratio: float = 0.2
    voters: int | None = None
    newest_weight: float = 1.2
    sinks: int = 4
    min_tokens: int = 64
    cosine_start: float = 0.9
    select: Select = Select.top_k
    top_p: float = 0.95
    decay: float = 0.99
    evict_every: int = 16

    narrows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.schedule = choice("schedule", Schedule, self.schedule)
        self.select = choice("select", Select, self.select)
        for name in ("mean_keep", "recent_ratio", "cosine_start", "top_p", "decay"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ValueError(f"policy.{name}={value} must be a share in (0, 1]")
        for name, least in (("sinks", 0), ("min_tokens", 1), ("evict_every", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"policy.{name}={getattr(self, name)} must be at least {least}")
        if self.voters is not None and self.voters < 1:
            raise ValueError(f"policy.voters={self.voters} must be at least 1 token, or null for all recent ones")
        if not 0 < self.newest_weight < math.inf:
            raise ValueError(f"policy.newest_weight={self.newest_weight} must be above 0")
        if self.schedule is not Schedule.cosine and self.mean_keep <= self.recent_ratio:
            raise ValueError(
                f"policy.mean_keep={self.mean_keep} must be above policy.recent_ratio={self.recent_ratio}, which every "
                "layer keeps"
            )

    def layer_tokens(self, num_tokens: int, num_layers: int) -> list[int]:
        if self.select is Select.top_p:
            raise ValueError(
                "policy.select=top_p keeps as many tokens as the votes say, which other ranks cannot know ahead; "
                "use policy.select=top_k, or one rank"
            )
        return self.lengths(num_tokens, num_layers)

    def lengths(self, num_tokens: int, num_layers: int) -> list[int]:
        """Tokens that each layer computes of a chunk, with the schedule alone deciding."""
        recent = self.recent(num_tokens)
        context, least = num_tokens - recent, min(num_tokens, max(self.min_tokens, recent + self.sinks))
        if self.schedule is Schedule.cosine:
            r, lengths = self.cosine_start, [num_tokens]
            for i in range(num_layers - 1):
                rho = r + (1 - r) * (math.cos(math.pi * i / num_layers) + 1) / 2
                lengths.append(max(least, int((lengths[-1] - recent) * rho) + recent))
            return lengths
        shape = [_DROP[self.schedule](i / max(1, num_layers - 1)) for i in range(num_layers)]

        def dropping(h: float) -> list[int]:
            return [max(least, round(recent + context * max(0.0, 1 - h * drop))) for drop in shape]

        # The mean falls with h: the first layer keeps all, and with the largest h the others only what they must.
        low, high = 0.0, 4.0 * num_layers**2
        for _ in range(BISECTIONS):
            h = (low + high) / 2
            low, high = (h, high) if sum(dropping(h)) > self.mean_keep * num_tokens * num_layers else (low, h)
        return dropping(low)

    def recent(self, num_tokens: int) -> int:
        """Recent tokens of a chunk, the last one included."""
        return min(num_tokens, int(self.recent_ratio * num_tokens) + 1)

    def narrow(self, view: LayerView) -> Tensor | None:
        if view.layer == view.num_layers - 1:
            return None
        recent = self.recent(view.chunk_tokens)
        votes_BC = self._votes_Bn(view, recent)[:, -view.num_new :].clone()
        positions_BC = view.new_positions_BC
        votes_BC[positions_BC < 0] = -math.inf
        votes_BC[(positions_BC >= 0) & (positions_BC < self.sinks)] = math.inf
        votes_BC[:, -recent:] = math.inf
        best_first = votes_BC.sort(dim=-1, descending=True, stable=True)
        going_on = self.lengths(view.chunk_tokens, view.num_layers)[view.layer + 1]
        if self.select is Select.top_p:
            going_on = max(min(view.num_new, self.min_tokens), self._with_share(best_first.values, view.layer))
        if going_on >= view.num_new:
            return None
        return best_first.indices[:, :going_on].sort(dim=-1).values

    def carry(self, view: LayerView) -> Tensor | None:
        """Votes so far (B, K, n): in the prefill of the recent tokens, then of each new one, older ones fading."""
        recent = self.recent(view.prompt_tokens)
        votes_Bn = self._votes_Bn(view, recent if view.phase is Phase.prefill else view.num_new)
        fading = 1 - 1 / recent
        if view.carried_BKn is None:
            return votes_Bn[:, None].expand(-1, view.num_kv_heads, -1)
        return fading * view.carried_BKn + (1 - fading) * votes_Bn[:, None]

    def keep(self, view: LayerView) -> Tensor | None:
        """While decoding: as many tokens as the layer had behind the prompt."""
        if view.phase is Phase.prefill:
            return None
        m = self.lengths(view.prompt_tokens, view.num_layers)[view.layer]
        if view.num_slots < m + self.evict_every or view.carried_BKn is None:
            return None
        recent = self.recent(view.prompt_tokens)
        return best_slots(view.carried_BKn[:, :1], m, sinks=self.sinks, recent=recent, pads=view.pads)

    def _votes_Bn(self, view: LayerView, recent: int) -> Tensor:  # noqa: N802
        voters = recent if self.voters is None else min(recent, self.voters)
        return view.signals.votes(voters, self.newest_weight).mean(dim=1)

    def _with_share(self, best_first_BC: Tensor, layer: int) -> int:
        """Tokens that get the share of the votes of this layer: the most that any row needs."""
        certain_B = best_first_BC.isposinf().sum(dim=-1)
        votes_BC = best_first_BC.masked_fill(best_first_BC.isinf(), 0.0)
        share = self.top_p * self.decay**layer
        enough_BC = votes_BC.cumsum(dim=-1) >= share * votes_BC.sum(dim=-1, keepdim=True)
        needed_B = torch.maximum(certain_B, enough_BC.int().argmax(dim=-1) + 1)
        return int(needed_B.max())


_DROP = {
    Schedule.power: lambda x: x**2,
    Schedule.uniform: lambda x: x,
    Schedule.more: lambda x: 1 - (1 - x) ** 2,
}
BISECTIONS = 60
