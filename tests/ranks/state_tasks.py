"""Tasks of ranks about the states of hybrid models."""

from __future__ import annotations

from typing import Any
from unittest import mock

from runahead import Ranks
from runahead.attention.states import StateLayer
from tests.ranks import tasks


def bytes_of(ranks: Ranks, family: str) -> tuple[int, int]:
    """Bytes of a token's keys and values, and of the states of a row."""
    model = tasks.tiny_model(family)
    kv = sum(shape.bytes_per_token() for shape in model.kv_shapes)
    return kv, sum(shape.num_bytes for shape in model.state_shapes)


def prefill_without(ranks: Ranks, lost: str, *args: Any) -> tasks.PrefillOutcome:
    """A prefill in which one kind of state does not arrive."""
    read = StateLayer.read

    def incomplete(self: StateLayer, *given: Any) -> None:
        read(self, *given)
        for name, _, state in self.tensors():
            if name == lost:
                state.zero_()

    with mock.patch.object(StateLayer, "read", incomplete):
        return tasks.prefill(ranks, *args)
