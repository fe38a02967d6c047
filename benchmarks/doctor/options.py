"""Options of launch/doctor.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from runahead.config import ModelName, ModelOptions, RanksOptions, require

AUTO = "auto"
"""model.config of the doctor: one of its two shapes, by the memory of the GPUs."""

LARGE_MIB = 44 * 1024
"""Memory of each GPU from which on the large shape is run, whose weights are loaded twice for TP."""

SHAPES = {True: "llama-8b.json", False: "llama-8-heads.json"}
"""The two shapes in benchmarks/models/: large, and small."""

FEWEST_TOKENS = 32
"""Shortest prompt that is checked, in tokens."""


@dataclass(kw_only=True)
class DoctorOptions:
    """Options of the doctor: its jobs, its time, and the folder of its page.

    Attributes:
        ranks: ranks that it starts on this host; None is a rank per GPU, or two without GPUs. Under a launcher it
            takes the launcher's.
        lengths: prompt lengths in tokens; empty takes three by device.
        minutes: time budget. What would not fit is left out, and the page says so.
        rounds: measured rounds of each length.
        timeout_s: `ranks.timeout_s` of the fault drills.
        faults: whether to run the fault drills.
        out: folder of doctor.txt, doctor.json and doctor.png.
    """

    ranks: int | None = None
    lengths: list[int] = field(default_factory=list)
    minutes: float = 10.0
    rounds: int = 2
    timeout_s: float = 5.0
    faults: bool = True
    out: str = "doctor"

    def __post_init__(self) -> None:
        if self.ranks is not None:
            require(self.ranks >= 1, "doctor.ranks", self.ranks, "must be at least 1")
        shortest = min(self.lengths, default=FEWEST_TOKENS)
        rule = f"must be a list of whole numbers of at least {FEWEST_TOKENS}"
        require(shortest >= FEWEST_TOKENS, "doctor.lengths", self.lengths, rule)
        self.lengths = sorted(set(self.lengths))
        require(0 < self.minutes < math.inf, "doctor.minutes", self.minutes, "must be a number of minutes above 0")
        require(self.rounds >= 1, "doctor.rounds", self.rounds, "must be at least 1")
        require(0 < self.timeout_s <= 600, "doctor.timeout_s", self.timeout_s, "must be above 0 and at most 600")


@dataclass(kw_only=True)
class DoctorRun:
    """Configuration of one run of launch/doctor.py."""

    model: ModelOptions = field(default_factory=lambda: ModelOptions(name=ModelName.random, config=AUTO))
    ranks: RanksOptions = field(default_factory=RanksOptions)
    doctor: DoctorOptions = field(default_factory=DoctorOptions)

    def __post_init__(self) -> None:
        rule = "has no use: jobs of the doctor give each rank the whole model; leave it out"
        require(self.ranks.tensor == 1, "ranks.tensor", self.ranks.tensor, rule)
