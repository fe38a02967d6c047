"""The arguments of a part's work on each rank, and the models, prompts and timers that several parts share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.doctor.findings import Finding, Verdict
from benchmarks.doctor.options import LARGE_MIB, SHAPES
from benchmarks.first_day.figures import Figures
from benchmarks.harness.machine import ROOT
from runahead.config import DType, ModelName, ModelOptions
from runahead.model.loading.memory import free_bytes
from runahead.model.memory import activation_bytes
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Visit:
    """A rank of a part at work.

    Attributes:
        folder: of the part's logs, for files of its own.
        limit_s: seconds after which its processes are ended.
    """

    ranks: Ranks
    figures: Figures
    folder: Path
    limit_s: float

    @property
    def is_small(self) -> bool:
        """Whether this is a rehearsal on a CPU, with small sizes."""
        return self.ranks.device.type == "cpu"

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    def say(self, text: str) -> None:
        """Print what comes next, for the log of a part that hangs there."""
        print(f"rank {self.ranks.rank}: {text}", flush=True)

    def model_to_measure(self) -> ModelOptions:
        """Llama-3-8B's shape with random weights, or a small one where a GPU has no room. Every rank calls this."""
        if self.is_small:
            return small_model(layers=2)
        mib = torch.cuda.get_device_properties(self.device).total_memory >> 20
        is_large = min(self.ranks.gather(mib, "the GPUs' memory")) >= LARGE_MIB
        return ModelOptions(name=ModelName.random, config=_shape(SHAPES[is_large]), dtype=DType.bfloat16)

    def has_room(self, model: Model, num_tokens: int) -> bool:
        """Whether each rank has memory for a prompt of so many tokens. Every rank calls this; a lack is taken down."""
        kv_bytes = sum(shape.bytes_per_token() for shape in model.kv_shapes)
        needed = num_tokens * (kv_bytes + activation_bytes(model.config, model.dtype, model.num_shards))
        free = min(self.ranks.gather(free_bytes(self.device, self.ranks.local_size), "the free memory"))
        if needed > free:
            words = f"left out: it needs about {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free"
            name = f"{num_tokens:,} tokens"
            self.figures.found(
                Finding(group=self.figures.part, name=name, verdict=Verdict.skipped, measured="", words=words)
            )
        return needed <= free

    def median_ms(self, call: Callable[[], object], *, times: int = 5) -> float:
        """Median of the milliseconds that a GPU takes for a call, after two that are not counted."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        for _ in range(2):
            call()
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        torch.cuda.synchronize(self.device)
        return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds until a call and all work that it queued on a GPU are done."""
        began_s = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began_s


def small_model(*, layers: int) -> ModelOptions:
    """A model of a small shape in float32, in which ranks that compute the same say the same."""
    return ModelOptions(name=ModelName.random, config=_shape(SHAPES[False]), dtype=DType.float32, layers=layers)


def _shape(name: str) -> str:
    return str(ROOT / "benchmarks" / "models" / name)
