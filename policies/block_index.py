"""Retrieval of blocks of consecutive tokens, of one size or events, by a digest of each block's keys."""

# Legend: B batch, N query heads, K kv heads, G = N / K, k choices (1 or K), n slots, P blocks, S slots of a block (in
# surprises all slots), C new tokens, T tokens of a window, L layers, H key dim, V value dim, X digest dim. b are rows
# whose blocks end alike.

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, Self

import torch
from torch import Tensor

from policies.clustering import rows_by_pad
from policies.events import By, Events, Refine
from policies.options import nested_options, require_default
from policies.precision import widened
from policies.retriever import Choice, Index, PromptView, Retriever, Slots, need_of_group
from policies.row_values import sent


@dataclass(kw_only=True)
class BlockRetriever(Retriever):
    """Base of policies that retrieve blocks.

    Attributes:
        events: where blocks end: by=surprise, gamma, window, least, most, refine=modularity, layers.
    """

    takes_full_pool: ClassVar[bool] = False  # blocks are of consecutive tokens

    events: Events = field(default_factory=Events)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.events = nested_options(self, "events", "by=surprise")
        rule = "with policy.events.by=surprise; use policy.events.most"
        require_default(self, "block", "page", given=self.needs_surprise, rule=rule)

    @property
    def needs_surprise(self) -> bool:
        return self.events.by is By.surprise

    @property
    def compares_layers(self) -> bool:
        return self.events.refine is not Refine.none

    def tell(self, indices: Sequence[Index], surprise_BS: Sequence[Sequence[float]], num_told: int) -> None:
        blocks = [index for index in indices if isinstance(index, BlockIndex)]
        last = blocks[-max(1, round(self.events.layers * len(blocks))) :]
        k_LBKnH = [index.stored() for index in last] if self.compares_layers else []
        for row, surprise_S in enumerate(surprise_BS):
            edges = blocks[0].parts[row].edges
            k_LKnH = [k_BKnH[row] for k_BKnH in k_LBKnH]
            ends = self.events.ends(
                surprise_S, num_told=num_told, begin=edges[0] - self.sinks, before=edges[-1], k_LKSH=k_LKnH
            )
            for index in blocks:
                index.parts[row].edges.extend(ends)
        for index in blocks:
            index.catch_up()


@dataclass(kw_only=True)
class BlocksOfRows:
    """Blocks of rows that end alike: of rows with the same padding, or of one row.

    Attributes:
        rows: these rows.
        edges: first slot of the first block, and the slots after all blocks that are known.
        digests_bKPX: what stands for each of the first blocks, those that have left the window.
        sizes: their numbers of tokens (P,), or one that all have, with which a step launches fewer kernels.
    """

    rows: slice
    edges: list[int]
    digests_bKPX: Tensor
    sizes: Tensor | int

    @property
    def num_blocks(self) -> int:
        """Number of blocks with a digest."""
        return self.digests_bKPX.shape[2]

    @property
    def slots(self) -> slice:
        """The slots of the blocks with a digest."""
        return slice(self.edges[0], self.edges[self.num_blocks])


class BlockIndex(Index):
    """Index of the blocks that have left a window of recent tokens, whose keys are read where they are stored.

    No token of the policy's first `sinks` and last `recent` ones is in a block.
    """

    together: ClassVar[bool] = False
    """Whether all heads make one choice, k = 1; otherwise each KV head makes its own."""

    how: BlockRetriever

    def __init__(self, view: PromptView, how: BlockRetriever) -> None:
        super().__init__(view, how)
        self.see(view.q_BNwH)
        none_BK0X = self.digest(slice(None), view.k_BKnH[:, :, :0].unflatten(2, (0, 1)))
        sizes: Tensor | int = self.block
        of_rows = rows_by_pad(view.pads)
        if how.needs_surprise:
            sizes = torch.empty(0, dtype=torch.int64, device=none_BK0X.device)
            of_rows = [(slice(row, row + 1), pad) for row, pad in enumerate(view.pads)]
        self.parts = [
            BlocksOfRows(rows=rows, edges=[pad + how.sinks], digests_bKPX=none_BK0X[rows], sizes=sizes)
            for rows, pad in of_rows
        ]
        self.catch_up(view.k_BKnH)

    @property
    def block(self) -> int:
        """Tokens of a block whose end nothing says: of all blocks, or of those after the last event."""
        return self.how.events.most

    @abstractmethod
    def digest(self, rows: slice, k_bKPSH: Tensor) -> Tensor:
        """Digests that stand for blocks of rows (b, K, P, X)."""

    @property
    def num_bytes(self) -> int:
        return sum(part.digests_bKPX.nbytes for part in self.parts)

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor) -> None:
        self.num_slots += k_BKCH.shape[2]
        self.catch_up()

    def fork(self, stored: Callable[[], Tensor]) -> Self:
        other = super().fork(stored)
        other.parts = [replace(part, edges=list(part.edges)) for part in self.parts]
        return other

    def catch_up(self, k_BKnH: Tensor | None = None, *, of_all: bool = False) -> None:
        """Make the digests of the blocks that have left the window.

        Args:
            k_BKnH: all keys, if they are at hand.
            of_all: tokens after the last event are in blocks, too: nothing more will be told of them.
        """
        for part in self.parts:
            if of_all or not self.how.needs_surprise:
                part.edges.extend(range(part.edges[-1] + self.block, self.num_slots + 1, self.block))
            limit = self.num_slots - self.how.recent
            sizes = [end - start for start, end in pairwise(part.edges[part.num_blocks :]) if end <= limit]
            if not sizes:
                continue
            k_BKnH = self.stored() if k_BKnH is None else k_BKnH
            start = part.edges[part.num_blocks]
            k_bKTH = k_BKnH[part.rows, :, start : start + sum(sizes)]
            new_bKPX = self._digests(part.rows, k_bKTH, sizes)
            part.digests_bKPX = torch.cat([part.digests_bKPX, new_bKPX], dim=2)
            if isinstance(part.sizes, Tensor):
                part.sizes = torch.cat([part.sizes, sent(torch.tensor(sizes), new_bKPX.device)])

    def _digests(self, rows: slice, k_bKTH: Tensor, sizes: Sequence[int]) -> Tensor:
        """Digests (b, K, P, X) of blocks one after another, all of a size at once."""
        if len(set(sizes)) == 1:
            return self.digest(rows, k_bKTH.unflatten(2, (len(sizes), -1)))
        k_PbKSH, found = k_bKTH.split(list(sizes), dim=2), dict[int, Tensor]()
        for size in set(sizes):
            numbers = [number for number, each in enumerate(sizes) if each == size]
            new_bKPX = self.digest(rows, torch.stack([k_PbKSH[number] for number in numbers], dim=2))
            found.update(zip(numbers, new_bKPX.unbind(dim=2), strict=True))
        return torch.stack([found[number] for number in range(len(sizes))], dim=2)

    def choose(self, q_BNH: Tensor, slots: Slots) -> Choice | None:
        self.catch_up(of_all=True)
        return super().choose(q_BNH, slots)

    def need(self, q_BNH: Tensor, slots: Slots) -> Tensor:
        """Need (B, k, n), float64, of each slot: its block's place from the last to the best; in no block, above all.

        Of a block that is cut short the later tokens come first.
        """
        within_n = torch.arange(self.num_slots, device=q_BNH.device, dtype=torch.float64) / (2 * self.num_slots)
        need_Bkn = within_n.repeat(len(q_BNH), 1 if self.together else self.num_kv_heads, 1)
        for part in self.parts:
            need_Bkn[part.rows] += part.num_blocks
            if part.num_blocks == 0:
                continue
            q_bKGH = q_BNH[part.rows].unflatten(1, (self.num_kv_heads, -1)) * self.scaling
            score_bkP = need_of_group(block_scores(q_bKGH, part.digests_bKPX), self.how.group)
            if self.together:
                score_bkP = score_bkP.mean(dim=1, keepdim=True)
                if slots.mean_over_shares is not None:
                    score_bkP = slots.mean_over_shares(score_bkP)
            place_bkP = self.places(part, score_bkP, slots)
            num_tokens = part.slots.stop - part.slots.start
            wide_bkn = place_bkP.repeat_interleave(part.sizes, dim=2, output_size=num_tokens)
            need_Bkn[part.rows, :, part.slots] += wide_bkn - part.num_blocks
        return need_Bkn if slots.positions_BKn is None else need_Bkn.expand(slots.positions_BKn.shape).clone()

    def places(self, part: BlocksOfRows, score_bkP: Tensor, slots: Slots) -> Tensor:
        """Place (b, k, P) of each block from the last to the best one."""
        return score_bkP.argsort(dim=-1, stable=True).argsort(dim=-1)


def block_scores(q_BKGH: Tensor, digests_BKPX: Tensor) -> Tensor:
    """Scores (B, K, G, P) of blocks, in at least float32, by a key each, or by both ends of its keys in each dim."""
    if digests_BKPX.shape[-1] > q_BKGH.shape[-1]:
        q_BKGH = torch.cat([q_BKGH.clamp_max(0), q_BKGH.clamp_min(0)], dim=-1)
    return widened(q_BKGH @ digests_BKPX.mT)
