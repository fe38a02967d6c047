"""The options of a plan, as dataclasses that check themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from partitioner.cost.known_gpus import NAMES, KnownGPU, known_gpu
from partitioner.cost.link import Link
from partitioner.meshes.units import bytes_per_s, flops
from partitioner.options import MAX_RANKS, MAX_TOKENS
from policies.byte_size import num_bytes
from runahead.config import Attention, DecodeOptions, ModelOptions, PrefillOptions, Speculative, require


@dataclass(kw_only=True)
class PlanRanks:
    """`tensor`: shares of a stage, as `ranks.tensor` of a run; None for what is best."""

    tensor: int | None = None

    def __post_init__(self) -> None:
        require(self.tensor is None or self.tensor >= 1, "ranks.tensor", self.tensor, "must be at least 1")


@dataclass(kw_only=True)
class PlanPrefill:
    """Options of the prefill that change its cost, as of a run."""

    attention: Attention = Attention.causal
    threshold: float = PrefillOptions.threshold
    density: float | None = None
    stride: int = PrefillOptions.stride
    exact_layers: list[int] = field(default_factory=list)
    speculative: Speculative = Speculative.none
    speculative_share: float = PrefillOptions.speculative_share
    speculative_chunk: int = PrefillOptions.speculative_chunk
    speculative_ahead: int = PrefillOptions.speculative_ahead
    speculative_layers: int | None = None
    wire_bits: int | None = None

    def __post_init__(self) -> None:
        run = self.of_run()
        self.attention, self.speculative = run.attention, run.speculative
        if self.speculative is Speculative.model:
            raise ValueError("prefill.speculative=model is not planned, as its draft is not known; use layers")
        if self.attention is Attention.dense:
            raise ValueError("prefill.attention=dense is for prefill=tsp, which is not planned; use causal")

    def of_run(self) -> PrefillOptions:
        """The options of a run. Raises: ValueError: one of them is out of range."""
        return PrefillOptions(**vars(self))


@dataclass(kw_only=True)
class PlanLinks:
    """Links of a plan, by their stated rates in one direction.

    Attributes:
        inside: of each GPU to the others of its node; by default the known GPU's.
        between: of one network card of a node, which its GPUs share.
        nics: network cards of a node.
        inside_us, between_us: latencies in microseconds.
    """

    inside: str | None = None
    between: str | None = None
    nics: int = 1
    inside_us: float = 10.0
    between_us: float = 20.0

    def __post_init__(self) -> None:
        for name in ("inside", "between"):
            if getattr(self, name) is not None:
                bytes_per_s(getattr(self, name), f"link.{name}")
        require(self.nics >= 1, "link.nics", self.nics, "must be at least 1")
        for name in ("inside_us", "between_us"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"link.{name}", value, "must be microseconds of at least 0")


@dataclass(kw_only=True)
class Efficiency:
    """Shares of the stated figures that are reached, and the overhead of a step of a layer in microseconds.

    The defaults are assumed: those of matrix products and attention are what docs/studies/paper_relations.md assumes
    of an A100 (200 and 120 of 312 TFLOP/s), and so is the overhead. Measure a device to have its own.
    """

    matmul: float = 0.64
    attention: float = 0.38
    memory: float = 0.8
    link: float = 0.8
    step_us: float = 20.0

    def __post_init__(self) -> None:
        for name in ("matmul", "attention", "memory", "link"):
            value = getattr(self, name)
            require(0 < value <= 1, f"efficiency.{name}", value, "must be a share above 0 and at most 1")
        require(0 <= self.step_us < math.inf, "efficiency.step_us", self.step_us, "must be microseconds of at least 0")


@dataclass(kw_only=True)
class PlanRun:
    """Options of one run of partitioner/plan.py.

    Attributes:
        policy: name and options of the cache policy that says which KV heads stream, as of a run.
        gpus, nodes: GPUs in all, and the nodes that they are in.
        tokens, batch: length and number of prompts that run at once.
        new_tokens: `generation.max_new_tokens`.
        device: name of a known GPU.
        memory, flops, bandwidth: of a device, in place of the known ones.
        compute: file in which python -m partitioner.search kept the measured compute of one device.
        reserve: memory of a GPU that libraries and the driver take.
        report, picture: files to write.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    ranks: PlanRanks = field(default_factory=PlanRanks)
    prefill: PlanPrefill = field(default_factory=PlanPrefill)
    policy: dict[str, Any] = field(default_factory=lambda: {"name": "full", "positions": "original"})
    link: PlanLinks = field(default_factory=PlanLinks)
    efficiency: Efficiency = field(default_factory=Efficiency)
    decode: DecodeOptions = field(default_factory=DecodeOptions)
    gpus: int = 1
    nodes: int = 1
    tokens: int | None = None
    batch: int = 1
    new_tokens: int = 256
    device: str | None = None
    memory: str | None = None
    flops: str | None = None
    bandwidth: str | None = None
    compute: str | None = None
    reserve: str = "2GiB"
    report: str | None = None
    picture: str | None = None

    def __post_init__(self) -> None:
        require(1 <= self.gpus <= MAX_RANKS, "gpus", self.gpus, f"must be from 1 to {MAX_RANKS:,}")
        require(1 <= self.nodes <= self.gpus, "nodes", self.nodes, "must be at least 1 and at most the number of GPUs")
        require(self.gpus % self.nodes == 0, "gpus", self.gpus, f"must be a multiple of nodes={self.nodes}")
        if self.tokens is None:
            raise ValueError("tokens=<n> is needed: the length of the prompt")
        for name, most in (("tokens", MAX_TOKENS), ("batch", MAX_TOKENS), ("new_tokens", MAX_TOKENS)):
            value = getattr(self, name)
            require(1 <= value <= most, name, value, f"must be from 1 to {most:,}")
        if self.nodes > 1 and self.link.between is None:
            raise ValueError("link.between=<rate> is needed with several nodes, such as link.between=200Gbit/s")
        _ = self.known  # an unknown name is refused
        for name, kind in (("memory", num_bytes), ("flops", flops), ("bandwidth", bytes_per_s), ("reserve", num_bytes)):
            if getattr(self, name) is not None:
                kind(getattr(self, name), name)
        needed = ["memory", "bandwidth", *(() if self.compute else ("flops",))]
        if self.prefill.speculative is not Speculative.none and self.ranks.tensor not in (None, 1):
            raise ValueError(
                f"prefill.speculative has the whole draft on each rank, not with ranks.tensor={self.ranks.tensor}; "
                "leave one of them out"
            )
        missing = [f"{name}=" for name in needed if self.known is None and getattr(self, name) is None]
        if missing:
            raise ValueError(f"{', '.join(missing)} must be given without a device=, such as device=h100")
        if self.gpus > self.nodes and self.known is None and self.link.inside is None:
            raise ValueError("link.inside=<rate> must be given without a device=, such as link.inside=50GB/s")

    @property
    def known(self) -> KnownGPU | None:
        """Stated figures of the device; None without one. Raises: ValueError: no such device is known."""
        if self.device is None:
            return None
        found = known_gpu(self.device)
        if found is None:
            shown = " ".join(self.device.split())[:60]
            raise ValueError(
                f"device={shown} is not known; it may be {', '.join(NAMES)}, or give memory=, flops= and bandwidth="
            )
        return found

    @property
    def on_gpus(self) -> bool:
        """Whether the ranks compute on GPUs, and so send over NCCL."""
        return self.known is not None

    @property
    def stated(self) -> KnownGPU:
        """Figures of the device from the table, overridden by the options; unknown figures that nothing needs are 0."""
        known = self.known or KnownGPU(memory_bytes=0, memory_Bps=0.0, matmul_flops=0.0, peer_Bps=0.0)
        return KnownGPU(
            memory_bytes=known.memory_bytes if self.memory is None else num_bytes(self.memory, "memory"),
            memory_Bps=known.memory_Bps if self.bandwidth is None else bytes_per_s(self.bandwidth, "bandwidth"),
            matmul_flops=known.matmul_flops if self.flops is None else flops(self.flops, "flops"),
            peer_Bps=known.peer_Bps if self.link.inside is None else bytes_per_s(self.link.inside, "link.inside"),
        )

    def links(self) -> tuple[Link, Link | None]:
        """Links inside a node and between nodes, with what they sustain."""
        link, share = self.link, self.efficiency.link
        # A lone GPU of a node has no link inside it, and none is used.
        inside = Link(latency_s=link.inside_us * 1e-6, bandwidth_Bps=share * self.stated.peer_Bps or math.inf)
        if link.between is None:
            return inside, None
        between_Bps = share * bytes_per_s(link.between, "link.between")
        return inside, Link(latency_s=link.between_us * 1e-6, bandwidth_Bps=between_Bps)
