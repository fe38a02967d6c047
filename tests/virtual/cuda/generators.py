"""Random numbers on the virtual GPU: the same for a seed every time, and others than a GPU's."""

from __future__ import annotations

from typing import Any

import torch


class Generator(torch.Generator):
    """Stands for torch.Generator, which a CPU build has for no GPU. Nothing checks that its own device uses it."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


GENERATOR = Generator("cuda")
"""The GPU's default generator."""
