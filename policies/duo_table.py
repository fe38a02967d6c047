"""The table of a model's gates in DuoAttention's own format: a folder with full_attention_heads.tsv and config.json.

A line of the first file has the gates of a layer's KV heads, between tabs; the second has the number of first and last
tokens that streaming heads saw when the gates were found, and whatever else. The authors publish such folders for some
models (github.com/mit-han-lab/duo-attention, attn_patterns/).
"""

# Legend: K kv heads.

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policies.model_file import PathLike

GATES, CONFIG = "full_attention_heads.tsv", "config.json"
REMEDY = "make one for this model with python -m policies.duo_gates model=... out=<folder>"


@dataclass(frozen=True, kw_only=True)
class DuoTable:
    """Gates of all KV heads of a model: from 0, the first and last tokens are enough, to 1, all are needed.

    Attributes:
        gates: of the KV heads (K) of each layer, in [0, 1].
        sinks, recent: number of first and last tokens that streaming heads saw, if the folder says so.
        fingerprint: of the model, if the folder says so; those that the authors publish do not.
    """

    gates: list[Tensor]
    sinks: int | None = None
    recent: int | None = None
    fingerprint: str | None = None

    def files(self, **about: Any) -> dict[str, str]:
        """Content of the files of a folder by their names, with more about the gates in its config.json."""
        lines = ["\t".join(f"{gate:.6f}" for gate in gates_K.tolist()) for gates_K in self.gates]
        config = {"sink_size": self.sinks, "recent_size": self.recent, "fingerprint": self.fingerprint, **about}
        return {GATES: "\n".join(lines) + "\n", CONFIG: json.dumps(config, indent=2) + "\n"}

    @classmethod
    def load(cls, folder: PathLike) -> DuoTable:
        """Read a folder. Gates beyond 0 or 1 are clamped, as the authors do.

        Raises:
            ValueError: it is not there, or is no such folder; in one line.
        """
        name = f"policy.heads={folder}"
        path = Path(folder)
        if not path.is_dir():
            raise ValueError(f"{name}: there is no such folder; {REMEDY}")
        if not (path / GATES).is_file():
            raise ValueError(f"{name} has no file {GATES}; {REMEDY}")
        config: Any = {}
        try:
            lines = (path / GATES).read_text(encoding="utf-8").splitlines()
            gates = [[float(gate) for gate in line.split("\t")] for line in lines if line.strip()]
            if (path / CONFIG).is_file():
                config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise ValueError(f"{name} cannot be read ({reason}); {REMEDY}") from error
        if not gates or not all(math.isfinite(gate) for gates_K in gates for gate in gates_K):
            raise ValueError(f"{name}: {GATES} is empty or has gates that are no numbers; {REMEDY}")
        if not isinstance(config, dict):
            raise ValueError(f"{name}: {CONFIG} is no JSON object; {REMEDY}")
        sizes = [config.get(key) for key in ("sink_size", "recent_size")]
        if any(size is not None and (type(size) is not int or size < 0) for size in sizes):
            raise ValueError(f"{name}: sink_size or recent_size of {CONFIG} is no number of tokens; {REMEDY}")
        fingerprint = config.get("fingerprint")
        return cls(
            gates=[torch.tensor(gates_K, dtype=torch.float64).clamp(0, 1) for gates_K in gates],
            sinks=sizes[0],
            recent=sizes[1],
            fingerprint=None if fingerprint is None else str(fingerprint),
        )
