"""Interface of a cache policy: it looks at what a layer has stored and returns the indices of the tokens to keep.

The runtime does the rest: storage, positions, padding, attention probabilities, copies and accounting. Slots hold
tokens in the order of their positions; padding is on the left of each row. A policy keeps the same number of slots in
every row and KV head, so that they form one dense tensor; a row with fewer tokens keeps some of its padding.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens, n stored slots, m kept slots, H key dim, V value dim.

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor

from policies.reuse import GivenPrompt as GivenPrompt
from policies.reuse import ReusingPrompt as ReusingPrompt
from policies.reuse import Segment as Segment
from policies.reuse import ids_of as ids_of


class Phase(Enum):
    """Phase of a forward pass: the new tokens are a prompt, or generated one at a time."""

    prefill = "prefill"
    decode = "decode"


class Signals(Protocol):
    """What the newest queries tell of the stored tokens, computed on demand in O(block) memory."""

    def votes(self, num_queries: int, newest: float = 1.0) -> Tensor:
        """Attention probabilities (B, N, n), float32, averaged over the newest `num_queries` tokens' queries.

        Weights rise linearly from 1 for the oldest of them to `newest`. Queries that are padding do not count.
        """
        ...

    def received(self) -> Tensor:
        """Attention probabilities (B, N, n), float32, summed over the queries of all new tokens."""
        ...

    def next_queries(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Mean (B, N, H) and covariance (B, N, H, H) of the queries at the next `num_positions` positions, as expected.

        Those of the queries since the layer was last cut back, before RoPE, turned by the mean of the rotations to
        these positions; in units in which a query and a key multiply to a score. In at least float32. Only for a
        policy with `queries_from`.
        """
        ...


def alone(x: Tensor) -> Tensor:
    """Mean of a tensor over the ranks that share the model, where a rank has all of it."""
    return x


@dataclass(frozen=True, kw_only=True)
class PromptPart:
    """The tokens of a prompt that one rank keeps, where each rank keeps those of its own chunk (decode=sharded).

    Attributes:
        chunk: indices of the tokens in the padded prompt.
        num_tokens: length of the padded prompt.
        row_pads: left padding of each row of the prompt.
    """

    chunk: range
    num_tokens: int
    row_pads: Sequence[int]

    @property
    def num_after(self) -> int:
        """Number of the prompt's tokens after this part."""
        return self.num_tokens - self.chunk.stop

    def share_of(self, number: int) -> int:
        """This part's share of a number of tokens, by its length; at least 1 if that is not 0.

        The shares of all parts add up to the number, but for those that would be 0.
        """
        start, stop = (number * end // self.num_tokens for end in (self.chunk.start, self.chunk.stop))
        return max(min(number, 1), stop - start)

    def sinks(self, num_sinks: int) -> list[int]:
        """Number of each row's first `num_sinks` tokens that are in this part."""
        start, stop = self.chunk.start, self.chunk.stop
        return [max(0, min(pad + num_sinks, stop) - max(pad, start)) for pad in self.row_pads]


@dataclass(frozen=True, kw_only=True)
class LayerView:
    """State of one layer after its new tokens have attended to everything stored. Read-only.

    Attributes:
        layer, num_layers: index of this layer, and number of layers.
        phase: phase of the new tokens.
        num_new: number of new tokens, which are in the last slots.
        chunk_tokens: number of new tokens before any layer narrowed them.
        new_positions_BC: positions of the new tokens in their rows, below 0 on padding.
        prompt_tokens: length of the padded prompt so far, which a budget that is a share refers to.
        pads: number of padding slots on the left of each row.
        k_BKnH, v_BKnV: stored keys, rotated as the new queries see them, and values.
        carried_BKn: for a policy that accumulates, what its `carry` returned for these slots; 0 for new ones.
        signals: attention probabilities of the new tokens' queries.
        mean_over_shares: mean of a tensor over the ranks that share the model; all of them call it alike.
        part: the tokens of the prompt that this rank keeps, if each rank keeps its own. `prompt_tokens` and all slots
            then are of this part, and probabilities still are shares of the attention to all tokens. A generated token
            is in the last slot of one rank, and has a query on all of them.

    Where ranks share the model, heads are those of this rank's share. What is chosen by KV head needs no others; what
    is chosen for all heads alike has to be the same on all ranks, and so takes `mean_over_heads`.
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
    mean_over_shares: Callable[[Tensor], Tensor] = alone
    part: PromptPart | None = None

    @property
    def num_slots(self) -> int:
        return self.k_BKnH.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.k_BKnH.shape[1]

    def sinks(self, num_sinks: int) -> list[int]:
        """Number of the first `num_sinks` tokens of each row that are stored here, in the first slots after padding."""
        return [num_sinks] * len(self.pads) if self.part is None else self.part.sinks(num_sinks)

    def is_token_Bn(self, after: Sequence[int] | None = None) -> Tensor:  # noqa: N802
        """Whether each slot (B, n) has a token, not padding; with `after` without so many first tokens of each row."""
        found_Bn = torch.ones(len(self.pads), self.num_slots, dtype=torch.bool, device=self.k_BKnH.device)
        for row, (pad, num_first) in enumerate(zip(self.pads, after or [0] * len(self.pads), strict=True)):
            found_Bn[row, : pad + num_first] = False
        return found_Bn

    def mean_over_heads(self, x_BNn: Tensor) -> Tensor:
        """Mean (B, n) over all query heads of the model, those of other ranks that share it included."""
        return self.mean_over_shares(x_BNn.mean(dim=1))

    def by_kv_head(self, x_BNn: Tensor) -> Tensor:
        """Mean (B, K, n) over the query heads that share a KV head."""
        return x_BNn.unflatten(1, (self.num_kv_heads, -1)).mean(dim=2)


class Policy:
    """Base of all policies. A policy holds its options only; the state of a sequence is in the `LayerView`."""

    narrows: ClassVar[bool] = False
    """Whether `narrow` may drop tokens."""

    compares_by_kv_head: ClassVar[bool] = False
    """Whether what is kept or fetched for a KV head depends on all query heads that share it."""

    @property
    def queries_from(self) -> int | None:
        """First position in a row whose query counts in `Signals.next_queries`; None: the policy does not ask."""
        return None

    def of_part(self, part: PromptPart) -> Self:
        """The policy for a rank that keeps a part of a prompt alone: every number of tokens is its share of it."""
        return self

    def layer_tokens(self, num_tokens: int, num_layers: int, before: Sequence[int]) -> list[int]:
        """Number of tokens of a chunk that each layer computes; ranks have to know it of each other's chunks.

        Args:
            num_tokens: length of the chunk.
            num_layers: number of layers.
            before: slots of earlier chunks, per layer.

        Raises:
            ValueError: the number depends on the content of the tokens.
        """
        return [num_tokens] * num_layers

    def most_slots(self, num_layers: int, phase: Phase) -> int | None:
        """Upper bound of the slots that `keep` leaves in any layer for a text of any length. None: no bound."""
        return None

    def carry(self, view: LayerView) -> Tensor | None:
        """Values (B, K, n) that the runtime carries along with the slots, for a policy that accumulates."""
        return None

    def keep(self, view: LayerView) -> Tensor | None:
        """Slots to keep (B, K, m), or (B, 1, m) for all KV heads alike, ascending. None keeps all slots."""
        return None

    def narrow(self, view: LayerView) -> Tensor | None:
        """New tokens that deeper layers compute: indices (B, c), ascending, including the last token. None: all.

        Deeper layers neither compute nor store the others. Called during prefill only.
        """
        return None


E = TypeVar("E", bound=Enum)


def require(rule_holds: bool, option: str, value: object, rule: str) -> None:
    """Raise a ValueError with policy.<option>, its value and the rule, unless the rule holds."""
    if not rule_holds:
        raise ValueError(f"policy.{option}={value} {rule}")


def require_least(options: object, **least: int) -> None:
    """Raise a ValueError for the first of these options that is below its least value."""
    for name, value in least.items():
        require(getattr(options, name) >= value, name, getattr(options, name), f"must be at least {value}")


def choice(option: str, kind: type[E], value: E | str) -> E:
    """Member of `kind` that `value` is or names. Raises: ValueError that lists the names."""
    if isinstance(value, kind):
        return value
    require(value in kind.__members__, option, value, f"is not one of {', '.join(kind.__members__)}")
    return kind[str(value)]


Budget = int | float
"""Number of tokens if it is an integer, else a share of the prompt in (0, 1]."""


def check_budget(budget: Budget, option: str = "budget") -> None:
    """Check a budget. Raises: ValueError that names policy.<option>."""
    is_number = isinstance(budget, int | float) and not isinstance(budget, bool)
    rule_holds = is_number and (budget >= 1 if isinstance(budget, int) else 0 < budget <= 1)
    rule = "must be a whole number of tokens of at least 1, or a share of the prompt in (0, 1]"
    require(rule_holds, option, budget, rule)


def budget_tokens(budget: Budget, prompt_tokens: int) -> int:
    """A budget as a number of tokens, at least 1."""
    return budget if isinstance(budget, int) else max(1, round(budget * prompt_tokens))


def best_slots(score_BKn: Tensor, num_kept: int, *, sinks: Sequence[int], recent: int, pads: list[int]) -> Tensor:
    """Slots (B, K, num_kept) to keep, ascending: sinks, recent tokens, then the highest scores; padding last.

    Args:
        sinks: number of sink tokens of each row.
    """
    score_BKn = score_BKn.clone()
    score_BKn[..., score_BKn.shape[-1] - recent :] = math.inf
    for row, (pad, num_sinks) in enumerate(zip(pads, sinks, strict=True)):
        score_BKn[row, :, :pad] = -math.inf
        score_BKn[row, :, pad : pad + num_sinks] = math.inf
    # A stable sort keeps the earlier of two equal (pooled) scores, wherever padding has moved them.
    best_first = score_BKn.sort(dim=-1, descending=True, stable=True).indices
    return best_first[..., :num_kept].sort(dim=-1).values


@dataclass(kw_only=True)
class Scorer(Policy, ABC):
    """Base of policies that keep sink tokens, recent tokens, and of the others those with the highest scores.

    Attributes:
        budget: tokens to keep per layer and KV head: a number, or a share of the prompt.
        sinks: first tokens that always stay (Xiao et al., StreamingLLM).
        recent: last tokens that always stay.
        evict_every: while decoding, number of tokens by which a layer may exceed the budget before it is cut back,
            since cutting back copies what is kept.

    Raises:
        ValueError: an invalid budget, a negative number, or a budget without room for sinks and recent tokens.
    """

    budget: Budget = 1024
    sinks: int = 0
    recent: int = 0
    evict_every: int = 16

    def __post_init__(self) -> None:
        check_budget(self.budget)
        require_least(self, sinks=0, recent=0, evict_every=1)
        if isinstance(self.budget, int) and self.sinks + self.recent > self.budget:
            raise ValueError(
                f"policy.budget={self.budget} has no room for policy.sinks={self.sinks} and "
                f"policy.recent={self.recent}; use at least {self.sinks + self.recent}"
            )

    @abstractmethod
    def score(self, view: LayerView) -> Tensor:
        """Score of each slot, (B, K, n) or (B, 1, n); the scores of sinks, recent tokens and padding do not matter."""

    def of_part(self, part: PromptPart) -> Self:
        other = copy(self)  # not checked again: a share may be too small for what the whole has to hold
        if isinstance(self.budget, int):
            other.budget = part.share_of(self.budget)
        other.recent, other.evict_every = part.share_of(self.recent), part.share_of(self.evict_every)
        return other

    def recent_of(self, num_kept: int) -> int:
        """Number of last tokens that always stay, of so many slots."""
        return self.recent

    def slots(self, view: LayerView) -> int:
        """Number of slots to keep in this layer."""
        return self.slots_of(budget_tokens(self.budget, view.prompt_tokens), view.layer, view.num_layers)

    def slots_of(self, budget: int, layer: int, num_layers: int) -> int:
        """Number of slots to keep in a layer, for a budget in tokens."""
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
        sinks = [min(num, m) for num in view.sinks(self.sinks)]
        recent = min(self.recent_of(m), m - max(sinks))
        return best_slots(self.score(view).float(), m, sinks=sinks, recent=recent, pads=view.pads)
