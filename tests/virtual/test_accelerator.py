"""The seam to CUDA and NCCL: nothing goes around it, it sets and refuses environment variables, and it can end."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from runahead.config import RanksOptions
from runahead.ranks import accelerator as seam
from runahead.ranks.accelerator import Accelerator, Communicator, accelerator_for, prepare_environment
from runahead.ranks.graphs import Graph
from runahead.ranks.ranks import Ranks
from tests.test_imports import project_sources
from tests.virtual.device import Job
from tests.waiting import until

VARIABLES = ("NCCL_LAUNCH_ORDER_IMPLICIT", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING")
BEHIND_THE_SEAM = re.compile(
    r"torch\.cuda\.(Stream|Event|stream|current_stream|synchronize|set_device)\b|new_group\(.*nccl|batch_isend_irecv"
)
OUTSIDE = {
    "runahead/ranks/accelerator.py": "the seam",
    "runahead/ranks/devices.py": "chooses the GPU",
    "partitioner/measure.py": "measures links as they are",
}


def test_streams_events_and_groups_are_used_behind_the_seam_alone() -> None:
    found = {
        path
        for path, source in project_sources().items()
        if not path.startswith("benchmarks/") and BEHIND_THE_SEAM.search(source)
    }
    assert found == set(OUTSIDE)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without the variables; changes by the code under test are undone, too."""
    monkeypatch.setattr(os, "environ", {name: text for name, text in os.environ.items() if name not in VARIABLES})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    return monkeypatch


def test_cuda_gets_all_hardware_queues_and_loads_kernels_before_it_starts(environment: pytest.MonkeyPatch) -> None:
    assert prepare_environment() == []
    assert {name: os.environ.get(name) for name in VARIABLES[1:]} == {VARIABLES[1]: "32", VARIABLES[2]: "EAGER"}


def test_what_is_set_is_kept_and_warned_of(environment: pytest.MonkeyPatch) -> None:
    environment.setitem(os.environ, "CUDA_DEVICE_MAX_CONNECTIONS", "1")
    environment.setitem(os.environ, "CUDA_MODULE_LOADING", "LAZY")
    (sentence,) = prepare_environment()
    assert sentence.startswith("CUDA_DEVICE_MAX_CONNECTIONS is 1, so compute may wait for transfers")
    assert (seam.num_connections(), os.environ["CUDA_MODULE_LOADING"]) == (1, "LAZY")


def test_nothing_is_set_after_cuda_has_started(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(torch.cuda, "is_initialized", lambda: True)
    (sentence,) = prepare_environment()
    assert sentence.startswith("CUDA_DEVICE_MAX_CONNECTIONS is 8") and not set(VARIABLES) & set(os.environ)


@pytest.mark.parametrize(("value", "is_refused"), [("1", True), ("0", False), ("", False)])
def test_an_order_of_launches_between_links_is_refused(
    environment: pytest.MonkeyPatch, value: str, is_refused: bool
) -> None:
    environment.setitem(os.environ, "NCCL_LAUNCH_ORDER_IMPLICIT", value)
    if is_refused:
        with pytest.raises(ValueError, match=r"^NCCL_LAUNCH_ORDER_IMPLICIT is set.*unset it$"):
            prepare_environment()
    else:
        prepare_environment()


def test_the_environment_is_prepared_before_the_gpu_is_looked_for(environment: pytest.MonkeyPatch) -> None:
    def chosen(*_: object) -> None:
        raise LookupError(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"])

    environment.setattr("runahead.ranks.ranks.choose_device", chosen)
    environment.setattr(torch.backends.cuda, "is_built", lambda: True)
    environment.setitem(os.environ, "WORLD_SIZE", "2")
    environment.setitem(os.environ, "RANK", "0")
    with pytest.raises(LookupError, match="32"):
        Ranks.start(RanksOptions())
    environment.setitem(os.environ, "CUDA_DEVICE_MAX_CONNECTIONS", "4")
    with pytest.raises(LookupError, match="4"), pytest.warns(UserWarning, match="CONNECTIONS is 4"):
        Ranks.start(RanksOptions())


class Options:
    """Stands for NCCL's options, which a PyTorch for CPUs does not have."""

    def __init__(self, is_high_priority_stream: bool) -> None:
        self.is_high_priority_stream, self.config = is_high_priority_stream, SimpleNamespace(max_ctas=None)


def test_a_link_has_high_priority_and_few_ctas(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(seam.dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(
        seam.dist, "new_group", lambda members, **keywords: asked.append({"members": members} | keywords)
    )
    gpu = Accelerator(torch.device("cuda", 3))
    for ranks, ctas in (((0, 1), 4), (None, None)):
        gpu.communicator(ranks, timedelta(days=1), ctas)
    assert [(each["members"], each["backend"], each["device_id"]) for each in asked] == [
        ([0, 1], "nccl", gpu.device),
        (None, "nccl", gpu.device),
    ]
    options = [each["pg_options"] for each in asked]
    assert [(each.is_high_priority_stream, each.config.max_ctas) for each in options] == [(True, 4), (True, None)]
    assert all(each._timeout == timedelta(days=1) for each in options)


def test_a_device_has_one_accelerator_per_process() -> None:
    assert accelerator_for(torch.device("cpu")) is None
    assert accelerator_for(torch.device("cuda", 5)) is accelerator_for(torch.device("cuda", 5))


class Group:
    """A process group whose abort returns once `released` is set."""

    def __init__(self, released: threading.Event) -> None:
        self.aborted, self._released = threading.Event(), released

    def abort(self) -> None:
        self.aborted.set()
        self._released.wait()


RETURNED, NEVER = threading.Event(), threading.Event()
RETURNED.set()


def rank_with(*groups: Group) -> Ranks:
    """Rank 0 of two on one host, with links over these groups."""
    ranks = Job(2, hosts=(0, 0)).ranks[0]
    ranks._links = {((0, 1 + at), 4): Communicator(cast(Any, group)) for at, group in enumerate(groups)}
    return ranks


def add_graph(ranks: Ranks, destroy: Callable[[], object]) -> Graph[None]:
    assert ranks.accelerator is not None
    graph = Graph[None](cast(Any, None), None, lambda: cast(None, destroy()))
    graph.destroy.atexit = False  # else this process would not end
    ranks.accelerator.graphs._living.add(graph)
    return graph


@pytest.fixture
def _short_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runahead.ranks.ranks.ABORT_S", 0.5)


@pytest.mark.usefixtures("_short_aborts")
def test_an_error_aborts_all_communicators_within_a_deadline() -> None:
    """Without it the process would wait at its end for operations whose peer is gone."""
    groups = [Group(NEVER), Group(RETURNED), Group(RETURNED)]
    with pytest.raises(RuntimeError, match="out of luck"), rank_with(*groups):  # which would never be left
        raise RuntimeError("out of luck")
    until(lambda: all(group.aborted.is_set() for group in groups))


class TestGraphsThatRunWhenARankFails:
    """A driver destroys a graph that runs once it has come to its end, and the graph may wait for a peer."""

    def test_one_that_waits_for_a_copy_goes_on(self) -> None:
        group = Group(RETURNED)
        ranks, order = rank_with(group), list[bool]()
        assert ranks.copying is not None
        arrived = ranks.copying.memory.own.cell("arrived", 1)

        def destroy() -> None:
            until(lambda: arrived.reached(1))
            order.append(group.aborted.is_set())

        graph = add_graph(ranks, destroy)
        ranks.abort()
        assert order == [False] and group.aborted.is_set() and not graph.destroy.alive

    def test_one_that_waits_for_a_message_ends_with_the_abort(self) -> None:
        destroyed = threading.Event()
        group = Group(destroyed)  # NCCL waits for the graph
        ranks = rank_with(group)

        def destroy() -> None:
            group.aborted.wait()
            destroyed.set()

        graph = add_graph(ranks, destroy)
        ranks.abort()
        assert group.aborted.is_set() and destroyed.is_set() and not graph.destroy.alive

    @pytest.mark.usefixtures("_short_aborts")
    @pytest.mark.timeout(60)
    def test_one_that_never_ends_is_left_to_the_end_of_the_process(self) -> None:
        group = Group(RETURNED)
        ranks = rank_with(group)
        graph = add_graph(ranks, NEVER.wait)
        ranks.abort()
        assert group.aborted.is_set() and graph


def test_a_rank_without_nccl_has_nothing_to_abort() -> None:
    with pytest.raises(RuntimeError), Ranks(0, 1, device=torch.device("cpu"), backend="gloo", timeout_s=1.0):
        raise RuntimeError
