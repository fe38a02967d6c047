"""Metrics of the connector, in vLLM's log and at its /metrics."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from runahead_vllm.scheduling import Happened

KINDS = ("loaded", "given_up", "dropped", "alone")


@dataclass
class RunaheadStats(KVConnectorStats):
    """Prompts that have ended since the last report: `data["happened"]` is a list of `Happened` as dicts."""

    def __post_init__(self) -> None:
        self.data.setdefault("happened", [])

    @classmethod
    def of(cls, happened: list[Happened]) -> RunaheadStats:
        return cls({"happened": [asdict(each) for each in happened]})

    def reset(self) -> None:
        self.data["happened"] = []

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data["happened"] += other.data["happened"]
        return self

    def is_empty(self) -> bool:
        return not self.data["happened"]

    def reduce(self) -> dict[str, int | float]:
        """Numbers for vLLM's periodic line of the log."""
        found = self.data["happened"]
        loaded = [each for each in found if each["kind"] == "loaded"]
        counts: dict[str, int | float] = {
            f"Runahead prompts {kind}": sum(each["kind"] == kind for each in found) for kind in KINDS
        }
        if loaded:
            counts |= {
                "tokens loaded": sum(each["num_tokens"] for each in loaded),
                "MB loaded": round(sum(each["num_bytes"] for each in loaded) / 1e6, 1),
                "mean wait (s)": round(sum(each["waited_s"] for each in loaded) / len(loaded), 3),
                "mean load (s)": round(sum(each["load_s"] for each in loaded) / len(loaded), 3),
            }
        return counts


class RunaheadPromMetrics(KVConnectorPromMetrics):
    """`vllm:runahead_...` at /metrics, per engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        prompts = self._counter_cls(
            name="vllm:runahead_prompts",
            documentation=(
                "Prompts by outcome: loaded, given_up (vLLM computes them), dropped (no longer wanted), alone (never "
                "asked for)."
            ),
            labelnames=[*self._labelnames, "outcome"],
        )
        values = self.per_engine_labelvalues
        self._prompts = {
            (engine, kind): prompts.labels(*given, kind) for engine, given in values.items() for kind in KINDS
        }
        self._tokens = self._made("tokens_loaded", "Prompt tokens loaded from files.", self._counter_cls)
        self._bytes = self._made("bytes_loaded", "Bytes of files read, by all workers.", self._counter_cls)
        self._waits = self._made(
            "wait_seconds", "From asking to a file, or to its end without one.", self._histogram_cls
        )
        self._loads = self._made("load_seconds", "Reading a file into the KV cache.", self._histogram_cls)

    def _made(self, name: str, documentation: str, kind: Any) -> dict[int, Any]:
        metric = kind(name=f"vllm:runahead_{name}", documentation=documentation, labelnames=self._labelnames)
        return {engine: metric.labels(*given) for engine, given in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for each in transfer_stats_data["happened"]:
            self._prompts[engine_idx, each["kind"]].inc()
            if each["kind"] == "alone":
                continue
            self._waits[engine_idx].observe(each["waited_s"])
            if each["kind"] == "loaded":
                self._tokens[engine_idx].inc(each["num_tokens"])
                self._bytes[engine_idx].inc(each["num_bytes"])
                self._loads[engine_idx].observe(each["load_s"])
