"""Prompts of the studies of retrieval: one prefill, or drawn keys and values, under any policy."""

from __future__ import annotations

import pytest
import torch

from benchmarks.studies import retrieved_prompt
from benchmarks.studies.retrieved_prompt import RetrievedPrompt, fetched_share, full_bytes, retrieved_bytes
from policies.base import Policy
from policies.clusterkv import ClusterKV
from policies.exact_topk import ExactTopK
from policies.sparq import SparQ
from runahead.retrieval.cache import RetrievedCache
from tests.families import prompt
from tests.ranks.tasks import tiny_model

NUM_TOKENS = 60


@pytest.mark.parametrize("is_filled", [False, True], ids=["prefilled", "filled"])
def test_an_index_has_all_tokens_and_is_asked(monkeypatch: pytest.MonkeyPatch, is_filled: bool) -> None:
    """Fails if the cache is given another list of layers than its indices look into."""
    monkeypatch.setattr(retrieved_prompt, "LAST_TOKENS", 12)
    monkeypatch.setattr(retrieved_prompt, "NUM_CENTRES", 9)
    model, ids = tiny_model("llama"), prompt(NUM_TOKENS, seed=3)
    made = RetrievedPrompt.filled(model, ids) if is_filled else RetrievedPrompt(model, ids)
    bytes_read = []
    for policy in (ExactTopK(fetch=6, sinks=1, recent=1, min_tokens=0), sparq(2), sparq(6), clusters()):
        conversation = made.under(policy)
        assert isinstance(conversation.cache, RetrievedCache) and conversation.num_tokens == NUM_TOKENS
        found = [layer for layer in conversation.cache.retrieval.layers if layer is not None]
        assert found and all(layer.index.num_slots == NUM_TOKENS for layer in found)
        logits = conversation.follow(torch.tensor([ids[:2]]))
        assert bool(logits.isfinite().all()) and fetched_share(conversation.cache) < 0.2
        bytes_read.append(sum(retrieved_bytes(model, conversation.cache)))
    assert all(read < full_bytes(model, NUM_TOKENS) for read in bytes_read)
    assert (
        bytes_read[1] < bytes_read[2] and bytes_read[3] < bytes_read[0]
    )  # few dims, and means, are less than all keys


def sparq(dims: int) -> Policy:
    return SparQ(fetch=6, sinks=1, recent=1, min_tokens=0, dims=dims)


def clusters() -> Policy:
    return ClusterKV(fetch=6, sinks=1, recent=1, min_tokens=0, first_layer=0, cluster=20, block=40)
