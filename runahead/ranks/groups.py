"""The mesh of the ranks, and process groups on it: NCCL communicators of links, chains and stages, and Gloo groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from runahead.ranks.accelerator import Accelerator, Communicator, exchange_ctas, link_ctas, stage_ctas
from runahead.ranks.control_messages import ControlMessages
from runahead.ranks.mesh import Mesh

NEVER = timedelta(days=20)
"""Timeout of the process groups: never, since runahead/ranks/watcher.py decides when a peer will not come."""


class ProcessGroups(ControlMessages):
    """Process groups for keys and values and for the ranks of a stage; a base class of `Ranks`, which knows the device.

    Every rank makes them together with all others, in the same order.

    Attributes:
        stage: the stage of this rank, its place in the chain.
        share: the share of its stage's model that this rank has.
    """

    device: torch.device
    backend: str
    accelerator: Accelerator | None
    _kv_group: dist.ProcessGroup

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        super().__init__(rank, size, timeout_s)
        self.stage, self.share = self.mesh.stage(rank), self.mesh.share(rank)
        self._links: dict[tuple[tuple[int, int], int], Communicator] = {}
        """Communicators by link and number of CTAs."""
        self._sets: dict[tuple[tuple[tuple[int, ...], ...], int | None], Communicator] = {}
        """Communicators of sets of ranks, one set for each rank, by all sets and the number of CTAs."""
        self._stage_groups: dict[Mesh, dist.ProcessGroup] = {}
        self._stage_hosts: dict[Mesh, dist.ProcessGroup] = {}
        self._mail_group: dist.ProcessGroup | None = None

    def arrange(self, num_shares: int) -> None:
        """Arrange the ranks as stages of `num_shares` ranks that share one model. Every rank calls this.

        Raises:
            ValueError: the ranks make no whole stages.
        """
        self.mesh = Mesh.with_shares(self.size, num_shares)
        self.stage, self.share = self.mesh.stage(self.rank), self.mesh.share(self.rank)
        for stage in range(self.num_stages) if self.rank == 0 and self.present else ():
            hosts = list(dict.fromkeys(self.present[rank].host for rank in self.mesh.members(stage)))
            if len(hosts) > 1:
                warnings.warn(
                    f"stage {stage} is on hosts {' and '.join(hosts)}, so a network carries its two all-reduces "
                    "per layer; use a ranks.tensor that divides the ranks of a host",
                    stacklevel=3,
                )
                return

    @property
    def num_stages(self) -> int:
        return self.mesh.num_stages

    @property
    def num_shares(self) -> int:
        return self.mesh.num_shares

    @property
    def kv_group(self) -> dist.ProcessGroup:
        """Gloo group that carries KV between CPUs, or between GPUs by way of host memory."""
        return self._kv_group

    def mail_group(self) -> dist.ProcessGroup:
        """Gloo group for messages of threads, while main threads compute. Every rank calls this."""
        if self._mail_group is None:
            what = "the connections for mail"
            self._mail_group = self.control(what, lambda: dist.new_group(backend="gloo", timeout=NEVER))
        return self._mail_group

    def nccl_links(self, links: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Communicator]:
        """NCCL communicators of directed links (from rank, to rank). All ranks call it with the same links.

        Operations of one communicator run one after the other, so links that must not wait for each other need
        communicators of their own. New ones are warmed up with one message.

        Raises:
            ValueError: the links would take too much of a GPU.
        """
        assert self.accelerator is not None, self.device
        links, made = list(links), {}
        num_ctas = link_ctas(
            links,
            self.accelerator.num_multiprocessors,
            self.accelerator.num_queues,
            has_collectives=self.num_shares > 1,
        )
        for link in links:
            if (link, num_ctas) not in self._links:
                with self._stuck_in(f"the NCCL link from {self.name(link[0])} to {self.name(link[1])}"):
                    communicator = self.accelerator.communicator(link, NEVER, num_ctas)
                    self._links[link, num_ctas] = communicator
                    if self.rank in link:
                        token = torch.zeros(1, device=self.device)
                        sends, peer = self.rank == link[0], sum(link) - self.rank
                        (communicator.isend if sends else communicator.irecv)(token, peer).wait()
                        self.accelerator.synchronize()
            made[link] = self._links[link, num_ctas]
        return made

    def nccl_between_stages(self) -> Communicator:
        """NCCL communicator of the ranks with this rank's share, all pairs connected, made on first use.

        Every rank calls this.
        """
        assert self.accelerator is not None, self.device
        chains = [self.mesh.chain(share) for share in range(self.num_shares)]
        num_ctas = exchange_ctas(self.accelerator.num_multiprocessors) if self.num_shares > 1 else None

        def connect(communicator: Communicator) -> None:
            own_chain = chains[self.share]
            token = torch.zeros(self.size, device=self.device)
            peers = [peer for peer in own_chain if peer != self.rank]
            own = token[self.rank : self.rank + 1]
            received, sent = [(token[peer : peer + 1], peer) for peer in peers], [(own, peer) for peer in peers]
            for work in communicator.exchange(received, sent):
                work.wait()

        return self._nccl_of(chains, "the NCCL connections between stages", connect, num_ctas)

    def _nccl_of(
        self,
        sets: list[list[int]],
        what: str,
        connect: Callable[[Communicator], None],
        num_ctas: int | None = None,
    ) -> Communicator:
        """NCCL communicator of the set of ranks that this rank is in, made and connected on first use.

        Every rank makes those of all sets, in the same order.

        Args:
            sets: all ranks, each in one set.
            connect: sends what makes NCCL connect the ranks of this rank's set.
            num_ctas: most CTAs of its kernels; None leaves it to NCCL.
        """
        assert self.accelerator is not None, self.device
        key = tuple(map(tuple, sets)), num_ctas
        if key not in self._sets:
            with self._stuck_in(what):
                for members in sets:
                    ranks = None if len(members) == self.size else members
                    communicator = self.accelerator.communicator(ranks, NEVER, num_ctas)
                    if self.rank in members:
                        self._sets[key] = communicator
                connect(self._sets[key])
                self.accelerator.synchronize()
        return self._sets[key]

    def stage_group(self) -> dist.ProcessGroup:
        """Process group of this rank's stage, for the collectives of its layers alone. Every rank calls this.

        A stage's collectives never wait for messages between stages, nor these for them: on a GPU they have a
        communicator, and so a stream, of their own, and both together leave multiprocessors free (`link_ctas`).
        """
        if self.mesh not in self._stage_groups:
            group = self.nccl_in_stage().group if self.backend == "nccl" else self.stage_hosts()
            self._stage_groups[self.mesh] = group
        return self._stage_groups[self.mesh]

    def stage_hosts(self) -> dist.ProcessGroup:
        """Gloo group of this rank's stage, for what hosts tell each other without GPUs. Every rank calls this."""
        if self.mesh not in self._stage_hosts:
            what, stages = "the connections inside stages", [self.mesh.members(n) for n in range(self.num_stages)]
            groups = self.control(
                what, lambda: [dist.new_group(ranks, timeout=NEVER, backend="gloo") for ranks in stages]
            )
            self._stage_hosts[self.mesh] = groups[self.stage]
        return self._stage_hosts[self.mesh]

    @property
    def stage_device(self) -> torch.device:
        """Where tensors are that `stage_group` carries."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def nccl_in_stage(self) -> Communicator:
        """NCCL communicator of `stage_group`."""

        assert self.accelerator is not None, self.device

        def connect(communicator: Communicator) -> None:
            communicator.all_reduce(torch.zeros(1, device=self.device)).wait()

        stages = [self.mesh.members(stage) for stage in range(self.num_stages)]
        num_ctas = stage_ctas(self.accelerator.num_multiprocessors)
        return self._nccl_of(stages, "the NCCL connections inside stages", connect, num_ctas)

    @contextmanager
    def _stuck_in(self, what: str) -> Iterator[None]:
        """Context manager for calls that block the main thread until all ranks have made them."""
        if self._watcher is None:
            yield
            return
        with self._watcher.waiting(what, range(self.size)):
            yield

    @property
    def _communicators(self) -> list[Communicator]:
        """All NCCL communicators that this rank is in."""
        return [each for (link, _), each in self._links.items() if self.rank in link] + list(self._sets.values())
