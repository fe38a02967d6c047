"""Some heads of a tensor, by slices: views where they are evenly spaced, and no index goes to the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Heads:
    """KV heads of a layer.

    Attributes:
        numbers: of these heads, ascending.
        of: number of all KV heads of the layer.
    """

    numbers: tuple[int, ...]
    of: int

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def slices(self) -> list[tuple[slice, slice]]:
        """Slices of all heads, and of these alone, that are the same heads."""
        numbers, found = self.numbers, list[tuple[slice, slice]]()
        steps = {after - before for before, after in pairwise(numbers)} or {1}
        if numbers and len(steps) == 1:
            return [(slice(numbers[0], numbers[-1] + 1, steps.pop()), slice(0, len(numbers)))]
        first = 0
        for end in range(1, len(numbers) + 1):
            if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
                found.append((slice(numbers[first], numbers[end - 1] + 1), slice(first, end)))
                first = end
        return found

    def pairs(self, whole: Tensor, some: Tensor, dim: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of the same heads in tensors of all heads and of these alone."""
        before = (slice(None),) * dim
        for in_whole, in_some in self.slices:
            yield whole[(*before, in_whole)], some[(*before, in_some)]

    def select(self, whole: Tensor, dim: int) -> Tensor:
        """These heads, as a view if they are evenly spaced."""
        before = (slice(None),) * dim
        parts = [whole[(*before, in_whole)] for in_whole, _ in self.slices]
        return parts[0] if len(parts) == 1 else torch.cat(parts or [whole[(*before, slice(0))]], dim=dim)

    def select_queries(self, q_BNCH: Tensor) -> Tensor:
        """The query heads of these KV heads."""
        return self.select(q_BNCH.unflatten(1, (self.of, -1)), 1).flatten(1, 2)
