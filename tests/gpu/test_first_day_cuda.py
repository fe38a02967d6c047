"""Parts of launch/first_day.py for one GPU, on small sizes: they run, and what they compare is equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.first_day import copies, kernels, speed
from benchmarks.first_day.estimates import GPUFigures
from benchmarks.first_day.figures import Figures
from benchmarks.first_day.visit import Visit
from benchmarks.first_day.work import WORK
from partitioner.cost.known_gpus import known_gpu
from tests.gpu.models import CUDA, alone, model

SMALL: dict[str, tuple[Any, dict[str, object]]] = {
    "kernels": (kernels, {"PRODUCT": (8, 16, 8), "CHUNKS": (64,), "PREFIX": 96, "LENGTHS": (128,), "BLOCKWISE": 64}),
    "copies": (copies, {"NUM_BYTES": 1 << 16, "DIM": 16, "PRODUCTS": 2}),
    "speed": (speed, {"LENGTHS": (64,), "NEW_TOKENS": 6}),
    "rows": (speed, {"ROWS": (1, 2), "STEPS": 2}),
}
"""By part, the module whose sizes are made small, and those."""


@pytest.mark.parametrize("part", SMALL)
def test_parts_for_one_gpu_run(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, sizes = SMALL[part]
    for name, size in sizes.items():
        monkeypatch.setattr(module, name, size)
    h100 = known_gpu("H100")
    assert h100 is not None
    monkeypatch.setattr(speed, "load", lambda visit: model(CUDA, torch.bfloat16))
    path = tmp_path / "figures.jsonl"
    figures = Figures(part, path, GPUFigures(gpu=h100, is_hopper=True))
    WORK[part](Visit(ranks=alone(), figures=figures, folder=tmp_path, limit_s=240))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert not [line for line in lines if line["verdict"] == "failed"]
    assert any(line.get("expected") is not None for line in lines)
    if part == "kernels":
        equal = {line["name"] for line in lines if line["verdict"] == "good" and line["measured"].endswith("apart")}
        assert equal >= {f"{kernel}, {what}" for kernel in ("flash", "efficient") for what in ("own chunk", "prefix")}
        assert "flash, sequences" in equal
