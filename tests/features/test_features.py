"""Every row of the tables of refused combinations and of slower ways is met by what its facts say, and nothing less."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.inputs import options
from launch.inputs.options import RunOptions
from launch.inputs.policies import rank_policies
from launch.server.options import ServeRun
from policies.adakv import AdaKV
from policies.base import Policy
from policies.clusterkv import ClusterKV
from policies.criticalkv import CriticalKV
from policies.em_llm import EMLLM
from policies.events import By, Events
from policies.exact_topk import ExactTopK
from policies.expected_attention import ExpectedAttention
from policies.experiments.dms import DMS
from policies.experiments.minicache import MiniCache
from policies.h2o import H2O
from policies.infinigen import InfiniGen
from policies.infllm import InfLLM
from policies.kvzip import KVzip
from policies.magicpig import MagicPIG
from policies.pool import Pool
from policies.pyramidinfer import PyramidInfer
from policies.quest import Quest
from policies.razor_attention import RazorAttention
from policies.snapkv import SnapKV
from runahead.config import (
    Attention,
    CacheOptions,
    DecodeName,
    DecodeOptions,
    GenerationOptions,
    Positions,
    PrefillName,
    PrefillOptions,
    Speculate,
    Speculative,
    Weights,
)
from runahead.features import refused
from runahead.features.combination import PLACES, Combination
from runahead.features.facts import FACTS
from runahead.features.refused import REFUSED, check
from runahead.features.refused.row import Refused
from runahead.features.setup import Setup
from runahead.features.slower import PREFIXES, SLOWER, Slower, Way, in_the_way_of_prefixes, slower, takes
from runahead.model.model import Model
from runahead.thinning.rank_policies import RankPolicies
from tests.combinations import PAGE, table
from tests.policies.made_up_kvzap import MadeUpKVzap
from tests.policies.made_up_streaming import MadeUpStreaming
from tests.ranks.tasks import tiny_model

ROOT = Path(__file__).resolve().parents[2]


FOUND = dict.fromkeys(("rotations", "rotaries", "output_projections", "attention_input_dims", "query_prediction"), ())
"""Attributes that are looked for in a model that needs them, and found in most."""


def altered(**values: Any) -> Model:
    """A small model with other facts, none of which is looked for. An error is raised by what it is in place of."""
    model = copy(tiny_model("llama"))

    def raising(error: Exception) -> property:
        def get(self: Model) -> Any:
            raise error

        return property(get)

    values = FOUND | values
    assert set(values) <= set(dir(model))
    members = {name: raising(each) if isinstance(each, Exception) else each for name, each in values.items()}
    model.__class__ = type("Altered", (Model,), members)
    for name in values:
        vars(model).pop(name, None)
    return model


def with_config(**values: Any) -> Any:
    config = deepcopy(tiny_model("llama").config)
    for name, value in values.items():
        setattr(config, name, value)
    return config


def with_states(*others: str) -> Model:
    return altered(config=with_config(layer_types=["linear_attention", *others]))


def speculating(kind: Speculate) -> dict[str, Any]:
    return {"generation": GenerationOptions(speculate=kind)}


def drafting(*policies: Policy, positions: Positions = Positions.original) -> dict[str, Any]:
    by_policy = RankPolicies(last=list(policies), positions=positions)
    return speculating(Speculate.policy) | {"drafting": by_policy}


UNKNOWN = ValueError("model llama (llama) has none of a known kind")
WINDOW = SimpleNamespace(sees_everything=False)

EXAMPLES: dict[str, Callable[[], dict[str, Any]]] = {
    "prefill=tsp or zigzag": lambda: {"prefill": PrefillOptions(name=PrefillName.tsp)},
    "prefill=zigzag": lambda: {"prefill": PrefillOptions(name=PrefillName.zigzag)},
    "prefill=tensor": lambda: {"prefill": PrefillOptions(name=PrefillName.tensor)},
    "prefill=pipeline": lambda: {"prefill": PrefillOptions(name=PrefillName.pipeline)},
    "prefill other than kv_runahead": lambda: {"prefill": PrefillOptions(name=PrefillName.single)},
    "prefill.chunk_tokens": lambda: {"prefill": PrefillOptions(chunk_tokens=128)},
    "prefill.attention=xattention": lambda: {"prefill": PrefillOptions(attention=Attention.xattention)},
    "prefill.attention=streaming_heads": lambda: {"prefill": PrefillOptions(attention=Attention.streaming_heads)},
    "prefill.row_tokens": lambda: {"prefill": PrefillOptions(row_tokens=128)},
    "prefill.speculative": lambda: {"prefill": PrefillOptions(speculative=Speculative.layers)},
    "prefill.speculative=layers": lambda: {"prefill": PrefillOptions(speculative=Speculative.layers)},
    "prefill.speculative=model": lambda: {"prefill": PrefillOptions(speculative=Speculative.model)},
    "prefill.wire_bits": lambda: {"prefill": PrefillOptions(wire_bits=8)},
    "decode=sharded": lambda: {"decode": DecodeOptions(name=DecodeName.sharded)},
    "decode other than last": lambda: {"decode": DecodeOptions()},
    "decode other than last on several stages": lambda: {"decode": DecodeOptions(), "num_stages": 2},
    "cache.bits": lambda: {"cache": CacheOptions(bits=4)},
    "cache.tier_bits": lambda: {"cache": CacheOptions(tier_bits=4)},
    "generation.speculate": lambda: speculating(Speculate.lookup),
    "generation.speculate=lookup or model": lambda: speculating(Speculate.model),
    "generation.speculate=policy": lambda: speculating(Speculate.policy),
    "generation.speculate=policy or model": lambda: speculating(Speculate.model),
    "draft.speculate=model": lambda: {"options": {"draft.speculate": "model"}},
    "option ranks.tensor": lambda: {"options": {"ranks.tensor": 2}},
    "option policy.positions": lambda: {"options": {"policy.positions": "reencoded"}},
    "ranks.tensor": lambda: {"num_shares": 2},
    "decode=auto on several stages": lambda: {"decode": DecodeOptions(), "num_stages": 2},
    "rows of one batch": lambda: {"options": {"a server": False}},
    "model.weights=int8": lambda: {"weights": Weights.int8},
    "a GPU": lambda: {"device": "cuda"},
    "ranks.backend=nccl": lambda: {"backend": "nccl"},
    "one stage": lambda: {"num_stages": 1},
    "several stages": lambda: {"num_stages": 2},
    "several stages with decode=last": lambda: {
        "num_stages": 2,
        "prefill": PrefillOptions(),
        "decode": DecodeOptions(name=DecodeName.last),
    },
    "a prompt in several chunks": lambda: {"num_chunks": 2},
    "a server": lambda: {"options": {"a server": True}},
    "a DynamicCache": lambda: {"options": {"a DynamicCache": True}},
    "prompt.question": lambda: {"options": {"prompt.question": "why?"}},
    "prompt.ids_file": lambda: {"options": {"prompt.ids_file": "ids.json"}},
    "prompt.random_tokens": lambda: {"options": {"prompt.random_tokens": 9}},
    "prompt.chat": lambda: {"options": {"prompt.chat": "true"}},
    "partition=ratios or table": lambda: {"options": {"partition": "ratios"}},
    "serve.handover": lambda: {"options": {"serve.handover": "/dev/shm/runahead"}},
    "serve.decode_ranks": lambda: {"options": {"serve.decode_ranks": 1}},
    "reuse of prefixes": lambda: {"prefixes": "reuse of prefixes"},
    "echo with logprobs": lambda: {"scores": True},
    "policy=prompt_cache": lambda: {"segments": "policy=prompt_cache"},
    "policy.recompute": lambda: {"blends": True},
    "a conversation": lambda: {"rows": 1},
    "a conversation of several rows": lambda: {"rows": 2},
    "a policy": lambda: {"policy": "policy=snapkv"},
    "cache policies": lambda: {"policy": "policy=snapkv"},
    "cache policies or cache.bits": lambda: {"steps": [ClusterKV()]},
    "a policy that drops tokens": lambda: {"steps": [SnapKV()]},
    "a policy that needs all tokens of a prompt": lambda: {"steps": [H2O()]},
    "policy.positions=reencoded": lambda: {"positions": Positions.reencoded, "storage": CacheOptions(bits=4)},
    "a policy that needs the whole prompt": lambda: {"steps": [KVzip()]},
    "a policy that decides on each token": lambda: {"steps": [H2O()]},
    "a policy that decides on the whole prompt": lambda: {"steps": [KVzip()]},
    "no policy of streaming heads alone": lambda: {"steps": [KVzip()]},
    "a policy that repeats the prompt": lambda: {"steps": [KVzip()]},
    "a policy that merges layers": lambda: {"steps": [MiniCache()]},
    "a retrieving policy": lambda: {"steps": [ClusterKV()]},
    "policy.events.by=surprise": lambda: {"steps": [Quest(events=Events(by=By.surprise))]},
    "policy.events.refine": lambda: {"steps": [EMLLM(clamped=False)]},
    "drafts by policy.events.by=surprise": lambda: drafting(Quest(events=Events(by=By.surprise))),
    "policy.clamped=true": lambda: {"steps": [InfLLM(recent=16)]},
    "policy.recent of all positions": lambda: {"model": altered(), "steps": [InfLLM(recent=512)]},
    "policy.pool.bytes": lambda: {"steps": [ExactTopK(pool=Pool(bytes=4096))]},
    "a policy of earlier ranks that narrows": lambda: {"others": [PyramidInfer()]},
    "a policy that follows marks": lambda: {"steps": [DMS()]},
    "a policy that follows no marks": lambda: {"steps": [SnapKV()]},
    "a policy that narrows": lambda: {"steps": [PyramidInfer()]},
    "a policy that narrows, retrieves or merges layers": lambda: {"steps": [Quest()]},
    "a policy that narrows later": lambda: {"steps": [PyramidInfer()]},
    "a policy that compares by KV head": lambda: {"steps": [Quest()]},
    "a policy that turns queries": lambda: {"steps": [ExpectedAttention()]},
    "a policy that needs output projections": lambda: {"steps": [CriticalKV()]},
    "a policy that needs attention inputs": lambda: {"steps": [MadeUpKVzap()]},
    "a policy that needs attention inputs of each token": lambda: {"steps": [MadeUpKVzap()]},
    "a policy that looks ahead": lambda: {"model": altered(), "steps": [InfiniGen(ahead=True)]},
    "a sequence": lambda: {"before": [H2O()]},
    "a policy twice": lambda: {"steps": [SnapKV()], "before": [SnapKV()]},
    "unequal heads": lambda: {"before": [AdaKV()]},
    "unequal heads, decided on the whole prompt": lambda: {"steps": [KVzip()]},
    "unequal heads, compensated": lambda: {"steps": [RazorAttention()]},
    "a step after one that retrieves": lambda: {"steps": [Quest(), H2O()]},
    "drafts by a retrieving policy after others": lambda: drafting(SnapKV(), Quest()),
    "drafts by policy.late or policy.pool": lambda: drafting(ExactTopK(pool=Pool(bytes=4096))),
    "drafts by policy.clamped=true": lambda: drafting(InfLLM(recent=16)),
    "drafts by a policy that narrows": lambda: drafting(PyramidInfer()),
    "drafts by a policy that decides on layers together": lambda: drafting(KVzip()),
    "drafts by policy.positions=reencoded": lambda: drafting(SnapKV(), positions=Positions.reencoded),
    "marks": lambda: {"config": with_config(dms_window_size=8)},
    "no marks": lambda: {"config": with_config()},
    "shared KV layers": lambda: {"model": altered(reads_kv_of={3: 2})},
    "passes": lambda: {"config": with_config(runs_in_passes=True)},
    "states": lambda: {"model": with_states("full_attention")},
    "states one by one": lambda: {"model": altered(gives_one_by_one=True)},
    "states alone": lambda: {"model": with_states()},
    "norms by head": lambda: {"config": with_config(model_type="cohere", use_qk_norm=True)},
    "windows": lambda: {"model": altered(rules=[None, WINDOW])},
    "exact layers alone": lambda: {"prefill": PrefillOptions(exact_layers=[0, 1, 2]), "model": altered()},
    "no layer that retrieves": lambda: {"model": altered(), "steps": [Quest(first_layer=3)]},
    "ALiBi": lambda: {"model": altered(has_key_bias=True)},
    "angles by length": lambda: {"model": altered(rotates_by_length=True, length_threshold=40)},
    "angles by length, of each token": lambda: {"model": altered(rotates_by_length=True, length_threshold=None)},
    "an answer past LongRoPE's threshold": lambda: {"model": altered(length_threshold=40), "outgrows": True},
    "scaled queries": lambda: {"model": tiny_model("llama4_text_tempered")},
    "own positions": lambda: {"model": altered(uneven_limit=512)},
    "KV heads that ranks copy": lambda: {"model": altered(copies_kv_heads=True, num_shards=4)},
    "a share of a model": lambda: {"model": altered(num_shards=2)},
    "rotations unknown": lambda: {"model": altered(rotations=UNKNOWN)},
    "positions that cannot be re-encoded": lambda: {"model": altered(rotaries=UNKNOWN)},
    "output projections unknown": lambda: {"model": altered(output_projections=UNKNOWN)},
    "attention inputs unknown": lambda: {"model": altered(attention_input_dims=UNKNOWN)},
    "queries that cannot be predicted": lambda: {"model": altered(query_prediction=UNKNOWN)},
    "steps that differ": lambda: {"model": altered(steps_differ="model llama marks tokens")},
    "no kernel for graphs": lambda: {"model": altered(lacks_step_kernel="float32 with 8 dims per head")},
    "no kernels of our own": lambda: {"model": altered(lacks_kernels="kernels of our own are not built")},
    "no list of layers": lambda: {"model": altered(has_layers=False)},
    "no layers to merge": lambda: {"model": altered(rules=[WINDOW] * 3)},
}
"""For each fact, parts of a setup in which it holds. `steps` are policies, `before` those that come before them."""

OF_LAST = {
    "cache.bits",
    "a conversation",
    "a policy that decides on each token",
    "a policy that decides on the whole prompt",
    "a policy that repeats the prompt",
    "a policy that merges layers",
    "a policy that needs all tokens of a prompt",
    "a policy of earlier ranks that narrows",
    "a policy that needs attention inputs of each token",
    "positions that cannot be re-encoded",
}
"""Facts of the rank that decodes alone: policies of earlier ranks that make them hold elsewhere change nothing."""


def setup_with(*facts: str) -> Setup:
    """A setup in which these facts hold, and as few others as can be."""
    known: dict[str, Any] = {}
    steps: list[Policy] = []
    others: list[Policy] = []
    positions, storage, made = Positions.original, CacheOptions(), Setup()
    for fact in reversed(facts):  # later facts are more special
        if FACTS[fact](made):
            continue
        parts = EXAMPLES[fact]()
        steps = [*parts.pop("before", []), *steps, *parts.pop("steps", [])]
        others, positions = parts.pop("others", others), parts.pop("positions", positions)
        storage = parts.pop("storage", storage)
        options = {**known.get("options", {}), **parts.pop("options", {})}
        if "prefill" in parts and "prefill" in known:  # each is told by the options that it sets
            asked, default = asdict(parts["prefill"]), asdict(PrefillOptions())
            chosen = {name: value for name, value in asked.items() if value != default[name]}
            known["prefill"] = replace(known["prefill"], **chosen)
        known = {**parts, **known, "options": options}
        policies = RankPolicies(last=steps, others=others, positions=positions, storage=storage)
        made = Setup(**known, policies=policies or None)
    return made


def told(row: Combination, setup: Setup) -> str | None:
    """Facts of the place that a row refuses first."""
    return next(filter(None, (row.message(replace(setup, place=place)) for place in PLACES)), None)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: " + ".join(row.facts))
def test_each_combination_ends_in_its_sentence(row: Refused) -> None:
    expected = told_alone(row)
    with pytest.raises(ValueError) as raised:
        check(setup_with(*row.facts))
    assert str(raised.value) == expected


@pytest.mark.parametrize("row", SLOWER, ids=lambda row: " + ".join((row.way.name, *row.facts)))
def test_each_slower_way_is_told_with_its_reason(row: Slower) -> None:
    expected, setup = told_alone(row), setup_with(*row.facts)
    assert slower(setup)[row.way] == expected and not takes(setup, row.way)
    assert takes(Setup(), row.way) and not slower(Setup())


@pytest.mark.parametrize(
    ("policy", "rules"),
    [(Quest(first_layer=3), [None] * 3), (MagicPIG(dense_every=1), [None] * 3), (Quest(), [WINDOW] * 3)],
)
def test_layers_that_do_not_retrieve_are_told_whatever_the_cause(policy: Policy, rules: list[Any]) -> None:
    model = altered(rules=rules)
    told = slower(Setup(model=model, policies=RankPolicies(last=[policy])))[Way.retrieved]
    assert f": {policy.label} retrieves in none of the layers of {Setup(model=model).model_name} that see" in told


def told_alone(row: Combination) -> str:
    """A row says its sentence; without any one of its facts, or while one is not known, it says nothing."""
    setup = setup_with(*row.facts)
    expected = told(row, setup)
    assert expected is not None and "\n" not in expected and "{" not in expected.replace("{name:", "")
    for fact in row.facts:
        rest = setup_with(*(each for each in row.facts if each != fact))
        assert FACTS[fact](rest) or row.message(rest) is None, fact
    assert row.message(Setup()) is None
    return expected


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: " + ".join(row.facts))
def test_policies_of_earlier_ranks_end_in_the_same_sentence(row: Refused) -> None:
    """Unless the row is about what the rank that decodes does alone: then they are not refused."""
    setup = setup_with(*row.facts)
    policies, expected = setup.policies or RankPolicies(), told(row, setup)
    earlier = replace(setup, policies=replace(policies, last=policies.others, others=policies.last) or None)
    if (policies.last or policies.others) and not OF_LAST.isdisjoint(row.facts):
        assert told(row, earlier) is None
        return
    assert told(row, earlier) == expected
    with pytest.raises(ValueError) as raised:
        check(earlier)
    assert str(raised.value) == expected


def test_streaming_heads_are_refused_beside_earlier_ranks_that_narrow() -> None:
    """Though the rank that decodes has a policy of such heads alone."""
    setup = Setup(prefill=PrefillOptions(attention=Attention.streaming_heads))
    last: list[Policy] = [MadeUpStreaming()]
    with pytest.raises(ValueError, match="policy pyramidinfer leaves some out of deeper layers; use policy=duo_att"):
        check(replace(setup, policies=RankPolicies(last=last, others=[PyramidInfer()])))
    for others in ([], [SnapKV()], last):
        check(replace(setup, policies=RankPolicies(last=last, others=others)))


@pytest.mark.parametrize("last", ["quest", "infllm"])
def test_clamped_distances_are_refused_wherever_ranks_decode(last: str) -> None:
    """`decode=sharded` lets every rank decode."""
    policy = {"name": "per_rank", "ranks": {"last": last, "others": {"quest": "infllm", "infllm": "quest"}[last]}}
    with pytest.raises(ValueError, match="policy.clamped=true counts the slots of one"):
        RunOptions(policy=policy, decode=DecodeOptions(name=DecodeName.sharded))


@pytest.mark.parametrize(
    ("by_policy", "message"),
    [
        (RankPolicies(positions=Positions.reencoded), "a drafting policy full re-encodes positions"),
        (RankPolicies(others=[KVzip()]), "a drafting policy kvzip decides on several layers together"),
    ],
)
def test_drafting_policies_without_one_that_decodes_end_in_a_sentence(by_policy: RankPolicies, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(Setup(**speculating(Speculate.policy), drafting=by_policy))


@pytest.mark.parametrize("row", [row for row in REFUSED if PREFIXES in row.facts], ids=lambda row: row.facts[-1])
def test_prefixes_that_nobody_has_asked_for_are_left_out_where_they_are_refused(row: Refused) -> None:
    setup = setup_with(*row.facts)
    reason = in_the_way_of_prefixes(setup)
    assert reason is not None and str(told(row, setup)).startswith(reason)
    assert in_the_way_of_prefixes(replace(setup, prefixes="")) is None


def test_prefixes_that_nobody_has_asked_for_make_no_run_slower() -> None:
    graphs = Setup(prefixes=PREFIXES, device="cuda", model=altered(), policies=RankPolicies())
    assert takes(replace(graphs, prefixes=""), Way.graph) and not takes(graphs, Way.graph)
    assert "without a CUDA graph: reuse of prefixes leaves" in str(in_the_way_of_prefixes(graphs))
    serves = replace(graphs, options={"a server": True}, num_stages=1)  # whose rows join others
    assert in_the_way_of_prefixes(serves) is None
    kept = RankPolicies.everywhere([SnapKV(budget=64)])  # of which prompts are stored, and answers are not
    assert in_the_way_of_prefixes(replace(serves, policies=kept)) is None


@pytest.mark.parametrize("program", [RunOptions, ServeRun])
def test_policies_of_the_options_are_made_once(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RankPolicies] = []

    def counted(*args: Any) -> RankPolicies:
        made.append(rank_policies(*args))
        return made[-1]

    monkeypatch.setattr(options, "rank_policies", counted)
    run = program(policy={"name": "snapkv", "budget": 64})
    assert [run.setup.policies, run.setup.policies] == made * 2 and len(made) == 1


def test_a_policy_that_cannot_be_made_ends_in_its_own_error() -> None:
    """The check of the options says what it knows without the policy, and leaves the error to the run."""
    run = RunOptions(policy={"name": "snapkv", "budget": -1})
    assert run.setup.policies is None
    with pytest.raises(ValueError, match="policy.budget=-1"):
        rank_policies(run.policy, run.cache)


def test_every_fact_is_in_the_table() -> None:
    """A fact that no row names is left over, and a fact that is only written in a row would fail for a user."""
    assert {fact for row in (*REFUSED, *SLOWER) for fact in row.facts} == set(FACTS) == set(EXAMPLES)
    assert len({row.facts for row in REFUSED}) == len(REFUSED)
    assert len({(row.way, row.facts) for row in SLOWER}) == len(SLOWER)


def test_every_file_of_rows_is_in_the_table() -> None:
    files = pkgutil.iter_modules(refused.__path__, "runahead.features.refused.")
    rows = [row for file in files for row in getattr(import_module(file.name), "ROWS", ())]
    assert len(rows) == len(REFUSED) and set(rows) == set(REFUSED)


def test_the_page_has_the_table() -> None:
    assert table() in (ROOT / PAGE).read_text(), f"python -m tests.combinations writes it into {PAGE}"
