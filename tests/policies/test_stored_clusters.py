"""Clusters that are stored with the modules of a Prompt Cache: made once, and used by all prompts of the module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from launch.inputs.options import RunOptions
from launch.inputs.policies import checked, rank_policies
from policies import clustering
from policies.base import Policy
from policies.clusterkv import ClusterKV
from policies.retriever import StoredPart
from policies.retroinfer import RetroInfer
from policies.reuse import ReusingPrompt, Segment, SegmentUse
from policies.snapkv import SnapKV
from policies.squeezed_attention import SqueezedAttention
from runahead import Engine, GenerationOptions, Ranks
from runahead.config import Device, RanksOptions
from runahead.report import GenerationBatch
from runahead.reuse.reused_kv import ReusedKV, ReusedPart
from runahead.reuse.store import SegmentStore
from runahead.thinning.rank_policies import RankPolicies
from tests.families import prompt, throughout
from tests.policies.test_indices import KV_HEADS, slots_of, view
from tests.policies.test_retrieval import ALL, SOME, policy
from tests.ranks.tasks import tiny_model
from tests.reuse.test_prefixes import require_same
from tests.serving.test_prefixes import Serving

OPTIONS = GenerationOptions(max_new_tokens=4, ignore_eos=True, logprobs=5)
FEW: dict[str, Any] = {"first_layer": 0, "min_tokens": 0, "cluster": 5, "iterations": 4, "sinks": 0, "recent": 7}
POLICIES: dict[str, ClusterKV] = {
    "clusterkv": ClusterKV(**FEW, fetch=20),
    "squeezed_attention": SqueezedAttention(**FEW, observed=7, quantile=0.6),
    "two_levels": SqueezedAttention(**FEW, observed=7, quantile=0.6, coarse=3, coarse_quantile=0.3),
    "retroinfer": RetroInfer(**FEW, fetch=20),
}

STORING = tuple(POLICIES)
INDEXED = [name for name in SOME if name not in (*STORING, "offload", "em_llm")]
"""Policies that retrieve and store nothing with modules: they index whole prompts, which em_llm has computed whole."""


def retrieving(name: str, **options: Any) -> Policy:
    """A policy of either kind; with other options if it has them."""
    if name in POLICIES:
        return replace(POLICIES[name], **{each: val for each, val in options.items() if hasattr(POLICIES[name], each)})
    seen = {"observed": 5} if name in ("infinigen", "infllm", "retrieval_attention") else {}
    return policy(name, (ALL if options else SOME)[name] | seen)


def engine_of(*policies: Policy, store: SegmentStore | None = None) -> Engine:
    ranks = Ranks.start(RanksOptions(device=Device.cpu))
    return Engine(tiny_model("llama"), ranks, policies=RankPolicies.everywhere(policies), store=store)


def segment(first: int, end: int, *more: int) -> Segment:
    ids = tuple(prompt(end - first + len(more), seed=first))
    return Segment(name=f"{first}", ids=ids, positions=(*range(first, end), *more))


def use(of: Segment, *parts: range) -> SegmentUse:
    return SegmentUse(segment=of, parts=parts)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Numbers of keys that are clustered, by call."""
    calls, real = list[int](), clustering.spherical_k_means

    def counting(k_XnH: torch.Tensor, *given: int) -> torch.Tensor:
        calls.append(k_XnH.shape[1])
        return real(k_XnH, *given)

    with patch.object(clustering, "spherical_k_means", counting):
        yield calls


def fetched(batch: GenerationBatch) -> list[float]:
    report = batch.ranks[0].retrieval
    assert report is not None
    return [share for share in report.fetched_share if share is not None]


MODULE = segment(0, 55)
ONE = ReusingPrompt(
    uses=(use(MODULE, range(55)),), new_ids=tuple(prompt(7, seed=1)), new_positions=tuple(range(55, 62))
)
"""A module and seven tokens, all of which are alone in their clusters."""


@pytest.mark.parametrize("name", [*STORING, *INDEXED])
def test_a_module_is_retrieved_as_if_it_was_clustered_in_the_prompt(name: str) -> None:
    """All numbers are those of the plain prompt, whose clusters are the same.

    With clusters of keys and values together it fails.
    """
    engine = engine_of(retrieving(name))
    with throughout(torch.float64):
        ours, theirs = engine.generate([ONE], OPTIONS), engine.generate([ONE.ids], OPTIONS)
    require_same(ours, theirs)
    assert fetched(ours) == fetched(theirs) and all(share < 0.8 for share in fetched(ours))


def test_a_module_is_clustered_once(tmp_path: Path) -> None:
    """With another process, too, which finds the clusters in files; other options have clusters of their own."""
    policy, model = POLICIES["squeezed_attention"], tiny_model("llama")
    layers, longer = model.num_layers, replace(ONE, new_ids=(*ONE.new_ids, 5, 6), new_positions=tuple(range(55, 64)))
    with throughout(torch.float64), counted() as calls:
        engine = engine_of(policy, store=SegmentStore(model, tmp_path))
        engine.generate([ONE], OPTIONS)
        assert calls == [55] * layers
        del calls[:]
        engine.generate([longer, ONE], OPTIONS)
        assert calls == [2] * layers, "two tokens of the longer prompt are not in the module, and not among the last"
        del calls[:]
        found = engine_of(policy, store=SegmentStore(model, tmp_path)).generate([ONE], OPTIONS)
        assert calls == []
        other = engine_of(replace(policy, cluster=4), store=SegmentStore(model, tmp_path)).generate([ONE], OPTIONS)
        assert calls == [55] * layers
        require_same(found, engine.generate([ONE], OPTIONS))
    assert fetched(other) != fetched(found)


OUTER, INNER = segment(0, 30, *range(45, 55)), segment(34, 44)
USES = use(OUTER, range(3, 28), range(30, 40)), use(INNER, range(10))
GAPS = ReusingPrompt(uses=USES, new_ids=tuple(prompt(24, seed=7)), new_positions=(1, 31, 32, 44, *range(60, 80)))
ALONE = ReusingPrompt(uses=USES[1:], new_ids=(5, 6, 7), new_positions=(2, 33, 46))


@pytest.mark.parametrize("name", [*STORING, *INDEXED])
def test_all_of_a_prompt_is_the_full_cache(name: str) -> None:
    """Modules with gaps, that are used in part, between new tokens, and in a row with padding."""
    default = SqueezedAttention
    every = retrieving(name, fetch=1.0, coarse=0, quantile=default.quantile, coarse_quantile=default.coarse_quantile)
    with throughout(torch.float64):
        require_same(*(engine_of(*each).generate([GAPS, ALONE], OPTIONS) for each in ((every,), ())))


@pytest.mark.parametrize("name", ["clusterkv", "two_levels"])
def test_the_order_in_which_modules_are_given_does_not_matter(name: str) -> None:
    """With clusters numbered in that order it fails on two levels, whose coarse clusters begin with every third one."""
    engine, turned = engine_of(POLICIES[name]), replace(GAPS, uses=GAPS.uses[::-1])
    with throughout(torch.float64):
        require_same(engine.generate([turned], OPTIONS), engine.generate([GAPS], OPTIONS))


def test_rows_that_share_a_module_retrieve_as_each_would_alone() -> None:
    """One module has a row of its own length in each, and one is in both."""
    engine = engine_of(POLICIES["clusterkv"])
    with throughout(torch.float64):
        both = engine.generate([GAPS, ALONE], OPTIONS).generations
        for ours, prompt_alone in zip(both, (GAPS, ALONE), strict=True):
            [theirs] = engine.generate([prompt_alone], OPTIONS).generations
            assert ours.new_token_ids == theirs.new_token_ids


@pytest.mark.parametrize("pads", [[0], [0, 11]], ids=["alone", "padded"])
def test_every_token_is_in_one_cluster_of_its_module_which_has_the_mean_of_those_in_the_prompt(pads: list[int]) -> None:
    """It fails if clusters of two modules share a number, or if tokens of no module join those of one.

    Of the first module some tokens are computed again, and of both some are alone; the second row has one of them.
    """
    how = RetroInfer(cluster=5, iterations=4, block=6, sinks=2, recent=6)
    seen, generator = view(50, pads), torch.Generator().manual_seed(1)
    slots = [torch.arange(-6, 14), torch.cat([torch.arange(20, 26), torch.tensor([-1] * 5), torch.arange(36, 47)])]
    parts = [
        StoredPart(slots_T=each, clusters_TKx=torch.randint(4, (len(each), KV_HEADS, 1), generator=generator).int())
        for each in slots
    ]
    parts[0].slots_T.clamp_(min=-1)
    parts_B = [parts, parts[1:]][: len(pads)]
    index = how.index(replace(seen, stored_parts_B=parts_B))
    of_BKn, sizes_BKY = index.of_BKn, index.sizes_BKY(slots_of(50, pads))
    means = torch.cat([index._clusters.means_BKPH, index._k_BKWH], dim=2)
    for row, pad in enumerate(pads):
        for head in range(KV_HEADS):
            members = of_BKn[row, head, pad:]
            assert members.bincount(minlength=sizes_BKY.shape[2]).tolist() == sizes_BKY[row, head].tolist()
            for cluster in members.unique().tolist():
                mean = seen.k_BKnH[row, head, pad:][members == cluster].mean(dim=0)
                torch.testing.assert_close(means[row, head, cluster], mean)
            for part in parts_B[row]:
                inside = (part.slots_T >= pad + 2) & (part.slots_T < 44)
                ours, stored = of_BKn[row, head, part.slots_T[inside]], part.clusters_TKx[inside, head, 0]
                assert torch.equal(ours[:, None] == ours, stored[:, None] == stored)
                others = torch.ones(50, dtype=torch.bool)
                others[part.slots_T[inside]] = False
                assert not set(ours.tolist()) & set(of_BKn[row, head, others & (torch.arange(50) >= pad)].tolist())


def test_a_server_retrieves_from_modules() -> None:
    serving = Serving("llama", policies=RankPolicies.everywhere([POLICIES["squeezed_attention"]]))
    with throughout(torch.float64):
        serving.prefill(ONE, num_new=4)
        serving.step(1)
        serving.prefill(GAPS, num_new=4)
        serving.executor.decode_all()
        expected = [serving.plain.generate([each], OPTIONS).generations[0].new_token_ids for each in (ONE, GAPS)]
    assert [serving.tokens[1, 0], serving.tokens[2, 0]] == expected


def test_a_stage_does_other_things_while_it_clusters_a_module_and_its_ranks_do_them_alike() -> None:
    """Also where another rank of the stage lacks the clusters. The time is one of the prefill, and is reported."""
    serving = Serving("llama", policies=RankPolicies.everywhere([POLICIES["squeezed_attention"]]))
    layers, seen, ranks = serving.model.num_layers, list[int](), serving.engine.ranks

    def gathered(value: Any, what: str) -> list[Any]:
        return [value, (set(), {MODULE.content_key})] if "clustered" in what else [value, value]

    clock = SimpleNamespace(perf_counter=count(step=100).__next__)
    with throughout(torch.float64), counted() as calls, patch("runahead.reuse.reuse.time", clock):
        with patch.object(serving.executor, "after_segment_layer", lambda: seen.append(len(calls))):
            serving.prefill(ONE, num_new=2)
            assert seen == [*[0] * (layers - 1), *range(1, layers + 1)]
            del seen[:], calls[:]
            with patch.object(ranks, "gather_in_stage", gathered):
                serving.prefill(ONE, num_new=2)
            assert seen == list(range(1, layers + 1)), "another rank of the stage lacks them"
            assert 100 <= serving.parts[1].prefill_s < 200, "it encodes nothing, and clusters"
        [first, again] = [serving.plain.generate([ONE], OPTIONS).ranks[0].reuse for _ in range(2)]
    assert first is not None and again is not None and first.cluster_s == 100 and again.cluster_s == 0


def test_two_answers_to_a_prompt_with_gaps_have_its_positions() -> None:
    """If a fork forgets the gaps, the second answer's tokens are rotated to positions that come too early."""
    serving = Serving("llama", policies=RankPolicies.everywhere([POLICIES["clusterkv"]]))
    with throughout(torch.float64):
        serving.prefill(GAPS, GAPS, num_new=4)
        serving.executor.decode_all()
        [expected] = serving.plain.generate([GAPS], OPTIONS).generations
    assert serving.tokens[1, 0] == serving.tokens[1, 1] == expected.new_token_ids


def test_what_is_stored_of_a_token_is_for_the_slot_that_has_its_key() -> None:
    """Here it is the key itself. With slots that count without padding, or parts that begin a module, it fails."""
    modules = {"one": torch.arange(100, 120)[:, None, None], "other": torch.arange(200, 205)[:, None, None]}
    given = [("one", range(3, 6), 4, (0, 1)), ("one", range(10, 17), 20, (0,)), ("other", range(5), 8, (0, 1))]
    parts = [
        ReusedPart(
            layers_TKX=[modules[name][at.start : at.stop]],
            positions_T=torch.arange(len(at)) + position,
            rows=rows,
            segment=name,
            first=at.start,
            clusters_TKx=[modules[name]],
        )
        for name, at, position, rows in given
    ]
    texts = ReusedKV(parts=parts, positions_BS=torch.tensor([[7, 30], [0, 14]]), ends=[31, 15]).whole([0, 1])
    found_TBKX = texts.kv(0, torch.zeros(2, 2, 1, 1, dtype=torch.int64), room=0)
    [rows] = texts.stored_parts()
    assert [[int((part.slots_T >= 0).sum()) for part in row] for row in rows] == [[10, 5], [3, 5]]
    for row, stored in enumerate(rows):
        for part in stored:
            is_used_T = part.slots_T >= 0
            assert torch.equal(found_TBKX[part.slots_T[is_used_T], row], part.clusters_TKx[is_used_T])


def test_parts_that_are_joined_are_of_no_segment() -> None:
    modules = [torch.arange(4)[:, None, None] + 10 * number for number in range(5)]
    parts = [
        ReusedPart(
            layers_TKX=[each],
            positions_T=each[:, 0, 0],
            rows=(0,),
            segment=f"{number}",
            first=2,
            clusters_TKx=[torch.zeros(6, 1, 1)],
        )
        for number, each in enumerate(modules)
    ]
    texts = ReusedKV(parts=parts, positions_BS=torch.tensor([[50]]), ends=[51])
    assert len(texts.whole([0]).stored_parts()[0][0]) == 5
    joined = texts.joined()
    [one] = joined.parts
    assert torch.equal(one.layers_TKX[0], torch.cat(modules))
    assert (one.segment, one.first, one.clusters_TKx) == ("", 0, None) and joined.whole([0]).stored_parts() == []


def test_policies_that_drop_tokens_and_models_with_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="policy snapkv may drop tokens.* gaps between these; use one that retrieves"):
        engine_of(SnapKV()).generate([ONE], OPTIONS)
    with pytest.raises(ValueError, match="policy clusterkv does not go with segments of model"):
        ranks = Ranks.start(RanksOptions(device=Device.cpu))
        Engine(tiny_model("gemma2"), ranks, policies=RankPolicies.everywhere([ClusterKV()])).check_reuse()
    with pytest.raises(ValueError, match="policy.retrieve=snapkv may drop tokens"):
        RunOptions(policy={"name": "prompt_cache", "retrieve": "snapkv"})
    given = {"name": "prompt_cache", "retrieve": {"name": "squeezed_attention", "quantile": 0.8}}
    assert rank_policies(checked(given)).last == [SqueezedAttention(quantile=0.8)]
