"""Files of tensors that are valid for one model: they hold the fingerprint of its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A kind of such files.

    Attributes:
        kind: what a file says that it is.
        option: option that names a file, for messages.
        program: module of the program that makes them.
    """

    kind: str
    option: str
    program: str

    def packed(self, tensors: Mapping[str, Tensor], fingerprint: str, **about: str) -> bytes:
        """Content of a file for the model with this fingerprint, with other text about it."""
        metadata = {"kind": self.kind, "fingerprint": fingerprint, **about}
        return safetensors.torch.save({name: x.contiguous() for name, x in tensors.items()}, metadata=metadata)

    def read(self, path: PathLike, fingerprint: str | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tensors of a file by name, and the text about it.

        Args:
            path: the file.
            fingerprint: fingerprint of the model; None accepts any, for a check before the model is loaded.

        Raises:
            ValueError: the file does not exist, is damaged or of another kind, or belongs to another model.
        """
        name, remedy = self._name(path), self.remedy(path)
        if not Path(path).is_file():
            raise ValueError(f"{name}: there is no such file; make it with {remedy}")
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{name} cannot be read ({reason}); make it again with {remedy}") from error
        if about.get("kind") != self.kind:
            raise self.of_another_kind(path)
        if fingerprint is not None and about.get("fingerprint") != fingerprint:
            raise ValueError(f"{name} was made for another model; make one for this model with {remedy}")
        return found, about

    def remedy(self, path: PathLike) -> str:
        """The command that makes a file."""
        return f"python -m {self.program} model=... out={os.fspath(path)}"

    def of_another_kind(self, path: PathLike) -> ValueError:
        """The error of a file that the program did not make."""
        return ValueError(
            f"{self._name(path)} is not a file of python -m {self.program}; make one with {self.remedy(path)}"
        )

    def damaged(self, path: PathLike) -> ValueError:
        """The error of a file with other tensors than it has to have."""
        return ValueError(
            f"{self._name(path)} has tensors of wrong names, shapes or values; make it again with {self.remedy(path)}"
        )

    def _name(self, path: PathLike) -> str:
        return f"{self.option}={os.fspath(path)}"
