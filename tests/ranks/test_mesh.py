"""Stages of several ranks that share a model: every prefill, policy and store gives what whole models give."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, seed, settings

from policies.adakv import AdaKV
from policies.base import Policy
from policies.clusterkv import ClusterKV
from policies.criticalkv import CriticalKV
from policies.exact_topk import ExactTopK
from policies.expected_attention import ExpectedAttention
from policies.experiments.minicache import MiniCache
from policies.h2o import H2O
from policies.infinigen import InfiniGen
from policies.infllm import InfLLM
from policies.keydiff import KeyDiff
from policies.keyformer import Keyformer
from policies.kvzip import KVzip
from policies.offload import Offload
from policies.pyramidinfer import PyramidInfer, Select
from policies.pyramidkv import PyramidKV
from policies.quest import Quest
from policies.r_kv import RKV
from policies.retroinfer import RetroInfer
from policies.scissorhands import Scissorhands
from policies.shadowkv import ShadowKV
from policies.snapkv import SnapKV
from policies.sparq import SparQ
from policies.squeezed_attention import SqueezedAttention
from policies.streaming_llm import StreamingLLM
from policies.tova import TOVA
from runahead import GenerationOptions, PrefillOptions
from runahead.config import Carrier, DecodeName, Exchange, Positions, PrefillName, Transfer
from runahead.report import GenerationBatch
from runahead.thinning.rank_policies import RankPolicies
from tests.beat_clock import give_up_silent
from tests.conftest import RankPools
from tests.families import build, largest_difference, prompt, throughout
from tests.partitions import boundaries
from tests.rank_pool import RankPool, short_lived_pool
from tests.ranks import mesh_tasks, tensor_tasks
from tests.ranks.ragged_tasks import KVzapOfShare
from tests.ranks.test_exactness import TOLERANCE
from tests.ranks.test_tensor import FAMILIES, GREEDY
from tests.reuse.test_prefixes import require_same

PROMPT_TOKENS = 50
KV_BYTES = 2 * 8 * 8
"""Bytes of one token, KV head and layer: keys and values of 8 dims in float64."""

CHAIN = [
    PrefillOptions(transfer=transfer, carrier=carrier, layers_in_flight=2)
    for transfer in Transfer
    for carrier in (Carrier.copy, Carrier.backend)
]
WITHOUT_PARTITION = [
    PrefillOptions(name=PrefillName.single),
    PrefillOptions(name=PrefillName.tsp),
    PrefillOptions(name=PrefillName.zigzag, exchange=Exchange.ring),
    PrefillOptions(name=PrefillName.zigzag, exchange=Exchange.direct),
]


@cache
def expected(family: str, **sizes: Any) -> torch.Tensor:
    """Logits (V) behind the prompt by transformers alone, in one process."""
    module = build(family, dtype=torch.float64, **(tensor_tasks.SIZES | sizes))
    with torch.inference_mode(), throughout(torch.float64):
        return module(input_ids=torch.tensor([prompt(PROMPT_TOKENS)]), use_cache=False).logits[0, -1]


def check(
    rank_pools: RankPools,
    stages: int,
    shares: int,
    family: str,
    cases: list[mesh_tasks.Case],
    stores_first: bool | None = None,
    **sizes: Any,
) -> None:
    """Every rank of the last stage has transformers' logits, and the same bits as the others of it.

    Args:
        stores_first: what stages decide on blocks of rows; None: as they do.
    """
    task = partial(mesh_tasks.first_logits, stores_first=stores_first, **sizes)
    outcomes = rank_pools.run(stages * shares, task, shares, family, prompt(PROMPT_TOKENS), cases)
    for case, of_ranks in zip(cases, zip(*outcomes, strict=True), strict=True):
        found = [logits for logits, *_ in of_ranks if logits is not None]
        assert len(found) == shares, case
        assert largest_difference(found[0], expected(family, **sizes)) < TOLERANCE, case
        assert all(logits == found[0] for logits in found), case


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral"])
@pytest.mark.parametrize("stores_first", [False, True])
def test_shares_compute_blocks_of_rows(rank_pools: RankPools, family: str, stores_first: bool) -> None:
    """They add up each block's products; a stage of which others wait stores all keys and values first, or does not."""
    cases: list[mesh_tasks.Case] = [
        (PrefillOptions(row_tokens=row_tokens), bounds) for row_tokens, bounds in ((7, (0, 30, 50)), (1, (0, 3, 50)))
    ]
    check(rank_pools, 2, 2, family, cases, stores_first)
    check(rank_pools, 1, 2, family, [(PrefillOptions(name=PrefillName.tensor, row_tokens=7), (0, 50))])


OFTEN = ("llama", "llama_dynamic_ntk", "qwen3", "phi3", "gemma2", "gemma3_text", "llama4_text", "mixtral")
"""Families of each kind; the others are tested with the slow tests."""


@pytest.mark.parametrize(
    "family", [each if each in OFTEN else pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES]
)
@pytest.mark.sampled(3)
def test_two_stages_of_two_equal_transformers_in_every_family(rank_pools: RankPools, family: str) -> None:
    @seed(zlib.crc32(family.encode()))
    @settings(max_examples=2, phases=[Phase.generate])
    @given(bounds=boundaries(PROMPT_TOKENS, 2))
    def check_chain(bounds: tuple[int, ...]) -> None:
        check(rank_pools, 2, 2, family, [(options, bounds) for options in CHAIN])

    check_chain()
    check(rank_pools, 2, 2, family, [(options, None) for options in WITHOUT_PARTITION])


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.sampled(2)
def test_three_stages_of_two_equal_transformers(rank_pools: RankPools, family: str) -> None:
    @seed(zlib.crc32(family.encode()))
    @settings(max_examples=4, phases=[Phase.generate])
    @given(bounds=boundaries(PROMPT_TOKENS, 3))
    def check_chain(bounds: tuple[int, ...]) -> None:
        check(rank_pools, 3, 2, family, [(options, bounds) for options in CHAIN])

    check_chain()
    check(rank_pools, 3, 2, family, [(options, None) for options in WITHOUT_PARTITION])


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_any_number_of_kv_heads_that_divides(rank_pools: RankPools, kv_heads: int) -> None:
    cases: list[mesh_tasks.Case] = [(options, (0, 31, PROMPT_TOKENS)) for options in CHAIN]
    check(rank_pools, 2, 2, "llama", [*cases, (WITHOUT_PARTITION[2], None)], num_key_value_heads=kv_heads)


def test_one_stage_of_four_is_any_prefill(rank_pools: RankPools) -> None:
    cases: list[mesh_tasks.Case] = [(CHAIN[0], (0, PROMPT_TOKENS)), *((options, None) for options in WITHOUT_PARTITION)]
    check(rank_pools, 1, 4, "llama", [*cases, (PrefillOptions(name=PrefillName.tensor), None)])


@pytest.mark.parametrize(("stages", "shares"), [(2, 2), (4, 1), (1, 4)])
def test_bytes_of_a_rank_are_those_of_its_heads(rank_pools: RankPools, stages: int, shares: int) -> None:
    bounds = {1: (0, 50), 2: (0, 30, 50), 4: (0, 20, 32, 42, 50)}[stages]
    options = PrefillOptions(layers_in_flight=2)
    cases = [(options, bounds)]
    outcomes = rank_pools.run(4, mesh_tasks.first_logits, shares, "llama", prompt(PROMPT_TOKENS), cases)
    row = 4 // shares * KV_BYTES  # of a token and layer on one rank
    for rank, ((_, sent, received, peak),) in enumerate(outcomes):
        stage = rank // shares
        assert sent == (3 * bounds[stage + 1] * row if stage < stages - 1 else 0)
        assert received == 3 * bounds[stage] * row
        assert peak == (3 if stage == stages - 1 else 2) * bounds[stage + 1] * row


class TestGeneration:
    """All shares of the last stage decode in step."""

    @pytest.mark.parametrize(("stages", "shares", "bounds"), [(2, 2, (0, 31, 50)), (2, 2, (0, 50, 50)), (1, 4, None)])
    def test_tokens_are_those_of_whole_models(
        self, rank_pools: RankPools, stages: int, shares: int, bounds: tuple[int, ...] | None
    ) -> None:
        prompts = [prompt(50), prompt(9, seed=1), prompt(31, seed=2)]
        sampled = GenerationOptions(max_new_tokens=12, do_sample=True, temperature=2.0, seed=3, ignore_eos=True)
        for options in (GREEDY, sampled):
            [(alone, _)] = rank_pools.run(1, mesh_tasks.generate, 1, "llama", prompts, options)
            task = partial(mesh_tasks.generate, boundaries=bounds)
            results = rank_pools.run(4, task, shares, "llama", prompts, options)
            for batch, _ in results:
                assert tokens(batch) == tokens(alone)
            assert [len(steps) for _, steps in results] == [len(results[0][1]), 0, 0, 0]
            assert results[0][1]

    @pytest.mark.parametrize("bounds", [(0, 31, 50), (0, 9, 50)])
    def test_tokens_and_bytes_of_stages_that_decode_together(
        self, rank_pools: RankPools, bounds: tuple[int, ...]
    ) -> None:
        """Each share gathers with those of the same heads; of some rows the first stage has no token."""
        prompts = [prompt(50), prompt(9, seed=1), prompt(31, seed=2)]
        task = partial(mesh_tasks.generate, boundaries=bounds, decode=DecodeName.sharded)
        whole = rank_pools.run(2, task, 1, "llama", prompts, GREEDY)[0][0]
        [(alone, _)] = rank_pools.run(1, mesh_tasks.generate, 1, "llama", prompts, GREEDY)
        results = rank_pools.run(4, task, 2, "llama", prompts, GREEDY)
        for batch, _ in results:
            assert batch.decode == "sharded"
            assert tokens(batch) == tokens(alone)
            kept = [rank.kv_kept_bytes for rank in batch.ranks]
            assert kept == [rank.kv_kept_bytes // 2 for rank in whole.ranks for _ in range(2)]
        assert [len(steps) for _, steps in results] == [len(results[0][1]), 0, 0, 0]

    def test_report_says_where_every_rank_is(self, rank_pools: RankPools) -> None:
        task = partial(mesh_tasks.generate, boundaries=(0, 31, 50))
        results = rank_pools.run(4, task, 2, "llama", [prompt(50)], GREEDY)
        for batch, _ in results:
            assert [(rank.stage, rank.share) for rank in batch.ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
            assert [rank.chunk_tokens for rank in batch.ranks] == [31, 31, 19, 19]
            assert batch.chunks == "31 + 19 tokens, 2 ranks each"
            assert all(spans for spans in batch.spans)
            assert any("to rank 3" in span.detail for span in batch.spans[1])

    @pytest.mark.slow
    def test_program(self, rank_pools: RankPools, tmp_path: Path) -> None:
        build("llama", **tensor_tasks.SIZES).config.save_pretrained(tmp_path)
        overrides = ["model=random", f"model.config={tmp_path}", "prompt.random_tokens=40", "ranks.device=cpu"]
        overrides += ["generation.max_new_tokens=4", "generation.ignore_eos=true", "partition=even"]
        reports = {
            shares: rank_pools.run(4, mesh_tasks.run_program, shares, overrides, str(tmp_path))[0] for shares in (1, 2)
        }
        assert reports[2]["new_token_ids"] == reports[1]["new_token_ids"]
        assert [(rank["stage"], rank["share"]) for rank in reports[2]["ranks"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert not {"stage", "share"} & set(reports[1]["ranks"][0])
        names = [event["args"]["name"] for event in trace(tmp_path) if event["name"] == "process_name"]
        assert names[3] == "rank 3 (stage 1, share 1)"
        together = rank_pools.run(4, mesh_tasks.run_program, 1, [*overrides, "prefill=tensor"], str(tmp_path))[0]
        assert together["new_token_ids"] == reports[1]["new_token_ids"]
        assert together["ranks"][3]["share"] == 3


def trace(folder: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return events


def tokens(batch: GenerationBatch) -> list[list[int]]:
    return [generation.new_token_ids for generation in batch.generations]


EVENTS = {"by": "surprise", "gamma": 0.3, "window": 20, "least": 2, "most": 7}
POLICIES: dict[str, list[Policy]] = {
    "streaming_llm": [StreamingLLM(budget=16)],
    "snapkv": [SnapKV(budget=16, window=4)],
    "pyramidkv": [PyramidKV(budget=16, window=4)],
    "h2o": [H2O(budget=16)],
    "adakv": [AdaKV(scorer=SnapKV(budget=16, window=4), alpha=0.1)],
    "criticalkv": [CriticalKV(scorer=SnapKV(budget=16, window=4), first_share=0.3)],
    "tova": [TOVA(budget=16)],
    "keydiff": [KeyDiff(budget=16)],
    "kvzip": [KVzip(budget=16, sinks=2, chunk_tokens=20)],
    "kvzap": [KVzapOfShare(sinks=2, recent=3, evict_every=2, threshold=0.5)],
    "expected_attention": [ExpectedAttention(budget=16, evict_every=8, future_tokens=16)],
    "r_kv": [RKV(budget=16, window=4, evict_every=6)],
    "scissorhands": [Scissorhands(budget=16, recent=3, window=6)],
    "keyformer": [Keyformer(budget=16, tau_tokens=8)],
    "minicache": [MiniCache(start_share=0.0, retain_share=0.25)],
    "pyramidinfer": [PyramidInfer(mean_keep=0.6, min_tokens=8)],
    "pyramidinfer, fixed": [PyramidInfer(budget=24, mean_keep=0.6, min_tokens=8)],
    "quest": [Quest(fetch=20, min_tokens=0, page=4)],
    "exact_topk": [ExactTopK(fetch=20, min_tokens=0, sample_every=2)],
    "offload": [Offload()],
    "retroinfer": [RetroInfer(fetch=16, min_tokens=0, cluster=4, block=6, recent=4)],
    "clusterkv": [ClusterKV(fetch=16, min_tokens=0, cluster=4, block=6, sinks=2, recent=4, first_layer=0)],
    "squeezed_attention": [
        SqueezedAttention(min_tokens=0, cluster=4, block=6, sinks=2, recent=4, first_layer=0, quantile=0.6, observed=8)
    ],
    "sparq": [SparQ(fetch=12, min_tokens=0, recent=4, dims=3)],
    "shadowkv": [ShadowKV(fetch=12, min_tokens=0, recent=4, page=4, outliers=1, rank=None)],
    "infllm": [InfLLM(fetch=24, min_tokens=0, sinks=2, recent=8, block=4, observed=8)],
    "infllm, true distances": [InfLLM(fetch=24, min_tokens=0, sinks=2, recent=8, block=4, observed=8, clamped=False)],
    "infllm, events": [InfLLM(fetch=24, min_tokens=0, sinks=2, recent=8, observed=8, clamped=False, events=EVENTS)],
    "quest, events": [Quest(fetch=20, min_tokens=0, events=EVENTS)],
    "infinigen": [InfiniGen(min_tokens=0, alpha=1.0, max_fetch=0.8, recent=4, first_ahead=1, ahead=True, observed=16)],
    "infinigen, own queries": [InfiniGen(min_tokens=0, alpha=1.0, max_fetch=0.8, recent=4, ahead=False, observed=16)],
    "both": [PyramidInfer(mean_keep=0.6, min_tokens=8), SnapKV(budget=16, window=4)],
}
REFUSED = {("kvzap", DecodeName.last)} | {
    (name, DecodeName.sharded) for name in ("kvzip", "infllm", "infllm, events", "quest, events")
}
"""Ways to decode that need all tokens on one stage where they are on several."""


class TestPolicies:
    """Shares choose what whole models choose."""

    @pytest.mark.parametrize(
        ("name", "decode"),
        [
            (name, how)
            for name in POLICIES
            for how in (DecodeName.last, DecodeName.sharded)
            if (name, how) not in REFUSED
        ],
    )
    @pytest.mark.sampled(18)
    def test_two_stages_choose_the_same_tokens(self, rank_pools: RankPools, name: str, decode: DecodeName) -> None:
        """All of them are on the last stage, or with sharded decoding each stage chooses among its own."""
        policies = RankPolicies.everywhere(POLICIES[name])
        task = partial(mesh_tasks.generate, boundaries=(0, 32, 50), policies=policies, decode=decode)
        options = GenerationOptions(max_new_tokens=20, ignore_eos=True)
        prompts = [prompt(50), prompt(44, seed=3)]
        whole = rank_pools.run(2, task, 1, "llama", prompts, options)[0][0]
        for batch, _ in rank_pools.run(4, task, 2, "llama", prompts, options):
            assert tokens(batch) == tokens(whole)
            for ours, theirs in zip(batch.generations, whole.generations, strict=True):
                logits = dict(theirs.first_token_logits_top5)
                assert dict(ours.first_token_logits_top5) == pytest.approx(logits, abs=TOLERANCE)
            assert batch.decode == decode.name
            for share in batch.ranks:
                same = whole.ranks[share.rank // 2]
                # Heads that share a budget keep more in one share than in the other.
                assert policies.ragged or share.kept_tokens == same.kept_tokens
                assert bool(share.kept_tokens) == (decode is DecodeName.sharded or share.stage == 1)
                if same.retrieval is not None and share.retrieval is not None:
                    assert share.retrieval.fetched_share == same.retrieval.fetched_share

    def test_votes_decide_how_many_tokens_go_on(self, rank_pools: RankPools) -> None:
        policy = PyramidInfer(select=Select.top_p, top_p=0.8, min_tokens=8)
        policies, single = RankPolicies.everywhere([policy]), PrefillOptions(name=PrefillName.single)
        task = partial(mesh_tasks.generate, policies=policies, prefill=single)
        options = GenerationOptions(max_new_tokens=8, ignore_eos=True)
        whole = rank_pools.run(1, task, 1, "llama", [prompt(50)], options)[0][0]
        for batch, _ in rank_pools.run(4, task, 2, "llama", [prompt(50)], options):
            assert tokens(batch) == tokens(whole)
            assert batch.ranks[-1].kept_tokens == whole.ranks[-1].kept_tokens
        assert min(whole.ranks[-1].kept_tokens) < 50

    def test_positions_are_encoded_anew(self, rank_pools: RankPools) -> None:
        policies = RankPolicies.everywhere([StreamingLLM(budget=16)], Positions.reencoded)
        task = partial(mesh_tasks.generate, boundaries=(0, 32, 50), policies=policies)
        options = GenerationOptions(max_new_tokens=8, ignore_eos=True)
        whole = rank_pools.run(2, task, 1, "llama", [prompt(50)], options)[0][0]
        for batch, _ in rank_pools.run(4, task, 2, "llama", [prompt(50)], options):
            assert tokens(batch) == tokens(whole)


@pytest.mark.parametrize("on_disk", [False, True])
def test_each_share_stores_its_heads_of_segments(rank_pools: RankPools, tmp_path: Path, on_disk: bool) -> None:
    folder = str(tmp_path) if on_disk else None
    arguments = "llama", 3, [3, 2], folder, 5
    *_, (whole, _, whole_bytes) = rank_pools.run(2, mesh_tasks.serve_segments, 1, *arguments)
    files = len(list(tmp_path.glob("*.safetensors")))
    results = rank_pools.run(4, mesh_tasks.serve_segments, 2, *arguments)
    for logits, _, num_bytes in results[2:]:
        assert len(logits) == len(whole)
        assert all(largest_difference(ours, theirs) < TOLERANCE for ours, theirs in zip(logits, whole, strict=True))
        assert on_disk or num_bytes == whole_bytes / 2
    assert len(list(tmp_path.glob("*.safetensors"))) == 3 * files
    again = rank_pools.run(4, mesh_tasks.serve_segments, 2, *arguments)
    encoded = [[report.encoded_tokens for _, report, _ in run[2:]] for run in (results, again)]
    assert encoded[0][0] == encoded[0][1] > 0
    assert encoded[1] == ([0, 0] if on_disk else encoded[0])  # what is on disk is there the second time


def test_a_split_is_learned_for_stages(rank_pools: RankPools, tmp_path: Path) -> None:
    results = rank_pools.run(4, mesh_tasks.split_by_auto, 2, tmp_path, [60, 90, 2])
    (boundaries, learned), *others = results
    assert all(each == (boundaries, None) for each in others)
    assert [(len(each), each[-1]) for each in boundaries] == [(3, 60), (3, 90), (3, 2)]
    assert learned is not None and len(learned) == 2
    rank_pools.run(4, mesh_tasks.split_by_auto, 1, tmp_path, [60])
    assert len(list(tmp_path.rglob("*.json"))) == 2  # what stages have learned is not for single ranks


def test_a_table_is_searched_for_stages(rank_pools: RankPools, tmp_path: Path) -> None:
    build("llama", **tensor_tasks.SIZES).config.save_pretrained(tmp_path)
    overrides = ["model=random", f"model.config={tmp_path}", f"table={tmp_path}/table.json", "search.lengths=[64]"]
    overrides += ["search.objective=measured", "search.repeats=1", "search.probe_layers=1", "search.max_loss=null"]
    overrides += ["search.probe_chunks=[8,32]", "search.probe_prefixes=[32,64]", "ranks.device=cpu"]
    results = rank_pools.run(4, mesh_tasks.search_table, 2, overrides)
    assert all(result == results[0] for result in results)
    tensor, boundaries = results[0]
    assert tensor == 2 and [len(each) - 1 for each in boundaries] == [1, 2]


class TestPeerFailure:
    """A rank that is gone ends all others, which name its stage and share."""

    @pytest.fixture
    def pool(self) -> Iterator[RankPool]:
        with short_lived_pool(4) as pool:
            yield pool

    @pytest.mark.parametrize(("rank", "layer"), [(1, 1), pytest.param(2, 0, marks=pytest.mark.slow)])
    def test_killed_rank(self, pool: RankPool, rank: int, layer: int) -> None:
        with pytest.raises(RuntimeError, match=f"rank {rank}:\nthe process has ended") as caught:
            pool.run(tensor_tasks.generate_and_act, 2, rank, layer, "kill")
        name = re.escape(f"rank {rank} (stage {rank // 2}, share {rank % 2})")
        assert len(re.findall(f"PeerFailure: .*{name} has ended", str(caught.value))) == 3

    @pytest.mark.parametrize(("rank", "layer"), [(3, 1), pytest.param(0, 0, marks=pytest.mark.slow)])
    def test_stopped_rank(self, pool: RankPool, rank: int, layer: int) -> None:
        pool.run(mesh_tasks.make_ready, 2)  # which takes longer than a rank may be silent
        pool.run(give_up_silent, 1.5, rank)
        pool.stopped = rank
        with pytest.raises(RuntimeError, match=f"rank {rank}:\nno answer") as caught:
            pool.run(tensor_tasks.generate_and_act, 2, rank, layer, "stop")
        name = re.escape(f"rank {rank} (stage {rank // 2}, share {rank % 2})")
        assert len(re.findall(f"PeerFailure: .*{name} has been silent", str(caught.value))) == 3

    def test_rank_that_fails(self, pool: RankPool) -> None:
        with pytest.raises(RuntimeError, match="ValueError: out of luck") as caught:
            pool.run(tensor_tasks.generate_and_act, 2, 1, 1, "raise")
        assert "PeerFailure: rank 1 (stage 0, share 1) failed: out of luck" in str(caught.value)


DOCUMENT = prompt(40, seed=60)
TURNS = [
    [DOCUMENT],
    [DOCUMENT + prompt(9, seed=61), prompt(20, seed=62)],
    [DOCUMENT[:25] + prompt(12, seed=63), DOCUMENT + prompt(9, seed=61) + prompt(7, seed=64)],
]
LARGE = math.inf


@pytest.mark.parametrize(
    ("size", "num_shares", "limits", "cached"),
    [(2, 2, (LARGE, LARGE), [0, 40, 74]), (4, 2, (0, 0, LARGE, 45), [0, 40, 0])],
    ids=["one stage", "two stages, of whose last one a rank has less room"],
)
def test_ranks_that_share_a_model_reuse_what_all_of_them_have_stored(
    rank_pools: RankPools, size: int, num_shares: int, limits: tuple[float, ...], cached: list[int]
) -> None:
    options = GenerationOptions(max_new_tokens=4, ignore_eos=True, logprobs=5)
    given = "llama", TURNS, options
    [expected] = rank_pools.run(1, mesh_tasks.generate_in_turn, 1, *given, None, PrefillOptions())
    for turns in rank_pools.run(size, mesh_tasks.generate_in_turn, num_shares, *given, limits, PrefillOptions()):
        for ours, theirs in zip(turns, expected, strict=True):
            require_same(ours, theirs)
        assert [turn.ranks[-1].reuse.cached_tokens for turn in turns] == cached
    if size == 2:
        as_one = PrefillOptions(name=PrefillName.tensor)
        for turns in rank_pools.run(2, mesh_tasks.generate_in_turn, num_shares, *given, limits, as_one):
            require_same(turns[-1], expected[-1])
            assert turns[-1].ranks[-1].reuse.cached_tokens == cached[-1]
