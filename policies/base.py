"""What a cache policy is: it looks at what a layer has stored and returns the indices of the tokens to keep.

Storage, positions, padding, signals, copies and accounting are the runtime's. Slots hold tokens in the order of their
positions; padding is on the left of each row. A policy keeps equally many slots in every row and KV head, so that what
is kept is one dense tensor; a row with fewer tokens than that keeps some of its padding.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens, n stored slots, m kept slots, H key dim, V value dim.

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol, TypeVar

from torch import Tensor

from policies.reuse import ReusingPrompt as ReusingPrompt
from policies.reuse import Segment as Segment


class Phase(Enum):
    """What the newest tokens are: a prompt, or generated one at a time."""

    prefill = "prefill"
    decode = "decode"


class Signals(Protocol):
    """What the newest queries tell about the stored tokens. Computed when asked for, in O(block) memory."""

    def votes(self, num_queries: int, newest: float = 1.0) -> Tensor:
        """Attention probabilities (B, N, n), float32, averaged over the newest `num_queries` tokens' queries.

        Weights rise linearly from 1 for the oldest of them to `newest`. Queries that are padding have no say.
        """
        ...

    def received(self) -> Tensor:
        """Attention probabilities (B, N, n), float32, summed over the queries of all new tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class LayerView:
    """What a policy sees of one layer, behind the attention of new tokens to everything stored. To be read only.

    Attributes:
        layer, num_layers: which of how many.
        phase: of the new tokens.
        num_new: slots of the new tokens, which are the last ones.
        chunk_tokens: new tokens before any layer narrowed them.
        new_positions_BC: positions of the new tokens in their rows, below 0 on padding.
        prompt_tokens: length of the padded prompt so far; what budgets that are shares refer to.
        pads: slots on the left of each row that are padding.
        k_BKnH, v_BKnV: the stored keys, rotated as the new queries see them, and values.
        carried_BKn: for a policy that accumulates: what its `carry` gave for these slots, 0 for new ones.
        signals: of the new tokens' queries.
    """

    layer: int
    num_layers: int
    phase: Phase
    num_new: int
    chunk_tokens: int
    new_positions_BC: Tensor
    prompt_tokens: int
    pads: list[int]
    k_BKnH: Tensor
    v_BKnV: Tensor
    carried_BKn: Tensor | None
    signals: Signals

    @property
    def num_slots(self) -> int:
        return self.k_BKnH.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.k_BKnH.shape[1]

    def by_kv_head(self, x_BNn: Tensor) -> Tensor:
        """The mean (B, K, n) over the query heads that share a KV head."""
        return x_BNn.unflatten(1, (self.num_kv_heads, -1)).mean(dim=2)


class Policy:
    """A policy has options only; what belongs to a sequence is in the view."""

    narrows: ClassVar[bool] = False
    """Does `narrow` ever drop tokens?"""

    def layer_tokens(self, num_tokens: int, num_layers: int, before: Sequence[int]) -> list[int]:
        """Of a chunk of so many tokens, those that each layer computes: what ranks must know of each other's `narrow`.

        Args:
            before: slots of earlier chunks, per layer.

        Raises:
            ValueError: it depends on what the tokens are.
        """
        return [num_tokens] * num_layers

    def most_slots(self, num_layers: int, phase: Phase) -> int | None:
        """The most slots that `keep` leaves in any layer in this phase, however long the text. None: no such bound."""
        return None

    def carry(self, view: LayerView) -> Tensor | None:
        """New values (B, K, n) to carry along with the slots, if this policy accumulates."""
        return None

    def keep(self, view: LayerView) -> Tensor | None:
        """Slots to keep: (B, K, m), or (B, 1, m) for all KV heads alike, ascending. None keeps all of them."""
        return None

    def narrow(self, view: LayerView) -> Tensor | None:
        """Which of the new tokens deeper layers compute: (B, c), ascending, the last one among them. None: all.

        Deeper layers neither compute nor store anything of the others. Asked in the prefill only.
        """
        return None


E = TypeVar("E", bound=Enum)


def choice(option: str, kind: type[E], value: E | str) -> E:
    """The member that is meant, also by its name; else a ValueError that lists the names."""
    if isinstance(value, kind):
        return value
    if value not in kind.__members__:
        raise ValueError(f"policy.{option}={value} is not one of {', '.join(kind.__members__)}")
    return kind[str(value)]


Budget = int | float
"""Tokens if it is an integer, else a share of the prompt in (0, 1]."""


def check_budget(budget: Budget, option: str = "budget") -> None:
    """Raise a ValueError, which calls it policy.<option>, unless it is one."""
    is_number = isinstance(budget, int | float) and not isinstance(budget, bool)
    if not is_number or not (budget >= 1 if isinstance(budget, int) else 0 < budget <= 1):
        raise ValueError(
            f"policy.{option}={budget} must be a whole number of tokens of at least 1, or a share of the prompt in "
            "(0, 1]"
        )


def budget_tokens(budget: Budget, prompt_tokens: int) -> int:
    """Tokens, at least one."""
    return budget if isinstance(budget, int) else max(1, round(budget * prompt_tokens))


def best_slots(score_BKn: Tensor, num_kept: int, *, sinks: int, recent: int, pads: list[int]) -> Tensor:
    """Slots (B, K, num_kept), ascending: first tokens, last ones, then those with the highest scores; padding last."""
    score_BKn = score_BKn.clone()
    score_BKn[..., score_BKn.shape[-1] - recent :] = math.inf
    for row, pad in enumerate(pads):
        score_BKn[row, :, :pad] = -math.inf
        score_BKn[row, :, pad : pad + sinks] = math.inf
    # Stable, so that of equal scores (pooled ones) the earlier is kept, wherever padding has moved them.
    best_first = score_BKn.sort(dim=-1, descending=True, stable=True).indices
    return best_first[..., :num_kept].sort(dim=-1).values


@dataclass(kw_only=True)
class Scorer(Policy, ABC):
    """Keeps the sink tokens, the recent ones, and of the others those with the highest scores.

    Attributes:
        budget: slots per layer and KV head.
        sinks: first tokens that always stay (Xiao et al., StreamingLLM).
        recent: last tokens that always stay.
        evict_every: while decoding, tokens by which the store may outgrow the budget before it is cut back to it:
            cutting copies what is kept.

    Raises:
        ValueError: a budget that is none, negative counts, or no room for sinks and recent tokens in the budget.
    """

    budget: Budget = 1024
    sinks: int = 0
    recent: int = 0
    evict_every: int = 16

    def __post_init__(self) -> None:
        check_budget(self.budget)
        for name, least in (("sinks", 0), ("recent", 0), ("evict_every", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"policy.{name}={getattr(self, name)} must be at least {least}")
        if isinstance(self.budget, int) and self.sinks + self.recent > self.budget:
            raise ValueError(
                f"policy.budget={self.budget} has no room for policy.sinks={self.sinks} and "
                f"policy.recent={self.recent}; use at least {self.sinks + self.recent}"
            )

    @abstractmethod
    def score(self, view: LayerView) -> Tensor:
        """One score per slot, (B, K, n) or (B, 1, n); those of sinks, recent tokens and padding do not matter."""

    def slots(self, view: LayerView) -> int:
        """Slots to keep in this layer."""
        return self.slots_of(budget_tokens(self.budget, view.prompt_tokens), view.layer, view.num_layers)

    def slots_of(self, budget: int, layer: int, num_layers: int) -> int:
        """A layer's slots, with a budget of so many tokens."""
        return budget

    def most_slots(self, num_layers: int, phase: Phase) -> int | None:
        if not isinstance(self.budget, int):
            return None
        most = max(self.slots_of(self.budget, layer, num_layers) for layer in range(num_layers))
        return most + (self.evict_every - 1 if phase is Phase.decode else 0)

    def keep(self, view: LayerView) -> Tensor | None:
        n, m = view.num_slots, self.slots(view)
        patience = self.evict_every - 1 if view.phase is Phase.decode else 0
        if n <= m + patience:
            return None
        sinks = min(self.sinks, m)
        return best_slots(self.score(view).float(), m, sinks=sinks, recent=min(self.recent, m - sinks), pads=view.pads)
