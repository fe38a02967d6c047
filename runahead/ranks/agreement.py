"""Comparison of what must be the same on all ranks: library versions, code, options, prompts and weights.

Ranks that were given different work would wait for each other for ever, or answer wrongly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

DIGEST = "sha256 "
"""Prefix of values that are compared but not shown in messages."""

SHOWN_LENGTH = 40
"""Longest value that a message shows, in characters; of longer ones the digests are compared."""

SHOWN_FACTS = 4
"""Most differences that a message names."""

CODE = ("runahead", "policies")
"""Packages whose source must be identical on all ranks: a version number does not tell checkouts apart."""


def disagreement(facts: Sequence[Mapping[str, str]]) -> str | None:
    """Describe which ranks differ from rank 0 and in what; None if all ranks agree.

    Args:
        facts: per rank, values by name. A value that begins with `DIGEST` is not shown.

    Returns:
        The beginning of a sentence, such as "rank 1 and rank 0 differ in torch (2.9 on rank 0, 2.8 on rank 1)".
    """
    names = list(dict.fromkeys(name for of_rank in facts for name in of_rank))
    others, told = set(), []
    for name in names:
        values = [of_rank.get(name, "nothing") for of_rank in facts]
        differing = [rank for rank, value in enumerate(values) if value != values[0]]
        if not differing:
            continue
        others.update(differing)
        first = differing[0]
        shown = not any(values[rank].startswith(DIGEST) for rank in (0, first))
        told.append(f"{name} ({values[0]} on rank 0, {values[first]} on rank {first})" if shown else name)
    if not told:
        return None
    if len(told) > SHOWN_FACTS:
        told = [*told[: SHOWN_FACTS - 1], f"{len(told) - SHOWN_FACTS + 1} more"]
    what = " and ".join([", ".join(told[:-1]), told[-1]] if len(told) > 1 else told)
    return f"rank {', '.join(map(str, sorted(others)))} and rank 0 differ in {what}"


def fact(value: object) -> str:
    """A value as it is compared: its text if that is short and printable, else its digest."""
    text = str(value)
    return text if len(text) <= SHOWN_LENGTH and text.isprintable() else DIGEST + digest_of(text.encode())


def digest_of(data: bytes) -> str:
    """SHA-256 of `data` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def secret(value: object) -> str:
    """Digest of a value that messages must not show, such as a prompt."""
    return DIGEST + digest_of(repr(value).encode())


def option_facts(options: Any, leave_out: Sequence[str] = ()) -> dict[str, str]:
    """Facts of a dataclass, or of a dictionary of them, by full option name, such as generation.top_p.

    Args:
        leave_out: full names of options that may differ between ranks.
    """
    facts: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                add(f"{name}.{key}" if name else str(key), inner)
        elif name not in leave_out:
            facts[name] = fact(value.name if isinstance(value, Enum) else value)

    add("", options)
    return facts


def library_facts() -> dict[str, str]:
    """Versions of the libraries that compute, and a digest of this project's own code."""
    facts = {package: metadata.version(package) for package in ("transformers", "numpy")} | {"torch": torch.__version__}
    root, code = Path(__file__).resolve().parent.parent.parent, hashlib.sha256()
    for path in code_files(root, CODE):
        code.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return facts | {"the code of runahead": DIGEST + code.hexdigest()}


def code_files(root: Path, packages: Sequence[str]) -> list[Path]:
    """Files of what packages in a checkout compute, sorted: Python's, and C++'s, whose kernels are of our own."""
    return sorted(
        path for package in packages for path in (root / package).rglob("*") if path.suffix in (".py", ".cpp", ".h")
    )
