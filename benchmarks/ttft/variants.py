"""Table of the variants that launch/bench.py compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policies.base import Policy

MEAN_KEEP = 0.6
"""Mean share of the prompt's KV cache that PyramidInfer keeps."""


class Split(Enum):
    """Source of a variant's context partition."""

    own = "the strategy's own"
    given = "partition=..."
    even = "even"
    searched = "of the lookup table, else searched for these ranks and this link, as a pipeline's chunks always are"
    free = "searched as if K,V travelled for free"


class Traffic(Enum):
    """Data sent between ranks, which determines the formula for its bytes."""

    nothing = "nothing"
    chain = "the sum of the inner boundaries"
    gathered = "(p - 1) C"
    wanted = "of zigzag chunks those that the receiver attends to: 3/4 (p - 1) C, less in the last layer"
    narrowed = "as chain, of the tokens that PyramidInfer leaves in each layer"
    streamed = "as chain, but of heads that stream the first and the last tokens alone"
    activations = "hidden states, not K,V"
    passed = "hidden states, (p - 1) C of them"


@dataclass(frozen=True)
class Variant:
    """A variant to compare.

    Attributes:
        what: short description for readers.
        prefill: options of `PrefillOptions`; None if the benchmark itself runs the variant, not the engine.
        split: source of its context partition.
        traffic: data that it sends.
        narrows: whether PyramidInfer is applied.
        streams: whether every second KV head sees, and sends, the first and the last tokens alone.
    """

    what: str
    prefill: Mapping[str, str | int] | None
    split: Split = Split.own
    traffic: Traffic = Traffic.nothing
    narrows: bool = False
    streams: bool = False

    @property
    def wire_bits(self) -> int | None:
        """As `prefill.wire_bits`."""
        bits = (self.prefill or {}).get("wire_bits")
        return None if bits is None else int(bits)

    @property
    def is_exact(self) -> bool:
        """Whether the output is that of the whole prompt, but for rounding."""
        return not self.narrows and not self.streams and self.wire_bits is None

    @property
    def policies(self) -> list[Policy]:
        """Cache policies, the same on every rank."""
        from policies.pyramidinfer import PyramidInfer  # imports torch, which --help need not wait for
        from policies.streaming_heads import EverySecondHead

        if self.streams:
            return [EverySecondHead()]
        return [PyramidInfer(mean_keep=MEAN_KEEP)] if self.narrows else []


ALONE, CHAIN, DIRECT_CHAIN = {"name": "single"}, {"name": "kv_runahead"}, {"name": "kv_runahead", "transfer": "direct"}
TSP, TSP_DENSE = {"name": "tsp", "attention": "causal"}, {"name": "tsp", "attention": "dense"}
ZIGZAG, ZIGZAG_RING, ZIGZAG_DIRECT = (
    {"name": "zigzag", "exchange": exchange} for exchange in ("all_gather", "ring", "direct")
)
PIPELINE = {"name": "pipeline"}
KEEPING = f"PyramidInfer keeping {MEAN_KEEP:.0%}"

VARIANTS = {
    "single": Variant("one rank alone", ALONE),
    "kv_runahead": Variant("KV-Runahead, split as partition= says", CHAIN, Split.given, Traffic.chain),
    "kvr_e": Variant("KV-Runahead, even chunks", CHAIN, Split.even, Traffic.chain),
    "kvr_s": Variant("KV-Runahead, searched split", CHAIN, Split.searched, Traffic.chain),
    "kvr_free": Variant("KV-Runahead, split searched for free links", CHAIN, Split.free, Traffic.chain),
    "kvr_direct": Variant("KV-Runahead, searched split, direct transfer", DIRECT_CHAIN, Split.searched, Traffic.chain),
    "kvr_8": Variant("KV-Runahead, searched split, 8 bits", {**CHAIN, "wire_bits": 8}, Split.searched, Traffic.chain),
    "kvr_4": Variant("KV-Runahead, searched split, 4 bits", {**CHAIN, "wire_bits": 4}, Split.searched, Traffic.chain),
    "kvr_streaming": Variant(
        "KV-Runahead, searched split, half of the KV heads see 64 first and 256 last tokens",
        {**CHAIN, "attention": "streaming_heads"},
        Split.searched,
        Traffic.streamed,
        streams=True,
    ),
    "tsp": Variant("TSP, causal kernel (tsp_causal)", TSP, Split.own, Traffic.gathered),
    "tsp_causal": Variant("TSP, causal kernel", TSP, Split.own, Traffic.gathered),
    "tsp_dense": Variant("TSP as published: dense attention, then the mask", TSP_DENSE, Split.own, Traffic.gathered),
    "zigzag": Variant("zigzag chunks, all-gather", ZIGZAG, Split.own, Traffic.gathered),
    "zigzag_ring": Variant("zigzag chunks, ring", ZIGZAG_RING, Split.own, Traffic.gathered),
    "zigzag_direct": Variant("zigzag chunks, what is attended to", ZIGZAG_DIRECT, Split.own, Traffic.wanted),
    "compute_only": Variant("TTFT(p), measured: the chunks of kvr_s with all K,V there", CHAIN, Split.searched),
    "single_pyramidinfer": Variant(f"one rank alone, {KEEPING}", ALONE, narrows=True),
    "kvr_pyramidinfer": Variant(
        f"KV-Runahead, searched split, {KEEPING} on every rank", CHAIN, Split.searched, Traffic.narrowed, narrows=True
    ),
    "tensor": Variant("tensor parallelism of transformers", {"name": "tensor"}, Split.own, Traffic.activations),
    "pipeline": Variant("pipeline of layers, searched chunks", PIPELINE, Split.searched, Traffic.passed),
    "pipeline_even": Variant("pipeline of layers, 8 even chunks per rank", PIPELINE, Split.even, Traffic.passed),
    "plain_transformers": Variant("transformers in one process with the threads of all ranks", None),
}

BASELINE, OURS, BOUND = "single", "kvr_s", "compute_only"
"""Names of the baseline of speed-ups, of the variant that is compared with others, and of the lower bound on TTFT."""
