"""The drills: each follows from a seed and a number."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

from runahead.ranks.mesh import Mesh

LAYERS = 6
TIMEOUT_S = 3.0

MOMENTS = ("load", "prefill", "send", "decode")
PREFILLS = ("kv_runahead", "kv_runahead direct", "tsp", "zigzag", "zigzag ring")
SHARDED = "kv_runahead sharded"
"""With sharded decoding, which is drilled by the tests alone."""
PIPELINE = "pipeline"
"""Of layers, in chunks of 16 tokens, which is drilled by the tests alone. A layer of the moment "send" is a chunk."""
FILES = ("report", "timeline", "fault report", "table", "cache")

KINDS = {
    "kill -9 of a rank": 34,
    "stop of a rank": 20,
    "delay of a rank": 14,
    "error in a rank": 20,
    "no memory in a rank": 16,
    "NaN in weights": 10,
    "link cut": 16,
    "link at 500 bit/s": 10,
    "full disk": 14,
    "read-only folder": 12,
    "Ctrl-C": 12,
    "SIGTERM to the launcher": 12,
    "kill -9 of the launcher": 10,
}
"""Weights of the kinds: how many of 200 drills."""

NETWORK_KINDS = ("link cut", "link at 500 bit/s")
DISK_KINDS = ("full disk", "read-only folder")
SILENT_KINDS = ("stop of a rank", *NETWORK_KINDS)
LAUNCHER_KINDS = ("Ctrl-C", "SIGTERM to the launcher", "kill -9 of the launcher")
RANK_KINDS = {
    "kill -9 of a rank": "kill",
    "stop of a rank": "stop",
    "delay of a rank": "stop",
    "error in a rank": "raise",
}


@dataclass(frozen=True, kw_only=True)
class Drill:
    """One fault.

    Attributes:
        kind: one of `KINDS`.
        size: ranks of the job; four stages are on two hosts.
        tensor: ranks of a stage, which share the model.
        prefill: one of `PREFILLS`, or `SHARDED`.
        rank: where it happens, or at whose moment the network or the launcher is attacked.
        moment, layer: when.
        seconds: of a delay.
        file: which file is on a disk that is full or read-only.
    """

    kind: str
    size: int = 2
    tensor: int = 1
    prefill: str = "kv_runahead"
    rank: int = 0
    moment: str = "prefill"
    layer: int = 0
    seconds: float = 0.0
    file: str = ""

    @property
    def hosts(self) -> int:
        return 2 if self.kind in NETWORK_KINDS or self.size == 4 * self.tensor else 1

    @property
    def is_answered(self) -> bool:
        """Is the right answer expected?"""
        return self.kind == "delay of a rank"

    @property
    def fault(self) -> dict[str, Any] | None:
        """Orders for tests/faults/faulty_infer.py."""
        if self.kind == "full disk" and self.file == "fault report":
            return {"rank": self.rank, "moment": self.moment, "layer": self.layer, "do": "raise"}
        if self.kind in DISK_KINDS or self.kind == "NaN in weights":
            return None
        do = RANK_KINDS.get(self.kind, "no_memory" if self.kind == "no memory in a rank" else "tell")
        return {"rank": self.rank, "moment": self.moment, "layer": self.layer, "do": do}

    @property
    def name(self) -> str:
        """How messages name the rank."""
        return Mesh.with_shares(self.size, self.tensor).name(self.rank)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


FIRST_LATER = 200
"""Number from which on drills are of meshes, whose stages have two ranks each, and of copies between ranks."""


def drill(seed: int, number: int) -> Drill:
    """The drill of that number. Moments are such that the rank reaches them."""
    chosen = _drill(seed, number)
    if number < FIRST_LATER or chosen.kind in (*NETWORK_KINDS, *DISK_KINDS):
        return chosen
    more = random.Random(f"{seed} {number} share")
    doubled = replace(chosen, size=2 * chosen.size, rank=2 * chosen.rank + more.randrange(2))
    if chosen.prefill == "kv_runahead" and more.random() < 0.5:
        doubled = replace(doubled, prefill="kv_runahead copy")
        if chosen.size == 2 and more.random() < 0.5:  # of four ranks in a chain the second sends to another host
            return replace(doubled, layer=min(chosen.layer, LAYERS - 2))
    return replace(doubled, tensor=2)


def _drill(seed: int, number: int) -> Drill:
    """The drill whose stages are single ranks."""
    chosen = random.Random(f"{seed} {number}")
    kind = chosen.choices(list(KINDS), list(KINDS.values()))[0]
    size = 2 if kind in NETWORK_KINDS else chosen.choice([2, 2, 3])
    prefill = chosen.choice(PREFILLS)
    rank, moment = chosen.randrange(size), chosen.choice(MOMENTS)
    layer = chosen.randrange(LAYERS)
    if prefill.startswith("kv_runahead") and moment == "send":
        rank = chosen.randrange(size - 1)  # the last one sends nothing
    if prefill.startswith("kv_runahead") and rank < size - 1:
        layer = min(layer, LAYERS - 2) if moment == "prefill" else layer
    if kind in NETWORK_KINDS:
        # While the ranks need each other: before it each one loads alone, behind it the last one decodes alone.
        moment = chosen.choice(["prefill", "send"])
    file = chosen.choice(FILES) if kind in DISK_KINDS else ""
    return Drill(
        kind=kind,
        size=1 if file == "table" else size,
        prefill=prefill,
        rank=rank,
        moment=moment,
        layer=layer,
        seconds=chosen.uniform(0.2, 0.6) * TIMEOUT_S if kind == "delay of a rank" else 0.0,
        file=file,
    )
