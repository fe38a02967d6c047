"""Cache policies after a sparse prefill: transformers with the mask of blocks and of what a policy left; any split."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d
from transformers import AttentionInterface

from policies.adakv import AdaKV
from policies.base import Policy
from policies.cake import CAKE
from policies.chunkkv import ChunkKV
from policies.clusterkv import ClusterKV
from policies.exact_topk import ExactTopK
from policies.infllm import InfLLM
from policies.kvzip import KVzip
from policies.magicpig import MagicPIG
from policies.offload import Offload
from policies.pyramidkv import PyramidKV
from policies.quest import Quest
from policies.r_kv import RKV
from policies.shadowkv import ShadowKV
from policies.snapkv import Pooling, SnapKV
from policies.sparq import SparQ
from policies.streaming_llm import StreamingLLM
from policies.tova import TOVA
from policies.zigzagkv import ZigZagKV
from runahead import GenerationOptions, PrefillOptions
from runahead.attention.sparse.choice import ChoiceRule
from runahead.config import Attention, CacheOptions
from runahead.report import Generation, GenerationBatch
from runahead.thinning.rank_policies import RankPolicies
from tests.attention.xattention import BLOCK, chosen_by_all_products
from tests.conftest import RankPools
from tests.families import build, prompt, throughout
from tests.ranks import policy_tasks

RULE, BUDGET, WINDOW, KERNEL, SINKS = ChoiceRule(density=0.5), 48, 8, 5, 4
SPARSE = PrefillOptions(attention=Attention.xattention, density=RULE.density)
NUM_TOKENS = 440
SPLITS = [(0, NUM_TOKENS), (0, 256, NUM_TOKENS), (0, 128, 384, NUM_TOKENS)]
SNAPKV = SnapKV(budget=BUDGET, window=WINDOW, kernel=KERNEL, pooling=Pooling.avg)
TOLERANCE = 1e-6
"""Log-probabilities are float32."""
REFERENCES: dict[str, Policy] = {
    "all": Offload(),
    "snapkv": SNAPKV,
    "streaming_llm": StreamingLLM(budget=BUDGET, sinks=SINKS),
}
EVICTING: list[Policy | list[Policy]] = [
    PyramidKV(budget=BUDGET, window=4),
    TOVA(budget=BUDGET),
    ChunkKV(budget=BUDGET, window=4, chunk=5),
    RKV(budget=BUDGET, window=4, evict_every=6),
    AdaKV(scorer=SnapKV(budget=BUDGET, window=4)),
    KVzip(budget=BUDGET),
    ZigZagKV(budget=BUDGET, window=4, kernel=3),
    CAKE(budget=BUDGET, window=4, kernel=3),
    [AdaKV(scorer=SnapKV(budget=60, window=4)), StreamingLLM(budget=BUDGET, sinks=2)],
]
RETRIEVING: list[Policy] = [
    Quest(min_tokens=0, fetch=32, page=8, first_layer=0),
    ExactTopK(min_tokens=0, fetch=32),
    SparQ(min_tokens=0, fetch=32, dims=3),
    MagicPIG(min_tokens=0, recent=3, bits=2, tables=6, dense_every=0),
    ClusterKV(min_tokens=0, fetch=32, cluster=4, block=6, sinks=2, recent=4, first_layer=0),
    ShadowKV(min_tokens=0, fetch=36, page=4, outliers=1, rank=6),
    InfLLM(min_tokens=0, fetch=32, sinks=2, recent=8, block=4, observed=8, clamped=False),
]


def kept_by_snapkv(q_NTH: Tensor, k_KTH: Tensor, scaling: float) -> Tensor:
    """Whether a token of the prompt is kept (K, T), by the votes of the last queries among all keys."""
    num_tokens, group = k_KTH.shape[1], len(q_NTH) // len(k_KTH)
    scores = q_NTH[:, -WINDOW:] @ k_KTH.repeat_interleave(group, dim=0).mT * scaling
    later = torch.arange(num_tokens) > torch.arange(num_tokens - WINDOW, num_tokens)[:, None]
    votes_KT = scores.masked_fill(later, -math.inf).softmax(dim=-1).mean(dim=1).unflatten(0, (-1, group)).mean(dim=1)
    before = avg_pool1d(votes_KT[:, :-WINDOW], KERNEL, stride=1, padding=KERNEL // 2)
    kept = torch.zeros(votes_KT.shape, dtype=torch.bool).scatter(1, before.topk(BUDGET - WINDOW).indices, True)
    kept[:, -WINDOW:] = True
    return kept


@cache
def logprobs(family: str, ids: tuple[int, ...], num_prompt: int, policy: str, prefill: str = "sparse") -> Tensor:
    """Transformers' log-probabilities after the prompt and each token after it; the last layer's last query sees all.

    Args:
        ids: tokens of the prompt and those that were generated.
    """

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        num_tokens, group = q.shape[2], q.shape[1] // k.shape[1]
        sees = torch.ones(k.shape[1], num_tokens, num_tokens).tril().bool()
        q_NTH, k_KTH = q[0, :, :num_prompt], k[0, :, :num_prompt]
        if prefill == "sparse":
            at = torch.arange(num_prompt) // BLOCK
            found = chosen_by_all_products(q_NTH, k_KTH, scaling, RULE)[:, at[:, None], at]
            if module.layer_idx == module.config.num_hidden_layers - 1:
                found[:, -1] = True
            sees[:, :num_prompt, :num_prompt] &= found
        if policy == "snapkv":
            sees[:, num_prompt:, :num_prompt] &= kept_by_snapkv(q_NTH, k_KTH, scaling)[:, None]
        elif policy == "streaming_llm":
            sees[:, num_prompt:, SINKS : num_prompt - BUDGET + SINKS] = False
        k, v, sees = (x.repeat_interleave(group, dim=x.dim() - 3) for x in (k, v, sees))
        scores = (q @ k.mT * scaling).masked_fill(~sees, -math.inf)
        return (scores.softmax(dim=-1) @ v).transpose(1, 2), None

    AttentionInterface.register("policy_by_mask", attention)
    with throughout(torch.float64), torch.no_grad():
        module = build(family).double()
        module.config._attn_implementation = "policy_by_mask"
        logits: Tensor = module(torch.tensor([ids])).logits[0, num_prompt - 1 :]
    return logits.log_softmax(dim=-1)


def generate(
    rank_pools: RankPools,
    bounds: tuple[int, ...],
    policies: RankPolicies,
    *,
    prompts: list[list[int]],
    family: str = "llama",
    num_new: int = 5,
    prefill: PrefillOptions = SPARSE,
) -> GenerationBatch:
    """The same on every rank."""
    asked = GenerationOptions(max_new_tokens=num_new, ignore_eos=True, logprobs=1)
    batches = rank_pools.run(
        len(bounds) - 1, policy_tasks.generate, family, prompts, bounds, policies, num_new, prefill, asked
    )
    assert all(batch.generations == batches[0].generations for batch in batches)
    return batches[0]


def farthest(batch: GenerationBatch, known: Tensor) -> float:
    """Largest error of the log-probabilities of what was generated."""
    (found,) = batch.generations
    of_tokens = known[:-1].gather(1, torch.tensor(found.new_token_ids)[:, None])[:, 0]
    return float((torch.tensor(of_each(found)) - of_tokens).abs().max())


def of_each(generation: Generation) -> list[float]:
    assert generation.logprobs is not None
    return [each.logprob for each in generation.logprobs]


@pytest.mark.parametrize("policy", list(REFERENCES))
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_steps_see_what_the_policy_left_of_a_sparse_prefill(rank_pools: RankPools, family: str, policy: str) -> None:
    """For every split; without the mask of blocks, and with another policy's, it is far off."""
    ids, policies = prompt(NUM_TOKENS), RankPolicies.everywhere([REFERENCES[policy]])
    for bounds in SPLITS:
        batch = generate(rank_pools, bounds, policies, prompts=[ids], family=family)
        given = (*ids, *batch.generations[0].new_token_ids)
        assert farthest(batch, logprobs(family, given, NUM_TOKENS, policy)) < TOLERANCE
    assert farthest(batch, logprobs(family, given, NUM_TOKENS, policy, "exact")) > 1e-4
    for other in REFERENCES:
        assert other == policy or farthest(batch, logprobs(family, given, NUM_TOKENS, other)) > 1e-4


@pytest.mark.parametrize("policy", [*EVICTING, *RETRIEVING], ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.sampled(8)
def test_a_chain_is_what_one_rank_does(rank_pools: RankPools, policy: Policy | list[Policy], bits: int | None) -> None:
    """Rows are padded; the last rank has all keys and values, and the queries of the window."""
    steps = policy if isinstance(policy, list) else [policy]
    policies = RankPolicies.everywhere(steps, storage=CacheOptions(bits=bits, residual=8))
    prompts = [prompt(NUM_TOKENS), prompt(333, seed=3)]
    alone, *chains = (generate(rank_pools, bounds, policies, prompts=prompts) for bounds in SPLITS)
    exact = generate(rank_pools, SPLITS[0], policies, prompts=prompts, prefill=PrefillOptions())
    for batch in chains:
        for ours, theirs in zip(batch.generations, alone.generations, strict=True):
            assert ours.new_token_ids == theirs.new_token_ids
            assert of_each(ours) == pytest.approx(of_each(theirs), abs=TOLERANCE)
        assert batch.ranks[-1].kept_tokens == alone.ranks[-1].kept_tokens
        assert batch.ranks[-1].retrieval == alone.ranks[-1].retrieval
    first = [batch.generations[0].first_token_logits_top5[0][1] for batch in (alone, exact)]
    assert abs(first[0] - first[1]) > 1e-4
