"""Measurements for a search: the compute of one device, the link between ranks, and TTFT on live ranks."""

# Legend: B batch, N query heads, K kv heads, C chunk, P prefix, S = P + C, H head dim, V value dim.

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.cost.link import Link
from partitioner.cost.measured import MeasuredCost
from partitioner.cost.places import Places
from runahead.attention.base import ForwardEndsHere
from runahead.attention.partial import AttentionTerms, attend
from runahead.cache.attention import CausalAttention, LayerCall, LayerHook
from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import Slabs
from runahead.config import GenerationOptions, PrefillOptions
from runahead.context import ContextPartition, even
from runahead.engine import Engine
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks
from runahead.thinning.rank_policies import RankPolicies
from runahead.timeline.clock import Clock, clock_for

T = TypeVar("T")
Progress = Callable[[str], None]
Inputs = tuple[Tensor, Tensor, Tensor, AttentionTerms]
"""Queries, keys and values of a layer's new tokens, and the terms of its attention."""

WARMUPS = 1
HOPELESS = 1.06
"""Ratio to the incumbent's TTFT from which on a candidate is not run again after its first run."""


class _Probe(LayerHook):
    """Marks when each place begins and ends: a layer's attention from when its keys and values are known, and its state
    from when it is waited for until that after the chunk is known. The forward ends where place `depth - 1` begins.
    """

    def __init__(self, model: Model, clock: Clock, depth: int, keep: Collection[int] = ()) -> None:
        self._place = {thing: place for place, thing in enumerate(model.order)}
        self._clock, self._keep = clock, keep
        self._end = depth - 1 if depth < len(model.order) else None
        self.began = clock.mark()
        self.known: dict[int, object] = {}
        self.ended: dict[int, object] = {}
        self.inputs: dict[int, Inputs] = {}

    def before_save(self, call: LayerCall) -> None:
        place, known = self._place["kv", call.layer], self._clock.mark()
        if call.layer in self._keep:
            self.inputs[call.layer] = call.q_BNCH, call.k_BKCH, call.v_BKCV, call.terms
        self._attends = place
        self._begin(place, known)

    def attended(self, call: LayerCall) -> None:
        self.ended[self._attends] = self._clock.mark()  # also once layers that read its keys have attended

    def load_state(self, number: int) -> None:
        self._begin(self._place["state", number], self._clock.mark())

    def save_state(self, number: int) -> None:
        self.ended[self._place["state", number]] = self._clock.mark()

    def _begin(self, place: int, known: object) -> None:
        self.known[place] = self.ended[place] = known
        if place == self._end:
            raise ForwardEndsHere


def probe_compute(
    model: Model,
    *,
    chunks: Sequence[int],
    prefixes: Sequence[int],
    repeats: int = 3,
    places: Places | None = None,
    probe_layers: int = 4,
    on_progress: Progress = lambda text: None,
) -> MeasuredCost:
    """Measure the compute of one device by running the runtime's own code on it.

    Layers are alike, so only a few are run; attention to a prefix is run by itself, on the queries of a real layer. If
    layers have different masks (sliding windows), hold states or follow each other in several ways, each kind is run,
    and weighted by how often it comes. Layers that take tokens after a given state one by one are run both ways.

    Args:
        chunks: chunk lengths in tokens, ascending.
        prefixes: prefix lengths in tokens, ascending.
        repeats: runs per point; the median counts.
        places: of the model to plan for, if `model` has fewer layers of the same kinds.
        probe_layers: places that are run, more if some kind needs more.
        on_progress: called before each point with a text that describes it.
    """
    kinds = _layer_kinds(model, max(chunks) + max(prefixes, default=0))
    places, run = places or Places.of_model(model), Places.of_model(model)
    keys_at = [place for place, (kind, _) in enumerate(model.order) if kind == "kv"]
    steps = Counter(places.alike(place) for place in range(len(places) - 1))
    states = Counter(num_bytes for num_bytes in places.state_bytes if num_bytes)
    needed = [*(keys_at[layers[0]] for layers in kinds), *_first_of_each(map(run.alike, range(len(run) - 1)), steps)]
    depth = min(len(run), max([probe_layers, *(place + 2 for place in needed)]))
    first, between, own, prefix, state, later = {}, {}, {}, {}, {}, {}
    for chunk in chunks:
        on_progress(f"chunk of {chunk} tokens")
        # Inputs are kept in the warm-up run only: tensors that stay allocated make the next layers slower.
        inputs = _run_layers(model, chunk, depth, keep=[layers[0] for layers in kinds]).inputs
        runs = [_run_layers(model, chunk, depth) for _ in range(repeats)]
        first[chunk] = statistics.median(each.first_s for each in runs)
        between[chunk] = statistics.median(_mean(each.between_s, run.alike, steps) for each in runs)
        if states:
            state[chunk] = _states_s(runs, run, states)
        if model.gives_one_by_one:
            runs = [_run_layers(model, chunk, depth, start=1) for _ in range(WARMUPS + repeats)]
            later[chunk] = _states_s(runs[WARMUPS:], run, states)
        per_kind = [_attention_s(model, inputs[layers[0]], layers[0], chunk, 0, repeats) for layers in kinds]
        own[chunk] = _weighted(per_kind, kinds)
        for length in prefixes:
            on_progress(f"chunk of {chunk} tokens after {length}")
            per_kind = [_attention_s(model, inputs[layers[0]], layers[0], chunk, length, repeats) for layers in kinds]
            prefix[chunk, length] = _weighted(per_kind, kinds)
    shortest = min(chunks)
    whole_runs = [_run_layers(model, shortest, len(run)) for _ in range(WARMUPS + repeats)]
    last_s = statistics.median(each.last_s for each in whole_runs[WARMUPS:])
    head_s = max(0.0, last_s - (between[shortest] - first[shortest]))
    # After the last place come the rest of its layer, without the next layer's projections, and the logits.
    last = {chunk: max(0.0, between[chunk] - first[chunk]) + head_s for chunk in chunks}
    if model.last_layer is not None:  # it computes that for the last token alone, whatever the chunk
        last = dict.fromkeys(chunks, last_s)
    return MeasuredCost(
        first_s=first,
        between_s=between,
        own_s=own,
        prefix_s=prefix,
        last_s=last,
        state_s=state,
        later_s=later,
        num_places=len(places),
        states=places.states,
    )


class _Run:
    """Seconds of one forward through a few places: to the first place, inside each, from each to the next, and after
    the last one that ran."""

    def __init__(self, probe: _Probe, clock: Clock) -> None:
        end = clock.mark()
        known = {place: clock.seconds(mark) for place, mark in probe.known.items()}
        ended = {place: clock.seconds(mark) for place, mark in probe.ended.items()}
        depth = len(known)
        self.first_s = known[0] - clock.seconds(probe.began)
        self.last_s = clock.seconds(end) - ended[depth - 1]
        self.between_s = {place: max(0.0, known[place + 1] - ended[place]) for place in range(depth - 1)}
        if not self.between_s:  # of one place: its next would begin as it does
            self.between_s = {0: self.first_s + self.last_s}
        self.inside_s = {place: ended[place] - known[place] for place in known if ended[place] > known[place]}
        self.inputs = probe.inputs


def _run_layers(model: Model, chunk: int, depth: int, keep: Collection[int] = (), start: int = 0) -> _Run:
    """Run a chunk through the first places, after `start` tokens that are not timed."""
    clock, spans = clock_for(model.device), [(0, start + chunk)] * model.num_layers
    cache = KVCache(Slabs.empty(model.kv_shapes, batch=1, spans=spans, num_slabs=1, device=model.device))
    cache.states = model.empty_states()
    ids_1S = torch.arange(start + chunk, device=model.device)[None] % model.vocab_size
    if start:
        model.forward(ids_1S[:, :start], CausalAttention(cache, start=0, pads=[0]), start=0, pads=[0])
    probe = _Probe(model, clock, depth, keep)
    attention = CausalAttention(cache, start=start, pads=[0], hooks=[probe])
    with suppress(ForwardEndsHere):
        model.forward(ids_1S[:, start:], attention, start=start, pads=[0])
    return _Run(probe, clock)


def _states_s(runs: Sequence[_Run], places: Places, numbers: Mapping[int, int]) -> float:
    """Seconds of a place that holds a state: the median of the runs, the mean of the places of `numbers` by bytes."""
    return statistics.median(_mean(each.inside_s, places.state_bytes.__getitem__, numbers) for each in runs)


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


def _first_of_each(kinds: Iterable[T], wanted: Container[T]) -> list[int]:
    """The first place of each kind that is wanted."""
    first: dict[T, int] = {}
    for place, kind in enumerate(kinds):
        if kind in wanted:
            first.setdefault(kind, place)
    return list(first.values())


def _mean(seconds: Mapping[int, float], kind_of: Callable[[int], T], numbers: Mapping[T, int]) -> float:
    """Mean over all places of the model to plan for, of the median of each kind.

    Args:
        seconds: measured, by place.
        kind_of: kind of a measured place.
        numbers: of the places of each kind; none for steps of a model of one place.
    """
    by_kind: dict[T, list[float]] = {}
    for place, each in seconds.items():
        by_kind.setdefault(kind_of(place), []).append(each)
    if not numbers:
        return statistics.median(seconds.values())
    weights = {kind: numbers.get(kind, 0) for kind in by_kind}
    assert any(weights.values()), f"none of {set(numbers)} was measured, only {set(by_kind)}"
    medians = {kind: statistics.median(found) for kind, found in by_kind.items()}
    return sum(medians[kind] * weight for kind, weight in weights.items()) / sum(weights.values())


def _weighted(seconds: list[float], kinds: list[list[int]]) -> float:
    return sum(each * len(layers) for each, layers in zip(seconds, kinds, strict=True)) / max(1, sum(map(len, kinds)))


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
        policies: cache policies of each rank; by default none.

    Attributes:
        best_s: the lowest cost so far.
        spread: of repeated runs, by boundaries: (largest - smallest) / median, or that of the ratios.
    """

    def __init__(
        self,
        model: Model,
        ranks: Ranks,
        prefill: PrefillOptions,
        num_tokens: int,
        repeats: int = 3,
        policies: RankPolicies | None = None,
    ) -> None:
        self._repeats = repeats
        self._partition = even(num_tokens, ranks.num_stages)
        self._engine = Engine(model, ranks, prefill=prefill, partition=lambda *_: self._partition, policies=policies)
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
