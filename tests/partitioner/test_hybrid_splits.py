"""Hybrid models in costs, simulation and searches: states are handed on in turn, and cost the same anywhere."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partitioner import measure
from partitioner.auto.balance import EFFORT
from partitioner.auto.learned import LearnedSplit, read_learned, write_learned
from partitioner.auto.partition import AutoPartition
from partitioner.auto.probe import combined
from partitioner.cost.compute import ComputeCost, layer_s
from partitioner.cost.fitted import FittedCost
from partitioner.cost.link import Link
from partitioner.cost.measured import MeasuredCost
from partitioner.cost.places import Places
from partitioner.measure import probe_compute
from partitioner.search import main
from partitioner.searches.best_split import best_split, simulated_cost
from partitioner.searches.equal_work import equal_work
from partitioner.searches.record import SearchRecord
from partitioner.simulation.bounds import chain_tokens
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from partitioner.table.lookup_table import LookupTable
from runahead import Engine, GenerationOptions, Ranks
from runahead.config import Transfer
from runahead.context import ContextPartition, even
from runahead.timeline.clock import Clock
from tests.conftest import RankPools
from tests.examples import examples
from tests.exit_status import exit_status
from tests.families import HYBRIDS, LINEAR_AND_FULL, build, oracle_tokens, prompt, throughout
from tests.partitioner.clusters import interleaved, partitions, random_hybrids, rank_s, states_first
from tests.partitioner.fixed_point import ttft_s
from tests.ranks.tasks import tiny_model


def split(*boundaries: int) -> ContextPartition:
    return ContextPartition(boundaries=boundaries)


@examples(60)
@given(random_hybrids(4), partitions(4), st.booleans())
def test_agrees_with_the_fixed_point(cluster: Cluster, boundaries: tuple[int, ...], as_landed: bool) -> None:
    cluster, partition = replace(cluster, pass_on_as_landed=as_landed), split(*boundaries)
    assert simulate(partition, cluster).ttft_s == pytest.approx(ttft_s(partition, cluster), rel=1e-9)


@given(random_hybrids(4), partitions(4))
def test_compute_bytes_and_waits_add_up(cluster: Cluster, boundaries: tuple[int, ...]) -> None:
    partition, compute = split(*boundaries), cluster.compute
    attending = compute.num_places - len(compute.states)
    for transfer in Transfer:
        result = simulate(partition, replace(cluster, transfer=transfer), record=True)
        states = (len(partition.chain) - 1) * len(compute.states) * cluster.state_bytes
        kv = chain_tokens(partition) * attending * cluster.kv_bytes_per_token
        assert sum(result.sent_bytes) == pytest.approx(kv + states, rel=1e-12)
        for rank in partition.chain:
            chunk, is_last = partition.chunk(rank), rank == partition.chain[-1]
            expected = rank_s(compute, len(chunk), chunk.start, is_last=is_last) / cluster.speed[rank]
            assert result.compute_s[rank] == pytest.approx(expected, rel=1e-9)
            busy = [span for span in result.spans[rank] if span.kind != "send"]
            assert busy[0].start_s == 0 and all(a.end_s == b.start_s for a, b in pairwise(busy))
            waited = sum(span.end_s - span.start_s for span in busy if span.kind == "wait")
            assert waited == pytest.approx(result.wait_s[rank], abs=1e-9)


def handed_over_s(num_layers: int, first: float, second: float, steps: tuple[float, float]) -> float:
    """When the second of two ranks ends, each place being a recurrence that it begins once the first has ended it.

    Args:
        first, second: seconds of the recurrence on each rank.
        steps: from one place to the next, on each rank.
    """
    ended, own = 0.0, 0.0
    for place in range(num_layers):
        ended += first + (steps[0] if place else 0.0)
        own = max(own + (steps[1] if place else 0.0), ended) + second
    return own


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.7, 0.3), (0.2, 0.8)])
def test_a_state_is_waited_for_layer_by_layer(shares: tuple[float, float]) -> None:
    """Two ranks, states alone, links and slots that cost nothing: a sum by hand."""
    compute = FittedCost(
        num_places=9,
        states=tuple(range(9)),
        first_s=(0.0, 0.0),
        between_s=(0.0, 1e-6),
        own_s=(0.0, 0.0, 0.0),
        prefix_s=(0.0, 0.0, 0.0, 0.0),
        last_s=(0.0, 0.0),
        state_s=(0.0, 3e-6),
    )
    cluster = Cluster(compute=compute, speed=[1.0, 1.0], links=None, kv_bytes_per_token=0, layers_in_flight=9)
    tokens = [round(1000 * share) for share in shares]
    partition = split(0, tokens[0], 1000)
    seconds = [3e-6 * each for each in tokens]
    steps = (1e-6 * tokens[0], 1e-6 * tokens[1])
    expected = handed_over_s(9, *seconds, steps)
    assert simulate(partition, cluster).ttft_s == pytest.approx(expected, rel=1e-9)
    # Without the hand-over the second rank would only compute its own part.
    assert expected >= 9 * seconds[1] + 8 * steps[1] + seconds[0] - 1e-12


def test_the_hand_over_costs_less_than_a_layer_for_each_rank() -> None:
    """At most (p - 1) / L of a chunk's time beside the work itself, if layers are alike."""
    for num_ranks in (2, 4, 8):
        cluster = interleaved(num_ranks, period=10**6, num_layers=48)
        partition = even(32768, num_ranks)
        result = simulate(partition, cluster)
        alone_s = rank_s(cluster.compute, 32768 // num_ranks, 0, is_last=True)
        layer = layer_s(cluster.compute, 32768 // num_ranks, 0)
        assert result.wait_s[-1] <= (num_ranks - 1) * layer * (1 + 1e-9)
        assert result.ttft_s <= alone_s + (num_ranks - 1) * layer * (1 + 1e-9)


@pytest.mark.parametrize(("num_ranks", "period"), [(2, 4), (2, 2), (3, 4)])
def test_the_split_that_is_found_is_the_best_of_all(num_ranks: int, period: int) -> None:
    num_tokens, stride = 4096, 64 if num_ranks == 2 else 128
    cluster = interleaved(num_ranks, period=period)
    cost = simulated_cost(cluster)
    ends = range(0, num_tokens + 1, stride)
    inner = combinations(ends, num_ranks - 1)
    brute_s = min(cost(split(0, *each, num_tokens)) for each in inner)
    found = best_split(num_tokens, num_ranks, cluster, min_stride=stride)
    assert found.cost_s <= brute_s * 1.001  # equal work, where it starts from, lies on no grid
    auto = EFFORT.split(num_tokens, cluster)
    assert cost(auto) <= brute_s * 1.005


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_equal_work_is_not_the_best_where_layers_with_states_come_first(num_ranks: int) -> None:
    """Ranks wait for states on any link, also on those that cost nothing, on which equal work is else the best."""
    cluster = states_first(num_ranks)
    cost = simulated_cost(cluster)
    balanced = cost(equal_work(4096, num_ranks, cluster.compute))
    assert balanced > 1.01 * best_split(4096, num_ranks, cluster, min_stride=16).cost_s
    assert balanced > 1.01 * cost(EFFORT.split(4096, cluster))


def test_the_split_lies_nearer_to_even_than_for_attention_alone() -> None:
    shares = []
    for period in (1, 2, 4, 8):
        found = best_split(8192, 2, interleaved(2, period=period), min_stride=32).partition
        shares.append(found.boundaries[1] / 8192)
    assert shares == sorted(shares, reverse=True) and shares[0] - shares[-1] > 0.05
    assert all(0.48 < share < 0.7 for share in shares)


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "nemotron_h", "zamba2", "lfm2", "mamba2"])
def test_places_are_those_of_the_chain(family: str) -> None:
    if family not in HYBRIDS:
        pytest.skip("not in this transformers")
    model = tiny_model(family, torch.float32)
    places = Places.of_model(model)
    assert places.states == tuple(place for place, (kind, _) in enumerate(model.order) if kind == "state")
    assert sum(places.state_bytes) == sum(shape.num_bytes for shape in model.state_shapes)
    assert model.held is not None
    deeper = Places.of_model(model, 2 * len(model.held.kinds), [*model.held.kinds] * 2)
    assert len(deeper) == 2 * len(places) and deeper.states[: len(places.states)] == places.states
    with pytest.raises(ValueError, match="leaves out all some_other layers"):
        Places.of_model(model, 1, ["some_other"])


def test_layers_without_states_do_not_stand_for_those_with_states() -> None:
    model = tiny_model("llama", torch.float32)
    assert model.held is None and len(Places.of_model(model, 5, ["full_attention"] * 5)) == 5
    with pytest.raises(ValueError, match="leaves out all conv and linear_attention layers, whose cost"):
        Places.of_model(model, 4, ["full_attention", "linear_attention", "full_attention", "conv"])


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "nemotron_h", "mamba2"])
def test_each_kind_of_place_is_measured(family: str) -> None:
    model = tiny_model(family, torch.float32)
    cost = probe_compute(model, chunks=[8, 80], prefixes=[16, 64], repeats=1)
    assert (cost.num_places, cost.states) == (len(model.order), Places.of_model(model).states)
    every = [*cost.first_s.values(), *cost.between_s.values(), *cost.state_s.values()]
    assert all(seconds > 0 for seconds in every)
    assert all((seconds > 0) == (model.num_layers > 0) for seconds in cost.own_s.values())
    assert MeasuredCost.from_json(cost.to_json()) == cost
    fitted = FittedCost.fit(cost)
    assert fitted.states == cost.states and FittedCost.from_json(fitted.to_json()) == fitted


class Calls(Clock):
    """A clock of which a second is a call of a module, and a reading takes a thousandth."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self.number = 0.0
        for module in modules:
            module.register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self.number += 1

    def mark(self) -> float:
        self.number += 1e-3
        return self.number


@pytest.mark.parametrize(("family", "is_one_by_one"), [("jamba", True), ("qwen3_next", False)])
def test_layers_that_take_tokens_one_by_one_are_timed_after_a_given_state_too(
    family: str, is_one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family, torch.float32)
    assert model.gives_one_by_one == is_one_by_one
    ends = [child for name, child in model.module.named_modules() if name.endswith(("mamba.out_proj", "attn.out_proj"))]
    calls = Calls(ends)
    monkeypatch.setattr(measure, "clock_for", lambda device: calls)
    cost = probe_compute(model, chunks=[8, 80], prefixes=[16, 64], repeats=1)
    at_start, later = ([cost.state(c, P) for c in (8, 80)] for P in (0, 64))
    assert max(at_start) < 1.1
    assert later == (pytest.approx([8, 80], rel=0.01) if is_one_by_one else at_start)
    assert list(cost.later_s.values()) == (later if is_one_by_one else [])
    assert MeasuredCost.from_json(cost.to_json()) == cost
    fitted = FittedCost.fit(cost)
    assert FittedCost.from_json(fitted.to_json()) == fitted
    assert [fitted.state(c, 64) for c in (8, 80)] == pytest.approx(later, rel=0.01)
    assert ("later_s" in cost.to_json(), "later_s" in fitted.to_json()) == (is_one_by_one, is_one_by_one)


@pytest.mark.parametrize("reads_late", [True, False])
def test_what_is_computed_while_a_state_is_on_its_way_is_timed_before_it(
    reads_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ranks wait for it: the simulated chain waits between the two."""
    model = tiny_model("qwen3_next", torch.float32)
    assert model.held is not None and model.held.reads_late
    monkeypatch.setattr(model, "held", replace(model.held, reads_late=reads_late))
    calls = Calls(child for name, child in model.module.named_modules() if name.endswith("attn.in_proj_qkvz"))
    monkeypatch.setattr(measure, "clock_for", lambda device: calls)
    cost = probe_compute(model, chunks=[8, 80], prefixes=[16, 64], repeats=1)
    for chunk in (8, 80):
        before, inside = cost.first(chunk), cost.state(chunk, 16)
        assert (before > 0.9, inside > 0.9) == (reads_late, not reads_late), (before, inside)


def test_each_kind_counts_as_often_as_it_comes() -> None:
    """Three kinds of steps, measured several times each, in a model in which they come 6, 2 and 1 times."""
    seconds = {0: 1.0, 1: 3.0, 2: 2.0, 3: 10.0, 4: 100.0}
    kinds = ["to a state", "to a state", "to a state", "to attention", "never"]
    numbers = {"to a state": 6, "to attention": 2}
    assert measure._mean(seconds, kinds.__getitem__, numbers) == pytest.approx((6 * 2.0 + 2 * 10.0) / 8)
    assert measure._mean({0: 7.0}, kinds.__getitem__, {}) == 7.0, "a model of one place"


@dataclass
class Split:
    """One rank's boundaries and tokens of each prompt, and on rank 0 how many places hold a state in the cost."""

    boundaries: list[list[int]]
    tokens: list[list[int]]
    states: int | None
    state_bytes: float | None


def answer(ranks: Ranks, folder: Path, family: str, prompts: list[list[int]]) -> Split:
    """Runs on a rank: a few tokens after each prompt, split by partition=auto."""
    model = tiny_model(family)
    with throughout(torch.float64):
        partition = AutoPartition.start(model, ranks, folder=folder, tell=lambda sentence: None)
        engine = Engine(model, ranks, partition=partition)
        options = GenerationOptions(max_new_tokens=3, ignore_eos=True)
        results = [engine.generate([ids], options) for ids in prompts]
    cluster = None if partition.balance is None else partition.balance.cluster
    return Split(
        boundaries=[result.boundaries for result in results],
        tokens=[result.generations[0].new_token_ids for result in results],
        states=None if cluster is None else len(cluster.compute.states),
        state_bytes=None if cluster is None else cluster.state_bytes,
    )


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_auto_splits_the_prompts_of_a_hybrid(rank_pools: RankPools, tmp_path: Path, family: str) -> None:
    prompts = [prompt(60), prompt(90), prompt(1), prompt(90, seed=1)]
    first, second = rank_pools.run(2, answer, tmp_path, family, prompts)
    assert first.boundaries == second.boundaries and [each[-1] for each in first.boundaries] == [60, 90, 1, 90]
    assert first.tokens == [oracle_tokens(family, tuple(ids), 3) for ids in prompts]
    model = tiny_model(family)
    sizes = [shape.num_bytes for shape in model.state_shapes]
    assert (first.states, first.state_bytes) == (len(sizes), sum(sizes) / len(sizes))
    [path] = tmp_path.rglob("*.json")
    kept = json.loads(path.read_text())
    assert kept["cost"]["states"] == list(Places.of_model(model).states) and len(kept["prompts"]) > 0


@pytest.mark.parametrize("more", [(), ("model.layers=4",)], ids=["all layers", "fewer layers"])
def test_a_search_finds_splits_of_a_hybrid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    types = [*LINEAR_AND_FULL, *LINEAR_AND_FULL]
    config = build("qwen3_next", dtype=torch.float32).config.to_dict()
    config |= {"num_hidden_layers": len(types), "layer_types": types}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "table.json"
    args = ["model=random", f"model.config={tmp_path / 'config.json'}", f"table={path}", "search.lengths=[128]"]
    args += ["search.ranks=[1,2]", "search.repeats=1", "ranks.threads=1", "ranks.device=cpu", "link.gbps=10", *more]
    assert main([*args, "search.max_loss=null"]) == 0, capsys.readouterr().err
    about = LookupTable.load(path).fingerprint.model
    with_states = types.count("linear_attention")
    assert (about.num_layers, about.num_states) == (len(types), with_states) and about.state_bytes > 0
    assert f"{len(types)} layers with {with_states} states" in capsys.readouterr().out
    _, _, cost = Path(f"{path}.compute.json").read_text().partition("\n")
    assert len(json.loads(cost)["states"]) == with_states
    [cluster] = [each for each in SearchRecord.beside(path).clusters.values() if each.num_ranks == 2]
    assert cluster.state_bytes == about.state_bytes / with_states
    # Compute is measured again if as many layers of each kind follow in another order.
    moved = [*types[:4], *reversed(types[4:])]
    (tmp_path / "config.json").write_text(json.dumps(dict(config, layer_types=moved)))
    assert main([*args, "search.max_loss=null"]) == 0, capsys.readouterr().err
    _, _, cost = Path(f"{path}.compute.json").read_text().partition("\n")
    assert json.loads(cost)["states"] == [place for place, kind in enumerate(moved) if kind == "linear_attention"]
    # A table is for a model with as many states, of as many bytes.
    wrong = [dict(config, layer_types=[*types[:-3], types[0], *types[-2:]]), dict(config, linear_num_value_heads=8)]
    for each in wrong:
        (tmp_path / "config.json").write_text(json.dumps(each))
        assert exit_status(main, args) == 2 and "state" in capsys.readouterr().err


def test_costs_of_states_are_checked() -> None:
    good = FittedCost.from_shape(
        num_layers=4, model_dim=8, kv_dim=8, mlp_dim=8, vocab_size=8, matmul_flops=1e9, attention_flops=1e9
    )
    for wrong in ((4,), (-1,), (2, 1), (1, 1), (True,), None):
        with pytest.raises(ValueError, match="must be ascending numbers below num_layers=4"):
            replace(good, states=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="state_s"):
        replace(good, state_s=(0.0, -1.0))


def test_ranks_agree_on_what_states_cost_after_a_prefix(tmp_path: Path) -> None:
    """The median of their constants, which is kept as it is."""
    one = interleaved(1, period=4).compute
    assert isinstance(one, FittedCost)
    costs = [replace(one, later_s=(0.0, slope)) for slope in (2e-6, 9e-6, 3e-6)]
    together, slowness = combined(costs, 1024)
    assert together.later_s == (0.0, 3e-6) and slowness[0] < slowness[2] < slowness[1]
    learned = LearnedSplit(cost=together, link=Link(latency_s=0.0, bandwidth_Bps=1e9), start=(0.0,) * 3, prompts=())
    write_learned(tmp_path / "learned.json", "this", learned)
    assert read_learned(tmp_path / "learned.json", "this", 3) == learned
    with pytest.raises(ValueError, match="later_s"):
        replace(one, later_s=(0.0,))  # type: ignore[arg-type]


@given(st.integers(0, 10**6))
def test_the_mean_layer_is_what_a_forward_takes(seed: int) -> None:
    rng = random.Random(seed)
    cost: ComputeCost = interleaved(1, period=rng.choice([1, 2, 3, 4]), num_layers=12).compute
    c, prefix = rng.randrange(1, 5000), rng.randrange(0, 5000)
    attending = cost.num_places - len(cost.states)
    whole = 12 * cost.between(c) + attending * (cost.own(c) + cost.prefix(c, prefix))
    whole += len(cost.states) * cost.state(c, prefix)
    assert 12 * layer_s(cost, c, prefix) == pytest.approx(whole, rel=1e-9)
