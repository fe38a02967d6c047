"""Rotary tables that depend on the prompt's length (LongRoPE, dynamic NTK), made for the whole prompt on every rank.

transformers takes the largest position of a forward for the length, so a chunk that ends before the threshold would
silently get the tables of a short prompt. It also keeps the largest length that it ever saw, which would leak from one
prompt to the next, and asks the device for it, for which the host would wait.
"""

# Legend: B batch, C tokens of this forward.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from policies.row_values import sent

NUM_LENGTHS = 64
"""Lengths whose frequencies are remembered: a decoding step asks for those of the step before."""


class LengthRotary:
    """A model's rotary embedding whose frequencies change with the length of the sequence.

    Its copy on the host tells the frequencies for a length, by transformers' own code. With these the embedding itself
    computes tables as one of fixed frequencies does.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self._host = module, deepcopy(module).to("cpu")
        for name, value in list(vars(self._host).items()):  # such as frequencies that are no buffers
            if isinstance(value, Tensor):
                setattr(self._host, name, value.cpu())
        self._values = lru_cache(NUM_LENGTHS)(self._values_on_host)

    @contextmanager
    def at(self, length: int, x: Tensor, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Context manager in which the embedding has the frequencies of a sequence of so many tokens.

        Args:
            x: of which tables have device and dtype; it is followed by whatever else the embedding is called with.
        """
        module, values = self.module, self._values(length, *args, **kwargs)
        before = {name: getattr(module, name) for name in values}
        try:
            for name, value in values.items():
                setattr(module, name, sent(value, x.device) if isinstance(value, Tensor) else value)
            yield
        finally:
            for name, value in before.items():
                setattr(module, name, value)

    def _values_on_host(self, length: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Attributes of the embedding for a length: frequencies, scale, and that there is nothing to update."""
        host, kinds = self._host, self._host.rope_type
        _forget(host)
        host(torch.empty(1, 1, 1), torch.tensor([[length - 1]]), *args, **kwargs)
        scales = [name for name in vars(self.module) if name.endswith("attention_scaling")]
        return {
            "rope_type": dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default",
            **{name: getattr(host, name) for name in scales},
            **{name: value for name, value in host.named_buffers() if _is_used(name)},
        }


def length_dependent_rotaries(module: nn.Module) -> list[LengthRotary]:
    """Find the rotary embeddings of a model whose frequencies change with the length of the sequence."""
    found = []
    for child in module.modules():
        kinds = getattr(child, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds):
            found.append(LengthRotary(child))
    return found


@contextmanager
def rotary_length(rotaries: list[LengthRotary], lengths_B: list[int]) -> Iterator[None]:
    """Context manager in which the rotary embeddings compute row r's tables for a sequence of lengths_B[r] tokens."""
    with ExitStack() as stack:
        for rotary in rotaries:
            stack.enter_context(_lengths(rotary, lengths_B))
        yield


def _is_used(name: str) -> bool:
    """Whether a buffer has the frequencies from which tables are computed."""
    return name.endswith("inv_freq") and "original" not in name


def _forget(rotary: nn.Module) -> None:
    """Reset a rotary embedding to its original frequencies, whatever lengths it has seen since."""
    for name in [name for name in vars(rotary) if name.endswith("max_seq_len_cached")]:
        setattr(rotary, name, rotary.original_max_seq_len)
    for name, inv_freq in list(rotary.named_buffers()):
        prefix = name.removesuffix("inv_freq")  # none, or one per layer type
        if name.endswith("inv_freq") and (original := getattr(rotary, f"{prefix}original_inv_freq", None)) is not None:
            rotary.register_buffer(name, original.to(inv_freq.device, copy=True), persistent=False)


@contextmanager
def _lengths(rotary: LengthRotary, lengths_B: list[int]) -> Iterator[None]:
    module = rotary.module
    replaced = vars(module).get("forward")
    # A server computes other rows inside a forward, whose lengths are not theirs.
    forward = getattr(replaced, "own", module.forward)

    def forward_rows(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = position_ids.expand(len(lengths_B), -1)
        shared = len(set(lengths_B)) == 1
        tables: list[tuple[Tensor, ...]] = []
        for row, length in [(rows, lengths_B[0])] if shared else zip(rows.split(1), lengths_B, strict=True):
            last = torch.full_like(row[:, :1], length - 1)  # tells the length to code that looks at positions itself
            with rotary.at(length, x, *args, **kwargs):
                made = forward(x, torch.cat([row, last], dim=1), *args, **kwargs)
            is_pair = isinstance(made, tuple)  # cosines and sines, or both as complex numbers
            tables.append(tuple(table[:, :-1] for table in (made if is_pair else (made,))))
        joined = tuple(torch.cat(each) for each in zip(*tables, strict=True))
        return joined if is_pair else joined[0]

    forward_rows.own = forward  # type: ignore[attr-defined]
    module.forward = forward_rows
    try:
        yield
    finally:
        if replaced is None:
            del module.forward
        else:
            module.forward = replaced
