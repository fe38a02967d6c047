"""`AutoPartition`: the partitioner of partition=auto, on live ranks."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from partitioner.auto.alone import BothWays
from partitioner.auto.balance import Balance
from partitioner.auto.chunks import PipelineChunks
from partitioner.auto.learned import LearnedSplit, learned_path, read_learned, write_learned
from partitioner.auto.probe import Progress, probe
from partitioner.cost.places import Places
from partitioner.cost.streaming import Streams
from partitioner.measure import ping
from partitioner.simulation.cluster import Cluster
from partitioner.table.fingerprint import Fingerprint
from runahead.config import PrefillOptions
from runahead.context import ContextPartition, even
from runahead.failures import first_line
from runahead.files import cache_folder
from runahead.model.model import Model
from runahead.pipeline.hidden import Boundary
from runahead.ranks.ranks import Ranks

PING_BYTES = 1 << 20
"""Size of the messages that measure the link; slow links take seconds for larger ones."""

MUCH = math.log(1.5)
"""Least surprise of a rank beside another one, in a run's first prompt, that is told."""
LEAST_S = 0.1
"""Seconds that all ranks together compute, below which a prompt is not compared: its times vary by as much."""

Tell = Callable[[str], None]
"""Receives a sentence for the user, on rank 0."""


class AutoPartition:
    """Splits by what a few timed layers and all prompts so far told. Every rank makes the same calls.

    Rank 0 decides, learns and keeps what it learned in a file for the next run; the other ranks are told. The chunks of
    a pipeline are searched with what was timed, and nothing is learned.

    Args:
        balance: what is known; None on ranks other than 0, and on a single stage, which has nothing to split.
        keep: writes what is known to a file.
        learn: False to split all prompts by what is known now.
        alone: the last stage may compute a prompt alone, where that is sooner.
        told_before: what is known is from earlier runs: called once if the first prompt's times are far from that.
    """

    def __init__(
        self,
        ranks: Ranks,
        balance: Balance | PipelineChunks | None,
        *,
        keep: Callable[[], None] = lambda: None,
        learn: bool = True,
        alone: bool = False,
        told_before: Tell | None = None,
    ) -> None:
        self._told_before = told_before
        self.balance, self._ranks, self._keep, self._learns, self._alone = balance, ranks, keep, learn, alone

    @classmethod
    def start(
        cls,
        model: Model,
        ranks: Ranks,
        *,
        prefill: PrefillOptions | None = None,
        policy: str = "",
        streams: Streams | None = None,
        learn: bool = True,
        alone: bool = False,
        folder: str | os.PathLike[str] | None = None,
        tell: Tell = lambda sentence: warnings.warn(sentence, stacklevel=2),
        on_progress: Progress = lambda total, text: None,
    ) -> AutoPartition:
        """Read what earlier runs kept for this model, machine and policy; else time a few layers, which takes seconds.

        Args:
            prefill: options of the engine's prefill.
            policy: anything that names the cache policies and their options: what is learned under some does not hold
                for others.
            streams: KV heads that stream in the prefill.
            learn, alone: as of the class.
            folder: cache folder; by default the user's.
            tell: called on rank 0 when layers are timed, or a file cannot be used.
            on_progress: called on every rank before each point that is timed, as `Progress` says.
        """
        if ranks.num_stages == 1:
            return cls(ranks, None)
        prefill = prefill or PrefillOptions()
        lent = _lent(ranks) if alone else 1.0
        purpose = _purpose(model, ranks, prefill, policy, lent)
        path = learned_path(cache_folder() if folder is None else Path(folder), purpose)
        file = _File(path, purpose, tell)
        learned = ranks.on_rank_0("the learned split", lambda: file.read(ranks.num_stages))
        boundary = model.boundary
        assert boundary is None or isinstance(boundary, Boundary), boundary
        if learned is None:
            if boundary is None:
                cost, slowness, gained = probe(model, ranks, on_progress, lent=lent)
            else:
                places = Places.of_attention(sum(ranks.gather(model.num_layers, "the layers")))
                with boundary.closed():
                    cost, slowness, gained = probe(model, ranks, on_progress, places=places)
            link = ping(ranks, num_bytes=PING_BYTES)
            assert link is not None
            learned = LearnedSplit(cost=cost, link=link, start=tuple(slowness), gained=gained)
            if ranks.rank == 0:
                file.write(learned)
                tell(f"partition=auto: timed a few layers for the first split; kept in {path}")
        if ranks.rank != 0:
            return cls(ranks, None, learn=learn, alone=alone)
        cluster = _cluster(learned, model, ranks, prefill, streams)
        if boundary is not None:
            return cls(ranks, PipelineChunks(cluster, boundary.token_bytes))
        cost, ways = learned.cost, BothWays(learned.times)
        balance = Balance(cluster, learned.slowness, lent=lent, gained=learned.gained, ways=ways)

        def keep() -> None:
            file.write(LearnedSplit.from_balance(cost, balance))

        def changed(how: str) -> None:
            then = "two such prompts mend the split" if learn else "partition.learn=false leaves the split as it is"
            tell(
                f"partition=auto: {how} as in earlier prompts, so this machine does more other work now, or did then; "
                f"{then}, and without {path} layers are timed anew"
            )

        return cls(ranks, balance, keep=keep, learn=learn, alone=alone, told_before=changed)

    def __call__(self, num_tokens: int, num_ranks: int) -> ContextPartition:
        if num_ranks == 1:
            return even(num_tokens, 1)
        return self._ranks.on_rank_0("the split", lambda: self.decide(num_tokens, num_ranks))

    def decide(self, num_tokens: int, num_ranks: int) -> ContextPartition:
        """The same on rank 0 alone."""
        assert self.balance is not None, "rank 0 knows what was timed"
        return even(num_tokens, 1) if num_ranks == 1 else self.balance.split(num_tokens)

    def is_alone_sooner(self, partition: ContextPartition, num_stored: int) -> bool:
        """Whether the last stage computes a prompt alone sooner than all do, split like this. Every rank asks."""
        if not self._alone:
            return False
        what = "whether one stage computes the prompt"
        return self._ranks.on_rank_0(what, lambda: self._known().is_alone_sooner(partition, num_stored))

    def learn(self, partition: ContextPartition, compute_s: Sequence[float], wait_s: Sequence[float]) -> None:
        """Correct the cost by the seconds that each stage computed and waited for one prompt."""
        balance, tells = self.balance, len(partition.chain) > 1 and sum(compute_s) >= LEAST_S
        tell = self._told_before if tells else None
        if not isinstance(balance, Balance) or (tell is None and not self._learns):
            return
        expected_s = balance.expected_s(partition)
        if tell is not None:
            self._told_before = None
            _compare(balance.slowness.surprise(partition.num_tokens, expected_s, compute_s), tell)
        if self._learns:
            if self._alone and partition.chain[-1] == partition.num_ranks - 1:
                balance.learn_time(partition, compute_s[-1] + wait_s[-1])
            balance.learn(partition, expected_s, compute_s, wait_s)
            self._keep()

    def _known(self) -> Balance:
        assert isinstance(self.balance, Balance), "rank 0 has the balance"
        return self.balance


@dataclass
class _File:
    """The file of what is learned, which may be damaged or not writable: the run goes on, and the user is told once."""

    path: Path
    purpose: str
    tell: Tell

    def read(self, num_ranks: int) -> LearnedSplit | None:
        try:
            return read_learned(self.path, self.purpose, num_ranks)
        except ValueError as error:
            self.tell(f"warning: partition=auto: {error}; layers are timed anew")
            return None

    def write(self, learned: LearnedSplit) -> None:
        try:
            write_learned(self.path, self.purpose, learned)
        except OSError as error:
            reason = error.strerror or first_line(error)
            self.tell(f"warning: partition=auto: {self.path} cannot be written ({reason}); the next run starts anew")
            self.tell = lambda sentence: None


def _compare(surprise: Sequence[float], tell: Tell) -> None:
    """Tell if a prompt took a rank much longer, beside another one, than is known: log slowness by rank."""
    slower, faster = (surprise.index(most) for most in (max(surprise), min(surprise)))
    apart = surprise[slower] - surprise[faster]
    if apart > MUCH:
        tell(f"beside rank {faster}, rank {slower} took {math.exp(apart):.2g} times as long")


def _cluster(
    learned: LearnedSplit, model: Model, ranks: Ranks, prefill: PrefillOptions, streams: Streams | None
) -> Cluster:
    return Cluster.chain(
        learned.cost,
        ranks.num_stages,
        learned.link,
        kv_bytes_per_token=model.layer_sent_bytes(prefill.wire_bits),
        state_bytes=Places.of_model(model).bytes_of_state,
        prefill=prefill,
        backend=ranks.backend,
        streams=streams,
    )


def _lent(ranks: Ranks) -> float:
    """Factor by which a rank of the last stage has more threads while the others wait. Every rank gets the same."""
    last, stages = ranks.num_stages - 1, range(ranks.num_stages)
    factors = ranks.gather(ranks.num_threads([last]) / ranks.num_threads(stages), "the threads")
    return factors[ranks.mesh.rank(last, 0)]


def _purpose(model: Model, ranks: Ranks, prefill: PrefillOptions, policy: str, lent: float) -> str:
    """One line that is equal for runs that may learn from each other: a table's fingerprint of every rank, the numbers
    of cores and of ranks per host, the policy, and how many more threads the last stage has alone, if it has."""
    own = Fingerprint.of_model(model, device=ranks.device, backend=ranks.backend, prefill=prefill).key()
    here = f"{own}|{os.cpu_count()} cores|{ranks.local_size} on a host"
    here += "|some of the layers" if model.boundary is not None else ""
    keys = ranks.gather(here, "the fingerprint")
    return " & ".join([*keys, policy, *([f"{lent:g} times as many threads alone"] if lent > 1 else [])])
