"""Cache policies under decode=sharded: each rank chooses of its own tokens, and attention is over all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from policies.adakv import AdaKV
from policies.base import Policy
from policies.chunkkv import ChunkKV
from policies.clusterkv import ClusterKV
from policies.criticalkv import CriticalKV
from policies.exact_topk import ExactTopK
from policies.expected_attention import ExpectedAttention
from policies.fastgen import FastGen
from policies.h2o import H2O
from policies.infinigen import InfiniGen
from policies.k_centers import KCenters
from policies.keydiff import KeyDiff
from policies.keyformer import Keyformer
from policies.lagkv import LagKV
from policies.layer_view import PromptPart
from policies.magicpig import MagicPIG
from policies.offload import Offload
from policies.pyramidinfer import PyramidInfer
from policies.pyramidkv import PyramidKV
from policies.quest import Quest
from policies.r_kv import RKV
from policies.retrieval_attention import RetrievalAttention
from policies.retroinfer import RetroInfer
from policies.scissorhands import Scissorhands
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from policies.tova import TOVA
from policies.window import Window
from runahead import GenerationOptions, PrefillOptions
from runahead.attention.base import LayerAttention
from runahead.attention.partial import AttentionTerms
from runahead.cache.quantised.few_bits import FewBits
from runahead.cache.quantised.groups import ChannelGroups, TokenGroups
from runahead.cache.shard import shards
from runahead.config import CacheOptions, DecodeName, Transfer
from runahead.context import ContextPartition
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import largest_difference, oracle_logits, oracle_tokens, prompt, throughout
from tests.policies.made_up_kvzap import MadeUpKVzap
from tests.policies.made_up_streaming import MadeUpStreaming
from tests.ranks import policy_tasks, sharded_policy_tasks
from tests.ranks.sharded_policy_tasks import Seen
from tests.ranks.tasks import tiny_model
from tests.ranks.test_memory import DEEP_LAYERS, LAYER_BYTES

NUM_TOKENS, NUM_NEW = 60, 8
TOLERANCE = 1e-9  # float64
GREEDY = GenerationOptions(max_new_tokens=NUM_NEW, ignore_eos=True)
BATCH = [prompt(NUM_TOKENS), prompt(44, seed=3), prompt(5, seed=5)]
"""Rows; the first rank has no token of the last one."""
BOUNDS = [(0, 35, 60), (0, 1, 59, 60), (0, 20, 20, 60)]

EVICTING: dict[str, Policy] = {
    "window": Window(budget=20),
    "streaming_llm": StreamingLLM(budget=20, sinks=3),
    "h2o": H2O(budget=20, sinks=2, evict_every=2),
    "snapkv": SnapKV(budget=20, window=6, kernel=3),
    "snapkv, a share": SnapKV(budget=0.4, window=6, kernel=3),
    "pyramidkv": PyramidKV(budget=24, window=6, kernel=3),
    "keydiff": KeyDiff(budget=20, evict_every=2),
    "tova": TOVA(budget=20),
    "chunkkv": ChunkKV(budget=20, window=6, chunk=5),
    "r_kv": RKV(budget=20, window=4, kernel=3, evict_every=4),
    "scissorhands": Scissorhands(budget=20, recent=3, window=6, drop_share=0.3),
    "keyformer": Keyformer(budget=20, evict_every=2, tau_tokens=4),
    "k_centers": KCenters(budget=20, sinks=2, evict_every=2),
    "criticalkv": CriticalKV(scorer=SnapKV(budget=20, window=6, kernel=3)),
    "lagkv": LagKV(budget=20, sinks=2, lag=5, evict_every=2),
    "expected_attention": ExpectedAttention(budget=20, sinks=2, evict_every=4, future_tokens=16),
    "kvzap": MadeUpKVzap(budget=20, sinks=2, recent=3, evict_every=2),
}
RAGGED: dict[str, Policy | list[Policy]] = {
    "adakv": AdaKV(scorer=SnapKV(budget=20, window=6, kernel=3), alpha=0.1),
    "kvzap": MadeUpKVzap(threshold=0.5, sinks=2, recent=3, evict_every=2),
    "fastgen": FastGen(window=6, sinks=2, frequent=6, local=8, recovered=0.6),
    "streaming heads": MadeUpStreaming(evict_every=2),
    "adakv, then h2o": [
        AdaKV(scorer=SnapKV(budget=24, window=6, kernel=3), alpha=0.1),
        H2O(budget=20, sinks=2, evict_every=2),
    ],
}
"""Heads keep different numbers of tokens."""
PYRAMID = PyramidInfer(mean_keep=0.6, min_tokens=4)
RETRIEVING: dict[str, Policy] = {
    "exact_topk": ExactTopK(min_tokens=0, fetch=12, sinks=2, recent=4),
    "quest": Quest(min_tokens=0, fetch=16, page=4, first_layer=1, sinks=2, recent=4),
    "clusterkv": ClusterKV(min_tokens=0, fetch=16, cluster=4, block=5, first_layer=1, sinks=2, recent=4),
    "infinigen": InfiniGen(min_tokens=0, fetch=12, sinks=2, recent=4, first_layer=1, observed=8),
    "infinigen by scores": InfiniGen(min_tokens=0, alpha=1.0, max_fetch=0.5, sinks=2, recent=4, observed=8),
    "infinigen, ahead": InfiniGen(min_tokens=0, fetch=12, sinks=2, recent=4, observed=8, ahead=True, first_ahead=1),
    "infinigen, full pool": InfiniGen(
        min_tokens=0, fetch=12, sinks=2, recent=4, observed=8, pool={"bytes": 24 * 3 * 3 * LAYER_BYTES}
    ),
    "retrieval_attention": RetrievalAttention(
        min_tokens=0, fetch=14, sinks=2, recent=4, observed=8, nearest=4, width=4, hops=2
    ),
}
ROOMY: dict[str, Policy] = {
    "streaming_llm": StreamingLLM(budget=400),
    "h2o": H2O(budget=400),
    "snapkv": SnapKV(budget=400),
    "pyramidkv": PyramidKV(budget=1.0),
    "adakv": AdaKV(scorer=SnapKV(budget=1.0), alpha=0.0),
    "kvzap": MadeUpKVzap(threshold=-1e9),
    "pyramidinfer": PyramidInfer(mean_keep=1.0),
    "exact_topk": ExactTopK(min_tokens=0, fetch=400),
    "quest": Quest(min_tokens=0, fetch=400),
    "infinigen": InfiniGen(min_tokens=0, fetch=1.0, observed=8),
    "offload": Offload(),
    "magicpig": MagicPIG(min_tokens=0, sinks=2, recent=4, bits=1, tables=600, dense_every=0),  # all are sampled
    "retroinfer": RetroInfer(min_tokens=0, fetch=8, cluster=1, first_layer=0, sinks=2, recent=4),
}
"""Policies with room for all tokens, or with an estimate of the others that is exact."""


def run(
    rank_pools: RankPools,
    policies: RankPolicies | Policy | list[Policy],
    bounds: tuple[int, ...],
    *,
    family: str = "llama",
    prompts: list[list[int]] | None = None,
    options: GenerationOptions = GREEDY,
    prefill: PrefillOptions | None = None,
    decode: DecodeName = DecodeName.sharded,
) -> list[Seen]:
    """Contents of each rank's cache."""
    if not isinstance(policies, RankPolicies):
        policies = RankPolicies.everywhere(policies if isinstance(policies, list) else [policies])
    arguments = (family, prompts or BATCH, bounds, policies, options, prefill, decode)
    seen = rank_pools.run(len(bounds) - 1, sharded_policy_tasks.generate, *arguments)
    assert all(each.batch.generations == seen[0].batch.generations for each in seen)
    assert seen[0].batch.decode == decode.name
    return seen


def logits_of(seen: Sequence[Seen], step: int) -> list[list[float]]:
    """Logits of a step, from the rank that chooses."""
    [of_rank] = [each.logits for each in seen if each.logits]
    return of_rank[step]


class Reference(LayerAttention):
    """Plain attention of one row, in float64: a prompt sees all before it, a new token what it is allowed to see.

    Attributes:
        allowed: (layer, KV head, query) -> positions that a new token sees before its own.
        means: (layer, KV head) -> sets of positions; a new token sees the mean of a set in place of each in it.
        as_stored: all keys and values (K, S, H) -> what a new token sees of them.
        probabilities_NSS: of the prompt, by layer.
    """

    def __init__(self) -> None:
        super().__init__(start=0, pads=[0])
        self.k: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}
        self.probabilities_NSS: dict[int, Tensor] = {}
        self.allowed: Callable[[int, int, Tensor], set[int]] | None = None
        self.means: Callable[[int, int], list[set[int]]] | None = None
        self.as_stored: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        before = (
            [store[layer] for store in (self.k, self.v)] if layer in self.k else [k_BKCH[0, :, :0], v_BKCV[0, :, :0]]
        )
        k_KSH = self.k[layer] = torch.cat([before[0], k_BKCH[0]], dim=1)
        v_KSV = self.v[layer] = torch.cat([before[1], v_BKCV[0]], dim=1)
        num_keys, group = k_KSH.shape[1], q_BNCH.shape[1] // k_KSH.shape[0]
        if self.as_stored is not None:
            k_KSH, v_KSV = self.as_stored(k_KSH, v_KSV)
        if self.means is not None:
            k_KSH, v_KSV = k_KSH.clone(), v_KSV.clone()
            for head in range(k_KSH.shape[0]):
                for at in map(list, self.means(layer, head)):
                    k_KSH[head, at], v_KSV[head, at] = k_KSH[head, at].mean(dim=0), v_KSV[head, at].mean(dim=0)
        queries_C = torch.arange(num_keys - q_BNCH.shape[2], num_keys)
        scores_NCS = q_BNCH[0] * terms.scaling @ k_KSH.repeat_interleave(group, 0).mT
        if terms.key_bias is not None:
            scores_NCS = scores_NCS + terms.key_bias(torch.arange(num_keys))[:, None]
        seen_NCS = (torch.arange(num_keys) <= queries_C[:, None]).expand(scores_NCS.shape).clone()
        if self.allowed is not None:
            for head in range(k_KSH.shape[0]):
                q_GH = q_BNCH[0, head * group : (head + 1) * group, 0] * terms.scaling
                may = self.allowed(layer, head, q_GH) | {num_keys - 1}
                seen_NCS[head * group : (head + 1) * group] &= torch.tensor([at in may for at in range(num_keys)])
        probabilities = scores_NCS.masked_fill(~seen_NCS, -math.inf).softmax(dim=-1)
        self.probabilities_NSS.setdefault(layer, probabilities)
        return (probabilities @ v_KSV.repeat_interleave(group, 0))[None]

    def run(self, ids: Sequence[int], start: int, family: str = "llama") -> Tensor:
        """Logits (V) after these tokens of the text."""
        model = tiny_model(family)
        with throughout(torch.float64):
            return model.forward(torch.tensor([ids]), self, start=start, pads=[0])[0]


def check_steps(
    seen: Sequence[Seen],
    allowed: Callable[[int, int], Callable[[int, int, Tensor], set[int]]] | None = None,
    means: Callable[[int, int], Callable[[int, int], list[set[int]]]] | None = None,
    *,
    family: str = "llama",
) -> None:
    """Compare the logits of each step with plain attention over what the ranks had.

    Args:
        allowed: (row, step) -> what a new token sees, as `Reference.allowed`; by default what the ranks said they had.
        means: (row, step) -> of which tokens it sees the mean, as `Reference.means`.
    """
    for row, ids in enumerate(BATCH):
        reference, generation = Reference(), seen[0].batch.generations[row]
        logits_V = reference.run(ids, 0, family)
        for step in range(NUM_NEW):
            assert largest_difference(logits_of(seen, step)[row], logits_V) < TOLERANCE, (row, step)
            if step == NUM_NEW - 1:
                break

            def told(layer: int, head: int, q_GH: Tensor, row: int = row, step: int = step) -> set[int]:
                found = set[int]()
                for each in seen:
                    if each.stored:
                        have = each.fetched[layer][step] if layer in each.fetched else each.stored[step][layer]
                        found |= {at for at in have[row][head % len(have[row])] if at >= 0}
                return found

            reference.allowed = told if allowed is None else allowed(row, step)
            reference.means = None if means is None else means(row, step)
            logits_V = reference.run([generation.new_token_ids[step]], len(ids) + step, family)


def in_few_bits(parts: Sequence[Sequence[int]], few: FewBits) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Keys and values of a row as they are stored by ranks of which each has these of its tokens."""

    def stored(k_KSH: Tensor, v_KSV: Tensor) -> tuple[Tensor, Tensor]:
        k_KSH, v_KSV = k_KSH.clone(), v_KSV.clone()
        for part in parts:
            at = [index for index in part if index < k_KSH.shape[1]]
            at = at[: few.leaving(len(at))]
            if at:
                keys, values = (
                    ChannelGroups.quantise(k_KSH[None, :, at], few.bits),
                    TokenGroups.quantise(v_KSV[None, :, at], few.bits),
                )
                k_KSH[:, at] = keys.read(0, len(at), k_KSH.dtype)[0]
                v_KSV[:, at] = values.read(0, len(at), v_KSV.dtype)[0]
        return k_KSH, v_KSV

    return stored


@pytest.mark.parametrize("bits", [8, 2])
@pytest.mark.parametrize("bounds", [(0, 35, 100), (0, 36, 36, 70, 100)])
def test_groups_of_few_bits_begin_anew_on_each_rank(rank_pools: RankPools, bounds: tuple[int, ...], bits: int) -> None:
    """Those of 32 tokens that a rank has of a row, those of the prompt first; one more group goes while it answers."""
    few = FewBits(bits=bits, residual=3, residual_bits=None, keys_by_token=False)
    storage = CacheOptions(bits=bits, residual=few.residual, residual_bits=None)
    prompts = [prompt(100), prompt(64, seed=3), prompt(20, seed=5)]
    seen = run(rank_pools, RankPolicies.everywhere([], storage=storage), bounds, prompts=prompts)
    of_stage = shards(ContextPartition(boundaries=bounds), NUM_NEW - 1, by_share=True).values()
    for row, ids in enumerate(prompts):
        pad = 100 - len(ids)
        parts = [[index - pad for index in shard.indices() if index >= pad] for shard in of_stage]
        reference = Reference()
        logits_V = reference.run(ids, 0)
        reference.as_stored = in_few_bits(parts, few)
        for step, token in enumerate(seen[0].batch.generations[row].new_token_ids):
            assert largest_difference(logits_of(seen, step)[row], logits_V) < TOLERANCE, (row, step)
            logits_V = reference.run([token], len(ids) + step)
        assert any(few.leaving(len(part)) for part in parts) or len(ids) < 64


@pytest.mark.parametrize("family", ["gemma3_text", "bloom", "gemma4_text"])
def test_in_few_bits_a_window_of_all_tokens_gives_the_answer_of_one_rank(rank_pools: RankPools, family: str) -> None:
    """Layers with windows, with a bias by distance, and layers that read earlier ones."""
    storage, prompts = CacheOptions(bits=4, residual=1000, residual_bits=None), [prompt(NUM_TOKENS), prompt(31, seed=4)]
    seen = run(rank_pools, RankPolicies.everywhere([], storage=storage), (0, 35, 60), family=family, prompts=prompts)
    for row, ids in enumerate(prompts):
        tokens = oracle_tokens(family, tuple(ids), NUM_NEW)
        assert seen[0].batch.generations[row].new_token_ids == tokens
        theirs = oracle_logits(family, (*ids, *tokens[:-1]))
        assert largest_difference(logits_of(seen, -1)[row], theirs) < TOLERANCE


def chunks(bounds: tuple[int, ...]) -> list[tuple[int, PromptPart]]:
    """Rank and part of each rank that has a chunk."""
    partition, pads = ContextPartition(boundaries=bounds), [NUM_TOKENS - len(ids) for ids in BATCH]
    return [(stage, shard.part(pads)) for stage, shard in shards(partition, 0).items()]


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2"])
@pytest.mark.parametrize("name", ROOMY)
@pytest.mark.sampled(4)
def test_with_room_for_all_tokens_the_answer_is_that_of_one_rank(rank_pools: RankPools, name: str, family: str) -> None:
    """Some families have windows in some layers, or attention sinks."""
    if name == "pyramidinfer" and family != "llama":
        pytest.skip("it is refused for windows")
    prompts = [prompt(NUM_TOKENS), prompt(31, seed=4)]
    for bounds in ((0, 35, 60), (0, 20, 20, 60)):
        seen = run(rank_pools, ROOMY[name], bounds, family=family, prompts=prompts)
        for row, ids in enumerate(prompts):
            tokens = oracle_tokens(family, tuple(ids), NUM_NEW)
            assert seen[0].batch.generations[row].new_token_ids == tokens
            theirs = oracle_logits(family, (*ids, *tokens[:-1]))
            assert largest_difference(logits_of(seen, -1)[row], theirs) < TOLERANCE


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.sampled(8)
def test_attention_is_over_what_the_ranks_kept(rank_pools: RankPools, name: str, bounds: tuple[int, ...]) -> None:
    seen = run(rank_pools, EVICTING[name], bounds)
    check_steps(seen)
    for layer in range(3):
        total = sum(each.batch.ranks[rank].kept_tokens[layer] for rank, each in enumerate(seen) if each.stored)
        assert total < NUM_TOKENS


@pytest.mark.parametrize("bounds", [(0, 35, 60), *(pytest.param(each, marks=pytest.mark.slow) for each in BOUNDS[1:])])
@pytest.mark.parametrize("name", RAGGED)
def test_attention_is_over_what_each_head_of_the_ranks_kept(
    rank_pools: RankPools, name: str, bounds: tuple[int, ...]
) -> None:
    """The last row has no token on the first rank. Each new token is on one rank, and has a query on both.

    Seen to fail: the parts' outputs summed without their log-sum-exps.
    """
    seen = run(rank_pools, RAGGED[name], bounds)
    check_steps(seen)
    layers = [layer for each in seen if each.stored for layer in each.stored[0]]
    assert any(len({sum(at >= 0 for at in head) for head in row}) > 1 for layer in layers for row in layer)


@pytest.mark.parametrize("family", ["bloom", "mpt"])
@pytest.mark.parametrize("policy", [EVICTING["h2o"], RAGGED["adakv"]], ids=["h2o", "adakv"])
def test_what_the_ranks_kept_has_the_bias_of_its_positions(rank_pools: RankPools, policy: Policy, family: str) -> None:
    """ALiBi: a rank's tokens are further from a new one than their slots say."""
    check_steps(run(rank_pools, policy, (0, 35, 60), family=family), family=family)


def test_the_mean_of_what_a_head_dropped_on_a_rank_stands_for_it_there(rank_pools: RankPools) -> None:
    """Seen to fail: one mean of what all ranks dropped, and a mean that forgets what was dropped before."""
    bounds = (0, 35, 60)
    seen = run(rank_pools, MadeUpStreaming(evict_every=2, compensate=True), bounds)

    def means(row: int, step: int) -> Callable[[int, int], list[set[int]]]:
        def dropped(layer: int, head: int) -> list[set[int]]:
            pad, found = NUM_TOKENS - len(BATCH[row]), list[set[int]]()
            for each, first, last in zip(seen, bounds, bounds[1:], strict=False):
                own = set(range(max(0, first - pad), max(0, last - pad)))
                had = [set(each.stored[before][layer][row][head]) for before in range(step + 1)]
                found.append(own.union(*had) - had[-1] - {at for at in set().union(*had) if at < 0})
            return found

        return dropped

    last = NUM_NEW - 2
    assert all(len(means(0, last)(layer, 1)[rank]) > 10 for layer in range(3) for rank in range(2))
    everything = set(range(NUM_TOKENS + NUM_NEW))
    check_steps(seen, lambda row, step: lambda *_: everything, means)


def test_a_rank_recovers_its_share_of_the_attention_to_its_own_tokens(rank_pools: RankPools) -> None:
    """If attention to other ranks' tokens counted as recovered, the last rank would recover less of its own."""
    policy = RAGGED["fastgen"]
    assert isinstance(policy, FastGen)
    reference = Reference()
    reference.run(BATCH[0], 0)
    for each, (_, part) in zip(run(rank_pools, policy, (0, 35, 60)), chunks((0, 35, 60)), strict=True):
        own = torch.arange(part.chunk.start, part.chunk.stop)
        voters = own[-part.share_of(policy.window) :]
        for layer, probabilities_NSS in reference.probabilities_NSS.items():
            votes_KGS = probabilities_NSS[:, voters].sum(dim=1).unflatten(0, (2, -1))
            stored = each.stored[0][layer][0]
            for head, votes_GS in enumerate(votes_KGS):
                kept = [at for at in stored[head % len(stored)] if at >= 0]
                recovered_G = votes_GS[:, kept].sum(dim=1) / votes_GS[:, own].sum(dim=1)
                assert recovered_G.min() >= policy.recovered - 1e-6  # scores are float32


def test_a_streaming_head_keeps_the_sinks_that_its_rank_has(rank_pools: RankPools) -> None:
    """If every rank had room for all sinks, the last one would keep all of its tokens."""
    policy, ids = MadeUpStreaming(sinks=30, recent=4), prompt(NUM_TOKENS)
    for each, sinks in zip(run(rank_pools, policy, (0, 35, 60), prompts=[ids]), (30, 0), strict=True):
        for layer in each.stored[0]:
            retrieving, streaming = ([at for at in head if at >= 0] for head in layer[0])
            assert streaming == retrieving[:sinks] + retrieving[-4:]


def test_ranks_keep_together_what_one_rank_keeps_by_a_threshold(rank_pools: RankPools) -> None:
    """Scores do not depend on other tokens, and all ranks drop after the same generated tokens.

    Seen to fail: a rank's share of `evict_every`, and a layer that is cut back but not put in its place.
    """
    policies = RankPolicies.everywhere([MadeUpKVzap(threshold=0.5, sinks=2, recent=0, evict_every=4)])
    alone = rank_pools.run(
        1, sharded_policy_tasks.generate, "llama", BATCH, (0, 60), policies, GREEDY, None, DecodeName.last
    )[0]
    seen = run(rank_pools, policies, (0, 35, 60))
    assert seen[0].batch.generations[0].new_token_ids == alone.batch.generations[0].new_token_ids
    for step in range(NUM_NEW - 1):
        for layer, whole in enumerate(alone.stored[step]):
            parts = [each.stored[step][layer] for each in seen]
            for row in range(len(BATCH)):
                for head in range(2):
                    joined = [at for part in parts for at in part[row][head % len(part[row])] if at >= 0]
                    assert sorted(joined) == [at for at in whole[row][head % len(whole[row])] if at >= 0]


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_heads_share_the_ranks_part_of_the_budget(rank_pools: RankPools, alpha: float) -> None:
    """Bit by bit the scorer alone, if all heads get as much. Seen to fail: every rank has the whole budget."""
    scorer = EVICTING["snapkv"]
    assert isinstance(scorer, SnapKV)
    ragged, even = (run(rank_pools, policy, (0, 35, 60)) for policy in (AdaKV(scorer=scorer, alpha=alpha), scorer))
    is_same = [
        [mine.logits, mine.stored] == [theirs.logits, theirs.stored] for mine, theirs in zip(ragged, even, strict=True)
    ]
    assert all(is_same) if alpha == 1 else not any(is_same)
    reference = Reference()
    reference.run(BATCH[0], 0)
    for each, (_, part) in zip(ragged, chunks((0, 35, 60)), strict=True):
        budget = part.share_of(20)
        for layer, probabilities_NSS in reference.probabilities_NSS.items():
            kept = [{at for at in head if at >= 0} for head in each.stored[0][layer][0]]
            by_head = kept_by_formula("snapkv", probabilities_NSS, part.chunk, budget, part.share_of(6))
            assert sum(map(len, kept)) == sum(map(len, by_head)) == 2 * budget
            for mine, theirs in zip(kept, by_head, strict=True):
                assert mine <= theirs or theirs <= mine  # a head's own order


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("name", RETRIEVING)
@pytest.mark.sampled(4)
def test_attention_is_over_what_the_ranks_retrieved(rank_pools: RankPools, name: str, bounds: tuple[int, ...]) -> None:
    seen = run(rank_pools, RETRIEVING[name], bounds)
    check_steps(seen)
    reports = [each.batch.ranks[rank].retrieval for rank, each in enumerate(seen) if each.stored]
    shares = [report.mean_fetched_share for report in reports if report is not None]
    assert len(shares) == len(reports) and min(share for share in shares if share is not None) < 1
    if "pool" in name:
        assert max(evicted for report in reports if report is not None for evicted in report.evicted) > 0


@pytest.mark.parametrize(
    "policy",
    [
        ExactTopK(min_tokens=0, fetch=24, sinks=2, recent=4),
        Quest(min_tokens=0, fetch=24, sinks=2, recent=4, page=1, first_layer=0),
    ],
    ids=["exact_topk", "quest, pages of a token"],
)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_each_rank_retrieves_the_highest_scores_of_its_own_tokens(
    rank_pools: RankPools, bounds: tuple[int, ...], policy: Policy
) -> None:
    """It also has the first and the last tokens of the text, each of which is on one rank."""
    seen = run(rank_pools, policy, bounds)
    partition = ContextPartition(boundaries=bounds)
    parts = shards(partition, NUM_NEW - 1, by_share=True)

    def allowed(row: int, step: int) -> Callable[[int, int, Tensor], set[int]]:
        reference, pad = references[row], NUM_TOKENS - len(BATCH[row])

        def of_query(layer: int, head: int, q_GH: Tensor) -> set[int]:
            found, query = set[int](), len(BATCH[row]) + step
            for shard in parts.values():
                slots = [*shard.chunk, *(index for index in shard.own_new if index < NUM_TOKENS + step)]
                own = [index - pad for index in slots if index >= pad]
                num = min(len(slots), max(shard.part([]).share_of(24), 2 + 4))
                if len(own) <= num:
                    found |= set(own)
                    continue
                scores_Gn = q_GH @ reference.k[layer][head, own].T
                need_n = (scores_Gn - scores_Gn.amax(dim=1, keepdim=True)).amax(dim=0)
                need_n[torch.tensor([at < 2 or at >= query - 4 for at in own])] = math.inf
                found |= {own[place] for place in need_n.topk(num).indices.tolist()}
            return found

        return of_query

    references: dict[int, Reference] = {}
    for row, ids in enumerate(BATCH):
        reference = references[row] = Reference()
        reference.run(ids, 0)
        for step in range(NUM_NEW - 1):
            reference.allowed = allowed(row, step)
            token = seen[0].batch.generations[row].new_token_ids[step]
            logits_V = reference.run([token], len(ids) + step)
            assert largest_difference(logits_of(seen, step + 1)[row], logits_V) < TOLERANCE, (row, step)


def kept_by_formula(name: str, probabilities_NSS: Tensor, chunk: range, budget: int, recent: int) -> list[set[int]]:
    """Tokens of a chunk that each KV head keeps, from the probabilities of the whole prompt, in plain words."""
    own = torch.arange(chunk.start, chunk.stop)
    voters = own if name == "h2o" else own[-recent:]
    votes_NC = probabilities_NSS[:, voters][:, :, own].sum(dim=1)
    votes_KC = votes_NC.unflatten(0, (2, -1)).mean(dim=1)
    if name == "snapkv":
        before = len(own) - recent
        pooled = [votes_KC[:, max(0, at - 1) : min(before, at + 2)].amax(dim=1) for at in range(before)]
        votes_KC[:, :before] = torch.stack(pooled, dim=1)
    else:
        recent = round(0.5 * budget)
        votes_KC[:, [at for at, index in enumerate(chunk) if index < 2]] = math.inf
    votes_KC[:, len(own) - recent :] = math.inf
    best_first_KC = votes_KC.sort(descending=True, stable=True).indices  # of equal ones the earlier
    return [set(own[best_C[:budget]].tolist()) for best_C in best_first_KC]


@pytest.mark.parametrize("name", ["snapkv", "h2o"])
@pytest.mark.parametrize("bounds", [(0, 35, 60), (0, 20, 40, 60)])
def test_a_rank_keeps_its_share_by_the_votes_of_its_own_last_queries(
    rank_pools: RankPools, name: str, bounds: tuple[int, ...]
) -> None:
    """A vote is a share of the query's attention to the whole text. The deeper layers have these inputs as well."""
    ids = prompt(NUM_TOKENS)
    reference = Reference()
    reference.run(ids, 0)
    for rank, seen in enumerate(run(rank_pools, EVICTING[name], bounds, prompts=[ids])):
        chunk = range(*bounds[rank : rank + 2])
        budget, recent = (number * chunk.stop // 60 - number * chunk.start // 60 for number in (20, 6))
        for layer, probabilities_NSS in reference.probabilities_NSS.items():
            kept = [set(head) for head in seen.stored[0][layer][0]]
            assert kept == kept_by_formula(name, probabilities_NSS, chunk, budget, recent)


def test_queries_of_layers_that_read_count_by_their_attention_to_the_tokens_of_all_ranks(rank_pools: RankPools) -> None:
    """H2O's sum for a generated token is then what it adds up on one rank.

    Seen to fail: the shares of a reader's attention among a rank's own tokens alone, and log-sum-exps in memory that
    the gathers of layers between have written over.
    """
    policies, layer = RankPolicies.everywhere([H2O(budget=400)]), 1  # the one that sees everything
    arguments = ("gemma4_text", [prompt(NUM_TOKENS)])
    one = rank_pools.run(1, sharded_policy_tasks.generate, *arguments, (0, 60), policies, GREEDY, None, DecodeName.last)
    two = rank_pools.run(2, sharded_policy_tasks.generate, *arguments, (0, 35, 60), policies, GREEDY)

    def carried(seen: Sequence[Seen], step: int) -> dict[int, Tensor]:
        """Attention that each token's KV heads have received, by its position."""
        return {
            at: received_K
            for each in seen
            for at, received_K in zip(each.stored[step][layer][0][0], each.carried[step][layer][0][0].T, strict=True)
        }

    for step in range(NUM_NEW - 2):
        (before, after), (own_before, own_after) = (
            [carried(seen, step + more) for more in (0, 1)] for seen in (one, two)
        )
        assert after.keys() == own_after.keys() and len(after) == NUM_TOKENS + step + 1
        for at in before:
            torch.testing.assert_close(
                own_after[at] - own_before[at],
                after[at] - before[at],
                atol=1e-5,
                rtol=0,  # float32
            )


@pytest.mark.parametrize("bounds", BOUNDS)
def test_sinks_are_the_first_tokens_of_the_text_and_every_rank_has_its_share_of_the_window(
    rank_pools: RankPools, bounds: tuple[int, ...]
) -> None:
    seen = run(rank_pools, EVICTING["streaming_llm"], bounds)
    for rank, part in chunks(bounds):
        budget = part.share_of(20)
        for row, pad in enumerate(part.row_pads):
            own = [index - pad for index in part.chunk if index >= pad]
            sinks = [at for at in own if at < 3]
            expected = own if len(own) <= budget else [*sinks, *own[len(own) - (budget - len(sinks)) :]]
            for of_layer in seen[rank].stored[0]:
                assert [at for at in of_layer[row][0] if at >= 0] == expected[-budget:]


def test_shares_of_a_number_of_tokens_add_up() -> None:
    parts = [PromptPart(chunk=range(*ends), num_tokens=70, row_pads=[0, 3]) for ends in pairwise((0, 1, 30, 31, 70))]
    for number in (0, 1, 4, 7, 70, 1024):
        shares = [part.share_of(number) for part in parts]
        assert all(share == 0 if number == 0 else share >= 1 for share in shares)
        if number >= 70:
            assert sum(shares) == number
    assert [part.sinks(4) for part in parts] == [[1, 0], [3, 4], [0, 0], [0, 0]]


@pytest.mark.parametrize("transfer", list(Transfer))
@pytest.mark.parametrize("bounds", [(0, 35, 60), (0, 20, 44, 60)])
def test_pyramid_narrows_as_with_all_keys_on_the_last_rank(
    rank_pools: RankPools, bounds: tuple[int, ...], transfer: Transfer
) -> None:
    """So the first token's logits are the same, and each rank keeps what it computed."""
    prompts, prefill = [prompt(NUM_TOKENS), prompt(31, seed=4)], PrefillOptions(transfer=transfer)
    seen = run(rank_pools, PYRAMID, bounds, prompts=prompts, prefill=prefill)
    last = rank_pools.run(
        len(bounds) - 1, policy_tasks.generate, "llama", prompts, bounds, RankPolicies.everywhere([PYRAMID]), 1, prefill
    )[0]
    for row, generation in enumerate(last.generations):
        for token, value in generation.first_token_logits_top5:
            assert logits_of(seen, 0)[row][token] == pytest.approx(value, abs=TOLERANCE)
    for rank, (start, end) in enumerate(pairwise(bounds)):
        assert seen[rank].batch.ranks[rank].kept_tokens == PYRAMID.lengths(end - start, 3)


def test_a_rank_may_have_another_policy_or_none(rank_pools: RankPools) -> None:
    bounds = (0, 35, 60)
    for policies, expected in (
        (RankPolicies(last=[SnapKV(budget=24, window=4)]), [35, 10]),
        (RankPolicies(others=[SnapKV(budget=24, window=4)]), [14, 25]),
        (RankPolicies(last=[Window(budget=24)], others=[ExactTopK(min_tokens=0, fetch=20)]), [35, 10]),
    ):
        seen = run(rank_pools, policies, bounds)
        check_steps(seen)
        assert [seen[0].batch.ranks[rank].kept_tokens for rank in range(2)] == [[kept] * 3 for kept in expected]


@pytest.mark.parametrize("num_new", [1, 5, 40])
@pytest.mark.parametrize("bounds", [(0, 35, 70), (0, 44, 70), (0, 20, 45, 70), (0, 30, 30, 70)])
@pytest.mark.sampled(6)
def test_bytes_are_the_share_of_the_budget_and_a_ring(
    rank_pools: RankPools, bounds: tuple[int, ...], num_new: int
) -> None:
    options = GenerationOptions(max_new_tokens=num_new, ignore_eos=True)
    policy = SnapKV(budget=28, window=7)
    seen = run(rank_pools, policy, bounds, family="llama_deep", prompts=[prompt(70)], options=options)
    made = shards(ContextPartition(boundaries=bounds), num_new - 1, by_share=True)
    slot = LAYER_BYTES + 2 * 4  # and a position in each of two KV heads
    for rank, report in enumerate(seen[0].batch.ranks):
        if rank not in made:
            assert report.kv_peak_bytes == 0
            continue
        own_new, share = len(made[rank].own_new), 28 * bounds[rank + 1] // 70 - 28 * bounds[rank] // 70
        kept = DEEP_LAYERS * (share + min(32, own_new)) * slot
        ring = PrefillOptions().layers_in_flight * bounds[rank + 1] * LAYER_BYTES
        assert report.kept_tokens == [share] * DEEP_LAYERS
        assert (report.kv_kept_bytes, report.kv_peak_bytes) == (kept, kept + ring)


def test_bytes_are_those_of_the_tokens_of_each_head(rank_pools: RankPools) -> None:
    """Layers whose heads keep different numbers have places where heads begin and end, which count."""
    bounds, num_new = (0, 44, 70), 6
    options = GenerationOptions(max_new_tokens=num_new, ignore_eos=True)
    policy = AdaKV(scorer=SnapKV(budget=28, window=7), alpha=0.1)
    seen = run(rank_pools, policy, bounds, family="llama_deep", prompts=[prompt(70)], options=options)
    made = shards(ContextPartition(boundaries=bounds), num_new - 1, by_share=True)
    for rank, report in enumerate(seen[0].batch.ranks):
        share, room = made[rank].part([]).share_of(28), min(32, len(made[rank].own_new))
        lengths = [[sum(at >= 0 for at in head) for head in layer[0]] for layer in seen[rank].stored[0]]
        assert all(sum(of_layer) == 2 * share for of_layer in lengths)
        ragged = sum(len(set(of_layer)) > 1 for of_layer in lengths)
        assert ragged > 0
        kept = DEEP_LAYERS * (share + room) * (LAYER_BYTES + 2 * 4) + ragged * ((2 + 3) * 4 + 2 * 8)
        ring = PrefillOptions().layers_in_flight * bounds[rank + 1] * LAYER_BYTES
        assert report.kept_tokens == [share] * DEEP_LAYERS
        assert report.kv_kept_bytes == kept
        assert report.kv_peak_bytes == kept + ring


def test_sampled_tokens_and_stop_strings_under_a_policy(rank_pools: RankPools) -> None:
    """With room for all, sampling is that of one rank, too."""
    options = GenerationOptions(max_new_tokens=12, do_sample=True, seed=5, top_k=20, ignore_eos=True)
    policies = RankPolicies.everywhere([H2O(budget=400)])
    alone = rank_pools.run(
        1, sharded_policy_tasks.generate, "llama", BATCH, (0, 60), policies, options, None, DecodeName.last
    )[0]
    seen = run(rank_pools, policies, (0, 35, 60), options=options)
    assert [row.new_token_ids for row in seen[0].batch.generations] == [
        row.new_token_ids for row in alone.batch.generations
    ]


def test_auto_leaves_the_choice_of_tokens_to_the_last_rank(rank_pools: RankPools) -> None:
    policies = RankPolicies.everywhere([SnapKV(budget=20, window=4)])
    batches = rank_pools.run(2, policy_tasks.generate, "llama", BATCH, (0, 35, 60), policies)
    assert [batch.decode for batch in batches] == ["last", "last"]
