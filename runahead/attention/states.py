"""States of recurrent and convolution layers: what stands for all tokens of a text so far, whose size never changes.

transformers' own class of a layer holds them, and the model's own code reads and updates them. Here is what the runtime
does with them: rows part, join and are copied, and a state is bytes on its way to another rank.
"""

# Legend: B batch, Z bytes of a row.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """One tensor of a layer's state.

    Attributes:
        name: "conv_states" or "recurrent_states" of transformers' layer.
        index: which of these, in a layer with several.
        shape: without the batch.
    """

    name: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """The tensors of one layer's state."""

    parts: tuple[StatePart, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of a row."""
        return sum(part.num_bytes for part in self.parts)


class StateLayer(LinearAttentionLayer):
    """The state of one layer, for all rows of a batch: nothing before the first token."""

    def tensors(self) -> Iterator[tuple[str, int, Tensor]]:
        """Name, index and tensor (B, ...) of each part that is there."""
        for name in ("conv_states", "recurrent_states"):
            for index, state in getattr(self, name).items():
                if state is not None:
                    yield name, index, state

    @property
    def shape(self) -> StateShape:
        """Shape of the parts that are there."""
        return StateShape(
            parts=tuple(
                StatePart(name=name, index=index, shape=tuple(state.shape[1:]), dtype=state.dtype)
                for name, index, state in self.tensors()
            )
        )

    @property
    def num_bytes(self) -> int:
        return sum(state.nbytes for *_, state in self.tensors())

    def hold(self, name: str, index: int, state: Tensor) -> None:
        """Hold this tensor (B, ...) as a part."""
        getattr(self, name)[index] = state
        getattr(self, f"is_{name}_initialized")[index] = True
        self.has_previous_state[index] = True
        if name == "conv_states":
            self.conv_kernel_size[index] = state.shape[-1]
            self.dtype, self.device = state.dtype, state.device

    def made(self, change: Callable[[Tensor], Tensor]) -> StateLayer:
        """A layer with what `change` makes of each part."""
        other = StateLayer(number_of_states=self.number_of_states)
        for name, index, state in self.tensors():
            other.hold(name, index, change(state))
        return other

    def clear(self, rows: Sequence[int], before: StateLayer | None = None) -> None:
        """Let these rows hold the state that they had before.

        Args:
            before: that state of all rows; None: of a text without tokens.
        """
        parts = {} if before is None else {(name, index): state for name, index, state in before.tensors()}
        for name, index, state in self.tensors():
            for row in rows:
                if before is None:
                    state[row].zero_()
                else:
                    state[row].copy_(parts[name, index][row])

    def write(self, bytes_BZ: Tensor) -> None:
        """Write the state to these bytes."""
        parts = [state.contiguous().view(torch.uint8).flatten(1) for *_, state in self.tensors()]
        torch.cat(parts, dim=1, out=bytes_BZ)

    def write_row(self, row: int, bytes_Z: Tensor) -> None:
        """Write the state of one row to these bytes."""
        self.made(lambda state: state[row : row + 1]).write(bytes_Z.view(1, -1))

    def allocate(self, shape: StateShape, batch: int, device: torch.device) -> None:
        """Hold memory for a state that will be read."""
        for part in shape.parts:
            self.hold(part.name, part.index, torch.empty(batch, *part.shape, dtype=part.dtype, device=device))

    def read(self, rows_Z: Sequence[Tensor], shape: StateShape) -> None:
        """Hold a copy of the state that was written to these bytes of each row, in the memory that is there, if any."""
        sizes = [part.num_bytes for part in shape.parts]
        for part, rows in zip(shape.parts, zip(*(row_Z.split(sizes) for row_Z in rows_Z), strict=True), strict=True):
            state = torch.stack(rows).view(part.dtype).view(len(rows_Z), *part.shape)
            held = getattr(self, part.name)[part.index]
            if held is None:
                self.hold(part.name, part.index, state)
            else:
                held.copy_(state)


class States:
    """The states of all layers that hold one, for all rows of a batch.

    Attributes:
        layers: in the order in which the model runs them.
        begun: rows that have states before their first new token, which padding before that token leaves as they are.
    """

    def __init__(self, layers: Sequence[StateLayer], begun: Sequence[int] = ()) -> None:
        self.layers, self.begun = list(layers), begun

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def is_part(self) -> bool:
        """Whether other rows have states in the same memory, or had, which stays as long as these."""
        return any(
            state.untyped_storage().nbytes() > state.nbytes for layer in self.layers for *_, state in layer.tensors()
        )

    def row(self, row: int) -> States:
        """The states of one row, in the same memory."""
        return States([layer.made(lambda state: state[row : row + 1]) for layer in self.layers])

    def fork(self) -> States:
        """A copy: the next token changes a state."""
        return States([layer.made(Tensor.clone) for layer in self.layers])

    @torch.inference_mode()
    def copy_from(self, other: States) -> None:
        """Hold the numbers of other states of the same shapes, in the memory that these have."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            for (*_, state), (*_, copied) in zip(mine.tensors(), theirs.tensors(), strict=True):
                state.copy_(copied)

    @staticmethod
    def together(rows: Sequence[States]) -> States:
        """The states of rows in one memory, in which each of `rows` has its own from now on."""
        joined = []
        for number, layer in enumerate(rows[0].layers):
            of_rows = [each.layers[number] for each in rows]
            whole = StateLayer(number_of_states=layer.number_of_states)
            for name, index, _ in layer.tensors():
                states = [getattr(each, name)[index] for each in of_rows]
                whole.hold(name, index, torch.cat(states))
                for each, state in zip(of_rows, getattr(whole, name)[index].split(1), strict=True):
                    each.hold(name, index, state)
            joined.append(whole)
        return States(joined)
