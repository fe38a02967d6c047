"""JSON lines of a benchmark: their fields, and the keys that identify measurements."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.harness import lines, machine
from benchmarks.harness.lines import Line
from benchmarks.ttft.bounds import Bounds
from benchmarks.ttft.measurement import Measurement
from benchmarks.ttft.options import BenchRun, Network
from benchmarks.ttft.traffic import formula_bytes, kv_bytes_per_token
from benchmarks.ttft.variants import VARIANTS, Split
from partitioner.cost.link import BITS_PER_BYTE, Link
from partitioner.table.fingerprint import Fingerprint
from runahead.context import ContextPartition, even
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks


def shared_fields(run: BenchRun, ranks: Ranks, fingerprint: Fingerprint, memory_is_of: str) -> dict[str, Any]:
    """Fields that all lines of a benchmark share; rank 0 calls it."""
    kind = "netns" if run.bench.network is Network.inside else "given"
    if kind == "given" and ranks.local_size == ranks.size:
        kind = "loopback" if ranks.backend == "gloo" else "one host"
    about = machine.about()
    return {
        "job": f"{about['date']} {secrets.token_hex(3)}",
        **about,
        "network": {
            "kind": kind,
            "gbps": run.link.gbps[0] if run.link.gbps else None,
            "compute_share": run.link.compute_share[0] if run.link.compute_share else None,
            "noise": run.link.noise,
        },
        "model": {"name": fingerprint.name, **asdict(fingerprint.model)},
        "dtype": fingerprint.dtype,
        "ranks": ranks.size,
        "hosts": ranks.size // ranks.local_size,
        "threads": fingerprint.threads,
        "backend": ranks.backend,
        "device": ranks.device.type,
        "layers_in_flight": run.prefill.layers_in_flight,
        "memory_is_of": memory_is_of,
    }


@dataclass
class Record:
    """JSON lines of one benchmark, and what they hold.

    Attributes:
        shared: fields that all lines share, from `shared_fields`.
        link: the link between ranks, if there is one; set once it is measured.
        bounds: bounds by prompt length; set once compute is measured.
    """

    run: BenchRun
    model: Model
    shared: dict[str, Any]
    link: Link | None = None
    bounds: dict[int, Bounds] = field(default_factory=dict)

    def key(self, name: str, length: int) -> str:
        """Key of a variant and length, equal for another benchmark of the same code, machine and options."""
        asks_partition = VARIANTS[name].split in (Split.given, Split.searched)
        parts = {name: value for name, value in self.shared.items() if name not in ("job", "date", "commit", "model")}
        partition = repr(self.run.partition) if asks_partition else None
        options = {"model": repr(self.run.model), "partition": partition, "variant": name, "length": length}
        return lines.key(parts | options)

    def line(self, name: str, length: int, runs: list[Measurement]) -> Line:
        """JSON line of one variant and length."""
        last, num_ranks, model = runs[-1], self.shared["ranks"], self.model
        partition = even(length, num_ranks)
        if last.boundaries is not None and len(last.boundaries) == num_ranks + 1:
            partition = ContextPartition(boundaries=tuple(last.boundaries))
        variant = VARIANTS[name]
        network = dict(self.shared["network"])
        if self.link is not None:
            network["ping"] = {
                "gbps": self.link.bandwidth_Bps * BITS_PER_BYTE / 1e9,
                "latency_us": self.link.latency_s * 1e6,
                "rate_is_given": bool(self.run.link.gbps),
            }
        return {
            "variant": name,
            "length": length,
            "key": self.key(name, length),
            **self.shared,
            "network": network,
            "prefill": None if variant.prefill is None else dict(variant.prefill),
            "split": variant.split.name,
            "boundaries": last.boundaries,
            "first_token": last.first_token,
            "runs": [
                {"round": number, "ttft_s": each.ttft_s, "sent_bytes": each.sent_bytes, "wire_bytes": each.wire_bytes}
                for number, each in enumerate(runs)
            ],
            "sent_bytes": last.sent_bytes,
            "formula_bytes": formula_bytes(
                variant.traffic, partition, model, variant.policies, wire_bits=variant.wire_bits
            ),
            "kv_bytes_per_token": kv_bytes_per_token(model.kv_shapes),
            "wire_bytes": last.wire_bytes,
            "memory": {
                "of": self.shared["memory_is_of"],
                "kv_kept_bytes": last.kv_kept_bytes,
                "kv_peak_bytes": [max(peaks) for peaks in zip(*(each.kv_peak_bytes for each in runs), strict=True)],
                "peak_bytes": [max(peaks) for peaks in zip(*(each.peak_bytes for each in runs), strict=True)],
            },
            **self.bounds[length].as_json(),
        }
