"""NCCL on one GPU: options, an exchange with oneself, capture, and the end with and without a live graph."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.first_day.visit import Visit
from runahead.ranks.accelerator import RELAY_CTAS, Communicator

NUM_ELEMENTS = 1 << 20
NEVER = timedelta(days=20)
"""Timeout of the groups, as the runtime has it: a hang lasts until the part's own limit."""


def operations(visit: Visit) -> None:
    """Everything that the runtime asks of NCCL, with one rank as its own peer, and then the end of the group."""
    communicator = _communicator(visit)
    accelerator = visit.ranks.accelerator
    assert accelerator is not None, "this part needs a GPU"
    source = torch.arange(NUM_ELEMENTS, device=visit.device, dtype=torch.float32)
    target, ones = torch.empty_like(source), torch.ones(4, device=visit.device)
    visit.say("an exchange with itself")
    _exchange(communicator, source, target)
    visit.figures.check("an exchange with itself", torch.equal(source, target), otherwise="other bytes came")
    communicator.all_reduce(ones).wait()
    visit.figures.check("a sum over one rank", ones.tolist() == [1.0] * 4, otherwise="another sum came")
    visit.say("capture")

    def step() -> Tensor:
        target.zero_()
        _exchange(communicator, source, target)
        return target * 2

    step()
    replay = accelerator.capture(step)
    for name in ("a replayed exchange", "a replayed exchange after an eager one"):
        visit.say(name)
        source.add_(1)
        doubled = replay()
        visit.figures.check(name, torch.equal(doubled, source * 2), otherwise="the graph saw other values")
        _exchange(communicator, source, target)
    del replay, doubled
    _end(visit)


def live_graph(visit: Visit) -> None:
    """The end of the group while something holds a graph with its operations, for whose end NCCL would wait."""
    communicator, accelerator = _communicator(visit), visit.ranks.accelerator
    assert accelerator is not None, "this part needs a GPU"
    source = torch.ones(NUM_ELEMENTS, device=visit.device)
    target = torch.empty_like(source)
    replay = accelerator.capture(lambda: _exchange(communicator, source, target))
    replay()
    torch.cuda.synchronize(visit.device)
    visit.say("the end of all graphs")
    accelerator.graphs.destroy()  # as `Ranks` does before it ends its groups
    _end(visit)
    assert replay is not None, "it is held until here, as by the traceback of an error"


def _communicator(visit: Visit) -> Communicator:
    """A communicator of this rank alone, with the options of a link."""
    visit.say(f"NCCL {torch.cuda.nccl.version()}")
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=NEVER)
    assert visit.ranks.accelerator is not None, "this part needs a GPU"
    began_s = time.perf_counter()
    communicator = visit.ranks.accelerator.communicator([0], NEVER, RELAY_CTAS)
    visit.figures.note("a communicator", time.perf_counter() - began_s, "a communicator")
    return communicator


def _exchange(communicator: Communicator, source: Tensor, target: Tensor) -> None:
    for work in communicator.exchange([(target, 0)], [(source, 0)]):
        work.wait()


def _end(visit: Visit) -> None:
    visit.say("the end of the process group")
    began_s = time.perf_counter()
    dist.destroy_process_group()
    visit.figures.note("end of the process group", time.perf_counter() - began_s, "its end")
