"""Checks of models' logits that were passed, kept in the cache folder: a model that is known is not checked again.

Models whose layers hold states are never known: transformers computes them with optional packages and kernels of its
hub where it finds some, now or after an install, and these decide what the check finds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from runahead.files import read_user_file, write_whole
from runahead.model.layers.cpu_linear import library
from runahead.ranks.agreement import library_facts

FORMAT, VERSION = "runahead checked model", 3
MOST_BYTES = 2**20
"""Largest file that is read; one has a few hundred bytes."""


@dataclass(frozen=True, kw_only=True)
class KnownCheck:
    """The check of one model, which is kept if it was passed with exactly these facts.

    Attributes:
        path: of its file.
        facts: all that it depends on, by name.
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
        facts = {"weights": weights, "files": files, "dtype": str(dtype)}
        facts |= _device_facts(device, dtype) | library_facts()
        return cls(path=folder / "checks" / f"{name}.json", facts=facts)

    def is_kept(self) -> bool:
        """Whether it was passed; no, if the file is missing, damaged or was written with other facts."""
        try:
            if self.path.stat().st_size > MOST_BYTES:
                return False
            content = json.loads(read_user_file(self.path).decode("utf-8"))
        except (OSError, ValueError, RecursionError):
            return False
        return content == self._content

    def keep(self) -> None:
        """Keep it for later runs. Where the folder cannot be written, each run checks the model."""
        with suppress(OSError, ValueError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(self._content, indent=1) + "\n")

    @property
    def _content(self) -> dict[str, object]:
        return {"format": FORMAT, "version": VERSION, "facts": dict(self.facts)}


def _device_facts(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Facts on which a model's logits depend besides its weights and the code: where and how products are computed."""
    products = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        place = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    else:
        place = f"{device.type}, {torch.backends.cpu.get_cpu_capability()}"
        products += f" by {library(dtype)}"
    return {"device": place, "products": products}
