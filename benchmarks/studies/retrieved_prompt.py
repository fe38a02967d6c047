"""KV cache of one prompt, computed once and decoded from under many retrieving policies; bytes of a decoding step."""

# Legend: B batch, V vocabulary.

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import torch
from torch import Tensor

from policies.base import Policy
from policies.exact_topk import ExactTopK
from policies.layer_view import Phase
from policies.offload import Offload
from runahead import Model
from runahead.cache.attention import CausalAttention
from runahead.cache.base import KVStore
from runahead.cache.kept import KeptLayer
from runahead.cache.kept_cache import KeptCache
from runahead.cache.kv_cache import KVCache
from runahead.cache.new_tokens import NewTokens
from runahead.config import CacheOptions
from runahead.conversation import Conversation
from runahead.retrieval.cache import RetrievedCache
from runahead.thinning.rank_policies import RankPolicies

LAST_TOKENS = 512
"""Number of last prompt tokens that are computed again for every policy; indices are made of their queries."""
NUM_CENTRES = 256
"""Number of computed tokens around which the keys and values of a filled prompt are drawn."""


class RetrievedPrompt:
    """A prompt of one row, prefilled up to the tokens that depend on the policy."""

    def __init__(self, model: Model, ids: Sequence[int]) -> None:
        self.model, self.ids = model, list(ids)
        # This policy keeps everything and selects nothing, so that decoding can continue under any other.
        self._start = Conversation(model, RankPolicies.everywhere([Offload()]))
        if len(ids) > LAST_TOKENS:
            self._start.feed(torch.tensor([self.ids[:-LAST_TOKENS]]), cut_back=False)

    @classmethod
    def filled(cls, model: Model, ids: Sequence[int]) -> RetrievedPrompt:
        """A prompt whose keys and values, but for the last `LAST_TOKENS` tokens, are drawn: for timing, in seconds.

        Keys are drawn around the keys of a few tokens that the model did compute, so that they form clusters.
        """
        prompt = cls(model, ids[:LAST_TOKENS])
        prompt.ids, start = list(ids), prompt._start
        num_drawn = len(ids) - LAST_TOKENS
        start.feed(torch.tensor([prompt.ids[: min(NUM_CENTRES, num_drawn)]]), cut_back=False)
        assert start.cache is not None
        num_new, random = num_drawn - start.num_tokens, torch.Generator().manual_seed(0)
        tokens = NewTokens(start.num_tokens, start.pads)
        for layer in start.cache.layers:
            like_BKSX = layer.kv_BKnX()[:, :, torch.randint(layer.num_slots, (num_new,), generator=random)]
            kv_BKSX = like_BKSX + 0.5 * like_BKSX.std() * torch.randn(like_BKSX.shape, generator=random)
            layer.append(kv_BKSX[..., : layer.shape.key_dim], kv_BKSX[..., layer.shape.key_dim :], tokens)
        start.rows, start.num_tokens = [prompt.ids[:num_drawn]], num_drawn
        return prompt

    def under(self, policy: Policy, storage: CacheOptions | None = None) -> Conversation:
        """A conversation after the prompt, as if it had been under this policy from the start."""
        policies = RankPolicies.everywhere([policy], storage=storage)
        if len(self.ids) > LAST_TOKENS:
            conversation = under_policies(self._start.fork(), policies)
        else:
            conversation = Conversation(self.model, policies)
        conversation.feed(torch.tensor([self.ids[-LAST_TOKENS:]]))
        return conversation


def under_policies(start: Conversation, policies: RankPolicies) -> Conversation:
    """A conversation under other policies that has the layers of `start` and goes on from there."""
    assert start.cache is not None
    conversation = Conversation(start.model, policies)
    conversation.pads, conversation.rows, conversation.num_tokens = start.pads, start.rows, start.num_tokens
    conversation.long_rows = start.long_rows
    conversation.cache = policies.cache(start.model, batch=1)
    conversation.cache.layers[:] = start.cache.layers  # in place: indices find slots in the same list
    return conversation


class Decoding:
    """Decoding of given tokens from a KV cache, as the engine does it.

    Args:
        cache: holds `num_tokens` tokens of each of `batch` rows.
    """

    def __init__(self, model: Model, cache: KVStore, *, num_tokens: int, batch: int) -> None:
        self.model, self.cache, self.num_tokens, self.pads = model, cache, num_tokens, [0] * batch

    @torch.inference_mode()
    def step(self, ids_B1: Tensor) -> Tensor:
        """Logits (B, V) after one token per row."""
        start = self.num_tokens
        self.num_tokens += 1
        attention = CausalAttention(self.cache, start=start, pads=self.pads, phase=Phase.decode)
        return self.model.forward(ids_B1, attention, start=start, pads=self.pads)


class FullCache(Decoding):
    """Decoding from the full KV cache.

    Args:
        num_tokens: tokens per row, whose keys and values the caller stores.
        room: further tokens that can be decoded.
    """

    cache: KVCache

    def __init__(self, model: Model, *, num_tokens: int, batch: int, room: int) -> None:
        super().__init__(model, model.empty_cache(num_tokens + room, batch=batch), num_tokens=num_tokens, batch=batch)

    @classmethod
    def copy_of(cls, conversation: Conversation, room: int) -> FullCache:
        """A copy of a conversation's keys and values."""
        assert conversation.cache is not None
        full = cls(conversation.model, num_tokens=conversation.num_tokens, batch=1, room=room)
        for layer, kept in enumerate(conversation.cache.layers):
            full.store(layer, kept)
        return full

    def store(self, layer: int, kept: KeptLayer) -> None:
        """Copy a layer's keys and values."""
        self.cache.layer(layer).tokens(0, self.num_tokens).copy_(kept.slab().slab_TBKX)


def fetched_share(cache: KeptCache | None) -> float:
    """Fetched share of tokens, a mean over all layers; layers that attend to everything count as 1."""
    assert isinstance(cache, RetrievedCache)
    return mean(1.0 if share is None else share for share in cache.retrieval.report().fetched_share)


def kv_bytes(model: Model, batch: int) -> int:
    """KV cache bytes of one token in every row, over all layers."""
    return sum(shape.bytes_per_token(batch) for shape in model.kv_shapes)


def weight_bytes(model: Model) -> int:
    """Bytes of all matrices that a token is multiplied with; an embedding tied to the output counts once."""
    parameters = {parameter.data_ptr(): parameter.nbytes for parameter in model.module.parameters()}
    embedding = model.module.get_input_embeddings().weight
    tied = embedding.data_ptr() == model.module.get_output_embeddings().weight.data_ptr()
    return sum(parameters.values()) - (0 if tied else embedding.nbytes)


def full_bytes(model: Model, num_tokens: int, batch: int = 1) -> int:
    """Bytes that one step reads with the full cache."""
    return weight_bytes(model) + num_tokens * kv_bytes(model, batch)


def retrieved_bytes(model: Model, cache: KeptCache | None) -> tuple[int, int]:
    """Bytes that one step needs under a retrieving policy: in the device's memory, and from the host to it.

    A layer that attends to everything counts in full.
    """
    assert isinstance(cache, RetrievedCache)
    retrieval, device, link = cache.retrieval, weight_bytes(model), 0
    shares = retrieval.report().fetched_share
    for shape, kept, found, share in zip(model.kv_shapes, cache.layers, retrieval.layers, shares, strict=True):
        stored = kept.num_slots * shape.bytes_per_token(len(kept.pads))
        fetched = int(stored * (1.0 if share is None else share))
        device += fetched
        if found is not None:
            device += found.index.scored_bytes
            if retrieval.policy.looks_ahead_on(model.device) and retrieval.policy.asks:
                heads = model.config.num_attention_heads
                device += model.config.hidden_size * heads * shape.key_dim * shape.dtype.itemsize
            if isinstance(retrieval.policy, ExactTopK):  # scores all keys where they are
                keys = stored * shape.key_dim // (shape.key_dim + shape.value_dim)
                fetched += keys
                device += 0 if kept.on_host else keys
        link += fetched if kept.on_host else 0
    return device, link
