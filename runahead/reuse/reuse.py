"""Collects the segments that a batch of prompts reuses: from the store, or encoded if they are missing.

A segment is encoded by one forward over its tokens at their positions, which see no other segment. Several stages that
share a folder encode some of the missing segments each. During prefill, segments are read in place, once for all
prompts of a batch that use them; for decoding they are concatenated.
"""

# Legend: N query heads, K kv heads, C tokens of the segment and of its context before it, H head dim, V value dim.

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from policies.retriever import Retriever
from policies.reuse import GivenPrompt, ReusingPrompt, Segment, SegmentUse
from runahead.attention.base import ForwardEndsHere
from runahead.attention.op import nothing
from runahead.cache.attention import CausalAttention, End
from runahead.features.refused import check
from runahead.features.setup import SEGMENTS, Setup
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks
from runahead.report import GenerationBatch, ReuseReport
from runahead.reuse.cache import reusing
from runahead.reuse.reused_kv import ReusedKV, ReusedPart
from runahead.reuse.store import Found, SegmentStore
from runahead.reuse.tiers.layer_rows import Layers, RecomputedRows


class Reuse:
    """The segments that the prompts of one call reuse on this rank.

    Args:
        prompts: prompts of the batch, some of which may reuse nothing.
        store: where segments are kept.
        after_layer: called after each layer of a segment that is encoded or clustered, on all ranks of a stage alike.
    """

    def __init__(
        self,
        prompts: Sequence[GivenPrompt],
        store: SegmentStore,
        model: Model,
        ranks: Ranks,
        after_layer: Callable[[], None] = nothing,
    ) -> None:
        self.prompts, self.store = [as_reusing(prompt) for prompt in prompts], store
        self.model, self.ranks = model, ranks
        self.report = ReuseReport()
        self.encoded: set[str] = set()
        self._after_layer = after_layer
        self._held: dict[str, list[Tensor]] = {}
        self._clusters: dict[str, Sequence[Tensor]] = {}

    @property
    def segments(self) -> list[Segment]:
        """All segments in use, each once."""
        found = {use.segment.content_key: use.segment for prompt in self.prompts for use in prompt.all_uses}
        return list(found.values())

    def encode_missing(self, *, in_stage: bool = False) -> None:
        """Encode the segments that are in no tier of the store; `encoded` are those of this rank. All ranks call it.

        Args:
            in_stage: the ranks of this stage call it, and encode what they lack.

        Raises:
            ValueError: as `encode_segment`.
        """
        began_s = time.perf_counter()
        encoded, self._held = encode_missing(
            self.segments, self.store, self.model, self.ranks, in_stage=in_stage, after_layer=self._after_layer
        )
        self.encoded = {segment.content_key for segment in encoded}
        self.report.encoded_tokens = sum(len(segment.ids) for segment in encoded)
        self.report.encode_s = time.perf_counter() - began_s if encoded else 0.0

    def fetch(self, retriever: Retriever | None = None) -> ReusedKV:
        """Begin to bring keys and values to the device for this call's attention, which waits for each layer.

        What is found lost in a layer is encoded again there and then. Where several ranks encode together all is
        waited for here, as are clusters.

        Args:
            retriever: policy of this rank's indices, whose clusters are stored with the segments.

        Raises:
            ValueError: as `encode_segment`.
        """
        began_s = time.perf_counter()
        all_found = {segment.content_key: self.store.find(segment) for segment in self.segments}
        found_clusters: dict[str, Found | None] = {}
        if retriever is not None and (key := retriever.clusters_key) is not None:
            found_clusters = {each.content_key: self.store.find(each, key) for each in self.segments}
        report, found_s = self.report, time.perf_counter()
        report.lookup_s = found_s - began_s
        unclustered = _lost(found_clusters)
        # Lost since they were looked up, by another process, or damaged.
        lost = _lost(all_found, waits=self.ranks.num_shares > 1) - self._held.keys()
        of_stage = self.ranks.gather_in_stage((lost, unclustered), "the segments that are to be encoded or clustered")
        lost, unclustered = (set[str]().union(*sets) for sets in zip(*of_stage, strict=True))
        report.copy_s = time.perf_counter() - found_s
        layers: dict[str, Sequence[Tensor]] = {}
        mapped: set[str] = set()
        for segment in self.segments:
            key = segment.content_key
            found = all_found[key]
            if key in lost:  # also on a rank that has it, since a stage encodes together
                layers[key] = self._encoded_again(segment)
            elif found is not None:
                layers[key] = RecomputedRows(found.layers_TKX, partial(self._encoded_again, segment))
                if found.is_mapped:
                    mapped.add(key)
                bytes_of = self.report.found_bytes
                bytes_of[found.tier.value] = bytes_of.get(found.tier.value, 0) + found.num_bytes
            else:
                layers[key] = self._held.pop(key)
        self._clusters = {
            key: found.layers_TKX
            for key, found in found_clusters.items()
            if found is not None and key not in unclustered
        }
        if retriever is not None and unclustered:
            began_s = time.perf_counter()
            for segment in self.segments:
                if (key := segment.content_key) in unclustered:  # also on a rank that has them, as above
                    self._clusters[key] = self._clustered(retriever, segment, layers[key])
            report.cluster_s = time.perf_counter() - began_s
        report.cached_tokens = sum(prompt.num_cached for prompt in self.prompts)
        longest = max(len(prompt.new_ids) for prompt in self.prompts)
        rows = [[0] * (longest - len(prompt.new_ids)) + list(prompt.new_positions) for prompt in self.prompts]
        ends = [prompt.end for prompt in self.prompts]
        return ReusedKV(
            parts=self._parts([prompt.uses for prompt in self.prompts], layers, mapped),
            positions_BS=torch.tensor(rows),
            ends=ends,
            blended=self._parts([prompt.blended for prompt in self.prompts], layers, mapped),
            shares=[prompt.share for prompt in self.prompts],
        )

    def _encoded_again(self, segment: Segment) -> list[Tensor]:
        """Encode a segment that was lost, perhaps inside a layer of a prefill."""
        layers_TKX = encode_segment(self.model, segment, self.ranks, self._after_layer)
        self.store.put(segment, layers_TKX)
        self.encoded.add(segment.content_key)
        return layers_TKX

    def _clustered(self, retriever: Retriever, segment: Segment, layers_TKX: Sequence[Tensor]) -> list[Tensor]:
        """Cluster a segment's keys on the device, layer by layer, and store the clusters."""
        assert retriever.clusters_key is not None, retriever
        clusters = list[Tensor]()
        for layer, (kv_TKX, shape) in enumerate(zip(layers_TKX, self.model.kv_shapes, strict=True)):
            clusters.append(retriever.clusters_of(layer, kv_TKX[..., : shape.key_dim]))
            self.ranks.progress()
            self._after_layer()
        self.store.put(segment, clusters, retriever.clusters_key)
        return clusters

    def add_to(self, batch: GenerationBatch) -> None:
        """Add every rank's report of reuse to the result. All ranks call it."""
        self.store.wait_for_copies()  # so that what was stored is on disk when a run ends
        self.report.stored_bytes = self.store.bytes_by_tier()
        every = self.ranks.gather(self.report, "what was reused")
        for rank, report in zip(batch.ranks, every, strict=True):
            rank.reuse = replace(report, computed_tokens=rank.chunk_tokens)

    def _parts(
        self, uses_B: Sequence[Sequence[SegmentUse]], layers: dict[str, Sequence[Tensor]], mapped: set[str]
    ) -> list[ReusedPart]:
        """The parts of segments in use, each once for all rows that use it.

        Args:
            uses_B: of each row.
            layers: keys and values by segment.
            mapped: segments that are mapped from files.
        """
        rows: dict[tuple[str, range], list[int]] = {}
        segments = {segment.content_key: segment for segment in self.segments}
        for row, uses in enumerate(uses_B):
            for use in uses:
                for part in use.parts:
                    rows.setdefault((use.segment.content_key, part), []).append(row)
        return [
            ReusedPart(
                layers_TKX=_Part(layers[key], part),
                positions_T=torch.tensor(segments[key].stored_positions[part.start : part.stop]),
                rows=tuple(users),
                is_mapped=key in mapped and self.model.device.type == "cpu",
                segment=key,
                first=part.start,
                clusters_TKx=self._clusters.get(key),
            )
            for (key, part), users in rows.items()
        ]


class _Part(Layers):
    """Some tokens of each layer, which is waited for when it is read."""

    def __init__(self, layers_TKX: Sequence[Tensor], part: range) -> None:
        self._layers_TKX, self._part = layers_TKX, part

    def __len__(self) -> int:
        return len(self._layers_TKX)

    def layer(self, number: int) -> Tensor:
        return self._layers_TKX[number][self._part.start : self._part.stop]


def _lost(all_found: dict[str, Found | None], *, waits: bool = True) -> set[str]:
    """Keys of what was not found; if it `waits` for all layers, also of what is found to be lost then."""
    return {key for key, found in all_found.items() if found is None or (waits and not found.layers_TKX.are_whole())}


def encode_segment(
    model: Model, segment: Segment, ranks: Ranks | None = None, after_layer: Callable[[], None] = nothing
) -> list[Tensor]:
    """Compute keys and values (T, K, H + V) of the segment's stored tokens in each layer.

    Args:
        ranks: notified of this rank's progress.
        after_layer: called after each layer but the last.

    Raises:
        ValueError: the model does not support reuse, the segment exceeds its positions, or memory is too small.
    """
    check(Setup(model=model, segments=SEGMENTS))
    ids = (*segment.context_ids, *segment.ids)
    positions = (*segment.context_positions, *segment.positions)
    if model.max_positions is not None and positions[-1] >= model.max_positions:
        raise ValueError(
            f"segment {segment.name} reaches position {positions[-1] + 1:,} of the {model.max_positions:,} that model "
            f"{model.name} has; shorten it"
        )
    cache = model.empty_cache(len(ids))
    at_positions = ReusedKV(parts=[], positions_BS=torch.tensor([positions]), ends=[positions[-1] + 1])

    def on_layer() -> None:
        if ranks is not None:
            ranks.progress()
        after_layer()

    ends: End = (model.num_layers - 1, "saved")
    attention = CausalAttention(reusing(cache.slabs, at_positions), start=0, pads=[0], ends=ends, on_layer=on_layer)
    with suppress(ForwardEndsHere):
        model.forward(torch.tensor([ids], device=model.device), attention, start=0, pads=[0], length=positions[-1] + 1)
    stored = torch.tensor(segment.stored, device=model.device) + len(segment.context_ids)
    # A copy even if all tokens are stored, since the cache's memory has another size and layout.
    return [cache.layer(layer).slab_TBKX[:, 0].index_select(0, stored) for layer in range(model.num_layers)]


def encode_missing(
    segments: Sequence[Segment],
    store: SegmentStore,
    model: Model,
    ranks: Ranks,
    *,
    in_stage: bool = False,
    after_layer: Callable[[], None] = nothing,
) -> tuple[list[Segment], dict[str, list[Tensor]]]:
    """Encode the segments that are in no tier of the store. All ranks call it, or with `in_stage` those of a stage.

    With a shared folder each stage encodes some of them, if all are asked. The ranks of a stage encode together,
    each its heads.

    Returns:
        the segments that this rank encoded; keys and values of those for which no tier has room, by content key.

    Raises:
        ValueError: as `encode_segment`.
    """
    missing = {segment.content_key for segment in segments if segment not in store}
    gather = ranks.gather_in_stage if in_stage else ranks.gather
    anywhere = set().union(*gather(missing, "the segments that are to be encoded"))
    longest_first = sorted(
        (segment for segment in segments if segment.content_key in anywhere), key=lambda each: -len(each.ids)
    )
    encoded: list[Segment] = []
    held: dict[str, list[Tensor]] = {}

    def is_missing(segment: Segment) -> bool:
        """Whether a rank of this stage lacks a segment."""
        lacks = segment not in store and segment.content_key not in held
        return any(ranks.gather_in_stage(lacks, "whether a segment is to be encoded"))

    def encode(segment: Segment) -> None:
        layers_TKX = encode_segment(model, segment, ranks, after_layer)
        store.put(segment, layers_TKX)
        encoded.append(segment)
        if segment not in store:
            held[segment.content_key] = layers_TKX

    shares_work = not in_stage and ranks.num_stages > 1
    if shares_work and all(ranks.gather(store.shares_disk, "whether the store is shared")):
        for segment in longest_first[ranks.stage :: ranks.num_stages]:
            if is_missing(segment):
                encode(segment)
        store.wait_for_copies()  # so that the others find its files
        ranks.barrier("all segments to be encoded")
    for segment in longest_first:
        if is_missing(segment):
            encode(segment)
    return encoded, held


def as_reusing(prompt: GivenPrompt) -> ReusingPrompt:
    """Token ids as a prompt that reuses nothing."""
    if isinstance(prompt, ReusingPrompt):
        return prompt
    return ReusingPrompt(uses=(), new_ids=tuple(prompt), new_positions=tuple(range(len(prompt))))
