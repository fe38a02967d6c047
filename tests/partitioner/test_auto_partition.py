"""partition=auto on live ranks: one split for all, kept for the next run, and a file that may be anything."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from launch.inputs import partitions
from launch.inputs.options import PartitionOptions, RunOptions, ineffective_settings
from launch.inputs.partitions import AutoChoice, TablePartition, kvr_name, partitioner, prepare_partition
from partitioner.auto import balance as auto_balance
from partitioner.auto import partition as auto_partition
from partitioner.auto.balance import Balance
from partitioner.auto.learned import LearnedSplit, learned_path, read_learned, write_learned
from partitioner.auto.partition import LEAST_S, AutoPartition
from partitioner.auto.probe import combined, counted_cost
from partitioner.auto.slowness import SeenPrompt
from partitioner.cost.link import Link
from partitioner.cost.measured import MeasuredCost
from partitioner.simulation.chain import simulate
from partitioner.table.fingerprint import Fingerprint
from policies.h2o import H2O
from policies.window import Window
from runahead import ContextPartition, Engine, GenerationOptions, PrefillOptions, Ranks, RanksOptions, even
from runahead.config import Device
from runahead.context import KnowsAlone, LearningPartitioner
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import VOCAB_SIZE
from tests.partitioner.clusters import llama
from tests.partitioner.test_alone import let_times_decide
from tests.partitioner.test_auto_balance import machine, ready
from tests.partitioner.test_auto_balance import run as simulated_prompts
from tests.partitioner.test_lookup_table import entry, table_of
from tests.ranks.tasks import tiny_model

LEARNED = LearnedSplit(
    cost=llama(),
    link=Link(latency_s=1e-5, bandwidth_Bps=1e9),
    start=(0.0, 0.1),
    prompts=(SeenPrompt(tokens=100, slowness=(-0.1, None), surprise=(0.0, 0.2)),),
)


@dataclass
class Told:
    """Results of a run on one rank."""

    boundaries: list[list[int]]
    told: list[str]
    tokens: list[list[int]]
    prompts: int | None


def prompts_of(lengths: list[int]) -> list[list[int]]:
    drawn = random.Random(0)
    return [[drawn.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def run(
    ranks: Ranks, folder: Path, batches: list[list[int]], policy: str | None = None, how: dict[str, Any] | None = None
) -> Told:
    """Generate from batches of prompts of these lengths, split by partition=auto."""
    model = tiny_model("llama", torch.float32)
    policies = RankPolicies.everywhere({None: [], "window": [Window(budget=8)], "h2o": [H2O(budget=0.5)]}[policy])
    told: list[str] = []
    partition = AutoPartition.start(model, ranks, policy=str(policy), folder=folder, tell=told.append, **(how or {}))
    engine = Engine(model, ranks, partition=partition, policies=policies)
    results = [engine.generate(prompts_of(lengths), GenerationOptions(max_new_tokens=2)) for lengths in batches]
    return Told(
        boundaries=[result.boundaries for result in results],
        told=told,
        tokens=[generation.new_token_ids for result in results for generation in result.generations],
        prompts=None if partition.balance is None else len(partition.balance.slowness.prompts),
    )


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.json"))


def test_ranks_split_alike_and_the_next_run_goes_on_from_the_file(rank_pools: RankPools, tmp_path: Path) -> None:
    lengths = [[60], [90], [40, 90, 70], [1], [2]]
    first, second = rank_pools.run(2, run, tmp_path, lengths)
    assert first.boundaries == second.boundaries and first.tokens == second.tokens
    assert [boundaries[-1] for boundaries in first.boundaries] == [60, 90, 90, 1, 2]
    [sentence] = first.told
    [path] = files(tmp_path)
    assert sentence == f"partition=auto: timed a few layers for the first split; kept in {path}"
    assert second.told == [] and second.prompts is None
    # Two prompts that agree on a changed machine, as load may make them, forget those before them.
    kept = [prompt["tokens"] for prompt in json.loads(path.read_text())["prompts"]]
    assert len(kept) == first.prompts and kept in ([60, 90, 90, 2], [90, 90, 2], [90, 2])

    before = json.loads(path.read_text())
    again, _ = rank_pools.run(2, run, tmp_path, [[60]])
    assert all(" as in earlier prompts, so this machine does more other work " in each for each in again.told)
    assert again.tokens[0] == first.tokens[0]
    [path] = files(tmp_path)
    after = json.loads(path.read_text())
    assert after["cost"] == before["cost"] and after["prompts"][-2] == before["prompts"][-1]
    before = path.read_text()
    fixed, _ = rank_pools.run(2, run, tmp_path, [[60], [60]], None, {"learn": False})
    assert fixed.boundaries[0] == fixed.boundaries[1] and path.read_text() == before


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize(
    ("then", "now", "told"), [(2.0, 1.0, (1, 0)), (1.0, 2.0, (0, 1)), (2.0, 2.0, None), (1.0, 1.3, None)]
)
def test_a_split_that_was_learned_beside_other_work_is_told_at_the_first_prompt(
    then: float, now: float, told: tuple[int, int] | None, learn: bool
) -> None:
    """Times are simulated on a machine whose second rank other work slows down, or slowed down, by a factor."""
    balance, sentences = ready(), list[str]()
    busy, present = (machine(speed=[1.0, 1 / factor]) for factor in (then, now))
    simulated_prompts(balance, busy, 4096, random.Random(0), prompts=6)
    partition = AutoPartition(Any, balance, learn=learn, told_before=sentences.append)  # type: ignore[arg-type]
    for _ in range(3):
        split = balance.split(4096)
        found = simulate(split, present)
        partition.learn(split, found.compute_s, found.wait_s)
    if told is None:
        assert not sentences
        return
    [sentence] = sentences
    times = float(sentence.split(" took ")[1].split()[0])
    faster, slower = told
    assert f"beside rank {faster}, rank {slower} took" in sentence and times == pytest.approx(2, rel=0.1)


def test_a_prompt_that_is_compared_and_learned_is_simulated_once() -> None:
    balance = ready()
    simulated_prompts(balance, machine(), 4096, random.Random(0), prompts=3)
    split = balance.split(4096)
    found, num_simulated = simulate(split, machine()), list[int]()
    for tell in (None, lambda sentence: None):
        partition = AutoPartition(Any, balance, told_before=tell)  # type: ignore[arg-type]
        with mock.patch.object(auto_balance, "simulate", wraps=simulate) as simulated:
            partition.learn(split, found.compute_s, found.wait_s)
        num_simulated.append(simulated.call_count)
    assert num_simulated[0] == num_simulated[1] > 0


def run_compared(ranks: Ranks, folder: Path, learn: bool) -> list[str]:
    """Sentences in a run of two prompts that take next to no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_partition, "LEAST_S", 0.0)
        return run(ranks, folder, [[60], [60]], None, {"learn": learn}).told


@pytest.mark.parametrize("learn", [True, False])
def test_the_first_prompt_of_a_run_is_compared_with_the_file(
    learn: bool, rank_pools: RankPools, tmp_path: Path
) -> None:
    rank_pools.run(2, run, tmp_path, [[60]])
    [path] = files(tmp_path)
    content = json.loads(path.read_text())
    content["prompts"] = [{"tokens": 60, "slowness": [4.0, -4.0], "surprise": [0.0, 0.0]}] * 3
    path.write_text(json.dumps(content))
    told, of_other = rank_pools.run(2, run_compared, tmp_path, learn)
    [sentence] = told
    assert sentence.startswith("partition=auto: beside rank 0, rank 1 took ") and f"without {path} layers" in sentence
    assert ("two such prompts mend the split" in sentence) == learn and of_other == []


def test_times_that_say_little_are_not_compared() -> None:
    """Before enough is known, far from what is known, of one rank alone, and of prompts of milliseconds, which the next
    one still may be."""
    sentences = list[str]()
    for prompts, known, num_tokens, expected in (
        (0, 4096, 4096, 0),
        (1, 4096, 4096, 0),
        (6, 4, 4, 0),
        (6, 4096, 9000, 0),
        (6, 4096, 2000, 0),
        (6, 4096, 8000, 1),
    ):
        balance = ready()
        simulated_prompts(balance, machine(), known, random.Random(0), prompts=prompts)
        partition = AutoPartition(Any, balance, told_before=sentences.append)  # type: ignore[arg-type]
        partition.learn(ContextPartition(boundaries=(0, 0, 4096)), [0.0, 1.0], [0.0, 0.0])
        split = balance.split(num_tokens)
        found = simulate(split, machine(speed=[1.0, 0.3]))
        assert (sum(found.compute_s) < LEAST_S) == (num_tokens == 4)
        partition.learn(split, found.compute_s, found.wait_s)
        assert len(sentences) == expected, prompts


@pytest.mark.parametrize("policy", ["window", "h2o"])
def test_a_policy_has_a_file_of_its_own(rank_pools: RankPools, tmp_path: Path, policy: str) -> None:
    rank_pools.run(2, run, tmp_path, [[60]])
    first, second = rank_pools.run(2, run, tmp_path, [[60], [40, 64]], policy)
    assert first.boundaries == second.boundaries and first.prompts == 2 and len(files(tmp_path)) == 2
    assert first.boundaries[0][1] < 60, "both ranks work"


def test_more_ranks_than_tokens(rank_pools: RankPools, tmp_path: Path) -> None:
    first, *others = rank_pools.run(4, run, tmp_path, [[3], [1], [50], [2]])
    assert all(each.boundaries == first.boundaries for each in others)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"format": 1}', b"null"])
@pytest.mark.sampled(2)
def test_a_damaged_file_is_told_and_made_anew(rank_pools: RankPools, tmp_path: Path, content: bytes) -> None:
    rank_pools.run(2, run, tmp_path, [[30]])
    [path] = files(tmp_path)
    path.write_bytes(content)
    first, second = rank_pools.run(2, run, tmp_path, [[30]])
    damaged, timed = first.told
    assert damaged.startswith(f"warning: partition=auto: {path} is damaged (") and "\n" not in damaged
    assert damaged.endswith("; layers are timed anew")
    assert "timed a few layers" in timed and second.told == []
    assert json.loads(path.read_text())["format"] == "runahead learned split"


def test_a_folder_that_cannot_be_written_is_told_once(rank_pools: RankPools, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = rank_pools.run(2, run, tmp_path / "file", [[30], [30]])
    assert len(first.told) == 2 and first.told[0].startswith("warning: partition=auto: ")
    assert "cannot be written (" in first.told[0] and second.told == []
    assert first.boundaries == second.boundaries


def test_one_rank_has_nothing_to_split(tmp_path: Path) -> None:
    told = run(Ranks.start(RanksOptions(device=Device.cpu, threads=1)), tmp_path, [[30]])
    assert told.boundaries == [[0, 30]] and told.told == [] and files(tmp_path) == []


def test_what_is_kept_is_read_as_it_was(tmp_path: Path) -> None:
    for kept in (
        LEARNED,
        replace(LEARNED, link=Link(latency_s=0, bandwidth_Bps=float("inf"), shared=True), prompts=()),
    ):
        write_learned(tmp_path / "a" / "b.json", "here", kept)
        assert read_learned(tmp_path / "a" / "b.json", "here", 2) == kept
    assert read_learned(tmp_path / "none.json", "here", 2) is None
    assert learned_path(tmp_path, "here") != learned_path(tmp_path, "there")


def damage(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return apply


@pytest.mark.parametrize(
    "spoil",
    [
        damage(lambda kept: kept.update(version=1)),  # of before
        damage(lambda kept: kept.update(purpose="elsewhere")),
        damage(lambda kept: kept.pop("cost")),
        damage(lambda kept: kept["cost"].update(own_s=[-1, 0, 0])),
        damage(lambda kept: kept["cost"].update(num_layers=True)),
        damage(lambda kept: kept.update(link=None)),
        damage(lambda kept: kept["link"].update(bandwidth_Bps="fast")),
        damage(lambda kept: kept["link"].update(bandwidth_Bps=10**400)),
        damage(lambda kept: kept["link"].update(latency_s="1")),
        damage(lambda kept: kept.update(start=[0.0])),
        damage(lambda kept: kept.update(start=[0.0, float("nan")])),
        damage(lambda kept: kept.update(gained="2")),
        damage(lambda kept: kept.update(prompts=[1])),
        damage(lambda kept: kept["prompts"][0].update(tokens=0)),
        damage(lambda kept: kept["prompts"][0].update(slowness=[1.0])),
        damage(lambda kept: kept["prompts"][0].update(slowness=[1.0, "x"])),
        damage(lambda kept: kept["prompts"][0].update(surprise=[None, 0.0])),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_every_damage_is_one_line_that_names_the_file(tmp_path: Path, spoil: Callable[[Path], Any]) -> None:
    path = tmp_path / "kept.json"
    write_learned(path, "here", LEARNED)
    spoil(path)
    with pytest.raises(ValueError, match="is damaged") as caught:
        read_learned(path, "here", 2)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_the_timed_cost_keeps_the_counted_shapes() -> None:
    true = llama(step_s=0.0)
    lengths = [64, 256, 1024]
    measured = MeasuredCost(
        num_places=true.num_places,
        first_s={c: true.first(c) for c in lengths},
        between_s={c: true.between(c) for c in lengths},
        own_s={c: true.own(c) * (3 if c == 64 else 1) for c in lengths},
        last_s={c: true.last(c) for c in lengths},
        prefix_s={(c, P): true.prefix(c, P) for c in lengths for P in (64, 1024)},
    )
    found = counted_cost(measured)
    for c, P in ((500, 700), (5000, 20000)):
        assert found.between(c) == pytest.approx(true.between(c))
        assert found.own(c) == pytest.approx(true.own(c))
        assert found.prefix(c, P) == pytest.approx(true.prefix(c, P))


def test_ranks_are_alike_unless_they_differ_clearly() -> None:
    def slower(factor: float) -> Any:
        return llama(matmul_flops=200e12 / factor, attention_flops=120e12 / factor, step_s=20e-6 * factor)

    cost, slowness = combined([slower(1.0), slower(1.08)], 1024)
    assert slowness == [0.0, 0.0]
    assert cost.between(1000) == pytest.approx(slower(1.04).between(1000), rel=1e-3)
    _, slowness = combined([slower(1.0), slower(1.0), slower(1.5)], 1024)
    assert slowness[0] == slowness[1] and slowness[2] - slowness[0] == pytest.approx(0.405, abs=0.01)


# The choice that launch/ makes.


def choice(ranks: Ranks, table: Path | None) -> tuple[str, str | None, list[int]]:
    """Kind of partitioner that partition=auto becomes, the paper's name of its split, and a split."""
    os.environ["RUNAHEAD_CACHE"] = str(table.parent if table else os.environ["RUNAHEAD_CACHE"])
    options = PartitionOptions(table=None if table is None else str(table))
    run = RunOptions(partition=options)
    partition = partitioner(options, ranks)
    assert isinstance(partition, AutoChoice) and isinstance(partition, LearningPartitioner)
    assert partition(10, 2) == even(10, 2), "before the model is known"
    prepare_partition(partition, tiny_model("llama", torch.float32), ranks, run)
    boundaries = partition(100, ranks.size).boundaries
    partition.learn(ContextPartition(boundaries=boundaries), [1.0, 1.0], [0.0, 0.0])
    return type(partition.chosen).__name__, kvr_name(run, partition, boundaries), list(boundaries)


def my_table(tmp_path: Path, **changes: Any) -> Path:
    mine = Fingerprint.of_model(
        tiny_model("llama", torch.float32), device=torch.device("cpu"), backend="gloo", prefill=PrefillOptions()
    )
    table = replace(table_of(entry([0, 70, 100])), fingerprint=replace(mine, threads=1, **changes))
    table.save(tmp_path / "table.json")
    return tmp_path / "table.json"


def test_a_table_that_fits_is_used(rank_pools: RankPools, tmp_path: Path) -> None:
    table = my_table(tmp_path)
    assert rank_pools.run(2, choice, table) == [("TablePartition", "KVR-S", [0, 70, 100])] * 2


def test_a_table_for_another_device_is_not(rank_pools: RankPools, tmp_path: Path) -> None:
    first, second = rank_pools.run(2, choice, my_table(tmp_path, device="another"))
    assert first == second and first[:2] == ("AutoPartition", None)
    assert len(files(tmp_path / "splits")) == 1


def choice_from_the_folder(ranks: Ranks, folder: Path) -> str:
    os.environ["RUNAHEAD_CACHE"] = str(folder)
    partition = partitioner(PartitionOptions(), ranks)
    prepare_partition(partition, tiny_model("llama", torch.float32), ranks, RunOptions())
    assert isinstance(partition, AutoChoice)
    return type(partition.chosen).__name__


def told_from_the_folder(ranks: Ranks, folder: Path) -> list[str]:
    """Lines about tables that rank 0 prints."""
    said = list[str]()
    with mock.patch.object(partitions, "say", said.append):
        choice_from_the_folder(ranks, folder)
    return [line for line in said if "is for" in line]


def test_a_table_for_other_heads_is_told_also_where_it_was_not_asked_for(rank_pools: RankPools, tmp_path: Path) -> None:
    """And none for another device, or if another one fits."""
    (tmp_path / "tables").mkdir()
    streaming = my_table(tmp_path, attention="streaming_heads 75% of KV heads see 24 tokens")
    streaming.rename(tmp_path / "tables" / "a.json")
    my_table(tmp_path, device="another").rename(tmp_path / "tables" / "b.json")
    [line] = rank_pools.run(2, told_from_the_folder, tmp_path)[0]
    assert "a.json is for prefill.attention=streaming_heads 75% of KV heads see 24 tokens, not nothing; the" in line
    my_table(tmp_path).rename(tmp_path / "tables" / "c.json")
    assert rank_pools.run(2, told_from_the_folder, tmp_path)[0] == []


def test_tables_of_the_cache_folder_are_tried_and_damaged_ones_passed_over(
    rank_pools: RankPools, tmp_path: Path
) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "a.json").write_text("{")
    my_table(tmp_path / "tables").rename(tmp_path / "tables" / "b.json")
    assert rank_pools.run(2, choice_from_the_folder, tmp_path) == [TablePartition.__name__] * 2


def is_alone_sooner(ranks: Ranks, folder: Path, alone: bool | None, lends: bool = True) -> bool:
    """What the engine hears of the partition that a program makes of partition.alone=; None for its default."""
    os.environ["RUNAHEAD_CACHE"] = str(folder)
    run = RunOptions(partition=PartitionOptions() if alone is None else PartitionOptions(alone=alone))
    partition = partitioner(run.partition, ranks)
    assert isinstance(partition, KnowsAlone)
    assert not partition.is_alone_sooner(even(100, ranks.size), 0), "before the model is known"
    prepare_partition(partition, tiny_model("llama", torch.float32), ranks, run, lends=lends)
    return partition.is_alone_sooner(even(100, ranks.size), 0)


@pytest.mark.parametrize(
    ("alone", "is_sooner", "expected"),
    [(None, True, True), (None, False, False), (True, True, True), (False, True, False)],
)
def test_programs_let_one_rank_compute_alone_where_it_is_sooner(
    rank_pools: RankPools, tmp_path: Path, alone: bool | None, is_sooner: bool, expected: bool
) -> None:
    rank_pools.run(2, is_alone_sooner, tmp_path, alone)
    let_times_decide(tmp_path, [100], is_alone=is_sooner)
    assert rank_pools.run(2, is_alone_sooner, tmp_path, alone) == [expected] * 2
    assert rank_pools.run(2, is_alone_sooner, tmp_path, alone, False) == [False] * 2, "a server lends no threads"


def test_learn_without_auto_has_no_effect() -> None:
    options = PartitionOptions(name="even", learn=False)  # type: ignore[arg-type]
    assert ineffective_settings(RunOptions(partition=options)) == [
        "partition.learn has no effect without partition=auto"
    ]


def test_a_library_users_balance_is_enough(rank_pools: RankPools) -> None:
    assert rank_pools.run(2, split_by_hand) == [ready().split(100).boundaries] * 2


def split_by_hand(ranks: Ranks) -> tuple[int, ...]:
    balance: Balance | None = ready() if ranks.rank == 0 else None
    return AutoPartition(ranks, balance)(100, 2).boundaries
