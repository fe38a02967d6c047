"""Attention of one new token per row to what a policy retrieves of all K,V before it."""

# Legend: B batch, N query heads, K kv heads, H head dim, V value dim.

from __future__ import annotations

import torch
from torch import Tensor

from runahead.attention.causal import CausalAttention
from runahead.attention.partial import AttentionTerms
from runahead.cache.kept import KeptCache
from runahead.retrieval.query_prediction import LayerInput


class RetrievingAttention(CausalAttention):
    """Attention of the token `start` of a left-padded batch, for one forward.

    Args:
        kept: the pool, with its retrieval; receives the new K,V.
        pads: left padding of every row.
    """

    def __init__(self, kept: KeptCache, *, start: int, pads: list[int]) -> None:
        assert kept.retrieval is not None
        self.kept, self.retrieval = kept, kept.retrieval
        self.start_of_input, self.pads_of_input = start, pads
        self._positions_B1 = torch.tensor([[start - pad] for pad in pads], device=kept.device)

    def see_input(self, layer: int, given: LayerInput) -> None:
        """Fetch for the next layer before this one computes."""
        self.retrieval.look_ahead(layer + 1, given)

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        start, pads = self.start_of_input, self.pads_of_input
        q_BNH, kept = q_BNCH[:, :, 0], self.kept.layers[layer]
        fetched = self.retrieval.fetched(layer, q_BNH, start, pads)
        if fetched is None:
            self.retrieval.store_token(layer, k_BKCH, v_BKCV, self._positions_B1)
            self.start, self.pads = kept.end - 1, kept.pads
            return self.attend_to_slab(kept.slab(), q_BNCH, terms)
        self.retrieval.sample_hits(layer, q_BNH, k_BKCH, fetched, terms.scaling)
        slab = fetched.slab(kept.shape.key_dim)
        self.start, self.pads = slab.end - 1, fetched.pads
        slab.write(self.start, k_BKCH, v_BKCV)
        self.retrieval.store_token(layer, k_BKCH, v_BKCV, self._positions_B1)
        return self.attend_to_slab(slab, q_BNCH, terms)
