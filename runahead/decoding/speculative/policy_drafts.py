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
from runahead.cache.slabs import Slabs
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import RowId
from runahead.decoding.speculative.drafts import Drafter
from runahead.decoding.speculative.generated_drafts import GeneratedDrafter
from runahead.decoding.speculative.lead import ALONE, Lead
from runahead.decoding.speculative.observed import as_kept, first_observed, observe, slabs_of
from runahead.model.model import Model
from runahead.thinning.steps import PolicySteps

OBSERVED_TOKENS = 64
"""Last tokens of a prompt that are computed again: their queries tell the policies what to keep."""


class PolicyDrafter(GeneratedDrafter):
    """The model drafts for itself, over fewer keys and values, as TriForce does (arXiv:2404.11912).

    The policies choose once, by the prompt's last tokens; what they keep is copied. New tokens are added to it, as the
    drafting forwards compute them, and none is dropped.

    Args:
        whole: the memory of the verifying model, with the prompts stored.
    """

    runs_on_all = True

    def __init__(
        self,
        model: Model,
        policies: Sequence[Policy],
        whole: Lanes,
        first: Drafter | None = None,
        lead: Lead = ALONE,
    ) -> None:
        super().__init__(first, lead)
        self._model, self._policies, self._whole = model, list(policies), whole

    @property
    def tokens_to_begin(self) -> float:
        return OBSERVED_TOKENS * len(self._rows) + super().tokens_to_begin

    def _made(self, texts: Mapping[RowId, Sequence[int]]) -> Lanes:
        kept = {row: self._kept(slabs_of(self._whole.lane(row).cache), text) for row, text in texts.items()}
        return Lanes.of_rows(self._model, kept, {row: len(text) for row, text in texts.items()})

    def _kept(self, whole: Slabs, ids: Sequence[int]) -> KVStore:
        """Keys and values that the policies keep of a row with these tokens."""
        model = self._model
        tokens = NewTokens(first_observed(model, whole, len(ids), OBSERVED_TOKENS), [0])
        tokens.ids_BC = sent(torch.tensor([list(ids[tokens.start :])]), model.device)
        steps = PolicySteps(model, self._policies, tokens, prompt_tokens=len(ids), room=NEW_ROOM)
        kept = KeptCache.empty(model.kv_shapes, batch=1, device=model.device)

        def cut_back(layer: int, seen: SeenKV, terms: AttentionTerms) -> None:
            kept.put(layer, steps.run(layer, as_kept(model, whole, layer, len(ids)), seen, terms))

        observe(model, whole, ids, tokens.start, cut_back)
        return kept
