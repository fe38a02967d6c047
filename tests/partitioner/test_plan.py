"""The planner: what a mesh needs and takes, which one is best and why the others lost, and the program's edges."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import PretrainedConfig
from transformers.models.jetmoe.modeling_jetmoe import JetMoeTopKGating

from launch.infer import INFER
from launch.inputs.options import ineffective_settings
from launch.program.compose import CONF, FLAGS_HELP
from launch.program.typed_options import leaf_names, option_kinds
from partitioner.cost.collectives import allgather_s, allreduce_s, allreduce_sent_bytes
from partitioner.cost.fitted import FittedCost
from partitioner.cost.link import Link, Links
from partitioner.cost.measured import MeasuredCost
from partitioner.cost.places import Places
from partitioner.cost.sparse import CHOICE
from partitioner.cost.streaming import Streams
from partitioner.meshes.decoding import token_s
from partitioner.meshes.experts import Experts
from partitioner.meshes.machine import Machine, PlannedDevice, counted_cost
from partitioner.meshes.memory import Workload, activation_bytes, kv_bytes
from partitioner.meshes.model_size import ModelSize, _weights
from partitioner.meshes.options import PlanRun
from partitioner.meshes.plan import Candidate, MeshPlan, make_plan, shares_that_fit
from partitioner.meshes.request import read_compute
from partitioner.meshes.text import as_json, nothing_fits, ratios, reason
from partitioner.meshes.units import bytes_per_s, flops
from partitioner.plan import HELP, PLAN, main, plan_of, plan_text
from partitioner.searches.best_split import best_split
from partitioner.searches.equal_work import equal_work
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from partitioner.table.fingerprint import Fingerprint
from policies.duo_table import DuoTable
from runahead import Engine, GenerationOptions, Model, ModelOptions, PrefillOptions, Ranks, RanksOptions
from runahead.cache.attention import CausalAttention
from runahead.config import Attention, ModelName, Speculative
from runahead.context import ContextPartition, even
from runahead.model.shares import allreduce_bytes
from tests.conftest import RankPools
from tests.families import HYBRIDS, JOINS, MARKS, Family, build, prompt, throughout
from tests.model.test_loading_gguf import write_gguf
from tests.ranks.tasks import tiny_model

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "benchmarks" / "models"
GIB = 2**30

NVLINK = Link(latency_s=10e-6, bandwidth_Bps=360e9)
NETWORK = Link(latency_s=20e-6, bandwidth_Bps=20e9)
FREE = Link(latency_s=0.0, bandwidth_Bps=math.inf)


@cache
def size_of(name: str) -> ModelSize:
    return ModelSize.read(ModelOptions(name="random", config=str(MODELS / f"{name}.json")))  # type: ignore[arg-type]


def machine(
    num_gpus: int = 8, num_nodes: int = 1, *, memory: float = 80, step_s: float = 20e-6, **more: Any
) -> Machine:
    device = PlannedDevice(
        name="h100",
        memory_bytes=int(memory * GIB),
        matmul_flops=600e12,
        attention_flops=400e12,
        memory_Bps=2.5e12,
        step_s=step_s,
    )
    links = {"inside": NVLINK, "between": NETWORK if num_nodes > 1 else None} | more
    return Machine(device=device, num_gpus=num_gpus, num_nodes=num_nodes, **links)


# --- sizes of models


def test_weights_of_the_llamas_are_those_that_are_published() -> None:
    billions = {name: size_of(name).weight_bytes() / 2 / 1e9 for name in ("llama-8b", "llama-70b", "llama-405b")}
    assert billions == pytest.approx({"llama-8b": 8.03, "llama-70b": 70.55, "llama-405b": 405.85}, rel=1e-3)
    assert [size_of(name).kv_bytes_per_token() for name in ("llama-8b", "llama-70b")] == [4096, 4096]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "falcon", "starcoder2"])
def test_bytes_of_weights_and_of_a_token_are_those_of_the_loaded_model(family: str, tied: bool, tmp_path: Path) -> None:
    module = build(family, dtype=torch.float32, tie_word_embeddings=tied)
    module.config.save_pretrained(tmp_path)
    size = ModelSize.read(ModelOptions(name="random", config=str(tmp_path), dtype="float32"))  # type: ignore[arg-type]
    model = Model(module)
    assert size.weight_bytes() == sum(parameter.nbytes for parameter in module.parameters())
    assert size.kv_bytes_per_token() == model.kv_shapes[0].bytes_per_token()
    assert size.shape.num_layers == model.num_layers


def test_shares_of_all_weights_are_the_whole_and_heads_are_repeated_where_they_are_fewer() -> None:
    size = size_of("llama-8b")
    norms = sum(weight.num_bytes(1) for weight in size.weights if len(weight.shape) == 1)
    for num_shares in (2, 4, 8):
        assert size.weight_bytes(num_shares) == (size.weight_bytes() - norms) // num_shares + norms
        assert size.kv_bytes_per_token(num_shares) == size.kv_bytes_per_token() // num_shares
    assert [num_shares for num_shares in range(1, 9) if size.fits(num_shares)] == [1, 2, 4, 8]
    # 16 shares of 8 KV heads: two ranks have the same one.
    assert size.kv_bytes_per_token(16) == size.kv_bytes_per_token(8)
    assert size.weight_bytes(16) > size.weight_bytes(8) / 2


@pytest.mark.parametrize(
    ("forms", "on_gpus", "expected"),
    [
        (None, False, ("float16", 2)),  # those of the file
        (None, True, ("float16", 2)),
        (["Q8_0", "F32"], False, ("float32", 4)),
        (["Q8_0", "F32"], True, ("bfloat16", 2)),
    ],
)
def test_a_gguf_file_is_planned_in_the_dtype_that_it_runs_in(
    forms: list[str] | None, on_gpus: bool, expected: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, form=GGMLQuantizationType.F16)
    if forms is not None:
        header = SimpleNamespace(tensors=dict(enumerate(forms)))
        monkeypatch.setattr("runahead.model.loading.checkpoint.read_gguf", lambda checkpoint: header)
    size = ModelSize.read(ModelOptions(name="hf", path=str(path)), on_gpus=on_gpus)  # type: ignore[arg-type]
    assert (size.dtype, size.item_bytes) == expected
    assert {weight.item_bytes for weight in size.weights} == {expected[1]}


def read_size(module: torch.nn.Module, folder: Path) -> ModelSize:
    module.config.save_pretrained(folder)  # type: ignore[operator, union-attr]
    return ModelSize.read(ModelOptions(name="random", config=str(folder), dtype="float32"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("family", "marks"), [("mistral", MARKS), ("phi3", MARKS), ("llama", MARKS), ("llama", JOINS)])
def test_models_that_mark_tokens_are_not_planned(family: str, marks: dict[str, Any], tmp_path: Path) -> None:
    """Whether or not they can be run."""
    with pytest.raises(
        ValueError, match=r"marks tokens that it evicts \(DMS, DMC\), and plans reckon with all; measure"
    ):
        read_size(build(family, **marks), tmp_path)


DBRX = Family(
    model_type="dbrx",
    config={
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
)
"""Its experts stand one below the other in matrices, and their numbers in a config inside the config."""


def one_token_flops(module: torch.nn.Module) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(input_ids=torch.tensor([[5]]), use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "jetmoe", DBRX])
def test_a_token_is_multiplied_with_the_experts_that_it_is_sent_to(family: str | Family, tmp_path: Path) -> None:
    """Operations of a forward of one token, counted by torch."""
    module = build(family, dtype=torch.float64, attention="eager")
    size = read_size(module, tmp_path)
    shape, layers = size.shape, size.shape.num_layers
    attention = 2 * layers * shape.num_heads * (shape.head_dim + size.value_dim)
    logits = 2 * shape.model_dim * shape.vocab_size
    assert one_token_flops(module) == 2 * layers * size.active_weights() + attention + logits
    if family != "llama":
        assert size.read_per_active() > 1.1 and size.read_bytes(batch=4) > size.read_bytes()
    device = machine().device
    cost = counted_cost(size, device)
    assert cost.between_s[1] == pytest.approx(2 * size.active_weights() / device.matmul_flops, rel=1e-9)


def test_weights_of_experts_are_known_by_their_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JetMoE's MLP names none of its weights after experts. Its forward needs values, but any of them will do."""
    module = build("jetmoe", dtype=torch.float64, attention="eager")
    experts = Experts.from_module(module, module.config, "jetmoe")
    assert experts is not None and (experts.number, experts.chosen) == (4, 2)
    weights = list(_weights(module, {}, 2, experts))
    active = sum(weight.elements(1) * weight.active for weight in weights if weight.is_matrix)
    attention = module.config.num_hidden_layers * module.config.num_attention_heads * 2 * module.config.kv_channels
    logits = module.config.hidden_size * module.config.vocab_size
    assert one_token_flops(module) == 2 * (active + attention + logits)
    size = read_size(module, tmp_path)
    assert size.kv_bytes_per_token() == Model(build("jetmoe", dtype=torch.float32)).kv_shapes[0].bytes_per_token()

    def asks_for_others(self: Any, hidden_states: torch.Tensor) -> Any:
        raise RuntimeError("these are not the weights")

    monkeypatch.setattr(JetMoeTopKGating, "forward", asks_for_others)
    with pytest.raises(ValueError, match="cannot be planned by its config alone"):
        read_size(module, tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"moe_top_k": 2}, "experts .experts.w., and its config does not say how many by"),
        ({"moe_num_experts": 3, "moe_top_k": 2}, "experts .experts.w., and its config does not say how many by"),
        ({"moe_num_experts": 4}, "experts, and its config does not say how many a token is sent to"),
    ],
)
def test_experts_of_unknown_number_are_not_planned(config: dict[str, int], said: str) -> None:
    module = torch.nn.Module()
    module.experts = torch.nn.Module()
    module.experts.w = torch.nn.Parameter(torch.zeros(8, 3))
    with pytest.raises(ValueError, match=f"model x has {said}"):
        Experts.from_module(module, PretrainedConfig(**config), "model x")


def test_a_convolution_with_as_many_channels_holds_no_experts() -> None:
    config = PretrainedConfig(num_experts=4, moe_top_k=2)
    assert Experts.from_module(torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3)), config, "") is None


@pytest.mark.parametrize(
    ("model_type", "billions", "active"),
    [("mixtral", 46.7, 12.9), ("qwen3_next", 79.7, 3.9), ("deepseek_v3", 671, 37.5)],
)
@pytest.mark.sampled(1)
def test_experts_are_as_many_as_is_published(model_type: str, billions: float, active: float, tmp_path: Path) -> None:
    """transformers' defaults are the published models. Active: as published, with logits (and embeddings at most)."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    options = ModelOptions(name="random", config=str(tmp_path), dtype="bfloat16")  # type: ignore[arg-type]
    size = ModelSize.read(options)
    assert size.weight_bytes() / 2e9 == pytest.approx(billions, rel=0.01)
    assert size.read_bytes() / 2e9 == pytest.approx(active, rel=0.15)
    if model_type == "qwen3_next":
        assert (len(size.places), size.num_attending) == (48, 12)
        assert size.shape.state_bytes == 36 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 4 * 2)


def test_a_model_without_attention_is_not_planned(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no layer with attention, and plans reckon with its heads; measure it"):
        read_size(build("mamba2", dtype=torch.float32), tmp_path)


@pytest.mark.parametrize("family", sorted({*HYBRIDS} - {"mamba", "mamba2"}))
def test_sizes_of_hybrids_are_those_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    module = build(family, dtype=torch.float32)
    size, model = read_size(module, tmp_path), Model(module)
    assert size.places == Places.of_model(model)
    assert size.kv_bytes_per_token() == model.kv_shapes[0].bytes_per_token()
    assert size.weight_bytes() == sum(parameter.nbytes for parameter in module.parameters())
    fingerprint = Fingerprint.of_model(model, device=torch.device("cpu"), backend="gloo", prefill=PrefillOptions())
    assert size.shape == fingerprint.model and size.share_counts == (1,)
    assert size.active_weights() > 0 and counted_cost(size, machine().device).states == size.places.states


def peaks(ranks: Ranks, family: str, bounds: tuple[int, ...], new_tokens: int) -> int:
    """Runs on a rank: peak of its slabs and its states."""
    model = tiny_model(family, torch.float32)
    options = GenerationOptions(max_new_tokens=new_tokens, ignore_eos=True)
    with throughout(torch.float32):
        engine = Engine(model, ranks, partition=lambda *_: ContextPartition(boundaries=bounds))
        batch = engine.generate([prompt(bounds[-1]), prompt(bounds[-1], seed=1)], options)
    return batch.ranks[ranks.rank].kv_peak_bytes


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "nemotron_h"])
@pytest.mark.parametrize("bounds", [(0, 40), (0, 30, 40), (0, 10, 20, 40)], ids=str)
def test_states_of_hybrids_are_held_as_the_runtime_holds_them(
    family: str, bounds: tuple[int, ...], rank_pools: RankPools, tmp_path: Path
) -> None:
    size = read_size(build(family, dtype=torch.float32), tmp_path)
    work, split = Workload(tokens=40, new_tokens=3, batch=2), ContextPartition(boundaries=bounds)
    expected = kv_bytes(size, work, 1, split, sharded=False)
    assert rank_pools.run(len(bounds) - 1, peaks, family, bounds, 3) == expected


def test_a_plan_of_a_hybrid_decodes_on_the_last_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_next"}))
    args = ["model=random", f"model.config={tmp_path}", "model.dtype=bfloat16", "gpus=8", "tokens=131072"]
    args += ["device=b200", f"report={tmp_path / 'plan.json'}"]
    assert main(args) == 0, capsys.readouterr().err
    said = " ".join(capsys.readouterr().out.split())
    assert "48 layers with 36 states" in said and "of its 512 experts the 10 count" in said
    report = json.loads((tmp_path / "plan.json").read_text())
    assert {each["shares"] for each in report["candidates"]} == {1}
    assert not any(each["decode"] == "sharded" for each in report["candidates"])
    assert all(each["tpot_last_s"] > 0 and each["tpot_sharded_s"] is None for each in report["candidates"])
    assert main([*args, "decode=sharded"]) == 2
    assert "decode=sharded" in capsys.readouterr().err


def test_a_hybrid_sends_less_and_splits_more_evenly_than_attention_of_its_widths() -> None:
    size, alone = size_of("llama-8b"), size_of("llama-8b")
    states = tuple(0 if layer % 4 == 3 else 1 << 20 for layer in range(32))
    kinds = tuple(("some",) for _ in range(32))
    size = replace(size, places=Places(num_layers=32, state_bytes=states, steps=kinds), state_numbers=1 << 18)
    work = Workload(tokens=131072, tensor=1)
    ends, sent = [], []
    for each in (alone, size):
        best = next(found for found in make_plan(each, machine(2), work).candidates if found.num_stages == 2)
        ends.append(best.partition.boundaries[1] / 131072)
        sent.append(sum(simulate(best.partition, machine(2).cluster(each, 2, 1)).sent_bytes))
    assert 0.5 < ends[1] < ends[0] - 0.02
    assert 0.2 < sent[1] / sent[0] < 0.3


# --- memory


@pytest.mark.parametrize("new_tokens", [1, 7])
def test_keys_and_values_of_one_rank_are_what_it_allocates(new_tokens: int, tmp_path: Path) -> None:
    module = build("llama", dtype=torch.float32)
    module.config.save_pretrained(tmp_path)
    size = ModelSize.read(ModelOptions(name="random", config=str(tmp_path), dtype="float32"))  # type: ignore[arg-type]
    options = GenerationOptions(max_new_tokens=new_tokens, ignore_eos=True)
    with Ranks.start(RanksOptions()) as ranks:
        batch = Engine(Model(module), ranks).generate([prompt(40), prompt(40, seed=1)], options)
    expected = kv_bytes(size, Workload(tokens=40, new_tokens=new_tokens, batch=2), 1, even(40, 1), sharded=False)
    assert [batch.ranks[0].kv_peak_bytes] == expected


def test_sharded_decoding_divides_the_keys_and_values_and_new_tokens_go_to_the_emptiest() -> None:
    size, split = size_of("llama-8b"), ContextPartition(boundaries=(0, 600, 1000))
    work = Workload(tokens=1000, new_tokens=101)
    last = kv_bytes(size, work, 1, split, sharded=False)
    sharded = kv_bytes(size, work, 1, split, sharded=True)
    assert last == [3 * 600 * 4096, 32 * 1100 * 4096]
    assert sharded == [32 * 601 * 4096, (3 * 600 + 32 * 501) * 4096]
    assert kv_bytes(size, work, 8, split, sharded=False) == [each // 8 for each in last]
    assert kv_bytes(size, work, 1, ContextPartition(boundaries=(0, 1000, 1000)), sharded=True)[1] == 0


class LiveBytes(TorchDispatchMode):
    """Most bytes of tensors that operations made and that are alive at a time, except those in `others`."""

    def __init__(self, others: list[torch.Tensor]) -> None:
        super().__init__()
        self.others = {tensor.untyped_storage().data_ptr() for tensor in others}
        self.live: dict[int, Any] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in self.others:
                storage = leaf.untyped_storage()
                self.live[storage._cdata] = (torch.multiprocessing.reductions.StorageWeakRef(storage), storage.nbytes())
        self.live = {at: each for at, each in self.live.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self.live.values()))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mlp_dim", [64, 512])
def test_activations_are_those_of_a_forward(dtype: torch.dtype, mlp_dim: int, tmp_path: Path) -> None:
    module = build("llama", dtype=dtype, hidden_size=128, intermediate_size=mlp_dim, num_attention_heads=4, head_dim=32)
    module.config.save_pretrained(tmp_path)
    name = str(dtype).removeprefix("torch.")
    size = ModelSize.read(ModelOptions(name="random", config=str(tmp_path), dtype=name))  # type: ignore[arg-type]
    model, tokens = Model(module), 512
    store = model.empty_cache(tokens)
    ids_1S = torch.tensor([prompt(tokens)])
    with LiveBytes([layer.slab.slab_TBKX for layer in store.layers]) as live:
        model.forward(ids_1S, CausalAttention(store, start=0, pads=[0]), start=0, pads=[0])
    # Between formula and forward are the rotary tables, token ids and logits.
    assert 0.85 < activation_bytes(size, 1, tokens) / live.peak < 1.15


# --- collectives and the compute of a stage


@given(
    num_bytes=st.floats(0, 1e9),
    num_ranks=st.integers(2, 64),
    latency_s=st.floats(0, 1e-3),
    bandwidth=st.floats(1e6, 1e12),
)
def test_an_all_reduce_takes_longer_with_more_bytes_latency_and_less_bandwidth(
    num_bytes: float, num_ranks: int, latency_s: float, bandwidth: float
) -> None:
    link = Link(latency_s=latency_s, bandwidth_Bps=bandwidth)
    own_s = allreduce_s(num_bytes, num_ranks, link)
    assert own_s >= allreduce_sent_bytes(num_bytes, num_ranks) / bandwidth
    assert own_s <= allreduce_s(2 * num_bytes + 1, num_ranks, link)
    assert own_s <= allreduce_s(num_bytes, num_ranks, replace(link, bandwidth_Bps=bandwidth / 2))
    assert own_s <= allreduce_s(num_bytes, num_ranks, replace(link, latency_s=2 * latency_s + 1e-9))
    assert allgather_s(num_bytes, num_ranks, link) >= (num_ranks - 1) * num_bytes / bandwidth
    assert allreduce_s(num_bytes, 1, link) == allgather_s(num_bytes, 1, link) == 0


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bytes_of_all_reduces_are_those_that_the_runtime_counts(num_ranks: int) -> None:
    model = Model(build("llama", dtype=torch.float32))
    each = 40 * int(model.config.hidden_size) * 4
    counted = num_ranks * 2 * model.num_layers * allreduce_sent_bytes(each, num_ranks)
    assert counted == pytest.approx(allreduce_bytes(model, 40, num_ranks))


def test_one_share_costs_what_a_device_does_to_the_digit() -> None:
    size, one = size_of("llama-8b"), machine()
    plain = FittedCost.from_shape(
        num_layers=32,
        model_dim=4096,
        kv_dim=1024,
        mlp_dim=14336,
        vocab_size=128256,
        matmul_flops=600e12,
        attention_flops=400e12,
        step_s=20e-6,
    )
    counted = one.compute(size, 1)
    for name in ("first_s", "between_s", "own_s", "prefix_s"):
        assert getattr(counted, name) == getattr(plain, name), name
    # For the last token alone the weights behind the last keys and values are read, from memory of 2.5 TB/s.
    behind = 4096**2 + 3 * 4096 * 14336
    logits_s = 2 * 4096 * 128256 / 600e12
    for c in (1, 100_000):
        assert plain.last(c) == pytest.approx(20e-6 + logits_s + 2 * behind / 600e12)
        assert counted.last(c) == pytest.approx(20e-6 + logits_s + 2 * behind / 2.5e12)
    # A plan of one share is the search of today: the same cluster, the same split, the same TTFT.
    plan = make_plan(size, one, Workload(tokens=8192, tensor=1))
    cluster = Cluster(
        compute=counted, speed=[1.0] * 8, links=Links(8, NVLINK), kv_bytes_per_token=4096, pass_on_as_landed=False
    )
    chain = next(each for each in plan.candidates if each.num_stages == 8)
    assert chain.ttft is not None
    assert chain.ttft.total == pytest.approx(simulate(chain.partition, cluster).ttft_s, rel=1e-12)
    assert chain.ttft.total <= 1.005 * best_split(8192, 8, cluster, min_stride=32).cost_s


@pytest.mark.parametrize("name", ["llama-8b", "llama-70b"])
def test_shares_with_free_all_reduces_and_no_overhead_divide_the_time(name: str) -> None:
    size, free = size_of(name), machine(step_s=0.0, inside=FREE)
    whole, eighth = free.compute(size, 1), free.compute(size, 8)
    for c, P in ((1000.0, 0.0), (4000.0, 9000.0)):
        for step in ("first", "between", "own", "last"):
            assert getattr(eighth, step)(c) == pytest.approx(getattr(whole, step)(c) / 8, rel=1e-3), step
        assert eighth.prefix(c, P) == pytest.approx(whole.prefix(c, P) / 8)


def test_measured_compute_is_divided_over_the_shares() -> None:
    size = size_of("llama-8b")
    measured = counted_cost(size, machine().device)
    shared = machine(measured=measured).compute(size, 4)
    allreduce_each_s = allreduce_s(1000 * 4096 * 2, 4, NVLINK)
    assert shared.own(1000) == measured.own(1000) / 4
    assert shared.between(1000) == pytest.approx(measured.between(1000) / 4 + 2 * allreduce_each_s)


def test_chains_of_the_shares_share_a_node_s_cards() -> None:
    two = machine(16, 2)
    assert [two.crosses(stage, 4) for stage in range(3)] == [False, True, False]
    links = two.links(4, 4)
    assert links.between(0, 1) == NVLINK and links.between(1, 2).bandwidth_Bps == NETWORK.bandwidth_Bps / 4
    many = replace(two, nics=8).links(4, 4)
    assert many.between(1, 2).bandwidth_Bps == NETWORK.bandwidth_Bps


# --- plans


def test_more_memory_and_faster_links_are_never_slower() -> None:
    size, work = size_of("llama-8b"), Workload(tokens=32768)
    by_memory = [best_s(make_plan(size, machine(4, memory=each), work)) for each in (2, 8, 20, 80)]
    assert by_memory == sorted(by_memory, reverse=True) and by_memory[0] > by_memory[-1]
    by_link = [
        best_s(make_plan(size, machine(4, inside=replace(NVLINK, bandwidth_Bps=each * 1e9)), replace(work, tensor=4)))
        for each in (1, 10, 100, math.inf)
    ]
    assert by_link == sorted(by_link, reverse=True) and by_link[0] > 1.5 * by_link[-1]


def best_s(plan: MeshPlan) -> float:
    """TTFT of the plan; infinite if nothing fits."""
    return math.inf if plan.best is None or plan.best.ttft is None else plan.best.ttft.total


def test_sparse_attention_is_sooner_by_its_pairs() -> None:
    """On one GPU without overheads, where all else takes what it took; the split of several is evener."""
    size, work = size_of("llama-8b"), Workload(tokens=65536, tensor=1)
    sparse = replace(work, prefill=PrefillOptions(attention=Attention.xattention, density=0.1))
    alone = machine(1, memory=1000, step_s=0)
    exact_s, sparse_s = (each.ttft.total for each in _best(size, alone, work, sparse) if each.ttft)
    cost = counted_cost(size, alone.device)
    all_s = size.shape.num_layers * cost.own(65536)
    seen = [max(min(2, at), math.ceil(0.1 * at)) - 0.5 for at in range(1, 513)]
    share = sum(seen) / (512 * 512 / 2) + CHOICE / 256
    assert exact_s - sparse_s == pytest.approx((1 - share) * all_s, rel=1e-9)
    given = PrefillOptions(attention=Attention.xattention, density=0.1, exact_layers=[*range(8)])
    (quarter_s,) = (each.ttft.total for each in _best(size, alone, replace(work, prefill=given)) if each.ttft)
    assert exact_s - quarter_s == pytest.approx((1 - 8 / size.shape.num_layers) * (exact_s - sparse_s), rel=1e-9)
    several = machine(4, memory=1000, inside=FREE)
    firsts = [each.partition.boundaries[1] for each in _best(size, several, work, sparse)]
    assert firsts[0] > firsts[1] > 65536 / 4


def test_heads_that_stream_cost_what_they_see() -> None:
    """On one GPU without overheads: three quarters of the heads see 64 + 256 tokens before their own; and keep them."""
    size, streams = size_of("llama-8b"), Streams(share=0.75, tokens=320)
    work = Workload(tokens=65536, tensor=1, prefill=PrefillOptions(attention=Attention.streaming_heads))
    alone, few = machine(1, memory=1000, step_s=0), replace(work, streams=streams)
    all_heads, found = _best(size, alone, work, few)
    cost = counted_cost(size, alone.device)
    num_layers, own_s, seen_s = size.shape.num_layers, cost.own(65536), cost.prefix(65536, 320)
    assert all_heads.ttft and found.ttft and found.held.piece_tokens is None
    saved_s = num_layers * 0.75 * (own_s - seen_s)
    assert all_heads.ttft.total - found.ttft.total == pytest.approx(saved_s, rel=1e-9)
    dropped = num_layers * 0.75 * (65536 - 320) * size.kv_bytes_per_token() / alone.device.memory_Bps
    assert all_heads.token_s - found.token_s == pytest.approx(dropped, rel=1e-9)
    slow = machine(4, memory=1000, inside=Link(latency_s=0.0, bandwidth_Bps=1e9))
    exact, streaming = _best(size, slow, replace(work, prefill=PrefillOptions()), few)
    assert exact.ttft and streaming.ttft and streaming.ttft.wait < exact.ttft.wait


def test_a_speculative_prefill_is_a_draft_of_all_and_a_prefill_of_what_stays() -> None:
    """On one GPU: 4 of 32 layers for 8,192 tokens, 2 steps of these, then 32 layers for a quarter of the chunks."""
    size, work = size_of("llama-8b"), Workload(tokens=8192, tensor=1)
    options = {"speculative_share": 0.25, "speculative_layers": 4, "speculative_ahead": 2}
    drafts = replace(work, prefill=PrefillOptions(speculative=Speculative.layers, **options))
    alone = machine(1, memory=1000, step_s=0)
    found, short, full = _best(size, alone, drafts, replace(work, tokens=2048), work)
    cost = counted_cost(size, alone.device)
    of_layers_s = cost.first(8192) + 3 * cost.between(8192) + 4 * cost.own(8192) + cost.last(8192)
    ahead_s = 2 * token_s(size, alone, 1, even(8192, 1), sharded=False) * 4 / 32
    assert found.partition.num_tokens == 2048 and found.ttft and short.ttft and full.ttft and found.draft
    assert found.draft.total == pytest.approx(of_layers_s + ahead_s, rel=1e-9)
    assert found.ttft.total == pytest.approx(found.draft.total + short.ttft.total, rel=1e-9)
    assert found.ttft.total < full.ttft.total and short.token_s == found.token_s < full.token_s
    several, exact = _best(size, machine(4, memory=1000, inside=FREE), drafts, work)
    assert several.ttft and exact.ttft and several.ttft.total < 0.5 * exact.ttft.total


def test_a_draft_s_keys_and_activations_have_to_fit(tmp_path: Path) -> None:
    """A draft holds more than what stays where few tokens do: all keys and values of a sixth of the layers."""
    size, work = size_of("llama-8b"), Workload(tokens=262144, tensor=1, new_tokens=1)
    prefill = PrefillOptions(speculative=Speculative.layers, speculative_share=0.01)
    (found,) = _best(size, machine(1, memory=60), replace(work, prefill=prefill))
    kv = 5 * (262144 + prefill.speculative_ahead) * size.kv_bytes_per_token()
    assert found.held.memory[0].kv == pytest.approx(kv, rel=0.01)
    # It takes no pieces (runahead/prompt_draft/drafting.py), but layers compute rows, with the input of all tokens.
    rows, hidden = found.held.row_tokens, size.shape.model_dim * size.item_bytes
    assert rows < 262144
    assert found.held.memory[0].activations == activation_bytes(size, 1, rows) + 262144 * hidden
    assert make_plan(size, machine(1, memory=17), replace(work, prefill=prefill)).best is None


def _best(size: ModelSize, on: Machine, *works: Workload) -> list[Candidate]:
    found = [make_plan(size, on, work).best for work in works]
    assert all(found)
    return [each for each in found if each is not None]


def test_infinite_links_give_the_perfect_split() -> None:
    size = size_of("llama-8b")
    plan = make_plan(size, machine(4, inside=FREE), Workload(tokens=24576, tensor=1))  # chunks at once
    best = plan.candidates[0]
    assert best.partition == equal_work(24576, 4, machine(4).compute(size, 1))
    assert best.ttft is not None and best.ttft.wait < 1e-3 * best.ttft.total


def test_a_model_larger_than_a_gpu_is_shared_out_and_the_others_are_told_why() -> None:
    plan = make_plan(size_of("llama-70b"), machine(8), Workload(tokens=8192))
    assert plan.best is not None and plan.best.num_shares >= 2 and plan.best.num_ranks == 8
    alone = next(each for each in plan.candidates if each.num_shares == 1)
    assert not alone.fits and alone.ttft is None
    assert reason(plan, alone).startswith("does not fit: needs 13") and "weights" in reason(plan, alone)
    slower = next(each for each in plan.candidates[1:] if each.fits)
    assert reason(plan, slower).startswith("TTFT 1.")


def test_slow_links_inside_a_node_are_the_reason_in_words() -> None:
    plan = make_plan(
        size_of("llama-8b"), machine(8, inside=replace(NVLINK, bandwidth_Bps=25e9)), Workload(tokens=131072)
    )
    assert plan.best is not None and plan.best.num_shares < 8
    tensor = next(each for each in plan.candidates if each.num_shares == 8)
    assert "all-reduces of 8 shares over 25 GB/s take" in reason(plan, tensor)
    slow = machine(2, 2, between=replace(NETWORK, bandwidth_Bps=1e7))
    plan = make_plan(size_of("llama-8b"), slow, Workload(tokens=8192))
    assert plan.best is not None and plan.best.num_stages == 1
    chain = next(each for each in plan.candidates if each.num_stages == 2)
    # A searched chain leaves the second rank next to nothing, and so is hardly slower than one rank.
    assert chain.ttft is not None and chain.ttft.total >= 0.99 * plan.best.ttft.total  # type: ignore[union-attr]


def test_decoding_is_sharded_where_the_keys_and_values_do_not_fit_or_are_most_of_what_is_read() -> None:
    size, four = size_of("llama-8b"), machine(4)
    short, long = (make_plan(size, four, Workload(tokens=tokens, tensor=1)) for tokens in (2048, 524288))
    assert short.candidates[0].num_stages == long.candidates[0].num_stages == 4
    assert not short.candidates[0].held.sharded and long.candidates[0].held.sharded
    full = make_plan(size, machine(4, memory=60), Workload(tokens=524288, tensor=1))
    assert full.best is not None and full.best.held.sharded
    split = long.candidates[0].partition
    assert token_s(size, four, 1, split, sharded=True) < token_s(size, four, 1, split, sharded=False)
    forced = make_plan(size, machine(4, memory=60), Workload(tokens=524288, tensor=1, sharded=False))
    assert forced.best is None


def test_a_single_stage_computes_pieces_if_its_activations_do_not_fit() -> None:
    plan = make_plan(size_of("llama-8b"), machine(1, memory=66), Workload(tokens=393216))
    assert plan.best is not None and plan.best.held.piece_tokens is not None
    assert plan.best.held.room >= 0 and plan.best.ttft is not None
    whole = machine(1).compute(size_of("llama-8b"), 1)
    alone_s = simulate(even(393216, 1), machine(1).cluster(size_of("llama-8b"), 1, 1)).ttft_s
    assert whole.own(1) > 0 and plan.best.ttft.total == pytest.approx(alone_s, rel=0.05)


def test_nothing_fits_tells_the_least_that_would() -> None:
    size, work = size_of("llama-70b"), Workload(tokens=131072)
    plan = make_plan(size, machine(1), work)
    assert plan.best is None and plan.least_gpus is not None and plan.least_gpus > 1
    message = nothing_fits(plan)
    assert f"at least {plan.least_gpus} GPUs with 80 GiB" in message and "\n" not in message
    assert make_plan(size, machine(plan.least_gpus), work).best is not None
    assert make_plan(size, machine(plan.least_gpus - 1), work).best is None
    never = make_plan(size, machine(2, memory=8), replace(work, tensor=1))
    assert never.best is None and never.least_gpus is None
    assert "GPUs with" in nothing_fits(never)


def test_shares_that_heads_or_nodes_do_not_allow_are_refused() -> None:
    size = size_of("llama-8b")
    assert shares_that_fit(size, 8) == [1, 2, 4, 8]
    assert shares_that_fit(size, 6) == [1, 2]
    assert shares_that_fit(size, 4) == [1, 2, 4]
    with pytest.raises(ValueError, match=r"ranks.tensor=8 is no number of shares .* it may be 1, 2, 4$"):
        make_plan(size, machine(16, 4), Workload(tokens=1024, tensor=8))


@given(lengths=st.lists(st.integers(0, 1000), min_size=1, max_size=9).filter(any))
def test_ratios_of_the_command_add_up_to_one(lengths: list[int]) -> None:
    ends = [sum(lengths[:at]) for at in range(len(lengths) + 1)]
    plan = make_plan(size_of("llama-8-heads"), machine(1), Workload(tokens=64))
    candidate = replace(plan.candidates[0], partition=ContextPartition(boundaries=tuple(ends)))
    assert sum(ratios(candidate)) == pytest.approx(1, abs=1e-9) and min(ratios(candidate)) >= -1e-3


# --- the program


def options(*more: str) -> list[str]:
    return [
        "model=random",
        f"model.config={MODELS / 'llama-8b.json'}",
        "gpus=2",
        "device=h100",
        "tokens=8192",
        *more,
    ]


def test_the_program_prints_the_plan_and_writes_its_report_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    assert main(options(f"report={report}", f"picture={picture}")) == 0
    out = capsys.readouterr().out
    plan = json.loads(report.read_text(encoding="utf-8"))
    best = plan["candidates"][0]
    assert f"{best['stages']} x {best['shares']}" in out and out.startswith("8,192 tokens of llama, 32 layers")
    assert "-m launch.infer model=hf" in out and "-m launch.infer model=random" in out and "assumed" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert best["why_not"] is None and all(each["why_not"] for each in plan["candidates"][1:])


@pytest.mark.parametrize(
    "args",
    [
        ["gpus=1"],
        ["gpus=8", "tokens=2097152", "ranks.tensor=8"],
        ["gpus=8", "ranks.tensor=1", "decode=sharded", "batch=3"],
        ["gpus=16", "nodes=2", "link.between=200Gbit/s", "ranks.tensor=4", "tokens=32768"],
        ["model.layers=3", "model.dtype=float32", "new_tokens=7"],
        ["model.overrides={max_position_embeddings: 20000}"],
        ["model.overrides={eos_token_id:[1,2],rope_parameters:{rope_type:linear,factor:2.0},pad_token_id:null}"],
        ["model.config={folder}"],
        ["model.config={folder}/config.json"],
        ["model=hf", "model.path={folder}", "~model.config"],
        ["model=smollm2", "~model.config", "tokens=1000"],
        ["gpus=8", "ranks.tensor=1", "prefill.attention=xattention", "prefill.density=0.2"],
        ["gpus=8", "ranks.tensor=1", "prefill.attention=xattention", "prefill.threshold=0.9", "prefill.stride=8"],
        ["gpus=8", "ranks.tensor=1", "prefill.attention=xattention", "prefill.exact_layers=[5,2]"],
        ["gpus=8", "ranks.tensor=1", "prefill.wire_bits=8"],
        ["gpus=4", "prefill.speculative=layers", "prefill.speculative_layers=3"],
        [
            "gpus=4",
            "ranks.tensor=1",
            "prefill.attention=streaming_heads",
            "policy=duo_attention",
            "policy.heads={gates}",
            "policy.retrieval_share=0.25",
            "policy.sinks=3",
            "policy.recent=9",
        ],
    ],
)
def test_what_is_printed_is_read_by_the_program_as_what_was_planned(args: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    build("llama").config.save_pretrained(folder)
    (gates := tmp_path / "gates").mkdir()
    for name, text in DuoTable(gates=[torch.ones(2)]).files().items():
        (gates / name).write_text(text)
    has_config = "~model.config" not in args
    args = [
        each.replace("{folder}", str(folder)).replace("{gates}", str(gates))
        for each in args
        if not each.startswith("~")
    ]
    run = PLAN.compose([*(options() if has_config else options()[2:]), *args])
    plan = plan_of(run)
    printed = re.findall(r"^(.*):\n(torchrun .*)$", plan_text(plan, run), re.MULTILINE)
    best = as_json(plan)["candidates"][0]
    assert len(printed) == (2 if has_config and run.model.layers is None else 1)
    for title, command in printed:
        assert not {"<", ">"} & set(command)  # which a shell would take for files
        words = shlex.split(command)
        at = words.index("-m")
        infer = INFER.compose(words[at + 2 :])
        launcher = get_args_parser().parse_args(words[1:])
        assert words[at + 1] == "launch.infer"
        assert int(launcher.nnodes.partition(":")[0]) * int(launcher.nproc_per_node) == best["stages"] * best["shares"]
        assert launcher.standalone == (run.nodes == 1) == ("HEAD" not in title)
        assert infer.ranks.tensor == best["shares"]
        assert infer.prefill.chunk_tokens == best["chunk_tokens"]
        assert infer.prefill.sparsity == run.prefill.of_run().sparsity
        assert infer.policy == run.policy
        for name in ("speculative", "speculative_share", "speculative_layers"):
            assert getattr(infer.prefill, name) == getattr(run.prefill, name)
        assert infer.prefill.wire_bits == (run.prefill.wire_bits if best["stages"] > 1 else None)
        assert infer.generation.max_new_tokens == run.new_tokens and infer.prompt.batch == run.batch
        if best["stages"] > 1:
            shares = np.diff(best["boundaries"]) / best["boundaries"][-1]
            assert infer.partition.ratios == pytest.approx(list(shares), abs=2e-4)
            assert infer.decode.name.name == best["decode"]
        has_weights = infer.model.name is not ModelName.random
        assert (infer.prompt.file, infer.prompt.random_tokens) == (
            ("prompt.txt" if run.batch == 1 else "prompts.jsonl", None) if has_weights else (None, run.tokens)
        )
        assert not [told for told in ineffective_settings(infer) if told.startswith("prompt.")]
        if infer.model.name is ModelName.hf:
            assert infer.model.path == (str(folder) if str(folder) in " ".join(args) else "weights/llama-8b")
        else:
            assert infer.model == run.model
        assert infer.model.dtype is run.model.dtype and infer.model.overrides == run.model.overrides


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["tokens=null"], "tokens=<n> is needed"),
        (["device=q100"], "device=q100 is not known; it may be B200, H200"),
        (["device=null"], "memory=, bandwidth=, flops= must be given without a device="),
        (["memory=much"], "memory=much is no size in bytes"),
        (["link.inside=200Gb/s"], "link.inside=200Gb/s is no rate above 0; write 450GB/s"),
        (["flops=9TB/s"], "flops=9TB/s is no rate above 0; write 989TFLOP/s"),
        (["gpus=9", "nodes=2"], "gpus=9 must be a multiple of nodes=2"),
        (["nodes=2"], "link.between=<rate> is needed with several nodes"),
        (["efficiency.matmul=0"], "efficiency.matmul=0.0 must be a share above 0"),
        (["ranks.tensor=3"], "ranks.tensor=3 is no number of shares"),
        (["report=/nowhere/at/all.json"], "report="),
        (["compute=missing.json"], "compute=missing.json cannot be read"),
        (["model.config=missing.json"], "model.config=missing.json does not exist"),
        (["decode=first"], "decode=first is not one of auto, last, sharded"),
        (["prefill.density=2"], "prefill.density=2.0 must be above 0 and at most 1"),
        (["prefill.attention=xattention", "prefill.exact_layers=[31,32]"], "exact_layers=[31, 32] names 32, and the"),
        (["prefill.attention=dense"], "prefill.attention=dense is for prefill=tsp"),
        (["prefill.attention=streaming_heads"], "takes the heads that stream from a cache policy"),
        (["prefill.attention=streaming_heads", "policy=duo_attention"], "give policy.sinks=<number>"),
        (["prefill.attention=streaming_heads", "policy=duo_attention", "policy.heads=no"], "there is no such folder"),
        (["prefill.speculative=model"], "prefill.speculative=model is not planned"),
        (["prefill.speculative=layers", "ranks.tensor=2"], "not with ranks.tensor=2"),
        (["prefill.speculative=layers", "prefill.attention=xattention"], "leaves gaps between those that are computed"),
    ],
)
def test_mistakes_are_told_in_one_line(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options(*args)) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1


def test_layers_with_windows_are_no_exact_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build("gemma2").config.save_pretrained(tmp_path)
    given = [*options("tokens=500", "ranks.tensor=1", "prefill.attention=xattention"), f"model.config={tmp_path}"]
    assert main([*given, "prefill.exact_layers=[0,1]"]) == 2
    err = capsys.readouterr().err
    assert "prefill.exact_layers=[0, 1] names 0, and the layers of model gemma2 in which" in err and "are 1;" in err
    assert main([*given, "prefill.exact_layers=[1]"]) == 0
    plan = " ".join(capsys.readouterr().out.split())
    assert "xattention chooses keys in no layer: prefill.exact_layers names all layers of this gemma2" in plan


def test_what_has_no_effect_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    told = {
        "prefill.stride=8": "prefill.stride has no effect without prefill.attention=xattention",
        "prefill.exact_layers=[1]": "prefill.exact_layers has no effect without prefill.attention=xattention",
        "prefill.speculative_chunk=8": "prefill.speculative_chunk has no effect without prefill.speculative",
        "policy=snapkv": "policy=snapkv has no effect here without prefill.attention=streaming_heads",
    }
    assert main(options(*told, "tokens=null")) == 2  # before that
    assert "warning" not in capsys.readouterr().err
    assert main(options(*told, "report=/nowhere/at/all.json")) == 2
    assert capsys.readouterr().err.splitlines()[:-1] == [f"warning: {each}" for each in told.values()]


def test_a_plan_that_fits_nothing_ends_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options("memory=8GiB")) == 1
    captured = capsys.readouterr()
    last = captured.err.rpartition("\r")[2]  # after the progress bar
    assert captured.out == "" and last.startswith("gpus=2 do not fit 8,192 tokens") and last.count("\n") == 1


def test_compute_that_a_search_measured_is_used_for_its_model_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = size_of("llama-8b")
    points = {256: 1e-3, 512: 2e-3}
    measured = {
        "num_layers": 32,
        **{name: sorted(points.items()) for name in ("first_s", "between_s", "own_s", "last_s")},
        "prefix_s": [[c, P, 1e-6 * c] for c in points for P in points],
    }
    key = "|".join(str(value) for value in (*size.shape.known.values(), "bfloat16", "H100"))
    path = tmp_path / "t.compute.json"
    path.write_text(f"{key} [256]\n{json.dumps(measured)}\n", encoding="utf-8")
    assert main(options(f"compute={path}")) == 0
    assert "compute of one device measured" in capsys.readouterr().out
    assert main(options(f"compute={path}", "model.dtype=float32")) == 2
    assert "was measured with another model" in capsys.readouterr().err


def test_measured_compute_is_of_the_same_layers_with_states(tmp_path: Path) -> None:
    def hybrid(states: tuple[int, ...]) -> ModelSize:
        sizes, kinds = tuple(64 * (place in states) for place in range(32)), (("some",),) * 32
        size = size_of("llama-8b")
        shape = replace(size.shape, num_states=len(states), state_bytes=64 * len(states))
        return replace(size, shape=shape, places=Places(num_layers=32, state_bytes=sizes, steps=kinds))

    size, path = hybrid((0, 1, 2)), tmp_path / "t.compute.json"
    cost = MeasuredCost(
        **{name: {8: 1e-3, 16: 2e-3} for name in ("first_s", "between_s", "own_s", "last_s", "state_s")},
        prefix_s={(c, P): 1e-6 * c for c in (8, 16) for P in (8, 16)},
        num_places=32,
        states=size.places.states,
    )
    key = "|".join(str(value) for value in (*size.shape.known.values(), size.dtype, "H100"))
    path.write_text(f"{key}\n{cost.to_json()}\n")
    assert read_compute(path, size, 1) == cost
    with pytest.raises(ValueError, match=r"states in places \[0, 1, 2\]\), not this one \(in \[0, 1, 5\]\)"):
        read_compute(path, hybrid((0, 1, 5)), 1)


def test_help_names_every_option_and_the_config_has_it() -> None:
    to_print = PLAN.read(["--help"]).to_print
    assert to_print == HELP + FLAGS_HELP
    for name in leaf_names(option_kinds(PlanRun)):
        if name in ("model.seed", "model.trust_remote_code"):
            continue
        assert f"{name.removesuffix('.name')}=" in HELP, name
    assert (CONF / "plan.yaml").is_file()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("200Gbit/s", 25e9), ("200 Gbps", 25e9), ("3.35TB/s", 3.35e12), ("64GiB/s", 64 * 2**30), ("1kB/s", 1000.0)],
)
def test_rates_are_read_in_bits_and_bytes(text: str, expected: float) -> None:
    assert bytes_per_s(text, "x") == pytest.approx(expected)
    assert flops("989TFLOP/s", "x") == flops("0.989P", "x") == pytest.approx(989e12)


@given(text=st.text(max_size=12))
def test_any_text_is_a_rate_or_refused_in_one_line(text: str) -> None:
    for read in (bytes_per_s, flops):
        try:
            assert read(text, "x") > 0
        except ValueError as error:
            assert len(str(error).splitlines()) == 1
