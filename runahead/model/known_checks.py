"""Outcomes of the check of a model's logits, kept in the cache folder: a model that is known is not checked again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from runahead.files import read_user_file, write_whole
from runahead.ranks.agreement import library_facts

FORMAT, VERSION = "runahead checked model", 1
MOST_BYTES = 2**20
"""Largest file that is read; one has a few hundred bytes."""


@dataclass(frozen=True, kw_only=True)
class CheckOutcome:
    """What a check that a model has passed found of its layers with states.

    Attributes:
        one_by_one: they are given the tokens after a text's first chunk one by one.
        reads_late: as of `Held`.
    """

    one_by_one: bool = False
    reads_late: bool = False


@dataclass(frozen=True, kw_only=True)
class KnownCheck:
    """The kept outcome of the check of one model, if there is one for exactly these facts.

    Attributes:
        path: of its file.
        facts: all that the outcome depends on, by name.
    """

    path: Path
    facts: Mapping[str, str]

    @classmethod
    def of_model(cls, folder: Path, weights: str, files: str, dtype: torch.dtype, device: torch.device) -> KnownCheck:
        """The check of a model from files.

        Args:
            folder: the cache folder.
            weights: fingerprint of samples of the weights.
            files: facts of the files and options that they were made from, which tell changes between the samples.
        """
        name = hashlib.sha256(f"{weights} {dtype} {device.type}".encode()).hexdigest()[:20]
        facts = {"weights": weights, "files": files, "dtype": str(dtype)} | _device_facts(device) | library_facts()
        return cls(path=folder / "checks" / f"{name}.json", facts=facts)

    def read(self) -> CheckOutcome | None:
        """The outcome; None without one, or if the file is damaged or was written under other facts."""
        try:
            if self.path.stat().st_size > MOST_BYTES:
                return None
            content = json.loads(read_user_file(self.path).decode("utf-8"))
            if not isinstance(content, dict) or content.keys() != {"format", "version", "facts", "outcome"}:
                return None
            about = (content["format"], content["version"], content["facts"])
            if about != (FORMAT, VERSION, dict(self.facts)) or not isinstance(content["outcome"], dict):
                return None
            outcome = content["outcome"]
            names = {field.name for field in fields(CheckOutcome)}
            if outcome.keys() != names or not all(isinstance(value, bool) for value in outcome.values()):
                return None
            return CheckOutcome(**outcome)
        except (OSError, ValueError, RecursionError):
            return None

    def write(self, outcome: CheckOutcome) -> None:
        """Keep an outcome for later runs. Where the folder cannot be written, each run checks the model."""
        content = {"format": FORMAT, "version": VERSION, "facts": dict(self.facts), "outcome": asdict(outcome)}
        with suppress(OSError, ValueError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(content, indent=1) + "\n")


def _device_facts(device: torch.device) -> dict[str, str]:
    """What a model's logits depend on besides its weights and the code: where and how products are computed."""
    if device.type == "cuda":
        place = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    else:
        place = f"{device.type}, {torch.backends.cpu.get_cpu_capability()}"
    return {"device": place, "products": torch.get_float32_matmul_precision()}
