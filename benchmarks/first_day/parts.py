"""The parts of a first day in the order of their worth: what each tries, what it needs, and how long it may take.

What only several hosts or several GPUs can tell comes before what one GPU can: they are seldom free for long. On one
GPU, code that calls the driver and NCCL comes before speed, and speed before what differs little from an earlier part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product


class Where(Enum):
    """Ranks of a part: some that share one GPU, one on each GPU of a host, or all ranks of several hosts."""

    gpu = "gpu"
    host = "host"
    hosts = "hosts"


MOST_SHARING = 3
"""Most ranks that share a GPU."""

LIMIT_S = 240.0
"""Seconds after which a part is ended."""


@dataclass(frozen=True, kw_only=True)
class FirstDayPart:
    """A part, which runs in processes of its own.

    Attributes:
        words: what it tries or measures, as a sentence without its full stop.
        num_ranks: ranks that share a GPU, with `Where.gpu`.
        num_shares: ranks that share a model.
        needs_gpu: whether it is left out on a CPU.
        sees_all_gpus: whether its processes see all GPUs of the host; else, with `Where.gpu`, they see the first alone.
        modules: what it imports besides what Runahead needs.
        takes_s: seconds on an H100, roughly, with the start of the processes.
        limit_s: seconds after which it is ended.
    """

    name: str
    words: str
    where: Where = Where.gpu
    num_ranks: int = 1
    num_shares: int = 1
    needs_gpu: bool = False
    sees_all_gpus: bool = False
    modules: Sequence[str] = ()
    takes_s: float
    limit_s: float = LIMIT_S


@dataclass(frozen=True)
class Case:
    """A way of the ranks that share a GPU to work together: names of options, and the number of ranks."""

    carrier: str
    transfer: str
    decode: str
    num_ranks: int

    @property
    def name(self) -> str:
        return f"{self.carrier}_{self.transfer}_{self.decode}_{self.num_ranks}"

    def part(self) -> FirstDayPart:
        carried = "copies between processes" if self.carrier == "copy" else "Gloo"
        words = (
            f"{self.num_ranks} ranks on one GPU say what one says: {carried}, transfer={self.transfer}, "
            f"decode={self.decode}"
        )
        return FirstDayPart(name=self.name, words=words, num_ranks=self.num_ranks, takes_s=30 + 5 * self.num_ranks)


CASES = [
    Case(carrier, transfer, decode, num_ranks)
    for carrier, num_ranks, transfer, decode in product(
        ("copy", "backend"), (2, MOST_SHARING), ("relay", "direct"), ("last", "sharded")
    )
]
"""All of them; the first one is a chain by copies."""

FIRST_CASES = [Case("copy", "relay", "last", 2), Case("copy", "direct", "sharded", MOST_SHARING)]
"""The two that have least in common."""


GPUS = {Where.hosts: "the GPUs of several hosts", Where.host: "all GPUs of a host"}
TAKES_S = {Where.hosts: 100.0, Where.host: 80.0}


def _ttft(name: str, where: Where, words: str, *, num_shares: int = 1) -> FirstDayPart:
    return FirstDayPart(
        name=name,
        words=f"TTFT of a model of Llama-3-8B's shape on {GPUS[where]} against one: {words}",
        where=where,
        num_shares=num_shares,
        takes_s=TAKES_S[where],
    )


PARTS = [
    FirstDayPart(
        name="hosts_links",
        words="Links between hosts, exactness and decoding over all ranks, as the doctor judges them",
        where=Where.hosts,
        takes_s=80,
    ),
    _ttft("hosts_chain", Where.hosts, "transfer=relay over NCCL"),
    _ttft("hosts_copy", Where.hosts, "transfer=relay by copies within a host, over NCCL between two"),
    _ttft("hosts_sharded", Where.hosts, "decode=sharded over NCCL"),
    _ttft("hosts_tensor", Where.hosts, "every two GPUs of a host share the model (ranks.tensor=2)", num_shares=2),
    FirstDayPart(
        name="links",
        words="Links between the GPUs of a host, exactness and decoding over all of them, as the doctor judges them",
        where=Where.host,
        takes_s=80,
    ),
    _ttft("chain_relay", Where.host, "transfer=relay over NCCL"),
    _ttft("chain_copy", Where.host, "transfer=relay by copies"),
    _ttft("chain_direct", Where.host, "transfer=direct over NCCL"),
    _ttft("chain_direct_copy", Where.host, "transfer=direct by copies"),
    _ttft("chain_sharded", Where.host, "decode=sharded over NCCL"),
    _ttft("chain_tensor", Where.host, "every two GPUs share the model (ranks.tensor=2)", num_shares=2),
    *(case.part() for case in FIRST_CASES),
    FirstDayPart(
        name="nccl_operations",
        words="NCCL's options, an exchange with oneself, capture in a graph, eager operations between two replays",
        needs_gpu=True,
        takes_s=40,
        limit_s=90,
    ),
    FirstDayPart(
        name="nccl_live_graph",
        words="The end of a process group while something holds a graph with its operations",
        needs_gpu=True,
        takes_s=40,
        limit_s=90,
    ),
    FirstDayPart(
        name="speed", words="TTFT and time per token of one GPU by length, and its peak of memory", takes_s=120
    ),
    FirstDayPart(
        name="kernels",
        words="Rates of the attention kernels, of merging and of matrix products, and their results against plain code",
        needs_gpu=True,
        takes_s=60,
    ),
    FirstDayPart(name="transformers", words="TTFT of one GPU against transformers alone, in turn", takes_s=70),
    FirstDayPart(
        name="doctor", words="One GPU's memory, matrix products and decoding, as the doctor judges them", takes_s=80
    ),
    FirstDayPart(
        name="copies",
        words="Rates of copies to, from and within a GPU, beside compute too, and the time of page-locking",
        needs_gpu=True,
        takes_s=30,
    ),
    FirstDayPart(
        name="shares_2",
        words="Two ranks on one GPU share a model (ranks.tensor=2) and say what one says",
        num_ranks=2,
        num_shares=2,
        takes_s=40,
    ),
    FirstDayPart(name="rows", words="Time per step of a server's rows, 1 to 64 at once", takes_s=70),
    FirstDayPart(
        name="tests",
        words="tests/gpu of a checkout",
        needs_gpu=True,
        sees_all_gpus=True,
        modules=("pytest", "hypothesis"),
        takes_s=200,
    ),
    FirstDayPart(
        name="memory",
        words="Memory that stays reserved after each of 30 prompts of different lengths",
        needs_gpu=True,
        takes_s=70,
    ),
    *(case.part() for case in CASES if case not in FIRST_CASES),
]
"""All parts."""


def chosen(names: Sequence[str]) -> list[FirstDayPart]:
    """The parts of these names; a name that no part has chooses those that begin with it and an underscore."""
    beginnings = tuple(f"{name}_" for name in names if name not in [part.name for part in PARTS])
    return [part for part in PARTS if part.name in names or part.name.startswith(beginnings)]


def listed() -> str:
    """A line for each part."""
    width = max(len(part.name) for part in PARTS)
    return "".join(f"  {part.name:{width}}  {part.words}\n" for part in PARTS)
