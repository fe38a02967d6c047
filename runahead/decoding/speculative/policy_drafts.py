"""Drafts by the model itself over what a cache policy keeps of the prompts' keys and values."""

# Legend: B batch, C new tokens.

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from policies.base import Policy
from policies.row_values import sent
from runahead.attention.partial import AttentionTerms
from runahead.cache.base import KVStore, SeenKV
from runahead.cache.kept import NEW_ROOM
from runahead.cache.kept_cache import KeptCache
from runahead.cache.new_tokens import NewTokens
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import RowId
from runahead.decoding.speculative.drafts import Drafter
from runahead.decoding.speculative.lead import ALONE, Lead
from runahead.decoding.speculative.observed import as_kept, observe, slabs_of
from runahead.decoding.speculative.own_drafts import OBSERVED_TOKENS, OwnDrafter
from runahead.model.model import Model
from runahead.thinning.steps import PolicySteps


class PolicyDrafter(OwnDrafter):
    """The model drafts for itself, over fewer keys and values, as TriForce does (arXiv:2404.11912).

    The policies choose once, by the last tokens of the text; what they keep is copied, with the states. New tokens are
    added to it, as the drafting forwards compute them, and none is dropped.

    Args:
        whole: as of `OwnDrafter`.
    """

    def __init__(
        self,
        model: Model,
        policies: Sequence[Policy],
        whole: Lanes,
        first: Drafter | None = None,
        lead: Lead = ALONE,
    ) -> None:
        super().__init__(model, whole, first, lead)
        self._policies = list(policies)

    @property
    def tokens_to_begin(self) -> float:
        return OBSERVED_TOKENS * len(self._rows) + super().tokens_to_begin

    def _made(self, texts: Mapping[RowId, Sequence[int]]) -> Lanes:
        kept = {row: self._kept(row, text) for row, text in texts.items()}
        return Lanes.of_rows(self._model, kept, {row: len(text) for row, text in texts.items()})

    def _kept(self, row: RowId, ids: Sequence[int]) -> KVStore:
        """Keys and values that the policies keep of a row with these tokens."""
        model, whole = self._model, slabs_of(self._whole.lane(row).cache)
        start, states = self._observed(row, whole, len(ids), OBSERVED_TOKENS)
        tokens = NewTokens(start, [0])
        tokens.ids_BC = sent(torch.tensor([list(ids[start:])]), model.device)
        steps = PolicySteps(model, self._policies, tokens, prompt_tokens=len(ids), room=NEW_ROOM)
        kept = KeptCache.empty(model.kv_shapes, batch=1, device=model.device)

        def cut_back(layer: int, seen: SeenKV, terms: AttentionTerms) -> None:
            kept.put(layer, steps.run(layer, as_kept(model, whole, layer, len(ids)), seen, terms))

        observe(model, whole, ids, start, cut_back, states)
        kept.states = self._states_of(row)
        return kept
