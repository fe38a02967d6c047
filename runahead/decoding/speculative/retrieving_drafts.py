"""Drafts by the model itself, which for each token retrieves a part of the verified keys and values.

Drafted tokens are in the index only once they were verified. Until then their keys and values are in the memory of the
tokens that verify them, which overwrite them, and all of them are attended to. So a rejected token leaves no trace.
"""

# Legend: C new tokens.

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from policies.retriever import Retriever
from runahead.attention.partial import AttentionTerms
from runahead.attention.states import States
from runahead.cache.base import KVStore, SeenKV
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import RowId
from runahead.decoding.speculative.drafts import Drafter
from runahead.decoding.speculative.lead import ALONE, Lead
from runahead.decoding.speculative.observed import as_kept, observe, slabs_of
from runahead.decoding.speculative.own_drafts import OwnDrafter
from runahead.model.model import Model
from runahead.retrieval.cache import RetrievedCache
from runahead.retrieval.retrieval import Retrieval, num_observed


class RetrievingDrafter(OwnDrafter):
    """The model drafts for itself over what a policy retrieves for each token, from the very cache that verifies.

    Each draft begins from the states that verified tokens have left.

    Args:
        policy: the policy.
        whole: as of `OwnDrafter`.
    """

    def __init__(
        self, model: Model, policy: Retriever, whole: Lanes, first: Drafter | None = None, lead: Lead = ALONE
    ) -> None:
        super().__init__(model, whole, first, lead)
        self._policy = policy
        self._drafting: dict[RowId, RetrievedCache] = {}

    @property
    def num_bytes(self) -> int:
        """The memory of the keys and values is that of the prompts' cache."""
        not_own = 0 if self._lanes is None else self._lanes.num_bytes - self._lanes.state_bytes
        return super().num_bytes - not_own + sum(row.retrieval.num_bytes for row in self._drafting.values())

    @property
    def tokens_to_begin(self) -> float:
        return num_observed(self._policy) * len(self._rows) + super().tokens_to_begin

    def _made(self, texts: Mapping[RowId, Sequence[int]]) -> Lanes:
        for row, text in texts.items():
            cache, num_last = self._whole.lane(row).cache, max(1, num_observed(self._policy))
            start, states = self._observed(row, slabs_of(cache), len(text), num_last)
            self._drafting[row] = over_whole(self._model, self._policy, cache, text, start, states)
            self._drafting[row].states = self._states_of(row)
        return Lanes.of_rows(self._model, self._drafting, {row: len(text) for row, text in texts.items()})

    def _to_feed(self, row: RowId, text: Sequence[int]) -> Sequence[int]:
        lane = self._whole.lane(row)
        num_verified = lane.num_tokens
        assert self._lanes is not None
        assert num_verified + len(lane.again) == len(text) - 1, (num_verified, lane.again, len(text))
        self._lanes.set_stored(row, num_verified, lane.cache.states)
        self._drafting[row].retrieval.grow(num_verified)
        return text[num_verified:]


def over_whole(
    model: Model, policy: Retriever, whole: KVStore, ids: Sequence[int], start: int, states: States | None = None
) -> RetrievedCache:
    """KV cache of one row for drafts, in the memory of the row that verifies them.

    Args:
        whole: keys and values of the row.
        ids: its tokens that are stored.
        start, states: as of `observe`.
    """
    slabs = slabs_of(whole)
    pool = [as_kept(model, slabs, layer, len(ids), has_room=True) for layer in range(whole.num_layers)]
    retrieval = Retrieval(policy, model, pool, batch=1)
    positions_1C = torch.arange(start, len(ids), device=model.device)[None]
    room = slabs.by_layer[0].end - len(ids)

    def index(layer: int, seen: SeenKV, terms: AttentionTerms) -> None:
        if retrieval.in_pool[layer]:
            retrieval.store_prompt(layer, seen.q_BNCH, positions_1C, terms, room=room, was_cut=False)

    observe(model, slabs, ids, start, index, states)
    return RetrievedCache(retrieval, of_drafts=True)
