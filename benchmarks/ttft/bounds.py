"""Bounds on TTFT from compute and links, computed before variants are measured."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.ttft.flops import PromptFlops, matmul_rate, prompt_flops
from benchmarks.ttft.options import BenchOptions
from benchmarks.ttft.traffic import kv_bytes_per_token
from launch.program.progress import Bar
from partitioner.auto.chunks import PipelineChunks
from partitioner.cost.link import Link
from partitioner.cost.measured import MeasuredCost
from partitioner.cost.places import Places
from partitioner.cost.streaming import Streams
from partitioner.measure import probe_compute
from partitioner.searches.best_split import best_splits, practical_bound
from partitioner.searches.evaluations import SearchResult
from partitioner.simulation.bounds import ttft_star
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from partitioner.table.fingerprint import Fingerprint
from runahead.config import Attention, PrefillOptions
from runahead.context import ContextPartition, even
from runahead.failures import first_line
from runahead.files import read_user_file, write_whole
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks

SHORTEST_PROBE = 64
MIN_STRIDE = 32
"""Boundaries are searched in multiples of this many tokens, except in prompts too short for it."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds for one prompt length.

    Attributes:
        single_s: TTFT on one rank, from measured compute.
        free_s: TTFT(p), the TTFT of the best split if communication is free.
        free_boundaries: boundaries of that split.
        star_dense_s, star_causal_s: TTFT*(p), see `partitioner.simulation.bounds.ttft_star`.
        flops: operations of the prompt; None where no formula holds.
        peak_flops: operations per second of all ranks together.
    """

    single_s: float
    free_s: float
    free_boundaries: list[int]
    star_dense_s: float
    star_causal_s: float
    flops: PromptFlops | None
    peak_flops: float

    def as_json(self) -> dict[str, Any]:
        """Fields of a line, known before any variant ran."""
        seconds = asdict(self)
        flops, peak_flops = seconds.pop("flops"), seconds.pop("peak_flops")
        return {"bounds": seconds, "flops": flops, "peak_flops": peak_flops}


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Measured compute of a rank, bytes of the KV cache per token and of states: enough to plan without the model."""

    cost: MeasuredCost
    kv_bytes_per_token: int
    purpose: str
    state_bytes: int = 0

    def to_json(self) -> str:
        """Serialise for `from_json`."""
        fields = {"cost": self.cost.to_json(), "kv_bytes": self.kv_bytes_per_token, "purpose": self.purpose}
        fields |= {"state_bytes": self.state_bytes} if self.state_bytes else {}
        return json.dumps(fields) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Compute:
        """Read the output of `to_json`. Raises: ValueError: the text is something else."""
        try:
            fields = json.loads(text)
            cost, kv_bytes, purpose = str(fields["cost"]), int(fields["kv_bytes"]), str(fields["purpose"])
            state_bytes = int(fields.get("state_bytes", 0))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError("it is no measured compute") from error
        measured = MeasuredCost.from_json(cost)
        if not int(len(measured.states) < measured.num_places) <= kv_bytes < 2**63:  # 0 if all places hold states
            raise ValueError("it has no bytes of K,V per token")
        if not 0 <= state_bytes < 2**63:
            raise ValueError("it has no bytes of states")
        return cls(cost=measured, kv_bytes_per_token=kv_bytes, purpose=purpose, state_bytes=state_bytes)

    def cluster(
        self,
        num_ranks: int,
        link: Link | None = None,
        prefill: PrefillOptions | None = None,
        backend: str = "gloo",
        *,
        sent_bytes_per_token: int | None = None,
        streams: Streams | None = None,
    ) -> Cluster:
        """Cluster of equal ranks with this compute; without a link, communication is free.

        Args:
            sent_bytes_per_token: of keys and values, if they are not sent as they are.
            streams: KV heads that stream.
        """
        kv_bytes = self.kv_bytes_per_token if sent_bytes_per_token is None else sent_bytes_per_token
        return Cluster.chain(
            self.cost,
            num_ranks,
            link,
            kv_bytes_per_token=kv_bytes / max(1, self.cost.num_places - len(self.cost.states)),
            state_bytes=self.state_bytes / max(1, len(self.cost.states)),
            prefill=prefill or PrefillOptions(),
            backend=backend,
            streams=streams,
        )


def read_compute(path: str) -> Compute | None:
    """Read the compute that an earlier run wrote; None if the file does not exist.

    Raises:
        ValueError: the file is not a measured compute.
    """
    if not Path(path).exists():
        return None
    try:
        return Compute.from_json(read_user_file(path).decode("utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise ValueError(f"bench.compute={path} cannot be read: {reason}; name another file") from error


def measure_compute(model: Model, ranks: Ranks, fingerprint: Fingerprint, options: BenchOptions) -> Compute:
    """Read the compute from bench.compute if it fits, else measure it on all ranks at once and write it there.

    Raises:
        ValueError: the file is not a measured compute.
    """
    longest, repeats = max(options.lengths), options.probe_repeats
    lengths = [min(SHORTEST_PROBE, max(1, longest // 2))]
    while lengths[-1] < longest:
        lengths.append(min(2 * lengths[-1], longest))
    num_points = len(lengths) * (1 + len(lengths))
    purpose, states = f"{fingerprint.key()} {repeats}", Places.of_model(model).states

    def earlier() -> Compute | None:
        found = None if options.compute is None else read_compute(options.compute)
        if found is None or (found.purpose, found.cost.states) != (purpose, states):
            return None
        return found if max(found.cost.first_s) >= longest else None

    known = ranks.on_rank_0("the compute cost", earlier)
    if known is not None:
        return known
    with Bar("measuring compute", shown=ranks.rank == 0) as bar:

        def tick(text: str) -> None:
            bar.step_of(num_points, text)
            ranks.progress()

        cost = ranks.on_all_ranks(
            "the compute cost",
            lambda: probe_compute(model, chunks=lengths, prefixes=lengths, repeats=repeats, on_progress=tick),
        )
    cost = ranks.broadcast(cost, 0, "the compute cost")
    measured = Compute(
        cost=cost,
        kv_bytes_per_token=kv_bytes_per_token(model.kv_shapes),
        purpose=purpose,
        state_bytes=sum(shape.num_bytes for shape in model.state_shapes),
    )
    if options.compute is not None:
        ranks.on_rank_0("the compute cost", partial(write_whole, options.compute, measured.to_json()))
    return measured


def peak_flops(model: Model, ranks: Ranks) -> float:
    """Sum over ranks of the operations per second of matrix products with the model's shapes, measured at once."""
    ranks.barrier("the peak")
    return sum(ranks.gather(ranks.on_all_ranks("the peak", lambda: matmul_rate(model)), "the peak"))


def bounds_of(model: Model, compute: Compute, num_tokens: int, num_ranks: int, peak: float) -> Bounds:
    """Compute the bounds for one prompt length."""
    free = practical(compute, num_tokens, num_ranks)
    single_s = simulate(even(num_tokens, 1), compute.cluster(1)).ttft_s
    return Bounds(
        single_s=single_s,
        free_s=free.cost_s,
        free_boundaries=list(free.partition.boundaries),
        star_dense_s=ttft_star(single_s, num_ranks, Attention.dense),
        star_causal_s=ttft_star(single_s, num_ranks, Attention.causal),
        flops=prompt_flops(model, num_tokens),
        peak_flops=peak,
    )


def practical(compute: Compute, num_tokens: int, num_ranks: int) -> SearchResult:
    """The split of TTFT(p), and its TTFT in seconds."""
    stride = _stride(num_tokens, num_ranks)
    return practical_bound(num_tokens, num_ranks, compute.cluster(num_ranks), min_stride=stride)


def searched(num_tokens: int, cluster: Cluster) -> ContextPartition:
    """Split that a table searched for this cluster would give, over the number of ranks with the lowest TTFT."""
    splits = best_splits(num_tokens, cluster, min_stride=_stride(num_tokens, cluster.num_ranks))
    best = min(splits.values(), key=lambda split: split.cost_s).partition
    return ContextPartition(boundaries=best.boundaries + (num_tokens,) * (cluster.num_ranks - best.num_ranks))


def searched_chunks(num_tokens: int, cluster: Cluster, activation_bytes: float) -> ContextPartition:
    """The chunks of a pipeline over all ranks of this cluster."""
    return PipelineChunks(cluster, activation_bytes).split(num_tokens)


def _stride(num_tokens: int, num_ranks: int) -> int:
    return min(MIN_STRIDE, max(1, num_tokens // (8 * num_ranks)))
