"""What a retrieving policy is: all K,V stay, in host memory, and in every step it says which of them attention sees.

It has an index per layer, on the device, in which slots are found by a query. The query is the layer's own, or one that
the runtime predicts a layer ahead, so that what is chosen is fetched while that layer computes. Storage, prediction,
copies and statistics are the runtime's.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, n stored slots, m chosen ones, w observed tokens, C new tokens,
# H key dim.

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from policies.base import Budget, Policy, budget_tokens, check_budget
from policies.pool import Pool


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a policy may have to know of a model before it works on it.

    Attributes:
        fingerprint: of its weights.
        heads: KV heads and key dim (K, H) of every layer.
    """

    name: str
    fingerprint: str
    heads: list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class PromptView:
    """What an index is made of, behind a prompt. To be read only.

    Attributes:
        q_BNwH: queries of the prompt's last tokens, rotated to where decoding goes on, if rotations are known; 0 on
            padding.
        k_BKnH: keys of all slots, rotated.
        scaling: of the scores of this layer.
        pads: slots on the left of each row that are padding.
        next_B: position of the token behind the prompt, in each row.
        turn: (queries (B, X, C, H), positions (B, C)) -> the queries that many positions further on; None where
            rotations are not known.
        room: new slots for which an index may make room at once.
        stored: keys (B, K, n, H) of all slots, at any time later.
    """

    layer: int
    num_layers: int
    q_BNwH: Tensor
    k_BKnH: Tensor
    scaling: float
    pads: list[int]
    next_B: Tensor
    turn: Callable[[Tensor, Tensor], Tensor] | None
    room: int
    stored: Callable[[], Tensor]


FEW_TOKENS = 2048
"""Stored tokens below which it takes as long to find some as to read all of them, where they need not be fetched."""
DECODED_SOON = 256
"""Positions behind a prompt for whose queries an index is made; by as many observed queries are turned on."""


def positions_ahead(view: PromptView, count: int) -> Tensor:
    """So many positions (B, count), spread over those where decoding goes on."""
    ahead = torch.arange(count, device=view.next_B.device) * DECODED_SOON // count
    return view.next_B[:, None] + ahead


class Index(ABC):
    """What a device keeps of one layer's keys to find slots by."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Allocated on the device."""

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """That are in it."""

    @property
    def query_basis_BKHr(self) -> Tensor | None:  # noqa: N802
        """Columns that it takes queries in; where a projection has them in its weights, it is given those alone."""
        return None

    @abstractmethod
    def append(self, k_BKCH: Tensor) -> None:
        """New slots, behind the others."""

    @abstractmethod
    def keep(self, slots_BKm: Tensor, k_BKmH: Tensor) -> None:
        """Only these slots are left, ascending, with these keys."""

    @abstractmethod
    def overwrite(self, slots_BK: Tensor, k_BKH: Tensor) -> None:
        """A new token in a slot of every row and KV head."""

    @abstractmethod
    def fork(self, stored: Callable[[], Tensor]) -> Index:
        """One that goes on from here on its own; `stored` as in a `PromptView`."""


class NoIndex(Index):
    """Of a policy that looks at the stored keys themselves, or at none."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots

    @property
    def num_bytes(self) -> int:
        return 0

    @property
    def num_slots(self) -> int:
        return self._num_slots

    def append(self, k_BKCH: Tensor) -> None:
        self._num_slots += k_BKCH.shape[2]

    def keep(self, slots_BKm: Tensor, k_BKmH: Tensor) -> None:
        self._num_slots = slots_BKm.shape[2]

    def overwrite(self, slots_BK: Tensor, k_BKH: Tensor) -> None:
        pass

    def fork(self, stored: Callable[[], Tensor]) -> Index:
        return NoIndex(self.num_slots)


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The stored slots of a layer, of which some are to be chosen.

    Attributes:
        pads: slots on the left of each row that are padding.
        positions_BKn: of the slots' tokens, below 0 on padding; None where slots are in the order of positions.
        next_B: position of the token that is about to be computed, in each row; None where nothing depends on it.
    """

    num_slots: int
    pads: list[int]
    positions_BKn: Tensor | None
    next_B: Tensor | None

    def mark(self, need_BKn: Tensor, *, sinks: int, recent: int) -> None:
        """Let the first and the last tokens be needed beyond all others, and padding be needed least."""
        if self.positions_BKn is not None:
            assert self.next_B is not None
            always = (self.positions_BKn < sinks) | (self.positions_BKn >= self.next_B[:, None, None] - recent)
            need_BKn.masked_fill_(always, math.inf).masked_fill_(self.positions_BKn < 0, -math.inf)
            return
        if recent:
            need_BKn[..., -recent:] = math.inf
        if not any(self.pads):
            need_BKn[..., :sinks] = math.inf
            return
        for row, pad in enumerate(self.pads):
            need_BKn[row, :, pad : pad + sinks] = math.inf
            need_BKn[row, :, :pad] = -math.inf


@dataclass(kw_only=True)
class Retriever(Policy, ABC):
    """Chooses slots by how much they are needed.

    Attributes:
        first_layer: layers before it attend to everything.
        min_tokens: with fewer stored tokens all layers do. None is 2,048 where K,V lie in the memory that is computed
            from, so that finding some costs more than reading all; else 0.
        sinks: first tokens that are always chosen.
        recent: last tokens that are always chosen, beside the one that is computed.
        fetch: slots that are chosen of every KV head, those among them; a share is one of the stored slots. A fixed
            number needs no look at the scores by the host. None leaves it to the policy, if it can tell.
        pool: of K,V in host memory.
        sample_every: steps between two in which the report's hit mass is measured, which needs all keys; 0 is never.

    Raises:
        ValueError: an option that is out of range.
    """

    looks_ahead: ClassVar[bool | None] = False
    """Is a query predicted from the layer before, or the layer's own? None: predicted where K,V have to travel."""
    first_ahead: ClassVar[int] = 0
    """Layers before it choose by their own queries all the same."""
    asks: ClassVar[bool] = True
    """Does what it chooses depend on the query?"""
    observed: ClassVar[int] = 0
    """Of the prompt's last tokens, those whose queries an index is made of."""

    first_layer: int = 0
    min_tokens: int | None = None
    sinks: int = 4
    recent: int = 16
    fetch: Budget | None = None
    pool: Pool = field(default_factory=Pool)
    sample_every: int = 0

    def __post_init__(self) -> None:
        for name in ("first_layer", "min_tokens", "sinks", "recent", "sample_every"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"policy.{name}={getattr(self, name)} must not be negative")
        if self.fetch is not None:
            check_budget(self.fetch, "fetch")
        self.pool = Pool.of(self.pool)

    def require(self, model: ModelFacts) -> None:
        """Raise a ValueError for a model that it cannot work on."""

    def looks_ahead_on(self, device: torch.device) -> bool:
        """Are queries predicted where this device computes?"""
        return device.type != "cpu" if self.looks_ahead is None else self.looks_ahead

    @abstractmethod
    def index(self, view: PromptView) -> Index:
        """The index of a layer from `first_layer` on."""

    @abstractmethod
    def choose(self, index: Index, q_BNH: Tensor, slots: Slots) -> Tensor | None:
        """Slots (B, K, m) that are fetched for this query, in any order, none of them twice. None is all.

        The query is (B, N, H), or (B, N, r) in the index's own basis.
        A policy that does not ask gets queries of no meaning.

        Where a row has fewer tokens than m, the others are its last slots of padding.
        """

    def chosen_padding(self, slots: Slots, num_chosen: int) -> list[int]:
        """Of so many chosen slots, those that are padding, in each row: the same in all of its KV heads."""
        return [max(0, num_chosen - (slots.num_slots - pad)) for pad in slots.pads]

    def num_chosen(self, slots: Slots, wanted: int | None = None) -> int:
        """m where so many slots are wanted, by default `fetch`."""
        if wanted is None:
            assert self.fetch is not None
            wanted = budget_tokens(self.fetch, slots.num_slots)
        return min(slots.num_slots, max(wanted, self.sinks + self.recent, 1))


def most_needed(need_BKn: Tensor, num_chosen: int, slots: Slots) -> Tensor | None:
    """Slots (B, K, m) with the highest needs; of padding those nearest to the tokens. None where that is all."""
    if num_chosen == slots.num_slots:
        return None
    for row, pad in enumerate(slots.pads):
        if slots.num_slots - pad < num_chosen:  # equal needs would leave to chance which padding is taken
            need_BKn[row, :, :pad] = torch.arange(pad, device=need_BKn.device, dtype=need_BKn.dtype) - 1e30
    if need_BKn.device.type == "cpu":
        # numpy selects five times as fast as torch does on a CPU, and rows in order are gathered faster.
        first = slots.num_slots - num_chosen
        return torch.from_numpy(np.sort(np.argpartition(need_BKn.numpy(), first, axis=-1)[..., first:], axis=-1))
    return need_BKn.topk(num_chosen, dim=-1, sorted=False).indices


def relative_need(scores_BKGn: Tensor, slots: Slots) -> Tensor:
    """By how much a slot's score is below the largest of the same query, (B, K, n): of the group's heads the least.

    The scores are overwritten.
    """
    if slots.positions_BKn is not None:
        scores_BKGn.masked_fill_(slots.positions_BKn.lt(0).unsqueeze(2), -torch.inf)
    elif any(slots.pads):
        for row, pad in enumerate(slots.pads):
            scores_BKGn[row, :, :, :pad] = -torch.inf
    return scores_BKGn.sub_(scores_BKGn.amax(dim=-1, keepdim=True)).amax(dim=2)


def num_needed(need_BKn: Tensor, least: float) -> int:
    """Slots that are needed as much at least, of all KV heads together, in the row where they are most."""
    if need_BKn.device.type == "cpu":  # torch takes three times as long to count
        return max(int(np.count_nonzero(row_Kn.numpy() >= least)) for row_Kn in need_BKn)
    return int((need_BKn >= least).sum(dim=(1, 2)).max())
