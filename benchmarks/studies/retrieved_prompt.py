"""One prompt's K,V, computed once and then decoded from under many retrieving policies."""

# Legend: B batch, V vocabulary.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from policies.base import Policy
from policies.offload import Offload
from runahead import Model
from runahead.cache.attention import CausalAttention
from runahead.cache.kv_cache import KVCache
from runahead.conversation import Conversation
from runahead.thinning.rank_policies import RankPolicies

LAST_TOKENS = 512
"""Of the prompt, those that are computed again for every policy: their queries are what indices are made of."""


class RetrievedPrompt:
    """A prompt of one row, prefilled as far as no policy has a say."""

    def __init__(self, model: Model, ids: Sequence[int]) -> None:
        self.model, self.ids = model, list(ids)
        # A policy that keeps everything and chooses nothing, so that what follows can be under any other.
        self._start = Conversation(model, RankPolicies.everywhere([Offload()]))
        if len(ids) > LAST_TOKENS:
            self._start.feed(torch.tensor([self.ids[:-LAST_TOKENS]]), cut_back=False)

    def under(self, policy: Policy) -> Conversation:
        """A conversation behind the prompt, as if it had been under this policy from the start."""
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
    """The same prompt with the full cache as the engine decodes from it, with room for so many tokens.

    Args:
        conversation: behind the prompt, from which K,V are copied.
    """

    def __init__(self, conversation: Conversation, room: int) -> None:
        assert conversation.cache is not None
        model, self.num_tokens = conversation.model, conversation.num_tokens
        self.model = model
        end = self.num_tokens + room
        self._cache = KVCache(
            model.kv_shapes,
            batch=1,
            spans=[(0, end)] * model.num_layers,
            num_slabs=model.num_layers,
            device=model.device,
        )
        for layer, kept in enumerate(conversation.cache.layers):
            self._cache.layer(layer).tokens(0, self.num_tokens).copy_(kept.slab().slab_TBKX)

    @torch.inference_mode()
    def follow(self, ids_1C: Tensor) -> Tensor:
        """Logits (1, C, V) behind each token."""
        parts = []
        for ids_11 in ids_1C.split(1, dim=1):
            attention = CausalAttention(self._cache, start=self.num_tokens, pads=[0])
            parts.append(self.model.forward(ids_11, attention, start=self.num_tokens, pads=[0]))
            self.num_tokens += 1
        return torch.stack(parts, dim=1)
