"""Rotary tables that depend on the prompt's length (LongRoPE, dynamic NTK), made for the whole prompt on every rank.

transformers takes the largest position of a forward for the length, so a chunk that ends before the threshold would
silently get the tables of a short prompt. It also keeps the largest length that it ever saw, which would leak from one
prompt to the next.
"""

# Legend: B batch, C tokens of this forward.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def length_dependent_rotaries(module: nn.Module) -> list[nn.Module]:
    """Find the rotary embeddings of a model whose frequencies change with the length of the sequence."""
    found = []
    for child in module.modules():
        kinds = getattr(child, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds):
            found.append(child)
    return found


@contextmanager
def rotary_length(rotaries: list[nn.Module], lengths_B: list[int]) -> Iterator[None]:
    """Context manager in which the rotary embeddings compute row r's tables for a sequence of lengths_B[r] tokens."""
    with ExitStack() as stack:
        for rotary in rotaries:
            stack.enter_context(_lengths(rotary, lengths_B))
        yield


def _forget(rotary: nn.Module) -> None:
    """Reset a rotary embedding to its original tables, whatever lengths it has seen since."""
    for name in [name for name in vars(rotary) if name.endswith("max_seq_len_cached")]:
        setattr(rotary, name, rotary.original_max_seq_len)
    for name, inv_freq in list(rotary.named_buffers()):
        prefix = name.removesuffix("inv_freq")  # none, or one per layer type
        if name.endswith("inv_freq") and (original := getattr(rotary, f"{prefix}original_inv_freq", None)) is not None:
            rotary.register_buffer(name, original.to(inv_freq.device, copy=True), persistent=False)


@contextmanager
def _lengths(rotary: nn.Module, lengths_B: list[int]) -> Iterator[None]:
    replaced = vars(rotary).get("forward")
    # A server computes other rows inside a forward, whose lengths are not theirs.
    forward = getattr(replaced, "own", rotary.forward)

    def forward_rows(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = position_ids.expand(len(lengths_B), -1)
        shared = len(set(lengths_B)) == 1
        tables: list[tuple[Tensor, ...]] = []
        for row, length in [(rows, lengths_B[0])] if shared else zip(rows.split(1), lengths_B, strict=True):
            _forget(rotary)
            last = torch.full_like(row[:, :1], length - 1)  # an additional position, which only tells the length
            made = forward(x, torch.cat([row, last], dim=1), *args, **kwargs)
            is_pair = isinstance(made, tuple)  # cosines and sines, or both as complex numbers
            tables.append(tuple(table[:, :-1] for table in (made if is_pair else (made,))))
        joined = tuple(torch.cat(each) for each in zip(*tables, strict=True))
        return joined if is_pair else joined[0]

    forward_rows.own = forward  # type: ignore[attr-defined]
    rotary.forward = forward_rows
    try:
        yield
    finally:
        if replaced is None:
            del rotary.forward
        else:
            rotary.forward = replaced
