"""Causal attention over K,V that a cache policy thins out: store, attend, then let the policy cut back."""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim.

from __future__ import annotations

from torch import Tensor

from runahead.attention.causal import CausalAttention
from runahead.attention.partial import AttentionTerms
from runahead.cache.kept import KeptCache
from runahead.cache.slot_positions import at_slots
from runahead.model.new_tokens import NewTokens
from runahead.thinning.steps import PolicySteps


class KeptAttention(CausalAttention):
    """Attention of the tokens [start, start + C) of a left-padded batch to what is kept of all before them.

    Args:
        kept: what is kept; receives the new K,V.
        steps: policies at work behind each layer.
    """

    def __init__(self, kept: KeptCache, steps: PolicySteps) -> None:
        self.kept, self.steps = kept, steps
        self.rotates = kept.reencodes

    @property
    def new_tokens(self) -> NewTokens:
        return self.steps.tokens

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        retrieval, num_new = self.kept.retrieval, q_BNCH.shape[2]
        kept = self.kept.layers[layer] if retrieval is None else retrieval.bring(layer)
        start = kept.end
        positions_BC = self.new_tokens.positions_BC(num_new, q_BNCH.device)
        kept.append(k_BKCH, v_BKCV, positions_BC, self.new_tokens.pads(num_new))
        # From here on positions are those of slots, which are in causal order.
        self.start, self.pads = start, kept.pads
        seen = kept.slab()
        if kept.rotary is not None:
            seen, q_BNCH = at_slots(kept.rotary, seen, q_BNCH, new=start, pads=kept.pads)
        out_BNCV = self.attend_to_slab(seen, q_BNCH, terms)
        self.steps.run(layer, kept, q_BNCH, terms, seen)
        if retrieval is not None:
            retrieval.settle(layer, room=self.steps.room)
        return out_BNCV
