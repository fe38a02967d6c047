"""The rest of a search is estimated from its strides, and shrinks to nothing."""

from __future__ import annotations

import pytest

from partitioner.options import Objective, SearchMethod, SearchOptions
from partitioner.searches.best_split import simulated_cost
from partitioner.searches.equal_work import equal_work
from partitioner.searches.evaluations import Evaluation, SearchTask
from partitioner.searches.grid import Grid
from partitioner.searches.progress import SearchProgress
from partitioner.searches.seeded import Seeded
from runahead.context import even
from tests.partitioner.clusters import llama, llama_cluster


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_estimate_is_near_what_a_search_asks_and_shrinks(num_ranks: int) -> None:
    options = SearchOptions(objective=Objective.measured)
    cluster = llama_cluster(num_ranks, 100)
    with SearchProgress([(8192, num_ranks)], options, shown=False) as progress:
        progress.begin(8192, num_ranks)
        left = [progress.evaluations_left()]

        def tick(step: Evaluation) -> None:
            progress.tick(step)
            left.append(progress.evaluations_left())

        task = SearchTask(
            num_tokens=8192,
            num_ranks=num_ranks,
            min_stride=options.stride(8192, num_ranks),
            reach=options.reach_tokens(8192, num_ranks),
            leave_out=False,
            on_evaluation=tick,
        )
        result = Seeded().search(simulated_cost(cluster), task, equal_work(8192, num_ranks, cluster.compute))
    assert left == sorted(left, reverse=True)
    assert left[0] / 4 < result.num_evaluations < 2 * left[0]
    assert left[-1] < left[0] / 2


@pytest.mark.parametrize(("num_ranks", "least"), [(1, 1), (2, 2), (3, 25)])
def test_a_grids_estimate(num_ranks: int, least: int) -> None:
    cost = simulated_cost(llama_cluster(num_ranks, 100, compute=llama(num_layers=2)))
    task = SearchTask(num_tokens=4096, num_ranks=num_ranks, min_stride=64)
    asked, expected = Grid().search(cost, task).num_evaluations, Grid().evaluations_left(task)
    assert least <= expected
    assert asked / 4 <= expected <= 4 * asked


def test_time_left_counts_later_searches_by_their_tokens_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("partitioner.searches.progress.time.perf_counter", lambda: now[0])
    options = SearchOptions(objective=Objective.measured, method=SearchMethod.seeded)
    with SearchProgress([(1024, 2), (2048, 2), (2048, 4)], options, shown=False) as progress:
        progress.begin(1024, 2)
        assert progress.seconds_left() is None and "all in" not in progress.text()

        def run(_: object) -> float:
            now[0] += 3.0
            return 1.0

        progress.timed(run)(even(1024, 2))
        alone = [
            Seeded().evaluations_left(
                SearchTask(
                    num_tokens=length,
                    num_ranks=count,
                    min_stride=options.stride(length, count),
                    reach=options.reach_tokens(length, count),
                )
            )
            for length, count in ((1024, 2), (2048, 2), (2048, 4))
        ]
        assert progress.seconds_left() == pytest.approx(3.0 * (alone[0] + 2 * alone[1] + alone[2]))
        progress.begin(2048, 2)
        assert progress.seconds_left() == pytest.approx(3.0 * (2 * alone[1] + alone[2]))
        assert "2048 tokens, 2 ranks" in progress.text() and "left; all in about" in progress.text()
