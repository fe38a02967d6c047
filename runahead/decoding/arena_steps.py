"""Steps of rows that lie in one arena, which are replayed: by a GPU as graphs, by a CPU as recorded steps."""

# Legend: B rows of a step, V vocabulary.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.layer_view import Phase
from policies.row_values import row_values
from runahead.cache.arena import Arena, ArenaIndex, Placed, Region
from runahead.cache.attention import CausalAttention
from runahead.cache.base import KVStore
from runahead.cache.kv_cache import KVCache
from runahead.cache.slabs import Slabs
from runahead.decoding.forward import FixedForward, Forward
from runahead.decoding.recorded import records
from runahead.model.model import Model
from runahead.ranks.accelerator import accelerator_for
from runahead.reuse.cache import reused_by, reusing

LEAST_LONGEST = 1024
"""Tokens of the longest row for which the first graph is captured; each later one is for twice as many."""


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step of so many rows.

    Attributes:
        index: where they lie.
        cache: of the arena by this index.
        forward: over it.
    """

    index: ArenaIndex
    cache: KVCache
    forward: Forward


class ArenaSteps:
    """An arena of rows, and the steps over it.

    A row that joins is copied into the arena, with what its prompt reuses; nothing else is moved as long as there is
    room. There is a graph, or a recorded step, for 1, 2, 4, 8, ... rows; it stays while rows join and leave, until the
    arena moves. What fills up a step costs little, as the weights are read anyway. When the last row has left, a GPU
    keeps all, as nothing else has that memory; a CPU the smallest arena with the step of one row, if it is recorded.

    Args:
        most_tokens: as of `Arena`.
    """

    def __init__(self, model: Model, most_tokens: int | None) -> None:
        self._model = model
        self._has_graphs = accelerator_for(model.device) is not None
        self._steps = dict[tuple[int, int], _Step]()
        self.arena = Arena(model.kv_shapes, model.device, most_tokens, let_go=self._steps.clear)

    @property
    def replays(self) -> bool:
        """Whether steps are replayed."""
        return self._has_graphs or (records(self._model) and not self._model.unrecordable)

    @classmethod
    def of(cls, model: Model, most_tokens: int | None) -> ArenaSteps | None:
        """Steps of a model's rows; None if its steps are of no fixed shape, or the device has no kernel for them."""
        if not model.repeats_steps or model.lacks_step_kernel or not model.kv_shapes:
            return None
        return cls(model, most_tokens)

    @torch.inference_mode()
    def enter(
        self, cache: KVStore, *, num_tokens: int, num_new: int, given: Slabs | None = None
    ) -> tuple[Region, KVCache] | None:
        """Copy a row into the arena.

        Args:
            cache: of the row alone.
            num_tokens: of its own that it stores.
            num_new: for which it needs room.
            given: the memory of that cache, if this row takes it over: each layer is let go once it is copied.

        Returns:
            its place, and the cache of its own tokens there; None if it has parts elsewhere, or there is no room.
        """
        reused, own = reused_by(cache), cache.row_kv(0, 0, num_tokens)
        is_part = cache.slab_index is None or cache.slab_index.shard is not None
        if own is None or is_part or cache.gather is not None or cache.shared_TKX:
            return None
        parts = [] if reused is None else reused.parts
        if any(part.is_mapped for part in parts):  # memory may have no room for it
            return None
        memory = {id(slabs): slabs for slabs in (cache.slabs, given) if given is not None and slabs is not None}
        taken = [slabs.take() for slabs in memory.values()]

        def copied(layer: int) -> list[Tensor]:
            for slabs in taken:
                next(slabs)
            return [*(part.layers_TKX[layer] for part in parts), own.pop(0)]

        offset = 0 if reused is None else reused.positions(0, num_tokens, num_tokens + 1)[0] - num_tokens
        region = self.arena.enter(
            sum(len(part.positions_T) for part in parts),
            num_tokens + num_new,
            offset,
            copied,
        )
        if region is None:
            return None
        return region, KVCache(region.slabs) if reused is None else reusing(region.slabs, reused)

    def leave(self, region: Region) -> None:
        """Take a row's place back."""
        self.arena.leave(region)
        if self.arena.num_used or self._has_graphs:
            return
        if not (self.replays and self.arena.is_smallest):
            self.arena.trim()
        for key in [key for key in self._steps if key[0] > 1]:
            del self._steps[key]

    @torch.inference_mode()
    def trim(self) -> None:
        """Give back memory that no row needs."""
        self.arena.trim()

    @torch.inference_mode()
    def attention(self, rows: Sequence[Placed]) -> CausalAttention:
        """Attention of the next token of each of these rows, in a forward that may have others."""
        step = self._step(len(rows))
        step.index.place(rows, advances=False)
        stored = [num_stored for _, num_stored in rows]
        start = max(stored)
        return CausalAttention(step.cache, start=start, pads=[start - num for num in stored], phase=Phase.decode)

    @torch.inference_mode()
    def step(self, rows: Sequence[Placed], ids: Sequence[int]) -> Tensor:
        """Logits (B, V) after these tokens, which are stored, by a forward of rows of the arena alone."""
        num_filling = (1 << (len(rows) - 1).bit_length()) - len(rows)
        longest = None
        if self._has_graphs:  # whose kernel splits as many keys among its blocks
            longest = max(LEAST_LONGEST, 1 << (max(len(region.slots) for region, _ in rows) - 1).bit_length())
        step = self._step(len(rows) + num_filling, longest)
        step.index.place(rows)
        ids_B = row_values([*ids, *[0] * num_filling], self._model.device)
        return step.forward(ids_B[:, None], 0)[: len(rows)]

    def _step(self, num_rows: int, longest: int | None = None) -> _Step:
        longest = self.arena.num_slots if longest is None else longest
        key = num_rows, longest
        if key not in self._steps:
            model, index = self._model, ArenaIndex(num_rows, longest, self._model.device)
            cache = KVCache(self.arena.slabs, index)
            forward = FixedForward(model, cache, num_rows=num_rows)
            self._steps[key] = _Step(index=index, cache=cache, forward=model.ranges.around("decoding step", forward))
        return self._steps[key]
