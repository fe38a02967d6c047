"""Measurements for a search: the compute of one device, the link between ranks, and TTFT on live ranks."""

# Legend: B batch, N query heads, K kv heads, C chunk, P prefix, H head dim, V value dim.

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.cost.link import Link
from partitioner.cost.measured import MeasuredCost
from runahead.attention.base import ForwardEndsHere
from runahead.attention.partial import AttentionTerms, attend
from runahead.cache.attention import CausalAttention, End, LayerCall, LayerHook
from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import Slabs
from runahead.config import GenerationOptions, PrefillOptions
from runahead.context import ContextPartition, even
from runahead.engine import Engine
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks
from runahead.timeline.clock import Clock, clock_for

Progress = Callable[[str], None]
Inputs = tuple[Tensor, Tensor, Tensor, AttentionTerms]
"""Queries, keys and values of a layer's new tokens, and the terms of its attention."""

WARMUPS = 1
HOPELESS = 1.06
"""Ratio to the incumbent's TTFT from which on a candidate is not run again after its first run."""


class _Probe(LayerHook):
    """Marks when each layer's keys and values are known and when its attention ends."""

    def __init__(self, clock: Clock, keep: Collection[int] = ()) -> None:
        self._clock, self._keep = clock, keep
        self.began = clock.mark()
        self.marks: list[tuple[object, object]] = []
        self.inputs: dict[int, Inputs] = {}

    def before_save(self, call: LayerCall) -> None:
        known = self._clock.mark()
        if call.layer in self._keep:
            self.inputs[call.layer] = call.q_BNCH, call.k_BKCH, call.v_BKCV, call.terms
        self.marks.append((known, known))

    def attended(self, call: LayerCall) -> None:
        self.marks[-1] = self.marks[-1][0], self._clock.mark()


def probe_compute(
    model: Model,
    *,
    chunks: Sequence[int],
    prefixes: Sequence[int],
    repeats: int = 3,
    num_layers: int | None = None,
    probe_layers: int = 4,
    on_progress: Progress = lambda text: None,
) -> MeasuredCost:
    """Measure the compute of one device by running the runtime's own code on it.

    Layers are alike, so only a few are run; attention to a prefix is run by itself, on the queries of a real layer. If
    layers have different masks (sliding windows), each kind is run, and weighted by its number of layers.

    Args:
        chunks: chunk lengths in tokens, ascending.
        prefixes: prefix lengths in tokens, ascending.
        repeats: runs per point; the median counts.
        num_layers: layers of the model to plan for, if `model` has fewer of the same kind.
        probe_layers: layers that are run.
        on_progress: called before each point with a text that describes it.
    """
    kinds = _layer_kinds(model, max(chunks) + max(prefixes, default=0))
    depth = min(model.num_layers, max([probe_layers, *(layers[0] + 2 for layers in kinds)]))
    first, between, own, prefix = {}, {}, {}, {}
    for chunk in chunks:
        on_progress(f"chunk of {chunk} tokens")
        # Inputs are kept in the warm-up run only: tensors that stay allocated make the next layers slower.
        inputs = _run_layers(model, chunk, depth, keep=[layers[0] for layers in kinds]).inputs
        runs = [_run_layers(model, chunk, depth) for _ in range(repeats)]
        first[chunk] = statistics.median(run.first_s for run in runs)
        between[chunk] = statistics.median(statistics.median(run.between_s) for run in runs)
        per_kind = [_attention_s(model, inputs[layers[0]], layers[0], chunk, 0, repeats) for layers in kinds]
        own[chunk] = _weighted(per_kind, kinds)
        for length in prefixes:
            on_progress(f"chunk of {chunk} tokens after {length}")
            per_kind = [_attention_s(model, inputs[layers[0]], layers[0], chunk, length, repeats) for layers in kinds]
            prefix[chunk, length] = _weighted(per_kind, kinds)
    shortest = min(chunks)
    whole_runs = [_run_layers(model, shortest, model.num_layers) for _ in range(WARMUPS + repeats)]
    last_s = statistics.median(run.last_s for run in whole_runs[WARMUPS:])
    head_s = max(0.0, last_s - (between[shortest] - first[shortest]))
    # After the last attention come the rest of its layer, without the next layer's projections, and the logits.
    last = {chunk: max(0.0, between[chunk] - first[chunk]) + head_s for chunk in chunks}
    return MeasuredCost(
        first_s=first,
        between_s=between,
        own_s=own,
        prefix_s=prefix,
        last_s=last,
        num_layers=num_layers or model.num_layers,
    )


class _Run:
    """Seconds of one forward through a few layers: to the first layer's keys and values, between attentions, and
    after the last attention that ran."""

    def __init__(self, probe: _Probe, clock: Clock) -> None:
        end = clock.mark()
        known = [clock.seconds(mark) for mark, _ in probe.marks]
        ended = [clock.seconds(mark) for _, mark in probe.marks]
        self.first_s = known[0] - clock.seconds(probe.began)
        self.last_s = clock.seconds(end) - ended[-1]
        between_s = [after - before for before, after in zip(ended, known[1:], strict=False)]
        self.between_s = between_s or [self.first_s + self.last_s]  # of one layer: its next would begin as it does
        self.inputs = probe.inputs


def _run_layers(model: Model, chunk: int, depth: int, keep: Collection[int] = ()) -> _Run:
    clock = clock_for(model.device)
    cache = KVCache(
        Slabs.empty(model.kv_shapes, batch=1, spans=[(0, chunk)] * model.num_layers, num_slabs=1, device=model.device)
    )
    probe = _Probe(clock, keep)
    ends: End | None = None if depth == model.num_layers else (depth - 1, "saved")
    attention = CausalAttention(cache, start=0, pads=[0], hooks=[probe], ends=ends)
    ids_1C = torch.arange(chunk, device=model.device)[None] % model.vocab_size
    with suppress(ForwardEndsHere):
        model.forward(ids_1C, attention, start=0, pads=[0])
    return _Run(probe, clock)


def _attention_s(model: Model, inputs: Inputs, layer: int, chunk: int, prefix: int, repeats: int) -> float:
    """Seconds of one layer's attention of a chunk to its prefix, or to itself if `prefix` is 0."""
    q, k, v, terms = inputs
    first = prefix
    if prefix:
        first = 0 if terms.rule is None else terms.rule.first_key(prefix)
        shape = model.kv_shapes[layer]
        packed = torch.randn(
            prefix - first, 1, shape.num_kv_heads, shape.key_dim + shape.value_dim, device=q.device
        ).to(q.dtype)
        k, v = (part.permute(1, 2, 0, 3) for part in packed.split([shape.key_dim, shape.value_dim], dim=-1))
    clock = clock_for(model.device)
    seconds = []
    with torch.inference_mode():
        for _ in range(WARMUPS + repeats):
            begin = clock.mark()
            attend(q, k, v, terms, q_start=prefix, k_start=first)
            seconds.append(clock.seconds(clock.mark()) - clock.seconds(begin))
    return statistics.median(seconds[WARMUPS:])


def _layer_kinds(model: Model, num_tokens: int) -> list[list[int]]:
    """Layers grouped by the first token that the last of `num_tokens` tokens attends to."""
    kinds: dict[int, list[int]] = {}
    for layer in range(model.num_layers):
        kinds.setdefault(model.first_needed(layer, num_tokens, [0]), []).append(layer)
    return list(kinds.values())


def _weighted(seconds: list[float], kinds: list[list[int]]) -> float:
    return sum(each * len(layers) for each, layers in zip(seconds, kinds, strict=True)) / sum(map(len, kinds))


def ping(
    ranks: Ranks, *, num_bytes: int = 8 << 20, rounds: int = 5, pair: tuple[int, int] | None = None
) -> Link | None:
    """Measure latency and bandwidth between two ranks over the backend that carries KV. Every rank calls this.

    Args:
        pair: the ranks; by default the first ones of the first two stages.

    Returns:
        The link on every rank; None for a single stage.
    """
    if pair is None:
        if ranks.num_stages == 1:
            return None
        pair = ranks.mesh.rank(0, 0), ranks.mesh.rank(1, 0)
    small_s = _exchange_s(ranks, pair, 8, rounds * 10)
    large_s = _exchange_s(ranks, pair, num_bytes, rounds)
    latency_s, bandwidth = ranks.broadcast((small_s, num_bytes / max(large_s - small_s, 1e-9)), pair[0], "a ping")
    return Link(latency_s=latency_s, bandwidth_Bps=bandwidth)


def _exchange_s(ranks: Ranks, pair: tuple[int, int], num_bytes: int, rounds: int) -> float:
    """Seconds of a message of `num_bytes` in one direction: the median of half round trips."""
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=ranks.device if ranks.backend == "nccl" else "cpu")
    seconds = []
    links = ranks.nccl_links([pair, pair[::-1]]) if ranks.backend == "nccl" else {}
    groups = {link: communicator.group for link, communicator in links.items()}
    for _ in range(rounds + WARMUPS):
        ranks.barrier("a ping")
        if ranks.rank not in pair:
            continue
        peer, begin = sum(pair) - ranks.rank, time.perf_counter()
        there, back = groups.get(pair, ranks.kv_group), groups.get(pair[::-1], ranks.kv_group)
        if ranks.rank == pair[0]:
            dist.send(tensor, peer, group=there)
            dist.recv(tensor, peer, group=back)
        else:
            dist.recv(tensor, peer, group=there)
            dist.send(tensor, peer, group=back)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        seconds.append((time.perf_counter() - begin) / 2)
    return statistics.median(seconds[WARMUPS:]) if seconds else 0.0


class LiveCost:
    """Cost of a partition: TTFT of a prompt of random tokens on live ranks. Every rank makes the same calls.

    A candidate is run in turn with the best partition so far (A B A B). Its cost is the cost of that one times the
    median ratio, so that a drift of the machine's speed does not decide. A candidate above `HOPELESS` is run once.

    Args:
        num_tokens: length of the prompt.
        repeats: runs of a candidate.

    Attributes:
        best_s: the lowest cost so far.
        spread: of repeated runs, by boundaries: (largest - smallest) / median, or that of the ratios.
    """

    def __init__(self, model: Model, ranks: Ranks, prefill: PrefillOptions, num_tokens: int, repeats: int = 3) -> None:
        self._repeats = repeats
        self._partition = even(num_tokens, ranks.num_stages)
        self._engine = Engine(model, ranks, prefill=prefill, partition=lambda *_: self._partition)
        generator = torch.Generator().manual_seed(num_tokens)
        self._ids = torch.randint(model.vocab_size, (num_tokens,), generator=generator).tolist()
        self._incumbent: ContextPartition | None = None
        self.best_s = float("inf")
        self.spread: dict[tuple[int, ...], float] = {}

    def __call__(self, partition: ContextPartition) -> float:
        if self._incumbent is None:
            self.run(partition)  # warm up
            runs = [self.run(partition) for _ in range(self._repeats)]
            cost_s = statistics.median(runs)
            self.spread[partition.boundaries] = (max(runs) - min(runs)) / cost_s
        else:
            cost_s = self._against(self._incumbent, partition)
        if cost_s < self.best_s:
            self.best_s, self._incumbent = cost_s, partition
        return cost_s

    def _against(self, incumbent: ContextPartition, partition: ContextPartition) -> float:
        ratios = []
        for _ in range(self._repeats):
            candidate_s, incumbent_s = self.run(partition), self.run(incumbent)
            ratios.append(candidate_s / incumbent_s)
            if ratios[0] > HOPELESS:
                break
        self.spread[partition.boundaries] = max(ratios) - min(ratios)
        return self.best_s * statistics.median(ratios)

    def run(self, partition: ContextPartition) -> float:
        """TTFT of one run in seconds."""
        self._partition = partition
        return self._engine.generate([self._ids], GenerationOptions(max_new_tokens=1)).ttft_s
