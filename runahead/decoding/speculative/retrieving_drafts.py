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
from runahead.cache.base import KVStore, SeenKV
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import RowId
from runahead.decoding.speculative.drafts import Drafter
from runahead.decoding.speculative.generated_drafts import GeneratedDrafter
from runahead.decoding.speculative.lead import ALONE, Lead
from runahead.decoding.speculative.observed import as_kept, first_observed, observe, slabs_of
from runahead.model.model import Model
from runahead.retrieval.cache import RetrievedCache
from runahead.retrieval.retrieval import Retrieval, num_observed


class RetrievingDrafter(GeneratedDrafter):
    """The model drafts for itself over what a policy retrieves for each token, from the very cache that verifies.

    Args:
        policy: the policy.
        whole: the memory of the verifying model, with the prompts stored.
    """

    runs_on_all = True

    def __init__(
        self, model: Model, policy: Retriever, whole: Lanes, first: Drafter | None = None, lead: Lead = ALONE
    ) -> None:
        super().__init__(first, lead)
        self._model, self._policy, self._whole = model, policy, whole
        self._drafting: dict[RowId, RetrievedCache] = {}

    @property
    def num_bytes(self) -> int:
        own = sum(row.retrieval.num_bytes for row in self._drafting.values())
        return own + (0 if self._first is None else self._first.num_bytes)

    @property
    def tokens_to_begin(self) -> float:
        return num_observed(self._policy) * len(self._rows) + super().tokens_to_begin

    def _made(self, texts: Mapping[RowId, Sequence[int]]) -> Lanes:
        for row, text in texts.items():
            self._drafting[row] = over_whole(self._model, self._policy, self._whole.lane(row).cache, text)
        return Lanes.of_rows(self._model, self._drafting, {row: len(text) for row, text in texts.items()})

    def _to_feed(self, row: RowId, text: Sequence[int]) -> Sequence[int]:
        num_verified = self._whole.lane(row).num_tokens
        assert self._lanes is not None and num_verified == len(text) - 1, (num_verified, len(text))
        self._lanes.set_stored(row, num_verified)
        self._drafting[row].retrieval.grow(num_verified)
        return text[-1:]


def over_whole(model: Model, policy: Retriever, whole: KVStore, ids: Sequence[int]) -> RetrievedCache:
    """KV cache of one row for drafts, in the memory of the row that verifies them.

    Args:
        whole: keys and values of the row.
        ids: its tokens that are stored.
    """
    slabs = slabs_of(whole)
    pool = [as_kept(model, slabs, layer, len(ids), has_room=True) for layer in range(whole.num_layers)]
    retrieval = Retrieval(policy, model, pool, batch=1)
    start = first_observed(model, slabs, len(ids), max(1, num_observed(policy)))
    positions_1C = torch.arange(start, len(ids), device=model.device)[None]
    room = slabs.by_layer[0].end - len(ids)

    def index(layer: int, seen: SeenKV, terms: AttentionTerms) -> None:
        if retrieval.in_pool[layer]:
            retrieval.store_prompt(layer, seen.q_BNCH, positions_1C, terms, room=room, was_cut=False)

    observe(model, slabs, ids, start, index)
    return RetrievedCache(retrieval, of_drafts=True)
