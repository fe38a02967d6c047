"""Table of the variants that launch/bench.py compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from policies.base import Policy
from policies.pyramidinfer import PyramidInfer

MEAN_KEEP = 0.6
"""Mean share of the prompt's KV cache that PyramidInfer keeps."""


class Split(Enum):
    """Source of a variant's context partition."""

    own = "the strategy's own"
    given = "partition=..."
    even = "even"
    searched = "of the lookup table, else searched for these ranks and this link"
    free = "searched as if K,V travelled for free"


class Traffic(Enum):
    """Data sent between ranks, which determines the formula for its bytes."""

    nothing = "nothing"
    chain = "the sum of the inner boundaries"
    gathered = "(p - 1) C"
    wanted = "of zigzag chunks those that the receiver attends to: 3/4 (p - 1) C, less in the last layer"
    narrowed = "as chain, of the tokens that PyramidInfer leaves in each layer"
    activations = "hidden states, not K,V"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A variant to compare.

    Attributes:
        what: short description for readers.
        prefill: options of `PrefillOptions`; None if the benchmark itself runs the variant, not the engine.
        split: source of its context partition.
        traffic: data that it sends.
        narrows: whether PyramidInfer is applied, so that the output is not exact.
    """

    what: str
    prefill: Mapping[str, str] | None = field(default_factory=dict)
    split: Split = Split.own
    traffic: Traffic = Traffic.chain
    narrows: bool = False

    @property
    def policies(self) -> list[Policy]:
        """Cache policies, the same on every rank."""
        return [PyramidInfer(mean_keep=MEAN_KEEP)] if self.narrows else []


def _chain(what: str, split: Split, **prefill: str) -> Variant:
    return Variant(what=what, prefill={"name": "kv_runahead", **prefill}, split=split)


def _tsp(what: str, attention: str) -> Variant:
    return Variant(what=what, prefill={"name": "tsp", "attention": attention}, traffic=Traffic.gathered)


def _zigzag(what: str, exchange: str, traffic: Traffic = Traffic.gathered) -> Variant:
    return Variant(what=what, prefill={"name": "zigzag", "exchange": exchange}, traffic=traffic)


VARIANTS: dict[str, Variant] = {
    "single": Variant(what="one rank alone", prefill={"name": "single"}, traffic=Traffic.nothing),
    "kv_runahead": _chain("KV-Runahead, split as partition= says", Split.given),
    "kvr_e": _chain("KV-Runahead, even chunks", Split.even),
    "kvr_s": _chain("KV-Runahead, searched split", Split.searched),
    "kvr_free": _chain("KV-Runahead, split searched for free links", Split.free),
    "kvr_direct": _chain("KV-Runahead, searched split, direct transfer", Split.searched, transfer="direct"),
    "tsp": _tsp("TSP, causal kernel (tsp_causal)", "causal"),
    "tsp_causal": _tsp("TSP, causal kernel", "causal"),
    "tsp_dense": _tsp("TSP as published: dense attention, then the mask", "dense"),
    "zigzag": _zigzag("zigzag chunks, all-gather", "all_gather"),
    "zigzag_ring": _zigzag("zigzag chunks, ring", "ring"),
    "zigzag_direct": _zigzag("zigzag chunks, what is attended to", "direct", Traffic.wanted),
    "compute_only": Variant(
        what="TTFT(p), measured: the chunks of kvr_s with all K,V there",
        prefill={"name": "kv_runahead"},
        split=Split.searched,
        traffic=Traffic.nothing,
    ),
    "single_pyramidinfer": Variant(
        what=f"one rank alone, PyramidInfer keeping {MEAN_KEEP:.0%}",
        prefill={"name": "single"},
        traffic=Traffic.nothing,
        narrows=True,
    ),
    "kvr_pyramidinfer": Variant(
        what=f"KV-Runahead, searched split, PyramidInfer keeping {MEAN_KEEP:.0%} on every rank",
        prefill={"name": "kv_runahead"},
        split=Split.searched,
        traffic=Traffic.narrowed,
        narrows=True,
    ),
    "tensor": Variant(
        what="tensor parallelism of transformers",
        prefill={"name": "tensor"},
        traffic=Traffic.activations,
    ),
    "plain_transformers": Variant(
        what="transformers in one process with the threads of all ranks", prefill=None, traffic=Traffic.nothing
    ),
}

BASELINE, OURS, BOUND = "single", "kvr_s", "compute_only"
"""Names of the baseline of speed-ups, of the variant that is compared with others, and of the lower bound on TTFT."""


def check_names(names: list[str]) -> None:
    """Check variant names. Raises: ValueError, in one sentence, for an unknown or a repeated name."""
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ValueError(f"bench.variants has {', '.join(unknown)}, which is not one of {', '.join(VARIANTS)}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"bench.variants=[{','.join(names)}] must name at least one variant, and each only once")
