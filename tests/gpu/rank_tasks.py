"""Tasks of ranks on GPUs: top-level functions, since they run in other processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import count
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from runahead import DecodeOptions, Engine, GenerationOptions, Model, PrefillOptions, Ranks, from_ratios
from runahead.cache.attention import LayerCall
from runahead.config import Carrier, DecodeName
from runahead.decoding.forward import FixedForward
from runahead.model.shares import shard_model, shares_of
from runahead.prefill.chain_run import ChainRun
from runahead.ranks.accelerator import RELAY_CTAS, Accelerator, Communicator
from runahead.ranks.graphs import Graph, Graphs
from runahead.ranks.groups import NEVER
from runahead.ranks.mapped.device_memory import DeviceMemory
from runahead.ranks.worker import Worker
from tests.gpu.models import ids, model

SHARES = {1: [1.0], 2: [0.6, 0.4], 3: [0.5, 0.3, 0.2]}
LENGTHS = [[60], [300], [300, 170], [2], [50]]
"""Lengths of the prompts of each batch. Arenas grow at the second and the third; of two tokens a rank has none."""

OPTIONS = GenerationOptions(max_new_tokens=4, ignore_eos=True)
LATE_S = 0.5
"""Seconds of sleep after the other rank's first layer. Without a wait it would be through with all of them by then."""

COPY = PrefillOptions(carrier=Carrier.copy)


def answers(
    ranks: Ranks,
    prefill: PrefillOptions | None = None,
    decode: DecodeOptions | None = None,
    lengths: Sequence[Sequence[int]] = LENGTHS,
    num_shares: int = 1,
    late: int | None = None,
) -> list[list[list[int]]]:
    """New tokens of all rows, by batch.

    Args:
        num_shares: ranks that share the model.
        late: a rank that is late at the first layer of a prefill, so that the other has to wait for it.
    """
    ranks.arrange(num_shares)
    shares = from_ratios(SHARES[ranks.size // num_shares], ranks_per_stage=num_shares)
    engine = Engine(_model(ranks, num_shares), ranks, prefill=prefill, decode=decode, partition=shares)
    found = []
    with nullcontext() if late is None else being_late(late, is_late=late == ranks.rank):
        for of_batch in lengths:
            batch = engine.generate([ids(each, seed=each) for each in of_batch], OPTIONS, record_timeline=True)
            found.append([each.new_token_ids for each in batch.generations])
    return found


def told_by_hosts(ranks: Ranks, num_shares: int) -> tuple[str, bool, list[int]]:
    """Backend of a stage's group of hosts, whether GPUs have another, and what its first rank tells its hosts."""
    ranks.arrange(num_shares)
    shares = shares_of(ranks)
    told = torch.tensor([ranks.rank, 7])
    shares.run(lambda: dist.broadcast(told, group=shares.hosts, group_src=0))
    return dist.get_backend(shares.hosts), shares.hosts is not shares.group, told.tolist()


@contextmanager
def being_late(late: int, *, is_late: bool) -> Iterator[None]:
    """Context manager in which a rank is late at the first layer. The other one tells it when it is there."""
    before_save, store, prefills = ChainRun.before_save, dist.distributed_c10d._get_default_store(), count()

    def be_late(self: ChainRun, call: LayerCall) -> None:
        if call.layer == 0:
            begun = f"prefill {next(prefills)}, rank {late} is late"
            if is_late:
                store.wait([begun])
                time.sleep(LATE_S)
            else:
                store.set(begun, "")
        before_save(self, call)

    with mock.patch.object(ChainRun, "before_save", be_late):
        yield


def sharded_answers(ranks: Ranks) -> tuple[list[int], list[int], int]:
    """New tokens of sharded decoding with graphs, and without, in bfloat16; the number of this rank's graphs."""
    ranks.arrange(1)
    engine = Engine(
        model(ranks.device, torch.bfloat16, initializer_range=0.2),
        ranks,
        decode=DecodeOptions(name=DecodeName.sharded),
        partition=from_ratios(SHARES[ranks.size]),
    )
    found, captured = list[list[int]](), list[Graph[object]]()
    capture = Graphs.capture

    def noted(graphs: Graphs, step: Callable[[], object]) -> Graph[object]:
        captured.append(capture(graphs, step))
        return captured[-1]

    for warm_up in (FixedForward.WARM_UP, OPTIONS.max_new_tokens * 3):
        with mock.patch.object(FixedForward, "WARM_UP", warm_up), mock.patch.object(Graphs, "capture", noted):
            batch = engine.generate([ids(300)], replace(OPTIONS, max_new_tokens=OPTIONS.max_new_tokens * 2))
        found.append(batch.generations[0].new_token_ids)
    return found[0], found[1], len(captured)


@cache
def _model(ranks: Ranks, num_shares: int) -> Model:
    # Wide weights, so that a key too many shows in the tokens; more layers than are in flight.
    made = model(ranks.device, initializer_range=0.2, num_hidden_layers=5)
    if num_shares > 1:
        shard_model(made, ranks)
    return made


def arenas(ranks: Ranks, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """The arenas after each prompt: those that this rank has made so far, and those of them that are not freed."""
    found = []
    for length in lengths:
        answers(ranks, COPY, lengths=[[length]])
        assert ranks.copying is not None and isinstance(ranks.copying.memory, DeviceMemory)
        memory = ranks.copying.memory
        found.append((memory._numbers, len(memory._arenas) + len(memory._retired)))
    return found


def _communicator(ranks: Ranks) -> tuple[Accelerator, Communicator]:
    """The GPU of a rank that is alone, and a communicator of this rank."""
    assert ranks.accelerator is not None
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=NEVER)
    return ranks.accelerator, ranks.accelerator.communicator([0], NEVER, RELAY_CTAS)


def exchanges(ranks: Ranks) -> tuple[bool, bool]:
    """Whether a tensor arrives, and is the sum over the only rank."""
    _, communicator = _communicator(ranks)
    sent = torch.arange(1000.0, device=ranks.device)
    received, added = torch.zeros_like(sent), sent.clone()
    for work in communicator.exchange([(received, 0)], [(sent, 0)]):
        work.wait()
    communicator.all_reduce(added).wait()
    return torch.equal(received, sent), torch.equal(added, sent)


def _doubled(communicator: Communicator, sent: Tensor, received: Tensor) -> Tensor:
    for work in communicator.exchange([(received, 0)], [(sent, 0)]):
        work.wait()
    return received * 2


def replayed_exchanges(ranks: Ranks) -> list[bool]:
    """Whether a graph with an exchange does it again: with new values, after one outside the graph, and once more."""
    gpu, communicator = _communicator(ranks)
    sent = torch.arange(1000.0, device=ranks.device)
    received = torch.zeros_like(sent)
    _doubled(communicator, sent, received)
    replay = gpu.capture(lambda: _doubled(communicator, sent, received))
    found = []
    for _ in range(3):
        sent += 1
        received.zero_()
        found.append(torch.equal(replay(), sent * 2))
        _doubled(communicator, sent, received)
    return found


def ends_with_a_graph(ranks: Ranks, end: str) -> bool:
    """Whether this rank leaves its job, at its end or after an error, while something still refers to a graph."""
    gpu, communicator = _communicator(ranks)
    sent = torch.arange(1000.0, device=ranks.device)
    received = torch.zeros_like(sent)
    _doubled(communicator, sent, received)
    replay = gpu.capture(lambda: _doubled(communicator, sent, received))
    replay()
    if end == "abort":
        ranks._links = {((0, 0), RELAY_CTAS): communicator}
        has_ended = _aborts(ranks)
        dist.destroy_process_group()
        return has_ended
    # A rank that is alone has nothing to leave.
    with mock.patch.multiple(ranks, create=True, size=2, barrier=lambda what: None, _worker=Worker("control")):
        ranks.close()
    return replay is not None and not dist.is_initialized()


def _aborts(ranks: Ranks) -> bool:
    """Whether all communicators of a rank have ended when it leaves its job after an error."""
    ended = list[None]()

    def noted_abort(communicator: Communicator) -> None:
        type(communicator).abort(communicator)
        ended.append(None)

    communicators = list(ranks._communicators)
    for each in communicators:
        each.abort = partial(noted_abort, each)  # type: ignore[method-assign]
    with mock.patch("runahead.ranks.ranks.ABORT_S", 60):
        ranks.abort()
    return len(ended) == len(communicators) > 0


def fails_in_a_replayed_step(ranks: Ranks) -> tuple[bool, bool]:
    """Whether steps were replayed before this rank failed in one, and whether all its communicators have ended then."""
    engine = Engine(
        model(ranks.device, torch.bfloat16),
        ranks,
        decode=DecodeOptions(name=DecodeName.sharded),
        partition=from_ratios(SHARES[ranks.size]),
    )
    replays = list[None]()
    replay = Graph.__call__

    def replay_or_fail(self: Graph[Tensor]) -> Tensor:
        replays.append(None)
        if len(replays) == 3:
            raise ArithmeticError("out of luck")
        return replay(self)

    with mock.patch.object(Graph, "__call__", replay_or_fail):
        try:
            engine.generate([ids(60)], GenerationOptions(max_new_tokens=12, ignore_eos=True))
        except ArithmeticError as error:
            raised = error  # whose traceback holds the step
    has_ended = _aborts(ranks)
    return len(replays) == 3 and raised.__traceback__ is not None, has_ended
