"""partition=auto lets the last rank compute a prompt alone, with the threads of all, where that is sooner."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from partitioner.auto import probe
from partitioner.auto.alone import BothWays, SeenTime
from partitioner.auto.balance import Balance
from partitioner.auto.learned import LearnedSplit, read_learned, write_learned
from partitioner.auto.partition import AutoPartition
from partitioner.auto.slowness import Slowness
from partitioner.cost.link import Link
from partitioner.cost.measured import MeasuredCost
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from policies.snapkv import SnapKV
from runahead import ContextPartition, DecodeOptions, Engine, GenerationOptions, PrefillOptions, Ranks, even
from runahead.config import DecodeName
from runahead.decoding import placement
from runahead.model.model import Model
from runahead.ranks.devices import RankThreads
from runahead.reuse.prefix_tree import PrefixTree
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import oracle_tokens, prompt, throughout
from tests.partitioner.clusters import llama
from tests.ranks.tasks import tiny_model

ALONE, ALL = True, False


def let_times_decide(folder: Path, lengths: Sequence[int], *, is_alone: bool) -> None:
    """Write into what a cache folder keeps of splits that at these lengths one way was far sooner than predicted."""
    paths = [*(folder / "splits").iterdir()]
    assert paths
    for path in paths:
        times = [
            {"tokens": length, "is_alone": way, "log": -30.0 if way == is_alone else 30.0}
            for length in lengths
            for way in (ALONE, ALL)
        ]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"times": times}))


def cluster(num_ranks: int, latency_s: float = 1e-5, bandwidth_Bps: float = 1e9) -> Cluster:
    return Cluster.chain(
        llama(),
        num_ranks,
        Link(latency_s=latency_s, bandwidth_Bps=bandwidth_Bps),
        kv_bytes_per_token=1024,
        state_bytes=0,
        prefill=PrefillOptions(),
        backend="gloo",
    )


def test_two_threads_of_one_rank_beat_two_ranks_that_wait_for_each_other() -> None:
    own = Balance(cluster(2), Slowness([0.0, 0.0]))
    lent = Balance(cluster(2), Slowness([0.0, 0.0]), lent=2.0)
    for num_tokens in (2000, 20_000):
        assert not own.is_alone_sooner(even(num_tokens, 2))
        assert lent.is_alone_sooner(even(num_tokens, 2))


def test_a_few_tokens_are_computed_sooner_alone_also_with_no_more_threads() -> None:
    balance = Balance(cluster(2, latency_s=1e-3), Slowness([0.0, 0.0]))
    assert balance.is_alone_sooner(even(8, 2))
    assert not balance.is_alone_sooner(even(20_000, 2))


def test_more_ranks_on_other_hosts_beat_the_lent_threads() -> None:
    assert not Balance(cluster(8), Slowness([0.0] * 8), lent=2.0).is_alone_sooner(even(20_000, 8))


def test_a_slow_last_rank_is_not_taken_for_a_fast_one() -> None:
    balance = Balance(cluster(2, latency_s=1e-3), Slowness([-1.0, 1.0]))
    assert not balance.is_alone_sooner(ContextPartition(boundaries=(0, 190, 200)))


def test_what_is_stored_is_attended_to_either_way_and_sent_to_the_others() -> None:
    num_tokens, num_stored = 4000, 100_000
    far, near = (Balance(cluster(8, bandwidth_Bps=Bps), Slowness([0.0] * 8)) for Bps in (1e9, 1e12))
    for balance in (far, near):
        assert not balance.is_alone_sooner(even(num_tokens, 8))
    assert far.is_alone_sooner(even(num_tokens, 8), num_stored), "sending it takes longer"
    assert not near.is_alone_sooner(even(num_tokens, 8), num_stored)
    one = cluster(1)
    expected_s = _compute_s(one, num_tokens) + one.compute.num_places * one.compute.prefix(num_tokens, num_stored)
    assert far._alone_s(num_tokens, num_stored) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("seen", "num_tokens", "expected"),
    [
        ([], 1000, ALONE),  # as predicted: 1.0 against 1.1 s
        ([(1000, ALONE, 0.5)], 1000, ALL),  # slower than predicted: the other way is tried
        ([(1000, ALONE, 0.5), (1000, ALL, 0.6)], 1000, ALONE),  # so the machine is slow
        ([(1000, ALONE, 0.5), (1000, ALL, 0.3)], 1000, ALL),
        ([(1000, ALL, -0.3)], 1000, ALONE),  # a faster machine is faster both ways
        ([(1000, ALONE, -0.3)], 1000, ALONE),
        ([(1000, ALONE, 0.5)], 2001, ALONE),  # which tells nothing of other lengths
        ([(1000, ALONE, 0.5)], 1999, ALL),
        ([(1000, ALONE, 2.0), (1000, ALL, 0.3), *[(1000, ALONE, 0.0)] * 3], 1000, ALONE),  # one was disturbed
    ],
)
def test_seen_times_correct_what_was_predicted(
    seen: list[tuple[int, bool, float]], num_tokens: int, expected: bool
) -> None:
    times = [SeenTime(tokens=tokens, is_alone=is_alone, log=log) for tokens, is_alone, log in seen]
    assert BothWays(times).is_alone_sooner(num_tokens, 1.0, 1.1) is expected


@pytest.mark.parametrize(("alone_s", "all_s"), [(2.0, 1.1), (1.0, 3.0), (3.0, 3.1), (3.1, 3.0)])
@pytest.mark.parametrize("predicted", [(1.0, 1.1), (1.1, 1.0), (1.0, 1.0)])
def test_of_ways_that_are_no_faster_than_predicted_the_sooner_is_found(
    alone_s: float, all_s: float, predicted: tuple[float, float]
) -> None:
    ways, taken = BothWays(), list[bool]()
    for _ in range(6):
        taken.append(ways.is_alone_sooner(500, *predicted))
        seconds = alone_s if taken[-1] else all_s
        ways.learn(500, is_alone=taken[-1], predicted_s=predicted[not taken[-1]], measured_s=seconds)
    assert taken[-1] == (alone_s < all_s)
    assert taken[2:] == taken[2:3] * 4, "each way was tried once"


def test_prompts_are_learned_against_what_was_predicted_of_their_way() -> None:
    balance = Balance(cluster(2), Slowness([0.0, 0.0]), lent=2.0)
    alone = ContextPartition(boundaries=(0, 0, 2000))
    balance.learn_time(alone, 10.0)
    assert not balance.is_alone_sooner(even(2000, 2)), "which was much slower than predicted"
    balance.learn_time(even(2000, 2), 20.0)
    assert balance.is_alone_sooner(even(2000, 2))
    assert [each.is_alone for each in balance.ways.seen] == [True, False]
    one = replace(cluster(1), speed=[2.0])
    assert balance.ways.seen[0].log == pytest.approx(math.log(10.0 / _compute_s(one, 2000)))


def _compute_s(one: Cluster, num_tokens: int) -> float:
    """Seconds of one rank, as sums of its steps."""
    steps, places = one.steps_s(ContextPartition(boundaries=(0, num_tokens)), 0), one.compute.num_places
    return steps.first + places * steps.own + (places - 1) * steps.between + steps.last


def test_what_is_kept_is_read_as_it_was_and_older_files_stay_valid(tmp_path: Path) -> None:
    times = (SeenTime(tokens=100, is_alone=True, log=-0.5), SeenTime(tokens=7, is_alone=False, log=1.0))
    kept = LearnedSplit(cost=llama(), link=Link(latency_s=0.0, bandwidth_Bps=1e9), start=(0.0, 0.0), times=times)
    path = tmp_path / "kept.json"
    write_learned(path, "here", kept)
    assert read_learned(path, "here", 2) == kept
    content = json.loads(path.read_text())
    for change in ({"times": [{"tokens": 0, "is_alone": True, "log": 0.0}]}, {"times": [{"tokens": 3}]}, {"times": 3}):
        path.write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match="is damaged"):
            read_learned(path, "here", 2)
    path.write_text(json.dumps({name: value for name, value in content.items() if name != "times"}))
    assert read_learned(path, "here", 2) == replace(kept, times=())


class Told:
    """A partitioner that says what a test wants.

    Attributes:
        asked: tokens of each prompt of which it was asked, and how many are stored before them.
    """

    def __init__(self, is_sooner: bool) -> None:
        self.is_sooner, self.asked = is_sooner, list[tuple[int, int]]()

    def __call__(self, num_tokens: int, num_ranks: int) -> ContextPartition:
        return even(num_tokens, num_ranks)

    def is_alone_sooner(self, partition: ContextPartition, num_stored: int) -> bool:
        self.asked.append((partition.num_tokens, num_stored))
        return self.is_sooner


LAST_SOONER, SHARDED_SOONER, UNTIMED = (1.0, 2.0), (2.0, 1.0), None
"""Seconds of a decoding step on the last stage and on all."""


def generate(
    ranks: Ranks,
    is_sooner: bool,
    decode: DecodeName,
    free: int,
    step_s: tuple[float, float] | None,
    policies: RankPolicies | None,
) -> tuple[list[int], list[int], str]:
    """Boundaries, new tokens, and where keys and values were, on ranks with so many free bytes each."""
    model = tiny_model("llama")
    with ExitStack() as patches:
        patches.enter_context(throughout(model.dtype))
        patch = mock.patch.object
        patches.enter_context(patch(placement, "available_bytes", lambda: free * ranks.local_size))
        if step_s is not None:

            def times(self: Any, forward: Any, batch: int, gather: Any = None) -> list[float]:
                return [step_s[gather is not None]]

            for name, least in (("LEAST_BYTES", 100), ("LEAST_SHARE", 0.0)):
                patches.enter_context(patch(placement, name, least))
            patches.enter_context(patch(placement.Placement, "_times", times))
        engine = Engine(model, ranks, partition=Told(is_sooner), policies=policies, decode=DecodeOptions(name=decode))
        batch = engine.generate([prompt(30)], GenerationOptions(max_new_tokens=4, ignore_eos=True))
    return batch.boundaries, batch.generations[0].new_token_ids, batch.decode


ALL_KEPT = RankPolicies.everywhere([SnapKV(budget=1.0)])


@pytest.mark.parametrize(
    ("is_sooner", "decode", "free_tokens", "step_s", "policies", "boundaries", "stored"),
    [
        (True, DecodeName.auto, 1000, UNTIMED, None, [0, 0, 30], "last"),
        (True, DecodeName.last, 1000, UNTIMED, None, [0, 0, 30], "last"),
        (True, DecodeName.sharded, 1000, UNTIMED, None, [0, 15, 30], "sharded"),
        (True, DecodeName.auto, 25, UNTIMED, None, [0, 15, 30], "sharded"),  # there is no room on one rank
        (True, DecodeName.auto, 25, UNTIMED, ALL_KEPT, [0, 0, 30], "last"),  # where all is in either case
        (True, DecodeName.auto, 1000, SHARDED_SOONER, None, [0, 15, 30], "sharded"),  # every step gains
        (True, DecodeName.auto, 1000, LAST_SOONER, None, [0, 0, 30], "last"),
        (False, DecodeName.auto, 1000, UNTIMED, None, [0, 15, 30], "last"),
    ],
)
def test_the_engine_leaves_a_prompt_to_the_last_rank_where_it_may(
    rank_pools: RankPools,
    is_sooner: bool,
    decode: DecodeName,
    free_tokens: int,
    step_s: tuple[float, float] | None,
    policies: RankPolicies | None,
    boundaries: list[int],
    stored: str,
) -> None:
    free = free_tokens * sum(shape.bytes_per_token() for shape in tiny_model("llama").kv_shapes)
    expected = oracle_tokens("llama", tuple(prompt(30)), 4)
    for found in rank_pools.run(2, generate, is_sooner, decode, free, step_s, policies):
        assert found == (boundaries, expected, stored)


def asked(ranks: Ranks) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """What a partitioner is asked of a prompt and of a longer one that begins with it, and the boundaries of both."""
    model, split = tiny_model("llama"), Told(False)
    with throughout(model.dtype):
        last = DecodeOptions(name=DecodeName.last)
        engine = Engine(model, ranks, partition=split, decode=last, tree=PrefixTree(1e9))
        found = [engine.generate([prompt(length)], GenerationOptions(max_new_tokens=1)) for length in (40, 60)]
    return split.asked, [batch.boundaries for batch in found]


def test_of_a_prompt_whose_beginning_is_stored_both_lengths_are_told(rank_pools: RankPools) -> None:
    for told, (first, second) in rank_pools.run(2, asked):
        assert told == [(40, 0), (20, 40)]
        assert (first[-1], second[-1]) == (40, 20)


def started(
    ranks: Ranks, folder: Path, processors: int, gains: float | None = None
) -> tuple[float | None, list[list[int]], list[bool]]:
    """Gain of lent threads, and of some prompts the boundaries, and which are known to be alone.

    Args:
        gains: by how much layers are faster with them; None: as much as their number promises.
    """
    model = tiny_model("llama", torch.float32)
    beside = {rank: RankThreads(number=3, processors=processors) for rank in range(ranks.size)}
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(ranks, "threads", beside))
        threads = patches.enter_context(mock.patch.object(torch, "set_num_threads"))
        if gains is None:
            patches.enter_context(mock.patch.object(probe, "LENT_ALIKE", 1.0))  # all that is measured is enough
        else:

            def measured(model: Model, chunks: Sequence[int], *_: Any) -> MeasuredCost:
                set_to = threads.call_args
                pace = gains if set_to is not None and set_to.args[0] > 3 else 1.0
                own = {c: 1e-3 * c / pace for c in chunks}
                prefix = {(c, P): 1e-6 * c * P / pace for c in chunks for P in (chunks[0], chunks[-1])}
                none = dict.fromkeys(chunks, 0.0)
                return MeasuredCost(num_places=2, first_s=none, between_s=none, own_s=own, last_s=none, prefix_s=prefix)

            patches.enter_context(mock.patch.object(probe, "_measured", measured))
        partition = AutoPartition.start(model, ranks, folder=folder, alone=True, tell=lambda sentence: None)
        engine, found = Engine(model, ranks, partition=partition), list[list[int]]()
        for length in (40, 40, 300, 40):
            found.append(engine.generate([prompt(length)], GenerationOptions(max_new_tokens=1)).boundaries)
    balance = partition.balance
    return (
        (None, found, []) if balance is None else (balance.gained, found, [each.is_alone for each in balance.ways.seen])
    )


def test_all_ranks_decide_alike_and_the_next_run_goes_on_from_what_was_seen(
    rank_pools: RankPools, tmp_path: Path
) -> None:
    (lent, boundaries, seen), (_, others, _) = rank_pools.run(2, started, tmp_path, 64)
    assert lent == 2.0 and boundaries == others
    assert seen == [len(set(bounds)) == 2 for bounds in boundaries]
    _, _, again = rank_pools.run(2, started, tmp_path, 64)[0]
    assert again[:4] == seen and len(again) == 8
    assert rank_pools.run(2, started, tmp_path, 4)[0][0] == pytest.approx(4 / 3)
    assert len(list(tmp_path.rglob("*.json"))) == 2, "other threads, other times"


def test_lent_threads_count_as_what_they_gain(rank_pools: RankPools, tmp_path: Path) -> None:
    """Twice as many threads make layers 1.25 times as fast, or as slow; what a run has timed is kept."""
    for gains in (1.25, 0.8):
        folder = tmp_path / str(gains)
        for timed in (gains, 2.0):  # the second run times nothing
            gained, *_ = rank_pools.run(2, started, folder, 64, timed)[0]
            assert gained == pytest.approx(gains)


@pytest.mark.parametrize(("measured", "counts"), [(2.3, 2.0), (2.0, 2.0), (1.61, 2.0), (1.5, 1.5), (0.1, 0.1)])
def test_less_than_lent_threads_should_gain_is_believed_beyond_noise(measured: float, counts: float) -> None:
    assert probe.gained(2.0, measured) == counts


def test_a_prompt_is_not_left_to_threads_that_wait_for_each_other() -> None:
    """On a machine that does other work; with what their number promises, it would be."""
    for gained, is_alone in ((2.0, True), (1.5, False), (0.1, False)):
        balance = Balance(cluster(2), Slowness([0.0, 0.0]), lent=2.0, gained=gained)
        assert balance.is_alone_sooner(even(2000, 2)) is is_alone


@pytest.mark.parametrize("gains", [2.0, 0.1])
def test_a_timing_of_lent_threads_that_was_wrong_is_mended_by_one_prompt(gains: float) -> None:
    """They were timed while the machine was busy, and gain as much as their number promises, or indeed little."""
    balance, alone = (
        Balance(cluster(2), Slowness([0.0, 0.0]), lent=2.0, gained=0.8),
        ContextPartition(boundaries=(0, 0, 2000)),
    )
    one, shared, taken = cluster(1), even(2000, 2), list[bool]()
    for _ in range(6):
        taken.append(balance.is_alone_sooner(shared))
        seconds = _compute_s(replace(one, speed=[gains]), 2000) if taken[-1] else simulate(shared, cluster(2)).ttft_s
        balance.learn_time(alone if taken[-1] else shared, seconds)
    assert taken == [False, True, *[gains == 2.0] * 4], "the timing is believed, then tried, then times decide"


@pytest.mark.parametrize("is_alone", [True, False])
def test_what_earlier_runs_saw_decides(rank_pools: RankPools, tmp_path: Path, is_alone: bool) -> None:
    rank_pools.run(2, started, tmp_path, 64)
    let_times_decide(tmp_path, [40, 300], is_alone=is_alone)
    for _, boundaries, _ in rank_pools.run(2, started, tmp_path, 64):
        assert [first == 0 for _, first, _ in boundaries] == [is_alone] * 4
