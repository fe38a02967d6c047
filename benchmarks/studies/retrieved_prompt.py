"""KV cache of one prompt, computed once and decoded from under many retrieving policies."""

# Legend: B batch, V vocabulary.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from policies.base import Policy
from policies.offload import Offload
from runahead import Model
from runahead.cache.attention import CausalAttention
from runahead.cache.kept import KeptLayer
from runahead.cache.kv_cache import KVCache
from runahead.conversation import Conversation
from runahead.thinning.rank_policies import RankPolicies

LAST_TOKENS = 512
"""Number of last prompt tokens that are computed again for every policy; indices are made of their queries."""


class RetrievedPrompt:
    """A prompt of one row, prefilled up to the tokens that depend on the policy."""

    def __init__(self, model: Model, ids: Sequence[int]) -> None:
        self.model, self.ids = model, list(ids)
        # This policy keeps everything and selects nothing, so that decoding can continue under any other.
        self._start = Conversation(model, RankPolicies.everywhere([Offload()]))
        if len(ids) > LAST_TOKENS:
            self._start.feed(torch.tensor([self.ids[:-LAST_TOKENS]]), cut_back=False)

    def under(self, policy: Policy) -> Conversation:
        """A conversation after the prompt, as if it had been under this policy from the start."""
        conversation = Conversation(self.model, RankPolicies.everywhere([policy]))
        if len(self.ids) > LAST_TOKENS:
            shared = self._start.fork()
            assert shared.cache is not None
            conversation.pads, conversation.rows, conversation.num_tokens = shared.pads, shared.rows, shared.num_tokens
            fresh = RankPolicies.everywhere([policy]).cache(self.model, batch=1)
            fresh.layers = shared.cache.layers
            conversation.cache = fresh
        conversation.feed(torch.tensor([self.ids[-LAST_TOKENS:]]))
        return conversation


class FullCache:
    """The full KV cache, as the engine decodes from it.

    Args:
        num_tokens: tokens per row, whose keys and values the caller stores.
        room: further tokens that can be decoded.
    """

    def __init__(self, model: Model, *, num_tokens: int, batch: int, room: int) -> None:
        self.model, self.num_tokens, self.pads = model, num_tokens, [0] * batch
        spans = [(0, num_tokens + room)] * model.num_layers
        self.cache = KVCache(model.kv_shapes, batch=batch, spans=spans, num_slabs=model.num_layers, device=model.device)

    @classmethod
    def of(cls, conversation: Conversation, room: int) -> FullCache:
        """A copy of a conversation's keys and values."""
        assert conversation.cache is not None
        full = cls(conversation.model, num_tokens=conversation.num_tokens, batch=1, room=room)
        for layer, kept in enumerate(conversation.cache.layers):
            full.store(layer, kept)
        return full

    def store(self, layer: int, kept: KeptLayer) -> None:
        """Copy a layer's keys and values."""
        self.cache.layer(layer).tokens(0, self.num_tokens).copy_(kept.slab().slab_TBKX)

    @torch.inference_mode()
    def step(self, ids_B1: Tensor) -> Tensor:
        """Logits (B, V) after one token per row."""
        start = self.num_tokens
        self.num_tokens += 1
        attention = CausalAttention(self.cache, start=start, pads=self.pads)
        return self.model.forward(ids_B1, attention, start=start, pads=self.pads)

    def follow(self, ids_BC: Tensor) -> Tensor:
        """Logits (B, C, V) after each token."""
        return torch.stack([self.step(ids_B1) for ids_B1 in ids_BC.split(1, dim=1)], dim=1)
