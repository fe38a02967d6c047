"""Policies that drop tokens, with a prefix tree: what is kept after a stored prefix is what is kept without one."""

from __future__ import annotations

from typing import Any

import pytest

from policies.adakv import AdaKV
from policies.base import Policy
from policies.cake import CAKE
from policies.criticalkv import CriticalKV
from policies.exact_topk import ExactTopK
from policies.experiments.minicache import MiniCache
from policies.h2o import H2O
from policies.infllm import InfLLM
from policies.keydiff import KeyDiff
from policies.kvzip import KVzip
from policies.lagkv import LagKV
from policies.pyramidinfer import PyramidInfer
from policies.r_kv import RKV
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from policies.tova import TOVA
from policies.zigzagkv import ZigZagKV
from runahead import Engine, GenerationOptions, PrefillOptions, Ranks
from runahead.config import CacheOptions, Device, Positions, RanksOptions
from runahead.reuse.prefix_tree import PrefixTree
from runahead.thinning.rank_policies import RankPolicies
from tests.families import throughout
from tests.ranks.tasks import tiny_model
from tests.reuse.test_prefixes import ROOMY, Texts, computed_and_cached, num_common, require_same

OPTIONS = GenerationOptions(max_new_tokens=6, ignore_eos=True, logprobs=5)
BUDGET: dict[str, Any] = {"budget": 14}
VOTING: dict[str, Any] = {**BUDGET, "window": 4, "kernel": 1}
POLICIES: dict[str, list[Policy]] = {
    "snapkv": [SnapKV(**VOTING)],
    "tova": [TOVA(**BUDGET, evict_every=3)],
    "streaming_llm": [StreamingLLM(**BUDGET, sinks=2)],
    "keydiff": [KeyDiff(**BUDGET)],
    "lagkv": [LagKV(budget=20, lag=8, sinks=2)],
    "r_kv": [RKV(**VOTING)],
    "adakv": [AdaKV(scorer=SnapKV(**VOTING))],
    "criticalkv": [CriticalKV(scorer=SnapKV(**VOTING))],
    "zigzagkv": [ZigZagKV(**VOTING)],
    "cake": [CAKE(**VOTING)],
    "kvzip": [KVzip(**BUDGET, sinks=2)],
    "minicache": [MiniCache(start_share=0.0, retain_share=0.3)],
    "snapkv, exact_topk": [SnapKV(**VOTING), ExactTopK(fetch=6, min_tokens=0, sinks=1, recent=2)],
}
CASES = [
    *((name, "llama", None, None) for name in POLICIES),
    ("snapkv", "gemma2", None, None),  # with windows
    ("snapkv", "gemma4_text", None, None),  # of which some layers read others
    ("snapkv", "llama", 4, None),
    ("adakv", "llama", 4, 7),
    ("snapkv", "llama", None, 7),
    ("zigzagkv", "llama", None, 7),
]


def engine_of(
    family: str, policies: RankPolicies, tree: PrefixTree | None = None, chunk_tokens: int | None = None
) -> Engine:
    ranks, prefill = Ranks.start(RanksOptions(device=Device.cpu)), PrefillOptions(chunk_tokens=chunk_tokens)
    return Engine(tiny_model(family), ranks, tree=tree, prefill=prefill, policies=policies)


@pytest.mark.parametrize(("name", "family", "bits", "chunk_tokens"), CASES)
@pytest.mark.sampled(4)
def test_what_is_kept_after_a_stored_prefix_is_what_is_kept_without_one(
    name: str, family: str, bits: int | None, chunk_tokens: int | None
) -> None:
    """Also of padded rows, and if the rest of a prompt is computed in pieces."""
    texts, num_cached = Texts(seed=3), 0
    policies = RankPolicies.everywhere(POLICIES[name], storage=CacheOptions(bits=bits, residual=8))
    ours, theirs = engine_of(family, policies, PrefixTree(ROOMY), chunk_tokens), engine_of(family, policies)
    for num_rows in (1, 3, 2):
        prompts, least_new = texts.prompts(num_rows), max(1, policies.num_observed)
        with throughout(ours.model.dtype):
            batch, expected = ours.generate(prompts, OPTIONS), theirs.generate(prompts, OPTIONS)
        require_same(batch, expected)
        assert batch.ranks[0].kept_tokens == expected.ranks[0].kept_tokens
        reused = [max((num_common(ids[:-least_new], text) for text in texts.known), default=0) for ids in prompts]
        assert computed_and_cached(batch)[1] == sum(reused)
        num_cached += sum(reused)
        texts.known += prompts  # and no answers, whose keys and values are of what was kept
    assert num_cached > 40


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (RankPolicies.everywhere([H2O(budget=16)]), "policy h2o decides by what is computed of all tokens of a prompt"),
        (RankPolicies.everywhere([PyramidInfer()]), "policy pyramidinfer leaves tokens out of deeper layers"),
        (RankPolicies(others=[PyramidInfer()]), "policy pyramidinfer leaves tokens out of deeper layers"),
        (
            RankPolicies.everywhere([StreamingLLM(budget=16)], Positions.reencoded),
            "policy.positions=reencoded needs keys that are not rotated.*use policy.positions=original",
        ),
        (RankPolicies.everywhere([InfLLM(recent=16)]), "needs keys that are not rotated.*use policy.clamped=false"),
    ],
)
def test_policies_that_need_more_than_stored_keys_and_values_are_refused(policies: RankPolicies, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_of("llama", policies, PrefixTree(ROOMY))
