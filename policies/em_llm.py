"""EM-LLM (Fountas et al., ICLR 2025): InfLLM whose blocks are events, and neighbours of retrieved ones.

Events end where the text surprises the model, refined by the modularity of their keys (policies/events.py). The share
`contiguity` of what is retrieved is a queue: whenever events are retrieved by similarity, those just before and after
them enter it, or move to its end, and the oldest leave it when it is full (Sec. 3.4). Published code moves none to the
end, and sets neither refinement nor the queue in its configurations.

Generated tokens, whose surprise published code does not take either, are in blocks of `events.most` tokens.
"""

# Legend: P blocks. b are rows whose blocks end alike.

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from policies.base import require
from policies.block_index import BlocksOfRows
from policies.events import By, Events, Refine
from policies.infllm import Blocks, InfLLM
from policies.retriever import PromptView, Slots


class NeighbouringEvents(Blocks):
    """Index of events, with a queue of neighbours of those that were retrieved.

    Args:
        view: the layer after the prompt.
        how: the policy.
        contiguity: share of the retrieved tokens that are of the queue.
    """

    def __init__(self, view: PromptView, how: InfLLM, contiguity: float) -> None:
        self._contiguity, self._steps = contiguity, 0
        self._entered: dict[int, Tensor] = {}  # by row: when each block (b, P) entered the queue; 0 outside of it
        super().__init__(view, how)

    def fork(self, stored: Callable[[], Tensor]) -> Self:
        other = super().fork(stored)
        other._entered = copy.copy(self._entered)
        return other

    def needs(self, q_BNH: Tensor, slots: Slots, num_chosen: int) -> Tensor:
        self._steps += 1
        return super().needs(q_BNH, slots, num_chosen)

    def places(self, part: BlocksOfRows, score_bP: Tensor, num_chosen: int) -> Tensor:
        place_bP = super().places(part, score_bP, num_chosen)
        row, num_blocks, sizes_P = part.rows.start or 0, part.num_blocks, self.sizes(part)
        room = max(0, num_chosen - (self.num_slots - part.begin - (part.num_slots - part.first)))
        before_bP = self._entered.get(row, score_bP.new_zeros(len(score_bP), 0, dtype=torch.float64))
        entered_bP = functional.pad(before_bP, (0, num_blocks - before_bP.shape[1]))
        is_similar_bP = _first_in(place_bP, sizes_P, (1 - self._contiguity) * room)
        is_similar_bP |= place_bP == num_blocks - 1
        near_bP = functional.pad(is_similar_bP[:, 1:], (0, 1)) | functional.pad(is_similar_bP[:, :-1], (1, 0))
        now_bP = self._steps + place_bP.double() / num_blocks
        entered_bP = torch.where(near_bP & ~is_similar_bP, now_bP, entered_bP)
        is_queued_bP = (entered_bP > 0) & ~is_similar_bP
        order_bP = torch.where(is_queued_bP, entered_bP, -1.0).argsort(dim=-1, stable=True).argsort(dim=-1)
        queued_P = torch.where(is_queued_bP, sizes_P, 0)
        is_kept_bP = is_queued_bP & _first_in(order_bP, queued_P, self._contiguity * room)
        self._entered[row] = torch.where(is_queued_bP & ~is_kept_bP, 0.0, entered_bP)
        rank_bP = torch.where(is_similar_bP, place_bP + 2 * num_blocks, place_bP)
        rank_bP = torch.where(is_kept_bP, order_bP + num_blocks, rank_bP)
        return rank_bP.argsort(dim=-1).argsort(dim=-1)


def _first_in(place_bP: Tensor, sizes_bP: Tensor, room: float) -> Tensor:
    """Mask of the best blocks that have room together, by their whole numbers of tokens."""
    order_bP = place_bP.argsort(dim=-1, descending=True)
    ends_bP = sizes_bP.expand(place_bP.shape).gather(1, order_bP).cumsum(dim=-1)
    return torch.empty_like(ends_bP, dtype=torch.bool).scatter_(1, order_bP, ends_bP <= math.floor(room))


@dataclass(kw_only=True)
class EMLLM(InfLLM, name="em_llm"):
    """Retrieve events and their neighbours, `fetch` slots in total, beside the first and the last tokens.

    Attributes:
        contiguity: share of what is retrieved that is of the queue of neighbours.

    Raises:
        ValueError: an option is out of range.
    """

    events: Events = field(default_factory=lambda: EMLLM._default_events())
    contiguity: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.contiguity < 1, "contiguity", self.contiguity, "must be at least 0 and below 1")

    @staticmethod
    def _default_events() -> Events:
        return Events(by=By.surprise, refine=Refine.modularity)

    def index(self, view: PromptView) -> NeighbouringEvents:
        return NeighbouringEvents(view, self, self.contiguity)
