"""Re-encoded positions in a chain of ranks: every rank numbers what is left of the prompt as one rank would."""

from __future__ import annotations

from itertools import pairwise

import pytest

from policies.base import Policy
from policies.pyramidinfer import PyramidInfer
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from runahead.config import Positions
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import prompt
from tests.policies.running import Run
from tests.ranks import policy_tasks
from tests.ranks.tasks import tiny_model

NUM_TOKENS = 60
TOLERANCE = 1e-9  # float64
POLICIES: list[Policy] = [
    StreamingLLM(budget=16),
    SnapKV(budget=16, window=4),
    PyramidInfer(mean_keep=0.6, min_tokens=8),
    PyramidInfer(mean_keep=0.6, budget=24, min_tokens=8, sinks=2),
]


@pytest.mark.parametrize("bounds", [(0, 60), (0, 35, 60), (0, 20, 44, 60)])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{type(policy).__name__}-{policy.budget}")
@pytest.mark.sampled(3)
def test_ranks_are_chunks_of_one_process(rank_pools: RankPools, policy: Policy, bounds: tuple[int, ...]) -> None:
    """Earlier chunks narrowed, nothing cut back before the last one: so the policies see the prompt whole."""
    prompts = [prompt(NUM_TOKENS), prompt(41, seed=4)]
    run = Run(tiny_model("llama"), [policy], prompts, reencoded=True)
    expected_BV = run.prefill([end - start for start, end in pairwise(bounds)])
    policies = RankPolicies.everywhere([policy], Positions.reencoded)
    batch, *others = rank_pools.run(len(bounds) - 1, policy_tasks.generate, "llama", prompts, bounds, policies, 20)
    assert all(other.generations == batch.generations for other in others)
    for row, generation in enumerate(batch.generations):
        for token, value in generation.first_token_logits_top5:
            assert value == pytest.approx(expected_BV[row, token].item(), abs=TOLERANCE)
    assert batch.ranks[-1].kept_tokens == run.kept.slots_by_layer
    # What is stored on the last rank is what decoding goes on from. Votes of earlier ranks' tokens are not known
    # there, so which tokens PyramidInfer gives up later, or for its budget, is the last rank's own choice.
    steps = 19 if not policy.narrows else 1 if policy.budget is None else 0
    for step in range(steps):
        tokens = [generation.new_token_ids[step] for generation in batch.generations]
        logits_BV = run.decode_each(tokens)
        assert logits_BV.argmax(dim=1).tolist() == [g.new_token_ids[step + 1] for g in batch.generations]
