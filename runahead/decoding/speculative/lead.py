"""The rank whose clock and drafts count, where several ranks decode the same rows and verify the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from runahead.decoding.row import RowId
from runahead.kv_transfer.gathering import Gathering
from runahead.model.model import Model

NO_TOKEN = -1
"""Fills up the drafts of a message to the same length."""


@dataclass(frozen=True, kw_only=True)
class Lead:
    """The rank that decides. All ranks that decode the rows make the same calls.

    Attributes:
        leads: whether this rank does.
        tell: numbers (int64) that this rank has found -> those of the rank that leads, of the same shape; None: this
            rank decodes alone.
    """

    leads: bool = True
    tell: Callable[[Tensor], Tensor] | None = None

    def number(self, own: int) -> int:
        """The number that the leading rank has found."""
        return own if self.tell is None else int(self.tell(torch.tensor([int(own)])))

    def drafts(self, own: Mapping[RowId, list[int]], most: Mapping[RowId, int]) -> dict[RowId, list[int]]:
        """The drafts of the leading rank.

        Args:
            own: this rank's, of the same rows.
            most: most tokens of each.
        """
        if self.tell is None:
            return dict(own)
        longest = max(most.values())
        filled = [[*draft, *[NO_TOKEN] * (longest - len(draft))] for draft in own.values()]
        told = self.tell(torch.tensor(filled)).tolist()
        return {row: [token for token in draft if token != NO_TOKEN] for row, draft in zip(own, told, strict=True)}


ALONE = Lead()


def lead_among(model: Model, gather: Gathering | None = None) -> Lead:
    """The lead among ranks that share a model, and among those that each store a part of the text.

    Args:
        gather: between the latter, of whom the last one chooses the tokens, and so leads.
    """
    leads = model.shard_number == 0 and (gather is None or gather.is_last)
    if model.num_shards == 1 and gather is None:
        return ALONE

    def tell(own: Tensor) -> Tensor:
        told = model.of_first_share(own)
        if gather is None:
            return told
        gather.await_device()
        told = gather(told.to(model.device), "what is drafted")[-1].cpu()
        gather.await_device()
        return told

    return Lead(leads=leads, tell=tell)
