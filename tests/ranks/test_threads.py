"""Ranks of one host lend their threads while they wait, and have them again before they compute."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from benchmarks.doctor import tasks
from benchmarks.ttft import measurement
from launch.inputs import engine as inputs
from launch.inputs.engine import make_engine
from runahead import DecodeOptions, PrefillOptions, RankPolicies, Ranks, even
from runahead.config import DecodeName, Device, RanksOptions
from runahead.decoding.placement import ROUNDS
from runahead.ranks.devices import SPINNING, RankThreads, threads_while
from tests.conftest import RankPools
from tests.families import oracle_tokens, prompt
from tests.rank_pool import RankPool, short_lived_pool
from tests.ranks import thread_tasks
from tests.ranks.tasks import tiny_model
from tests.ranks.thread_tasks import GREEDY, THREADS


def host(*numbers: int, processors: int = 64, spins: bool = False) -> dict[int, RankThreads]:
    return {rank: RankThreads(number=number, processors=processors, spins=spins) for rank, number in enumerate(numbers)}


@pytest.mark.parametrize(
    ("numbers", "computing", "expected"),
    [
        ((2, 2, 2), [2], {2: 6}),
        ((2, 2, 2), [1, 2], {1: 3, 2: 3}),
        ((2, 2, 2), [0, 1, 2], {0: 2, 1: 2, 2: 2}),
        ((2, 2, 2), [2, 7, 8], {2: 6}),  # ranks of other hosts
        ((1, 3), [1], {1: 4}),
        ((5, 1), [0, 1], {0: 5, 1: 1}),
        ((5, 1, 4), [0, 1], {0: 7, 1: 3}),
        ((4,), [0], {0: 4}),
    ],
)
def test_those_that_compute_share_the_threads_of_the_others(
    numbers: tuple[int, ...], computing: list[int], expected: dict[int, int]
) -> None:
    assert {rank: threads_while(computing, host(*numbers), rank) for rank in expected} == expected


def test_together_they_never_have_more_than_when_all_compute() -> None:
    for numbers in product((1, 2, 5, 8), repeat=3):
        for computing in ([0], [2], [0, 1], [0, 2], [0, 1, 2]):
            now = [threads_while(computing, host(*numbers), rank) for rank in computing]
            assert sum(now) <= sum(numbers)
            assert all(number >= numbers[rank] for number, rank in zip(now, computing, strict=True))
            if len(computing) < 3:
                assert sum(now) > sum(numbers) - len(computing), "but for the remainder all are lent"
            else:
                assert now == list(numbers)


def test_no_rank_has_more_threads_than_processors_or_fewer_than_before() -> None:
    assert threads_while([1], host(2, 2, processors=3), 1) == 3
    assert threads_while([1], host(2, 2, processors=2), 1) == 2  # as of tasks that are bound to processors of their own
    assert threads_while([1], host(2, 2, processors=1), 1) == 2  # which the user has asked for


def test_threads_that_keep_their_processors_busy_are_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads_while([1], host(2, 2, spins=True), 1) == 2
    assert threads_while([1], host(2, 2) | {0: RankThreads(number=2, processors=64, spins=True)}, 1) == 2
    for name in SPINNING:
        monkeypatch.delenv(name, raising=False)
    for name, value, spins in (
        ("OMP_WAIT_POLICY", "ACTIVE", True),
        ("OMP_WAIT_POLICY", "active", True),
        ("OMP_WAIT_POLICY", "passive", False),
        ("OMP_WAIT_POLICY", None, False),
        ("GOMP_SPINCOUNT", "INFINITE", True),
        ("GOMP_SPINCOUNT", "infinity", True),
        ("GOMP_SPINCOUNT", "10000", False),
        ("KMP_BLOCKTIME", "infinite", True),
        ("KMP_BLOCKTIME", "2147483647", True),
        ("KMP_BLOCKTIME", "1", False),
    ):
        with monkeypatch.context() as patch:
            if value is not None:
                patch.setenv(name, value)
            assert RankThreads.here().spins == spins, (name, value)
    assert RankThreads.here().number == torch.get_num_threads()


def test_the_last_rank_has_all_threads_while_it_decodes(rank_pools: RankPools) -> None:
    (first, tokens), (middle, _), (last, _) = rank_pools.run(
        3, thread_tasks.threads_set, (0, 10, 20, 30), DecodeName.last
    )
    assert first == middle == ["prefill", "decode"]
    assert last == ["prefill", 3 * THREADS, "decode", THREADS]
    assert tokens == oracle_tokens("llama", tuple(prompt(30)), GREEDY.max_new_tokens)


def test_a_stage_that_is_alone_has_them_in_its_prefill_too(rank_pools: RankPools) -> None:
    (first, _), (last, tokens) = rank_pools.run(2, thread_tasks.threads_set, (0, 0, 30), DecodeName.last)
    assert first == ["prefill", "decode"]
    assert last == [2 * THREADS, "prefill", THREADS, 2 * THREADS, "decode", THREADS]
    assert tokens == oracle_tokens("llama", tuple(prompt(30)), GREEDY.max_new_tokens)


def test_ranks_that_decode_together_keep_theirs_and_have_those_of_the_others(rank_pools: RankPools) -> None:
    for events, _ in rank_pools.run(2, thread_tasks.threads_set, (0, 10, 30), DecodeName.sharded):
        assert events == ["prefill", "decode"]
    (idle, _), *decoding = rank_pools.run(3, thread_tasks.threads_set, (0, 0, 10, 30), DecodeName.sharded)
    assert idle == ["prefill", "decode"]
    more = 3 * THREADS // 2
    assert [events for events, _ in decoding] == 2 * [[more, "prefill", THREADS, more, "decode", THREADS]]


def test_the_predicted_peak_counts_the_threads_of_prompt_and_answer(rank_pools: RankPools) -> None:
    for bounds, decode, threads in (
        ((0, 10, 20, 30), DecodeName.last, [THREADS, THREADS, 3 * THREADS]),  # which the last rank has for the answer
        ((0, 0, 10, 30), DecodeName.sharded, [THREADS, 6, 6]),
    ):
        assert rank_pools.run(3, thread_tasks.threads_of_memory, bounds, decode) == threads


def test_steps_are_timed_with_the_threads_with_which_they_run(rank_pools: RankPools) -> None:
    first, last = rank_pools.run(2, thread_tasks.threads_while_timed)
    assert first == ["sharded"] * ROUNDS + ["prefill", "decode"]
    lent = 2 * THREADS
    assert last == [lent, "last", THREADS, "sharded"] * ROUNDS + ["prefill", lent, "decode", THREADS]


def test_an_engine_that_lends_none_sets_no_number(rank_pools: RankPools) -> None:
    for boundaries in ((0, 0, 30), (0, 10, 30)):
        for events, _ in rank_pools.run(2, thread_tasks.threads_set, boundaries, DecodeName.last, False):
            assert events == ["prefill", "decode"]
    first, last = rank_pools.run(2, thread_tasks.threads_while_timed, False)
    assert first == ["sharded"] * ROUNDS + ["prefill", "decode"]
    assert last == ["last", "sharded"] * ROUNDS + ["prefill", "decode"]


class Stop(Exception):
    """What a test waits for has happened."""


def test_none_are_lent_in_a_server_and_where_a_chain_is_compared_with_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the one rank has the threads of all, and the memory was measured with those of one."""

    def made(*_: Any, **options: Any) -> NoReturn:
        raise Stop(options.get("lends", True))

    model = tiny_model("llama")
    for module in (tasks, measurement, inputs):
        monkeypatch.setattr(module, "Engine", made)
    monkeypatch.setattr(tasks, "memory_Bps", lambda device: 1.0)
    monkeypatch.setattr(tasks, "matmul_rate", lambda model: 1.0)
    monkeypatch.setattr(tasks.Model, "load", lambda *_, **__: model)
    bench: Any = SimpleNamespace(bench=SimpleNamespace(variants=["single"]), prefill=PrefillOptions())
    run: Any = SimpleNamespace(prefill=PrefillOptions(), decode=DecodeOptions())
    task = tasks.JobTask(kind="probe", model={}, ranks={}, length=8)
    with Ranks.start(RanksOptions(device=Device.cpu, threads=1)) as ranks:

        def engine_of(serves: bool) -> None:
            make_engine(run, model, ranks, print, partition=even, policies=RankPolicies(), serves=serves)

        for make, lends in (
            (lambda: tasks.probe(task, ranks), False),
            (lambda: measurement.Contenders(bench, model, ranks, even), False),
            (lambda: engine_of(True), False),
            (lambda: engine_of(False), True),
        ):
            with pytest.raises(Stop) as caught:
                make()
            assert caught.value.args == (lends,)


def test_the_numbers_are_those_of_the_threads_that_compute(rank_pools: RankPools) -> None:
    first, last = rank_pools.run(2, thread_tasks.threads_in_steps)
    assert first == [1, 1]
    assert last == [1, *[2] * (GREEDY.max_new_tokens - 1), 1]


class TestFailure:
    @pytest.fixture
    def pool(self) -> Iterator[RankPool]:
        with short_lived_pool(2) as pool:
            yield pool

    @pytest.mark.parametrize("failing", [0, 1])
    def test_gives_them_back(self, pool: RankPool, failing: int) -> None:
        by_rank = pool.run(thread_tasks.fail_while_lent, failing)
        (first, _), (last, _) = by_rank
        assert first == ["prefill", "decode"]
        assert last == ["prefill", 2 * THREADS, "decode", THREADS]
        assert by_rank[failing][1] == "ValueError: out of luck"
        assert f"PeerFailure: rank {failing} failed: out of luck" in by_rank[1 - failing][1]
