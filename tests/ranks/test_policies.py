"""Cache policies in a chain of ranks: what one rank would compute, and less of it on the wire and in memory."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from policies.adakv import AdaKV
from policies.base import Policy
from policies.cake import CAKE
from policies.chunkkv import ChunkKV
from policies.clusterkv import ClusterKV
from policies.criticalkv import CriticalKV
from policies.em_llm import EMLLM
from policies.exact_topk import ExactTopK
from policies.h2o import H2O
from policies.infinigen import InfiniGen
from policies.infllm import InfLLM
from policies.k_centers import KCenters
from policies.keydiff import KeyDiff
from policies.kvzip import KVzip
from policies.lagkv import LagKV
from policies.magicpig import MagicPIG
from policies.offload import Offload
from policies.pyramidinfer import PyramidInfer
from policies.pyramidkv import PyramidKV
from policies.quest import Quest
from policies.r_kv import RKV
from policies.retrieval_attention import RetrievalAttention
from policies.retroinfer import RetroInfer
from policies.scissorhands import Scissorhands
from policies.shadowkv import ShadowKV
from policies.snapkv import SnapKV
from policies.sparq import SparQ
from policies.squeezed_attention import SqueezedAttention
from policies.streaming_llm import StreamingLLM
from policies.tova import TOVA
from policies.zigzagkv import ZigZagKV
from runahead import PrefillOptions
from runahead.config import CacheOptions, DecodeName, PrefillName, Transfer
from runahead.report import GenerationBatch
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import build, prompt
from tests.policies.running import Run
from tests.ranks import policy_tasks
from tests.ranks.tasks import tiny_model

NUM_TOKENS = 60
TOLERANCE = 1e-9  # float64; as in test_exactness
EVENTS = {"by": "surprise", "gamma": 0.3, "window": 20, "least": 2, "most": 7, "refine": "modularity"}
PYRAMID = PyramidInfer(mean_keep=0.6, min_tokens=8)
EVICTING: list[Policy | list[Policy]] = [
    StreamingLLM(budget=16),
    SnapKV(budget=16, window=4),
    PyramidKV(budget=16, window=4),
    KeyDiff(budget=16),
    TOVA(budget=16),
    ChunkKV(budget=16, window=4, chunk=5),
    RKV(budget=16, window=4, evict_every=6),
    LagKV(budget=16, sinks=2, lag=5, evict_every=4),
    AdaKV(scorer=SnapKV(budget=16, window=4)),
    KVzip(budget=16),
    ZigZagKV(budget=16, window=4, kernel=3),
    CAKE(budget=16, window=4, kernel=3),
    Scissorhands(budget=16, recent=3, window=4),
    KCenters(budget=16, evict_every=4),
    CriticalKV(scorer=SnapKV(budget=16, window=4)),
    [AdaKV(scorer=SnapKV(budget=20, window=4)), StreamingLLM(budget=16, sinks=2)],
]


def generate(
    rank_pools: RankPools,
    bounds: tuple[int, ...],
    policies: RankPolicies,
    family: str = "llama",
    *,
    prompts: list[list[int]] | None = None,
    num_new: int = 4,
    prefill: PrefillOptions | None = None,
) -> GenerationBatch:
    """The same on every rank."""
    prompts = prompts or [prompt(NUM_TOKENS)]
    batches = rank_pools.run(
        len(bounds) - 1, policy_tasks.generate, family, prompts, bounds, policies, num_new, prefill
    )
    assert all(batch.generations == batches[0].generations for batch in batches)
    return batches[0]


def logits(batch: GenerationBatch, row: int = 0) -> dict[int, float]:
    return dict(batch.generations[row].first_token_logits_top5)


def assert_same_answer(ours: GenerationBatch, theirs: GenerationBatch) -> None:
    for row, (a, b) in enumerate(zip(ours.generations, theirs.generations, strict=True)):
        assert a.new_token_ids == b.new_token_ids
        assert logits(ours, row) == pytest.approx(logits(theirs, row), abs=TOLERANCE)
    assert ours.ranks[-1].kept_tokens == theirs.ranks[-1].kept_tokens


@pytest.mark.parametrize("policy", EVICTING, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("bounds", [(0, 35, 60), (0, 1, 59, 60), (0, 0, 40, 60)])
@pytest.mark.sampled(8)
def test_evicting_on_the_last_rank_is_what_one_rank_does(
    rank_pools: RankPools, policy: Policy | list[Policy], bounds: tuple[int, ...]
) -> None:
    """It has all K,V, and the queries of the window that votes if that is within its chunk."""
    steps = policy if isinstance(policy, list) else [policy]
    if bounds[-1] - bounds[-2] < max(getattr(getattr(step, "scorer", step), "window", 1) for step in steps):
        pytest.skip("part of the window is another rank's")
    policies = RankPolicies.everywhere(steps)
    prompts = [prompt(NUM_TOKENS), prompt(44, seed=3)]
    alone = generate(rank_pools, (0, NUM_TOKENS), policies, num_new=24, prompts=prompts)
    together = generate(rank_pools, bounds, policies, num_new=24, prompts=prompts)
    assert_same_answer(together, alone)
    assert max(alone.ranks[0].kept_tokens) < NUM_TOKENS


@pytest.mark.parametrize(
    ("family", "policies"),
    [
        ("llama", [SnapKV(budget=48, window=4)]),
        ("llama", [AdaKV(scorer=SnapKV(budget=48, window=4))]),
        ("llama", [KVzip(budget=48)]),
        ("mistral", []),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(type(each).__name__ for each in value),
)
def test_the_last_rank_stores_few_bits_and_receives_all(
    rank_pools: RankPools, family: str, policies: list[Policy]
) -> None:
    """Groups are those of one rank, also in a model with windows, in which early tokens need not have been sent."""
    exact, quantised = (
        RankPolicies.everywhere(policies, storage=CacheOptions(bits=bits, residual=8)) for bits in (None, 4)
    )
    prompts = [prompt(NUM_TOKENS), prompt(52, seed=3)]
    alone = generate(rank_pools, (0, NUM_TOKENS), quantised, family, num_new=12, prompts=prompts)
    together = generate(rank_pools, (0, 35, NUM_TOKENS), quantised, family, num_new=12, prompts=prompts)
    full = generate(rank_pools, (0, 35, NUM_TOKENS), exact, family, num_new=12, prompts=prompts)
    assert_same_answer(together, alone)
    assert logits(together) == logits(full)
    assert together.ranks[1].kv_kept_bytes == alone.ranks[0].kv_kept_bytes < 0.75 * alone.ranks[0].kv_peak_bytes
    if family == "llama":
        assert together.ranks[0].kv_sent_bytes == full.ranks[0].kv_sent_bytes


@pytest.mark.parametrize(
    "policy",
    [
        InfiniGen(min_tokens=0, ahead=True, first_ahead=1, fetch=12, sinks=2, recent=3, first_layer=1, observed=8),
        InfiniGen(
            min_tokens=0,
            fetch=20,
            first_layer=1,
            observed=8,
            pool={"bytes": 30 * 2 * 2 * 2 * 2 * 8 * 8, "victim": "fifo"},
        ),
        Quest(min_tokens=0, fetch=20, page=4, first_layer=0),
        ExactTopK(min_tokens=0, fetch=20),
        Offload(),
        SparQ(min_tokens=0, fetch=20, dims=3),
        MagicPIG(min_tokens=0, recent=3, bits=2, tables=6, dense_every=0),
        RetroInfer(min_tokens=0, fetch=12, cluster=4, block=6, recent=4, first_layer=0),
        ClusterKV(min_tokens=0, fetch=12, cluster=4, block=6, sinks=2, recent=4, first_layer=0),
        SqueezedAttention(min_tokens=0, cluster=4, block=6, recent=4, first_layer=0, observed=8),
        ShadowKV(min_tokens=0, fetch=36, page=4, outliers=1, rank=6),
        InfLLM(min_tokens=0, fetch=24, sinks=2, recent=8, block=4, observed=8),
        EMLLM(min_tokens=0, fetch=24, sinks=2, recent=8, observed=8, events=EVENTS),
        Quest(min_tokens=0, fetch=20, first_layer=0, events=EVENTS),
        RetrievalAttention(min_tokens=0, fetch=14, sinks=2, recent=4, observed=8, nearest=4, width=4, hops=2),
    ],
    ids=[
        "infinigen",
        "infinigen, full pool",
        "quest",
        "exact_topk",
        "offload",
        "sparq",
        "magicpig",
        "retroinfer",
        "clusterkv",
        "squeezed_attention",
        "shadowkv",
        "infllm",
        "em_llm",
        "quest, events",
        "retrieval_attention",
    ],
)
@pytest.mark.parametrize("bounds", [(0, 35, 60), (0, 20, 40, 60)])
@pytest.mark.sampled(3)
def test_retrieving_on_the_last_rank_is_what_one_rank_does(
    rank_pools: RankPools, policy: Policy, bounds: tuple[int, ...]
) -> None:
    """It has all K,V, and the last queries of the prompt, by which columns are chosen."""
    policies, prompts = RankPolicies.everywhere([policy]), [prompt(NUM_TOKENS), prompt(44, seed=3)]
    alone = generate(rank_pools, (0, NUM_TOKENS), policies, num_new=24, prompts=prompts)
    together = generate(rank_pools, bounds, policies, num_new=24, prompts=prompts)
    assert_same_answer(together, alone)
    found = [each.ranks[-1].retrieval for each in (alone, together)]
    assert found[0] == found[1] and found[0] is not None
    assert (max(found[0].evicted) > 0) == (policy.pool.bytes is not None)  # type: ignore[attr-defined]
    assert together.ranks[0].retrieval is None


def test_one_rank_alone_is_the_policy_step_by_step(rank_pools: RankPools) -> None:
    ids = prompt(NUM_TOKENS)
    for policy in (PYRAMID, H2O(budget=16)):
        run = Run(tiny_model("llama"), [policy], [ids])
        expected = run.prefill()[0]
        batch = generate(rank_pools, (0, NUM_TOKENS), RankPolicies.everywhere([policy]))
        for token, value in logits(batch).items():
            assert value == pytest.approx(float(expected[token]), abs=TOLERANCE)
        assert batch.ranks[0].kept_tokens == run.kept.slots_by_layer


@pytest.mark.parametrize("transfer", list(Transfer))
@pytest.mark.parametrize("bounds", [(0, 35, 60), (0, 20, 44, 60), (0, 0, 30, 60), (0, 1, 30, 60)])
@pytest.mark.parametrize("family", ["llama", "gpt_bigcode", "llama_deep"])
@pytest.mark.sampled(3)
def test_pyramid_on_every_rank_is_chunked_prefill_with_every_chunk_narrowed(
    rank_pools: RankPools, family: str, bounds: tuple[int, ...], transfer: Transfer
) -> None:
    """One process that takes the same chunks one after the other has the same tokens left in every layer."""
    prompts = [prompt(NUM_TOKENS), prompt(31, seed=4)]
    run = Run(tiny_model(family), [PYRAMID], prompts)
    expected = run.prefill([end - start for start, end in pairwise(bounds) if end > start])
    policies = RankPolicies.everywhere([PYRAMID])
    batch = generate(rank_pools, bounds, policies, family, prompts=prompts, prefill=PrefillOptions(transfer=transfer))
    for row in range(2):
        for token, value in logits(batch, row).items():
            assert value == pytest.approx(float(expected[row, token]), abs=TOLERANCE)
    assert batch.ranks[-1].kept_tokens == run.kept.slots_by_layer


def test_fewer_tokens_travel(rank_pools: RankPools) -> None:
    """Exactly those that each layer has left, and so fewer than without."""
    bounds, model = (0, 20, 44, 60), tiny_model("llama_deep")
    lengths = [PYRAMID.lengths(end - start, model.num_layers) for start, end in pairwise(bounds)]
    per_token = model.kv_shapes[0].bytes_per_token()
    expected = [
        sum(first for first in lengths[0]) * per_token,
        sum(first + second for first, second in zip(lengths[0], lengths[1], strict=True)) * per_token,
        0,
    ]
    batch = generate(rank_pools, bounds, RankPolicies.everywhere([PYRAMID]), "llama_deep")
    assert [rank.kv_sent_bytes for rank in batch.ranks] == expected
    full = generate(rank_pools, bounds, RankPolicies(), "llama_deep")
    assert [rank.kv_sent_bytes for rank in full.ranks] == [20 * 12 * per_token, 44 * 12 * per_token, 0]
    assert batch.ranks[-1].kv_kept_bytes < 0.8 * full.ranks[-1].kv_kept_bytes


def test_policies_by_rank(rank_pools: RankPools) -> None:
    """Narrowing on the last rank alone: earlier ranks' tokens all stay."""
    bounds = (0, 35, 60)
    batch = generate(rank_pools, bounds, RankPolicies(last=[PYRAMID]))
    assert batch.ranks[1].kept_tokens == [35 + tokens for tokens in PYRAMID.lengths(25, 3)]
    others = generate(rank_pools, bounds, RankPolicies(others=[PYRAMID]))
    assert others.ranks[1].kept_tokens == [25 + tokens for tokens in PYRAMID.lengths(35, 3)]


def test_steps_follow_each_other(rank_pools: RankPools) -> None:
    policies = RankPolicies.everywhere([PYRAMID, StreamingLLM(budget=16)])
    batch = generate(rank_pools, (0, 35, 60), policies, num_new=20)
    assert batch.ranks[1].kept_tokens == [16, 16, 16]
    assert (
        batch.ranks[0].kv_sent_bytes
        == generate(rank_pools, (0, 35, 60), RankPolicies.everywhere([PYRAMID])).ranks[0].kv_sent_bytes
    )


@pytest.mark.parametrize(
    ("family", "policies", "prefill", "says"),
    [
        ("gemma2", RankPolicies(last=[PYRAMID]), None, "windows"),
        ("bloom", RankPolicies(last=[Quest()]), None, "ALiBi"),
        ("llama", RankPolicies(last=[PYRAMID]), PrefillOptions(name=PrefillName.tsp), "prefill=kv_runahead"),
        (
            "llama",
            RankPolicies.everywhere([PyramidInfer(select="top_p")]),  # type: ignore[arg-type]
            None,
            "policy.select=top_k, or one rank",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    rank_pools: RankPools, family: str, policies: RankPolicies, prefill: PrefillOptions | None, says: str
) -> None:
    with pytest.raises(Exception, match=re.escape(says)):
        generate(rank_pools, (0, 35, 60), policies, family, prefill=prefill)


def test_a_pool_without_room_is_refused_on_all_ranks_before_a_prompt(rank_pools: RankPools) -> None:
    """Only ranks that decode have a pool, and the others would learn of it in the middle of the prefill."""
    row = sum(shape.bytes_per_token() for shape in tiny_model("llama").kv_shapes) * (4 + 16 + 1)
    enough, small = (ExactTopK(min_tokens=0, fetch=20, pool={"bytes": size}) for size in (row, row - 1))
    two, one = [prompt(NUM_TOKENS), prompt(44, seed=3)], [prompt(NUM_TOKENS)]
    others = RankPolicies(last=[enough], others=[small])
    for policies, prompts, decode, place, least in (
        (RankPolicies.everywhere([small]), one, DecodeName.last, "engine", row),
        (RankPolicies.everywhere([enough]), two, DecodeName.last, "prompts", 2 * row),
        (RankPolicies.everywhere([enough]), one, DecodeName.last, "", None),
        (others, one, DecodeName.sharded, "engine", row),
        (others, one, DecodeName.last, "", None),  # earlier ranks store nothing
    ):
        found = rank_pools.run(2, policy_tasks.refusal, prompts, policies, decode)
        assert found[0] == found[1] and found[0][0] == place
        assert least is None or re.match(rf"policy.pool.bytes=.*; use at least {least}$", found[0][1])


def test_what_only_the_loaded_model_tells_is_refused_by_one_rank(rank_pools: RankPools, tmp_path: Path) -> None:
    """The others end without a line of their own."""
    (tmp_path / "ids.json").write_text("[[1, 2, 3], [4, 5]]")
    for family, more, says in (
        ("bloom", ["policy=quest"], "ALiBi"),
        ("llama", ["policy=exact_topk", "policy.pool.bytes=20KiB", "prompt.batch=2"], "policy.pool.bytes=20480 holds"),
    ):
        build(family).save_pretrained(tmp_path / family)
        args = ["model=hf", f"model.path={tmp_path / family}", f"prompt.ids_file={tmp_path / 'ids.json'}", *more]
        first, second = rank_pools.run(2, policy_tasks.refusal_of_infer, args)
        assert first[0] == "ValueError" and says in first[1]
        assert second == ("SharedError", f"rank 0: {first[1]}")


def test_a_bias_is_that_of_the_positions_in_the_text(rank_pools: RankPools) -> None:
    """ALiBi: the last of several ranks keeps and attends as one alone does."""
    policies = RankPolicies.everywhere([H2O(budget=16, evict_every=4)])
    alone, together = (
        generate(rank_pools, bounds, policies, "bloom", num_new=24) for bounds in ((0, NUM_TOKENS), (0, 35, 60))
    )
    assert [generation.new_token_ids for generation in alone.generations] == [
        generation.new_token_ids for generation in together.generations
    ]
    assert alone.ranks[0].kept_tokens == together.ranks[1].kept_tokens


def test_windows_are_left_alone(rank_pools: RankPools) -> None:
    """Layers with a window keep what they have; the others are cut back, and decoding goes on from both."""
    policies = RankPolicies.everywhere([StreamingLLM(budget=16)])
    alone = generate(rank_pools, (0, NUM_TOKENS), policies, "gemma2", num_new=24)
    together = generate(rank_pools, (0, 35, 60), policies, "gemma2", num_new=24)
    assert [generation.new_token_ids for generation in alone.generations] == [
        generation.new_token_ids for generation in together.generations
    ]
    assert alone.ranks[0].kept_tokens[1] == together.ranks[1].kept_tokens[1] == 16
    assert min(alone.ranks[0].kept_tokens[::2]) > 16
