"""EM-LLM (Fountas et al., ICLR 2025): InfLLM whose blocks are events, and neighbours of retrieved ones.

Events end where the text surprises the model, refined by the modularity of their keys (policies/events.py). The share
`contiguity` of what is retrieved is a queue: whenever events are retrieved by similarity, those just before and after
them enter it, or move to its end, and the oldest leave it when it is full (Sec. 3.4). Published code moves none to the
end, and sets neither refinement nor the queue in its configurations.

Generated tokens, whose surprise published code does not take either, are in blocks of `events.most` tokens.
"""

# Legend: b rows whose blocks end alike, k = 1 choice for all heads, P blocks.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from policies.block_index import BlocksOfRows
from policies.events import By, Events, Refine
from policies.infllm import Blocks, InfLLM
from policies.options import require
from policies.retriever import Choice, PromptView, Slots


class NeighbouringEvents(Blocks):
    """Index of events, with a queue of neighbours of those that were retrieved."""

    how: EMLLM

    def __init__(self, view: PromptView, how: EMLLM) -> None:
        super().__init__(view, how)
        self._steps = 0
        self._entered: Mapping[int, Tensor] = {}  # by row: when each block (b, k, P) entered the queue; 0 outside of it

    def choose(self, q_BNH: Tensor, slots: Slots) -> Choice | None:
        choice = super().choose(q_BNH, slots)
        if choice is None:
            self.need(q_BNH, slots)  # the queue is of all queries, also of those that see the whole text
        return choice

    def places(self, part: BlocksOfRows, score_bkP: Tensor, slots: Slots) -> Tensor:
        place_bkP = super().places(part, score_bkP, slots).double() / part.num_blocks
        row, sizes_bkP = part.rows.start or 0, torch.zeros_like(place_bkP, dtype=torch.int64) + part.sizes
        room = max(0, self.how.num_chosen(slots) - self.how.sinks - (self.num_slots - part.slots.stop))
        is_similar_bkP = _first_in(place_bkP, sizes_bkP, (1 - self.how.contiguity) * room)
        is_similar_bkP |= place_bkP == place_bkP.amax(dim=-1, keepdim=True)
        is_near_bkP = pad(is_similar_bkP[..., 1:], (0, 1)) | pad(is_similar_bkP[..., :-1], (1, 0))

        self._steps += 1
        before_bkP = self._entered.get(row, place_bkP[..., :0])
        entered_bkP = pad(before_bkP, (0, part.num_blocks - before_bkP.shape[-1]))
        entered_bkP = torch.where(is_near_bkP & ~is_similar_bkP, self._steps + place_bkP, entered_bkP)
        queued_bkP = entered_bkP.masked_fill(is_similar_bkP, 0)  # similar ones keep their places, and take no room
        is_kept_bkP = _first_in(queued_bkP, sizes_bkP * (queued_bkP > 0), self.how.contiguity * room) & (queued_bkP > 0)
        self._entered = {**self._entered, row: entered_bkP.where(is_similar_bkP | is_kept_bkP, 0)}
        rank_bkP = torch.where(is_kept_bkP, 1 + queued_bkP / (self._steps + 1), place_bkP + 2 * is_similar_bkP)
        return rank_bkP.argsort(dim=-1).argsort(dim=-1)


def _first_in(rank_bkP: Tensor, sizes_bkP: Tensor, room: float) -> Tensor:
    """Mask of the highest blocks that have room together, by their numbers of tokens."""
    order_bkP = rank_bkP.argsort(dim=-1, descending=True)
    is_in_bkP = sizes_bkP.gather(-1, order_bkP).cumsum(dim=-1) <= math.floor(room)
    return torch.empty_like(is_in_bkP).scatter_(-1, order_bkP, is_in_bkP)


@dataclass(kw_only=True)
class EMLLM(InfLLM, name="em_llm"):
    """Retrieve events and their neighbours, `fetch` slots in total, beside the first and the last tokens.

    Attributes:
        contiguity: share of what is retrieved that is of the queue of neighbours.

    Raises:
        ValueError: an option is out of range.
    """

    index_class = NeighbouringEvents

    events: Events = field(default_factory=lambda: Events(by=By.surprise, refine=Refine.modularity))
    contiguity: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.contiguity < 1, "contiguity", self.contiguity, "must be at least 0 and below 1")
