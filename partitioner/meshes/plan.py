"""The plan for a prompt: every mesh of a machine as a candidate, those that fit by TTFT, and then the others by need.

A plan is a function of the model's sizes, the machine and the work. Candidates are meshes of p stages x t shares with
t inside a node; the split of each is searched on a simulated chain, and decoding is on the last stage or sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from partitioner.cost.compute import ComputeCost, layer_s
from partitioner.cost.fitted import FittedCost
from partitioner.cost.measured import MeasuredCost
from partitioner.cost.places import Places
from partitioner.cost.stage import ALLREDUCES, StageCost
from partitioner.meshes.decoding import token_s
from partitioner.meshes.machine import Machine
from partitioner.meshes.memory import MeshMemory, RankMemory, Workload, rank_memory, ways
from partitioner.meshes.model_size import ModelSize
from partitioner.searches.best_split import Effort
from partitioner.searches.equal_work import equal_work
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from partitioner.table.entry import scaled
from runahead.config import Speculative
from runahead.context import ContextPartition, even
from runahead.prefill.row_blocks import projects_twice, share_twice
from runahead.prompt_draft.choice import num_kept
from runahead.prompt_draft.drafting import LAYERS_SHARE

EFFORT = Effort(
    links_matter=0.002,
    strides=128,
    most_messages=1_000_000,
    least_evaluations=24,
    most_evaluations=400,
    leave_out=True,
)
"""Effort of the search for the split of one mesh: a few seconds."""
EVENING_STEPS = 10
"""Steps in which a split is sought between the best one, which does not fit, and even chunks."""
NODE = 8
"""GPUs of a node, up to which GPUs are added to a single one that has fewer."""
MOST_GPUS = 1 << 10
"""GPUs up to which a machine is sought that fits."""
ALIKE = 0.03
"""Relative difference of TTFT below which the time per new token decides: predictions are no better than that."""


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """TTFT in parts, as the last stage spends it: compute, all-reduces of the shares, waits for keys and values."""

    compute: float
    allreduce: float
    wait: float

    @property
    def total(self) -> float:
        return self.compute + self.allreduce + self.wait

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            compute=self.compute + other.compute,
            allreduce=self.allreduce + other.allreduce,
            wait=self.wait + other.wait,
        )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One mesh with its split and what is to be expected of it.

    Attributes:
        held: what its ranks hold, by the way to decode that is chosen.
        is_best_split: whether the split is the one with the earliest first token, or one of evener chunks that fits.
        ttft: None if it does not fit, since then no split is searched.
        last_s, sharded_s: seconds per new token by the two ways; None for the second where layers hold states, which
            are on the last stage alone.
        draft: what of TTFT the first layers take to choose the tokens that are computed; None: all are.
    """

    num_stages: int
    num_shares: int
    partition: ContextPartition
    held: MeshMemory
    is_best_split: bool
    ttft: Seconds | None
    last_s: float
    sharded_s: float | None
    draft: Seconds | None = None

    @property
    def fits(self) -> bool:
        return self.held.room >= 0

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.num_shares

    @property
    def fullest(self) -> RankMemory:
        """Memory of the rank that needs most."""
        return max(self.held.memory, key=lambda each: each.total)

    @property
    def token_s(self) -> float:
        """Seconds per new token by the chosen way."""
        if not self.held.sharded:
            return self.last_s
        assert self.sharded_s is not None, self
        return self.sharded_s


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """All candidates, the best first.

    Attributes:
        least_gpus: if nothing fits, the least number of such GPUs with which something does; None if none does.
    """

    size: ModelSize
    machine: Machine
    work: Workload
    candidates: list[Candidate]
    least_gpus: int | None = None

    @property
    def best(self) -> Candidate | None:
        """The plan; None if nothing fits."""
        return self.candidates[0] if self.candidates[0].fits else None


def make_plan(
    size: ModelSize, machine: Machine, work: Workload, on_candidate: Callable[[str], None] = lambda text: None
) -> MeshPlan:
    """Make the plan.

    Args:
        on_candidate: called before each candidate with a text that describes it.

    Raises:
        ValueError: no mesh has such shares, or measured compute is of another number of layers.
    """
    sizes = shares_that_fit(size, machine.per_node)
    if work.tensor is not None and work.tensor not in sizes:
        raise ValueError(
            f"ranks.tensor={work.tensor} is no number of shares for {size.shape.num_heads} heads and "
            f"{size.shape.num_kv_heads} KV heads on {machine.per_node} GPUs of a node; it may be "
            f"{', '.join(map(str, sizes))}"
        )
    found = []
    for num_stages, num_shares in meshes(size, machine, work):
        on_candidate(f"{num_stages} x {num_shares}")
        found.append(_candidate(size, machine, work, num_stages, num_shares))
    found.sort(key=lambda each: each.held.room, reverse=True)
    fitting = sorted((each for each in found if each.fits), key=lambda each: each.ttft.total if each.ttft else 0.0)
    if fitting and fitting[0].ttft:
        # Of meshes that are as fast to the first token, the one that decodes faster, on fewer GPUs.
        limit_s = (1 + ALIKE) * fitting[0].ttft.total
        alike = [each for each in fitting if each.ttft and each.ttft.total <= limit_s]
        best = min(alike, key=lambda each: (each.token_s, each.num_ranks))
        fitting.sort(key=lambda each: each is not best)
    candidates = fitting + [each for each in found if not each.fits]
    least = None if fitting else least_gpus(size, machine, work)
    return MeshPlan(size=size, machine=machine, work=work, candidates=candidates, least_gpus=least)


def shares_that_fit(size: ModelSize, per_node: int) -> list[int]:
    """Numbers of shares into which the GPUs of a node and the model's heads can be divided."""
    return [shares for shares in range(1, per_node + 1) if per_node % shares == 0 and size.fits(shares)]


def meshes(size: ModelSize, machine: Machine, work: Workload) -> Iterator[tuple[int, int]]:
    """Meshes (stages, shares): with all GPUs, and with half, a quarter, ... of the stages."""
    for num_shares in shares_that_fit(size, machine.per_node):
        if work.tensor in (None, num_shares):
            num_stages = machine.num_gpus // num_shares
            while num_stages >= 1:
                num_ranks = num_stages * num_shares
                if num_ranks <= machine.per_node or num_ranks % machine.per_node == 0:  # as torchrun starts them
                    yield num_stages, num_shares
                num_stages //= 2


def _candidate(size: ModelSize, machine: Machine, work: Workload, num_stages: int, num_shares: int) -> Candidate:
    cluster = machine.cluster(size, num_stages, num_shares, work.batch, work.prefill, work.streams)
    drafted = None if work.prefill.speculative is Speculative.none else _Drafted(size, machine, work)
    if drafted is not None:
        work = drafted.kept
    balanced = equal_work(work.tokens, num_stages, cluster.compute)

    def fits(partition: ContextPartition) -> bool:
        return held_by(partition).room >= 0

    def held_by(partition: ContextPartition) -> MeshMemory:
        held = _fitting(size, machine, work, num_shares, partition)
        return held if drafted is None else drafted.fuller(held, partition)

    partition, is_best = balanced, True
    if num_stages > 1 and any(fits(start) for start in (balanced, even(work.tokens, num_stages))):
        searched = EFFORT.split(work.tokens, cluster)
        partition = _evened(searched, fits)
        is_best = partition == searched
    held = held_by(partition)
    draft = None if drafted is None or held.room < 0 else drafted.seconds(partition, cluster)
    ttft = _ttft(partition, cluster, held, size, num_shares) if held.room >= 0 else None
    last_s, sharded_s = (
        token_s(size, machine, num_shares, partition, sharded=way, batch=work.batch, streams=work.streams)
        for way in (False, True)
    )
    return Candidate(
        num_stages=num_stages,
        num_shares=num_shares,
        partition=partition,
        held=held,
        is_best_split=is_best,
        ttft=ttft if ttft is None or draft is None else ttft + draft,
        draft=draft,
        last_s=last_s,
        sharded_s=None if size.places.states else sharded_s,
    )


@dataclass(frozen=True)
class _Drafted:
    """A speculative prefill: the first layers read the whole prompt in the same shares, and all layers what stays."""

    size: ModelSize
    machine: Machine
    work: Workload

    @property
    def num_layers(self) -> int:
        num_layers = self.size.shape.num_layers
        return min(num_layers, self.work.prefill.speculative_layers or max(1, num_layers // LAYERS_SHARE))

    @property
    def kept(self) -> Workload:
        """The work on the tokens that stay."""
        prefill = self.work.prefill
        tokens = num_kept(self.work.tokens, prefill.speculative_share, prefill.speculative_chunk)
        return replace(self.work, tokens=tokens)

    def fuller(self, held: MeshMemory, partition: ContextPartition) -> MeshMemory:
        """The memory at the fuller moment: while the draft reads the prompt, or after it.

        Args:
            held: after it.
        """
        first = replace(self.size, places=Places.of_attention(self.num_layers))
        whole, work = scaled(partition, self.work.tokens), self.work
        drafting = replace(work, new_tokens=work.prefill.speculative_ahead)
        rows = held.row_tokens
        # Of fewer layers, which are as wide: sizes of one are means over the places of all weights.
        of_all, of_first = (
            rank_memory(size, drafting, 1, whole, sharded=False, row_tokens=rows) for size in (self.size, first)
        )
        memory = [replace(each, kv=draft.kv) for each, draft in zip(of_all, of_first, strict=True)]
        room = self.machine.device.memory_bytes - max(each.total for each in memory)
        return held if held.room <= room else replace(held, memory=memory, room=room)

    def seconds(self, partition: ContextPartition, cluster: Cluster) -> Seconds:
        """Seconds of the draft's prefill and of the tokens that it looks ahead, each in its share of a step's time."""
        whole = scaled(partition, self.work.tokens)
        compute = cluster.compute
        assert isinstance(compute, FittedCost | MeasuredCost), "a draft is on each rank as a whole"
        first = replace(compute, num_places=self.num_layers)  # with the model's embeddings and logits
        simulated = simulate(whole, replace(cluster, compute=first))
        step_s = token_s(self.size, self.machine, 1, whole, sharded=False, batch=self.work.batch)
        ahead_s = self.work.prefill.speculative_ahead * step_s * self.num_layers / self.size.shape.num_layers
        wait_s = simulated.wait_s[whole.chain[-1]]
        return Seconds(compute=simulated.ttft_s - wait_s + ahead_s, allreduce=0.0, wait=wait_s)


def _evened(partition: ContextPartition, fits: Callable[[ContextPartition], bool]) -> ContextPartition:
    """The partition, moved towards even chunks as little as makes it fit; if these do not fit either, even chunks.

    Even chunks need least where each rank keeps its own.
    """
    num_tokens, num_stages = partition.num_tokens, partition.num_ranks
    if fits(partition):
        return partition

    def mixed(weight: float) -> ContextPartition:
        ends = zip(partition.boundaries, even(num_tokens, num_stages).boundaries, strict=True)
        return ContextPartition(boundaries=tuple(round((1 - weight) * own + weight * other) for own, other in ends))

    low, high = 0.0, 1.0
    for _ in range(EVENING_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(mixed(middle)) else (middle, high)
    return mixed(high)


def _fitting(
    size: ModelSize, machine: Machine, work: Workload, num_shares: int, partition: ContextPartition
) -> MeshMemory:
    """The faster of the ways to decode that fit; if none fits, the one that needs less."""

    def order(held: MeshMemory) -> tuple[bool, float]:
        if held.room < 0:
            return True, -held.room
        way, streams = held.sharded, work.streams
        return False, token_s(size, machine, num_shares, partition, sharded=way, batch=work.batch, streams=streams)

    return min(ways(size, machine.device.memory_bytes, work, num_shares, partition), key=order)


def _ttft(partition: ContextPartition, cluster: Cluster, held: MeshMemory, size: ModelSize, num_shares: int) -> Seconds:
    """TTFT of a prompt and its parts on the last stage; a single stage may compute pieces one after another.

    A stage that computes layers in blocks of rows makes the next one later by almost a layer, or computes queries, keys
    and values twice (runahead/prefill/row_blocks.py).
    """
    compute, last, piece_tokens = cluster.compute, partition.chain[-1], held.piece_tokens
    if piece_tokens is None:
        simulated = simulate(partition, cluster)
        allreduce_s = _allreduce_s(compute, len(partition.chunk(last)))
        wait_s = simulated.wait_s[last]
        own_s, again_s, later_s = simulated.ttft_s - wait_s - allreduce_s, 0.0, 0.0
        for stage in partition.chain[:-1]:
            chunk = partition.chunk(stage)
            if len(chunk) <= held.row_tokens:
                continue
            share = _share_twice(size, num_shares, chunk)
            if projects_twice(share, num_layers=compute.num_places, num_stages=len(partition.chain)):
                again_s = max(again_s, share * own_s)
            else:
                num_blocks = -(-len(chunk) // held.row_tokens)
                later_s += simulated.compute_s[stage] / compute.num_places * (1 - 1 / num_blocks)
        return Seconds(compute=own_s + again_s, allreduce=allreduce_s, wait=wait_s + later_s)
    total_s = allreduce_s = 0.0
    for start, end in pairwise([*range(0, partition.num_tokens, piece_tokens), partition.num_tokens]):
        c, layers = end - start, compute.num_places
        total_s += compute.first(c) + layers * layer_s(compute, c, start) - compute.between(c) + compute.last(c)
        allreduce_s += _allreduce_s(compute, c)
    return Seconds(compute=total_s - allreduce_s, allreduce=allreduce_s, wait=0.0)


def _share_twice(size: ModelSize, num_shares: int, chunk: range) -> float:
    """`share_twice` of a share's chunk."""
    shape = size.shape
    return share_twice(
        model_dim=shape.model_dim,
        mlp_dim=int(max(0.0, size.mlp_dim(num_shares))),
        query_dim=shape.num_heads // num_shares * shape.head_dim,
        kv_dim=2 * size.kv_heads(num_shares) * shape.head_dim,
        num_keys=(chunk.start + chunk.stop) / 2,
    )


def _allreduce_s(compute: ComputeCost, num_tokens: int) -> float:
    """Seconds of all all-reduces of a stage's forward of one chunk."""
    if not isinstance(compute, StageCost):
        return 0.0
    times = ALLREDUCES * compute.num_places + compute.splits_embeddings
    return times * compute.allreduce_s(num_tokens)


def least_gpus(size: ModelSize, machine: Machine, work: Workload) -> int | None:
    """The least number of such GPUs on which the work fits; GPUs are added to a single node, else nodes.

    Only even chunks are tried, since they need least where every stage keeps its own.
    """

    def fits(num_gpus: int, per_node: int) -> bool:
        for num_shares in shares_that_fit(size, per_node):
            num_stages = num_gpus // num_shares
            if work.tensor in (None, num_shares) and num_stages <= work.tokens:
                split = even(work.tokens, num_stages)
                if any(held.room >= 0 for held in ways(size, machine.device.memory_bytes, work, num_shares, split)):
                    return True
        return False

    per_node, few = machine.per_node, machine.num_nodes
    if machine.num_nodes == 1:
        alone = range(per_node, max(NODE, per_node))
        found = next((num_gpus for num_gpus in alone if fits(num_gpus, num_gpus)), None)
        if found is not None:
            return found
        per_node = max(NODE, per_node)
    most = MOST_GPUS // per_node
    if most < few or not fits(most * per_node, per_node):
        return None
    while few < most:  # a node more never needs more of each GPU
        middle = (few + most) // 2
        few, most = (few, middle) if fits(middle * per_node, per_node) else (middle + 1, most)
    return most * per_node
