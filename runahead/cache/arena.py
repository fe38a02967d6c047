"""Rows of different lengths in one memory: a decoding step of so many of them is of fixed shape."""

# Legend: S sequences of a step: rows, and what fills them up. T tokens, K kv heads, X = H + V (key and value).

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from policies.row_values import sent
from runahead.attention.op import Lengths
from runahead.cache.index import SlabIndex, Write
from runahead.cache.new_tokens import NewTokens
from runahead.cache.slabs import KVShape, KVSlab, Slabs

LEAST_TOKENS = 4096
"""Tokens of the smallest arena, if as many are allowed."""

SPARE = 1
"""First slots, which are of no row: what fills up a step stores its tokens there."""


@dataclass(eq=False, kw_only=True)
class Region:
    """A row's slots of an arena.

    Attributes:
        slots: the slots, contiguous.
        num_before: the first of them, with copies of what the row's prompt reuses.
        offset: position of each own token of the row, less its number.
        slabs: the slots of the row's own tokens in each layer, as views.
    """

    slots: range
    num_before: int
    offset: int
    slabs: Slabs = field(init=False)

    def view(self, slab: KVSlab) -> KVSlab:
        """Own tokens in a layer's memory."""
        first = self.slots.start + self.num_before
        return KVSlab(slab_TBKX=slab.slab_TBKX[first : self.slots.stop], key_dim=slab.key_dim, first=0)


class Arena:
    """Keys and values of rows in one memory, each row in contiguous slots.

    It is allocated when a row enters, and stays until `trim`. When it has no room for a row, all rows move to one that
    is twice as large, as long as that is allowed.

    Args:
        shapes: of the layers.
        most_tokens: most tokens that it has room for; None is any number.
        let_go: called before the memory is given back or its rows move; whoever else holds it forgets it then.

    Attributes:
        num_moves: how often it was allocated.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        device: torch.device,
        most_tokens: int | None = None,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        self._shapes, self._device, self._most, self._let_go = list(shapes), device, most_tokens, let_go
        self._slabs: Slabs | None = None
        self._regions = list[Region]()  # in the order of slots
        self.num_moves = 0

    @property
    def slabs(self) -> Slabs:
        """The memory, (T, 1, K, X) in each layer."""
        assert self._slabs is not None, "no row has entered"
        return self._slabs

    @property
    def num_slots(self) -> int:
        """Slots that are allocated."""
        return 0 if self._slabs is None else len(self._slabs.by_layer[0].slab_TBKX)

    @property
    def is_smallest(self) -> bool:
        """Whether none is smaller."""
        return self.num_slots == self._size(0)

    @property
    def num_used(self) -> int:
        """Slots of rows."""
        return sum(len(region.slots) for region in self._regions)

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots of rows."""
        return self.num_used * sum(shape.bytes_per_token() for shape in self._shapes)

    def enter(
        self, num_before: int, num_own: int, offset: int, parts: Callable[[int], Sequence[Tensor]]
    ) -> Region | None:
        """Give slots to a row, and copy what is stored of it.

        Args:
            num_before, offset: as of `Region`.
            num_own: slots for the row's own tokens.
            parts: keys and values (T, K, X) of a layer, those before the own ones first; asked for layer by layer, and
                held until those of a layer are copied.

        Returns:
            None if there is no room.
        """
        num_tokens = num_before + num_own
        start = self._free(num_tokens)
        if start is None:
            num_slots = self._size(self.num_used + num_tokens)
            if num_slots is None or not self._move(num_slots):
                return None
            start = self._free(num_tokens)
            assert start is not None, "rows that have moved lie side by side"
        region = Region(slots=range(start, start + num_tokens), num_before=num_before, offset=offset)
        region.slabs = Slabs.each_its_own([region.view(slab) for slab in self.slabs.by_layer])
        for layer, slab in enumerate(self.slabs.by_layer):
            _store(slab, start, parts(layer))
        self._regions.append(region)
        self._regions.sort(key=lambda each: each.slots.start)
        return region

    def leave(self, region: Region) -> None:
        """Take a row's slots back. What it stored is there until another row enters."""
        self._regions.remove(region)

    def trim(self) -> None:
        """Give back memory that no row needs."""
        if not self._regions:
            self._let_go()
            self._slabs = None
            return
        num_slots = self._size(self.num_used)
        if num_slots is not None and num_slots < self.num_slots:
            self._move(num_slots)

    def _size(self, num_used: int) -> int | None:
        """Slots of an arena for so many of rows; None if they are more than allowed."""
        if self._most is not None and num_used > self._most:
            return None
        num_slots = max(LEAST_TOKENS, 1 << (num_used + SPARE - 1).bit_length())
        return num_slots if self._most is None else min(num_slots, self._most + SPARE)

    def _free(self, num_tokens: int) -> int | None:
        """The first of so many free slots."""
        begin = SPARE
        for region in self._regions:
            if region.slots.start - begin >= num_tokens:
                return begin
            begin = region.slots.stop
        return begin if self.num_slots - begin >= num_tokens else None

    def _move(self, num_slots: int) -> bool:
        """Move all rows to other memory, one after another. Returns whether there was any."""
        spans = [(0, num_slots)] * len(self._shapes)
        try:
            slabs = Slabs.empty(self._shapes, batch=1, spans=spans, num_slabs=len(spans), device=self._device)
        except ValueError:  # rows then have memory of their own, as far as there is any
            return False
        self._let_go()
        before, self._slabs = self._slabs, slabs
        self.num_moves += 1
        froms, at = [region.slots for region in self._regions], SPARE
        for region in self._regions:
            region.slots = range(at, at + len(region.slots))
            at = region.slots.stop
        # Layer by layer, so that on a CPU, where memory is taken when it is written, the old one is freed meanwhile.
        for layer, old in enumerate(() if before is None else before.take()):
            for region, slots in zip(self._regions, froms, strict=True):
                to = slabs.by_layer[layer]
                to.slab_TBKX[region.slots.start : region.slots.stop] = old.slab_TBKX[slots.start : slots.stop]
                region.slabs.by_layer[layer] = region.view(to)
        return True


def _store(slab: KVSlab, at: int, parts: Sequence[Tensor]) -> None:
    """Copy keys and values (T, K, X) into a layer's memory, from a slot on."""
    for part_TKX in parts:
        slab.slab_TBKX[at : at + len(part_TKX), 0] = part_TKX
        at += len(part_TKX)


class Placed(NamedTuple):
    """A row in a step.

    Attributes:
        num_stored: own tokens that it stores.
    """

    region: Region
    num_stored: int


class ArenaIndex(SlabIndex):
    """Index of one new token each of rows of an arena. Where they lie is told before each step, and is on the device.

    Args:
        num_sequences: rows of a step; fewer are filled up.
        longest: most tokens that a row sees.
    """

    repeats_steps = True

    def __init__(self, num_sequences: int, longest: int, device: torch.device) -> None:
        self._size, self._device = num_sequences, device
        self._numbers_3S = torch.zeros(3, num_sequences, dtype=torch.long, device=device)
        self._next_S, self._position_S, self._grows_S = self._numbers_3S  # int64, as indices are
        self._bounds = torch.zeros(2 * num_sequences + 1, dtype=torch.int32, device=device)
        self._seen_S = self._bounds[num_sequences + 1 :]
        # The kernel takes sequences wherever they begin, as it is told how many of their tokens are seen.
        self._lengths = Lengths(starts=self._bounds[: num_sequences + 1], seen_S=self._seen_S, room=longest)
        self.numbers = [self._numbers_3S, self._bounds]
        self._told = list[list[int]]()

    def place(self, rows: Sequence[Placed], *, advances: bool = True) -> None:
        """Tell where the rows of the next step lie.

        Nothing is sent to the device where they are those of the last step, a token further.

        Args:
            advances: `advance` is called after the step.
        """
        firsts = [region.slots.start for region, _ in rows]
        seen = [region.num_before + num_stored + 1 for region, num_stored in rows]
        positions = [num_stored + region.offset for region, num_stored in rows]
        assert all(each <= len(row.region.slots) for each, row in zip(seen, rows, strict=True)), (seen, rows)
        filling = self._size - len(rows)
        if self._device.type == "cpu":
            places = [range(first, first + num) for first, num in zip(firsts, seen, strict=True)]
            self._lengths = replace(self._lengths, places=[*places, *[range(1)] * filling])
        is_told = self._told == [firsts, seen, positions]
        self._told = [firsts, [num + 1 for num in seen], [position + 1 for position in positions]] if advances else []
        if is_told:
            return
        none = [0] * filling
        last = [first + num - 1 for first, num in zip(firsts, seen, strict=True)]
        numbers = [[*last, *none], [*positions, *none], [*[1] * len(rows), *none]]
        self._numbers_3S.copy_(sent(torch.tensor(numbers), self._device))
        bounds = [*firsts, *none, 0, *seen, *[1] * filling]
        self._bounds.copy_(sent(torch.tensor(bounds, dtype=torch.int32), self._device))

    def writes(self, tokens: NewTokens, num_new: int) -> Sequence[Write]:
        return [Write(self._next_S)]

    def spans(self, tokens: NewTokens, num_new: int) -> Lengths:
        return self._lengths

    def positions_BC(self, index_C: Tensor, start: int) -> Tensor:  # noqa: N802
        return self._position_S[:, None]

    def advance(self) -> None:
        self._numbers_3S[:2] += self._grows_S
        self._seen_S += self._grows_S
