"""Tasks of ranks in test_ragged_shares.py: top-level functions, since they run in other processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.base import Policy
from policies.layer_view import LayerView
from runahead import ContextPartition, PrefillOptions, Ranks
from runahead.cache.kept_cache import KeptCache
from runahead.config import PrefillName
from runahead.decoding.forward import forward_over
from runahead.prefill import PREFILLS, PrefillJob, PromptBatch
from runahead.thinning.rank_policies import RankPolicies
from tests.families import throughout
from tests.policies.made_up_kvzap import MadeUpKVzap, made_up_scores
from tests.ranks.tensor_tasks import SIZES, arranged, shared_model

Kept = list[list[list[list[int]]]]
"""Positions of the kept tokens, by layer, row and KV head of this rank."""


@dataclass(kw_only=True)
class KVzapOfShare(MadeUpKVzap):
    """KVzap with the scores that the whole model's heads have."""

    def predicted(self, view: LayerView) -> Tensor:
        assert view.input_BCD is not None
        return made_up_scores(view.layer, SIZES["num_key_value_heads"], view.input_BCD)[:, view.own_heads]


def kept_by(
    ranks: Ranks,
    num_shares: int,
    policies: Sequence[Policy],
    prompts: list[list[int]],
    new_tokens: Sequence[int],
    chunk_tokens: int | None,
) -> list[tuple[Kept, list[list[list[float]]]]]:
    """Tokens that this rank keeps of prompts and later ones, by policy, and the logits (B, V) after each token."""
    found = []
    with arranged(ranks, num_shares), throughout(torch.float64), torch.inference_mode():
        model = shared_model(ranks, "llama", torch.float64, num_shares)
        batch = PromptBatch.from_prompts(prompts, ranks.device)
        for policy in policies:
            each = RankPolicies(last=[policy])
            each.check(model)
            job = PrefillJob(
                model=model,
                ranks=ranks,
                batch=batch,
                partition=ContextPartition(boundaries=(0, batch.num_tokens)),
                capacity=batch.num_tokens + len(new_tokens),
                options=PrefillOptions(name=PrefillName.single),
                policies=each,
                chunk_tokens=chunk_tokens,
            )
            cache = PREFILLS[PrefillName.single]().run(job).cache
            assert isinstance(cache, KeptCache)
            given = {"pads": batch.pads, "prompt_tokens": batch.num_tokens}
            forward = forward_over(model, cache, each.while_decoding, **given)
            logits = [
                forward(torch.full((len(prompts), 1), token), batch.num_tokens + place).tolist()
                for place, token in enumerate(new_tokens)
            ]
            kept = [
                [[[at for at in head if at >= 0] for head in row] for row in _positions(layer).tolist()]
                for layer in cache.layers
            ]
            found.append((kept, logits))
    return found


def _positions(layer) -> Tensor:  # type: ignore[no-untyped-def]
    return layer.positions_BKn().expand(-1, layer.shape.num_kv_heads, -1)
