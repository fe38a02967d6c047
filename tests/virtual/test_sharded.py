"""Sharded decoding over NCCL chooses one process's tokens, however early or late messages are."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch

from policies.base import Policy
from policies.h2o import H2O
from policies.pyramidinfer import PyramidInfer
from runahead.cache.attention import CausalAttention
from runahead.cache.fixed import in_fixed_shape
from runahead.cache.shard import shards
from runahead.config import GenerationOptions, PrefillOptions
from runahead.context import ContextPartition
from runahead.decoding.forward import forward_over
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import Row, batch_ids
from runahead.decoding.rows import decode
from runahead.decoding.together import choose_together
from runahead.kv_transfer.gathering import NcclGathering
from runahead.prefill import PrefillJob, PromptBatch
from runahead.prefill.kv_runahead import KVRunahead
from runahead.thinning.rank_policies import RankPolicies
from tests.virtual.deferred import Deferred
from tests.virtual.device import Choose, Job, VirtualRanks, at_random, transfers_early, transfers_late
from tests.virtual.jobs import tiny_llama

NUM_TOKENS, NUM_NEW, NUM_LAYERS = 16, 5, 3
ORDERS = {"early": transfers_early, "late": transfers_late, "random": at_random(7)}
GREEDY = GenerationOptions(max_new_tokens=NUM_NEW, ignore_eos=True)
NO_POLICIES = RankPolicies()
IDS = torch.randint(61, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()


@lru_cache
def alone() -> list[int]:
    model = tiny_llama(0, NUM_LAYERS)
    cache, row = model.empty_cache(NUM_TOKENS + NUM_NEW), Row(model, IDS, GREEDY, seed=0)
    ids = torch.tensor([IDS])
    logits = model.forward(ids, CausalAttention(cache, start=0, pads=[0]), start=0, pads=[0])
    lanes = Lanes.holding(model, batch_ids(1), cache, pads=[0], num_tokens=NUM_TOKENS)
    decode([row], logits, lambda: (lanes, None))
    return row.new_ids


def answers(
    boundaries: tuple[int, ...],
    choose: Choose,
    policies: RankPolicies = NO_POLICIES,
    *,
    num_layers: int = NUM_LAYERS,
    on_step: Callable[[int, Deferred], None] = lambda rank, device: None,
) -> list[list[int] | None]:
    """New tokens of each rank; None on a rank without a chunk.

    Args:
        on_step: called with each rank after each of its tokens.
    """
    partition, strategy, options = ContextPartition(boundaries=boundaries), KVRunahead(), PrefillOptions()
    chain, shard_of = partition.chain, shards(partition, NUM_NEW - 1, by_share=bool(policies))

    def body(ranks: VirtualRanks) -> list[int] | None:
        strategy.connect(ranks, partition, options)
        ranks.nccl_between_stages()
        if ranks.rank not in chain:
            return None
        gather, model = NcclGathering(ranks, chain), tiny_llama(ranks.rank, num_layers)
        row = Row(model, IDS, GREEDY, seed=0)
        with Deferred(ranks.accelerator, row_bytes=model.kv_shapes[0].bytes_per_token()) as device:

            def told(tokens: object) -> list[int]:
                on_step(ranks.rank, device)
                return []

            job = PrefillJob(
                model=model,
                ranks=ranks,
                batch=PromptBatch.from_prompts([IDS], ranks.device),
                partition=partition,
                capacity=NUM_TOKENS + NUM_NEW - 1,
                options=options,
                policies=policies,
                shards=shard_of,
            )
            prefilled, own_policies = strategy.run(job), job.own_policies
            assert prefilled.cache is not None
            fixed = in_fixed_shape(prefilled.cache, pads=[0], num_tokens=NUM_TOKENS)  # as on an accelerator
            own = prefilled.cache.for_decoding() if fixed is None else fixed
            whole = own.over_ranks(gather)
            forward = forward_over(
                model,
                whole,
                own_policies.while_decoding,
                pads=[0],
                prompt_tokens=NUM_TOKENS,
                is_told=ranks.rank != chain[-1],
                part=own_policies.part,
            )
            lanes = Lanes.holding(model, batch_ids(1), whole, forward, pads=[0], num_tokens=NUM_TOKENS)
            together = choose_together(gather)
            decode([row], prefilled.logits_BV, lambda: (lanes, None), choose=together, on_step=told)
        return row.new_ids

    return Job(partition.num_ranks, choose=choose).run(body)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("boundaries", [(0, 9, 16), (0, 7, 11, 16), (0, 6, 6, 11, 16)])
@pytest.mark.sampled(3)
def test_tokens_do_not_depend_on_when_messages_arrive(boundaries: tuple[int, ...], order: str) -> None:
    for rank, tokens in enumerate(answers(boundaries, ORDERS[order])):
        assert tokens == (alone() if boundaries[rank] < boundaries[rank + 1] else None)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", [H2O(budget=400), PyramidInfer(mean_keep=1.0)], ids=["h2o", "pyramidinfer"])
@pytest.mark.sampled(3)
def test_policies_on_each_rank_do_not_depend_on_it_either(policy: Policy, order: str) -> None:
    """The policies have room for all tokens, which are copied out of the ring, scored and attended to by slots."""
    found = answers((0, 7, 11, 16), ORDERS[order], RankPolicies.everywhere([policy]))
    assert found == [alone()] * 3
