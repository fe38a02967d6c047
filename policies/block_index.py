"""Index of blocks of consecutive tokens, of one size or of many, each with a digest of its keys."""

# Legend: B batch, K kv heads, n slots, P blocks, S slots of a block, C new tokens, H key dim, V value dim, X digest
# dim. b are rows whose blocks end alike.

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from policies.clustering import rows_by_pad
from policies.retriever import Index, PromptView
from policies.row_values import sent


@dataclass(frozen=True, kw_only=True)
class BlocksOfRows:
    """Blocks of rows that end alike: of rows with the same padding, or of one row.

    Attributes:
        rows: these rows.
        begin, first: first slot of the text, and of the first block.
        digests_bKPX: what stands for each block.
        sizes_P: tokens of each block with a digest, if these are of many sizes.
        ends: the slots after the blocks, and after those that have no digest yet.
    """

    rows: slice
    begin: int
    first: int
    digests_bKPX: Tensor
    sizes_P: Tensor
    ends: list[int] = field(default_factory=list)

    @property
    def last_end(self) -> int:
        return self.ends[-1] if self.ends else self.first

    @property
    def num_blocks(self) -> int:
        return self.digests_bKPX.shape[2]

    @property
    def num_slots(self) -> int:
        """Slots of all blocks, those before the first one included."""
        return self.ends[self.num_blocks - 1] if self.num_blocks else self.first


class BlockIndex(Index):
    """Index of the blocks that have left a window of recent tokens, whose keys are read where they are stored.

    Args:
        view: the layer after the prompt.
        block: tokens of a block.
        by_event: blocks end where `add_ends` says; later tokens, of which it says nothing, in blocks of `block`.
        sinks, recent: tokens that are in no block, the first ones and the last ones.
        digest_dim: of a block's digest.

    Attributes:
        num_told: slots of which `add_ends` was told all that is known.
    """

    def __init__(
        self, view: PromptView, *, block: int, by_event: bool, sinks: int, recent: int, digest_dim: int
    ) -> None:
        super().__init__(view.k_BKnH.shape[2])
        self.block, self.by_event, self._recent, self.stored = block, by_event, recent, view.stored
        self.num_told = 0
        self.num_kv_heads, self._scaling = view.k_BKnH.shape[1], view.scaling
        none_BK0X = view.k_BKnH.new_empty(*view.k_BKnH.shape[:2], 0, digest_dim)
        none_0 = torch.empty(0, dtype=torch.int64, device=none_BK0X.device)
        alone = [(slice(row, row + 1), pad) for row, pad in enumerate(view.pads)]
        self.parts = [
            BlocksOfRows(rows=rows, begin=pad, first=pad + sinks, digests_bKPX=none_BK0X[rows], sizes_P=none_0)
            for rows, pad in (alone if by_event else rows_by_pad(view.pads))
        ]

    @abstractmethod
    def digest(self, rows: slice, k_bKPSH: Tensor) -> Tensor:
        """Digests that stand for blocks of rows (b, K, P, X)."""

    @property
    def num_bytes(self) -> int:
        return sum(part.digests_bKPX.nbytes for part in self.parts)

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor) -> None:
        self.num_slots += k_BKCH.shape[2]
        if not self.by_event:  # else it is not known yet where those of given tokens end
            self.catch_up()

    def fork(self, stored: Callable[[], Tensor]) -> Self:
        other = super().fork(stored)
        other.parts = [replace(part, ends=list(part.ends)) for part in self.parts]
        return other

    def end_of(self, row: int) -> tuple[int, int]:
        """Where the last known block of a row of events ends, and where its text begins."""
        return self.parts[row].last_end, self.parts[row].begin

    def add_ends(self, row: int, ends: Sequence[int]) -> None:
        """Let the next blocks of a row of events end before these slots."""
        self.parts[row].ends.extend(ends)

    def catch_up(self, k_BKnH: Tensor | None = None, *, of_all: bool = False) -> None:
        """Make the digests of the blocks that have left the window.

        Args:
            k_BKnH: all keys, if they are at hand.
            of_all: tokens of which nothing was said end in blocks of one size, too.
        """
        limit = self.num_slots - self._recent
        for number, part in enumerate(self.parts):
            if of_all or not self.by_event:
                part.ends.extend(range(part.last_end + self.block, self.num_slots + 1, self.block))
            ends = [end for end in part.ends[part.num_blocks :] if end <= limit]
            if not ends:
                continue
            k_BKnH = self.stored() if k_BKnH is None else k_BKnH
            found = list[Tensor]()
            order = list[int]()
            for numbers, k_bKPSH in _by_size(k_BKnH[part.rows], part.num_slots, ends):
                found.append(self.digest(part.rows, k_bKPSH))
                order += numbers
            new_bKPX = torch.cat(found, dim=2) if len(found) > 1 else found[0]
            if len(found) > 1:
                new_bKPX = new_bKPX[:, :, sent(torch.tensor(order).argsort(), new_bKPX.device)]
            sizes_P = part.sizes_P
            if self.by_event:  # else no step needs them
                sizes = [end - start for start, end in zip([part.num_slots, *ends], ends, strict=False)]
                sizes_P = torch.cat([sizes_P, sent(torch.tensor(sizes), sizes_P.device)])
            digests_bKPX = torch.cat([part.digests_bKPX, new_bKPX], dim=2)
            self.parts[number] = replace(part, digests_bKPX=digests_bKPX, sizes_P=sizes_P)

    def need_of_slots(
        self, q_BNH: Tensor, num_choices: int, places: Callable[[BlocksOfRows, Tensor], Tensor]
    ) -> Tensor:
        """Need (B, k, n), float64, of each slot: its block's place from the last to the best; in no block, above all.

        Of a block that is cut short the later tokens come first.

        Args:
            num_choices: k: 1 if all heads choose together, or the number of KV heads.
            places: (rows with blocks, their scaled queries (b, K, G, H)) -> places of the blocks (b, k, P).
        """
        self.catch_up(of_all=True)
        within_n = torch.arange(self.num_slots, device=q_BNH.device, dtype=torch.float64) / (2 * self.num_slots)
        need_Bkn = within_n.repeat(len(q_BNH), num_choices, 1)
        for part in self.parts:
            num_blocks = part.num_blocks
            need_Bkn[part.rows] += num_blocks
            if num_blocks == 0:
                continue
            place_bkP = places(part, q_BNH[part.rows].unflatten(1, (self.num_kv_heads, -1)) * self._scaling)
            if self.by_event:
                num_slots = part.num_slots - part.first
                wide_bkn = place_bkP.repeat_interleave(part.sizes_P, dim=2, output_size=num_slots)
            else:
                wide_bkn = place_bkP.repeat_interleave(self.block, dim=2)
            need_Bkn[part.rows, :, part.first : part.num_slots] += wide_bkn - num_blocks
        return need_Bkn

    def sizes(self, part: BlocksOfRows) -> Tensor:
        """Tokens (P,) of each block that has a digest."""
        return part.sizes_P if self.by_event else part.sizes_P.new_full((part.num_blocks,), self.block)


def _by_size(k_bKnH: Tensor, begin: int, ends: Sequence[int]) -> Iterator[tuple[list[int], Tensor]]:
    """The blocks of each size: their numbers, and their keys (b, K, P, S, H)."""
    starts = [begin, *ends[:-1]]
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    if len(set(sizes)) == 1:
        yield list(range(len(ends))), k_bKnH[:, :, begin : ends[-1]].unflatten(2, (len(ends), sizes[0]))
        return
    for size in sorted(set(sizes)):
        numbers = [number for number, each in enumerate(sizes) if each == size]
        first_P = sent(torch.tensor([starts[number] for number in numbers]), k_bKnH.device)
        within_S = torch.arange(size, device=k_bKnH.device)
        yield numbers, k_bKnH[:, :, first_P[:, None] + within_S]
