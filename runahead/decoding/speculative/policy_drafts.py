"""Drafts by the model itself over what a cache policy keeps of the prompts' keys and values."""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim.

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from policies.base import Policy
from runahead.attention.base import LayerAttention
from runahead.attention.partial import AttentionTerms
from runahead.cache.base import KVStore
from runahead.cache.kept import NEW_ROOM, KeptCache, KeptLayer
from runahead.cache.kv_cache import SeenSlab, SlabRow
from runahead.cache.new_tokens import NewTokens
from runahead.cache.rows import RowsCache
from runahead.config import Positions
from runahead.decoding.decode import Row
from runahead.decoding.speculative.generated_drafts import GeneratedDrafter
from runahead.decoding.speculative.verification import RowForwards
from runahead.model.model import Model, PrefillEndsHere
from runahead.thinning.rank_policies import RankPolicies
from runahead.thinning.steps import PolicySteps

OBSERVED_TOKENS = 64
"""Last tokens of a prompt that are computed again: their queries tell the policies what to keep."""


class PolicyDrafter(GeneratedDrafter):
    """The model drafts for itself, over fewer keys and values, as TriForce does (arXiv:2404.11912).

    The policies choose once, by the prompt's last tokens; what they keep is copied. New tokens are added to it, as the
    drafting forwards compute them, and none is dropped.

    Args:
        forwards: of the model over whole caches, with the prompts stored.
    """

    def __init__(self, model: Model, policies: Sequence[Policy], rows: Sequence[Row], forwards: RowForwards) -> None:
        super().__init__(rows)
        self._model, self._policies, self._whole = model, list(policies), forwards

    @staticmethod
    def check(policies: RankPolicies) -> None:
        """Check that policies can choose what drafts are made of. Raises: ValueError."""
        why = None
        if policies.retriever is not None:
            why = "retrieves for each token, and from its index none can be taken back; use one that drops tokens"
        elif any(policy.narrows for policy in policies.last):
            why = "drops tokens between layers; use one that only drops from the cache"
        elif policies.deciding is not None or policies.merging is not None or policies.ragged:
            why = "decides on several layers or heads together, once the prompt is there; use another"
        elif policies.positions is Positions.reencoded:
            why = "re-encodes positions; use policy.positions=original and one that evicts"
        if why is not None:
            raise ValueError(f"a drafting policy {type(policies.last[-1]).__name__} {why}, such as snapkv")

    def _made(self) -> RowForwards:
        whole = self._whole
        kept = [self._kept(row, each.prompt) for row, each in zip(whole.rows, self._rows, strict=True)]
        longest = max(whole.stored)
        pads = [longest - stored for stored in whole.stored]
        return RowForwards(self._model, RowsCache(kept, pads), pads=pads, num_tokens=longest)

    def _kept(self, whole: KVStore, ids: Sequence[int]) -> KVStore:
        """Keys and values that the policies keep of a row with these tokens."""
        assert isinstance(whole, SlabRow), type(whole)
        model, start = self._model, max(0, len(ids) - OBSERVED_TOKENS)
        steps = PolicySteps(model, self._policies, NewTokens(start, [0]), prompt_tokens=len(ids), room=NEW_ROOM)
        choosing = _Choosing(model, whole, steps, len(ids))
        with suppress(PrefillEndsHere):
            ids_1C = torch.tensor([list(ids[start:])], device=model.device)
            model.forward(ids_1C, choosing, start=start, pads=[0], length=len(ids))
        return choosing.kept


class _Choosing(LayerAttention):
    """Attention of the last tokens of a row to what is stored of it, after which policies choose; nothing is stored.

    Attributes:
        kept: what they keep, in memory of its own once tokens are added.
    """

    def __init__(self, model: Model, whole: SlabRow, steps: PolicySteps, num_tokens: int) -> None:
        super().__init__(start=steps.tokens.start, pads=[0])
        self._whole, self._steps, self._num_tokens = whole, steps, num_tokens
        self.kept = KeptCache.empty(model.kv_shapes, batch=1, device=model.device)

    def see_ids(self, ids_BC: Tensor) -> None:
        self._steps.tokens.ids_BC = ids_BC

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        slab, end = self._whole.layers[layer].slab, self._num_tokens
        seen = SeenSlab.of(slab, q_BNCH, start=self.start, pads=[0])
        out_BNCV = seen.output(terms)
        positions_T = torch.arange(slab.first, end, dtype=torch.int32, device=q_BNCH.device)
        stored = KeptLayer(
            shape=self.kept.layers[layer].shape,
            slab_TBKX=slab.tokens(slab.first, end),
            positions_TBK=positions_T[:, None, None],
            pads=[0],
            num_slots=end - slab.first,
            first=slab.first,
        )
        self.kept.put(layer, self._steps.run(layer, stored, seen, terms))
        if layer == self.kept.num_layers - 1:
            raise PrefillEndsHere
        return out_BNCV
