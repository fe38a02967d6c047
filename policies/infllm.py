"""InfLLM (Xiao et al., NeurIPS 2024): retrieve blocks of tokens by a few representative keys, at clamped distances.

A block of consecutive tokens gets representatives once it has left the window of recent tokens: in each KV head the
keys to which later queries give the highest scores (Sec. 3.2). The mean scores of all representatives over heads and
queries rank the blocks, one choice for all heads. With `clamped` all tokens before the window are at one distance, the
window's length, so that no distance is longer than those of training, and a text may be longer than the model's
context. In the paper the queries that choose representatives are those of the window that follows a token; here they
are the last ones that were given when the block left it, and a KV head chooses for its group.

Tokens between the last block and the window are attended to, as there. In a chunk of a prompt the newest token is
`recent` away from all earlier blocks, others by their place less. There is no cache of blocks on the device.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, n slots, P blocks, S slots of a block, R representatives,
# w observed tokens, H key dim. b are rows with the same padding.

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from policies.base import Budget, PromptPart, require, require_least
from policies.clustering import rows_by_pad
from policies.retriever import Choice, Group, Index, PromptView, Retriever, Slots, most_needed, need_of_group


@dataclass(frozen=True, kw_only=True)
class BlocksOfRows:
    """Blocks of rows with the same padding.

    Attributes:
        rows: these rows.
        first: first slot of the first block.
        keys_bKPH: mean representative of each block.
    """

    rows: slice
    first: int
    keys_bKPH: Tensor


class Blocks(Index):
    """Index of the blocks that have left the window, whose keys are read where they are stored.

    Args:
        view: the layer after the prompt.
        how: the policy, with the numbers of tokens.
    """

    def __init__(self, view: PromptView, how: InfLLM) -> None:
        super().__init__(view.k_BKnH.shape[2])
        self._how, self._scaling, self._stored = how, view.scaling, view.stored
        none_BK0H = view.k_BKnH[:, :, :0]
        self._parts = [
            BlocksOfRows(rows=rows, first=pad + how.sinks, keys_bKPH=none_BK0H[rows])
            for rows, pad in rows_by_pad(view.pads)
        ]
        self.num_kv_heads = view.k_BKnH.shape[1]
        self.see(view.q_BNwH)
        self._add(view.k_BKnH)

    @property
    def num_bytes(self) -> int:
        return sum(part.keys_bKPH.nbytes for part in self._parts) + self._asking_BKH.nbytes

    def see(self, q_BNwH: Tensor) -> None:
        self._asking_BKH = q_BNwH.unflatten(1, (self.num_kv_heads, -1)).sum(dim=(2, 3))

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor) -> None:
        self.num_slots += k_BKCH.shape[2]
        if any(self._num_left(part) for part in self._parts):
            self._add(self._stored())

    def fork(self, stored: Callable[[], Tensor]) -> Index:
        other = copy.copy(self)
        other._stored = stored
        return other

    def _num_left(self, part: BlocksOfRows) -> int:
        """Number of whole blocks that have left the window and have no representatives yet."""
        end = part.first + part.keys_bKPH.shape[2] * self._how.block
        return max(0, self.num_slots - self._how.recent - end) // self._how.block

    def _add(self, k_BKnH: Tensor) -> None:
        parts = []
        for part in self._parts:
            begin, number = part.first + part.keys_bKPH.shape[2] * self._how.block, self._num_left(part)
            span = slice(begin, begin + number * self._how.block)
            k_bKPSH = k_BKnH[part.rows, :, span].unflatten(2, (number, self._how.block))
            scores_bKPS = (k_bKPSH @ self._asking_BKH[part.rows, :, None, :, None]).squeeze(-1)
            best_bKPR = scores_bKPS.topk(min(self._how.representatives, self._how.block), dim=-1).indices
            keys_bKPH = k_bKPSH.take_along_dim(best_bKPR.unsqueeze(-1), dim=3).mean(dim=3)
            parts.append(replace(part, keys_bKPH=torch.cat([part.keys_bKPH, keys_bKPH], dim=2)))
        self._parts = parts

    def need_of_slots(self, q_BNH: Tensor, slots: Slots) -> Tensor:
        """Need (B, 1, n), float64, of each slot: its block's place from the last to the best; in no block, above all.

        Of the block that is cut short the later tokens come first.
        """
        within_n = torch.arange(self.num_slots, device=q_BNH.device, dtype=torch.float64) / (2 * self.num_slots)
        need_B1n = within_n.repeat(len(q_BNH), 1, 1)
        for part in self._parts:
            num_blocks = part.keys_bKPH.shape[2]
            need_B1n[part.rows] += num_blocks
            if num_blocks == 0:
                continue
            q_bKGH = q_BNH[part.rows].unflatten(1, (self.num_kv_heads, -1)) * self._scaling
            scores_bKGP = q_bKGH @ part.keys_bKPH.mT
            scores_bKGP = scores_bKGP.to(torch.promote_types(scores_bKGP.dtype, torch.float32))
            score_bP = need_of_group(scores_bKGP, self._how.group).mean(dim=1)
            if slots.mean_over_shares is not None:
                score_bP = slots.mean_over_shares(score_bP)
            place_bP = score_bP.argsort(dim=-1, stable=True).argsort(dim=-1)
            span = slice(part.first, part.first + num_blocks * self._how.block)
            need_B1n[part.rows, 0, span] += place_bP.repeat_interleave(self._how.block, dim=1) - num_blocks
        return need_B1n


@dataclass(kw_only=True)
class InfLLM(Retriever, name="infllm"):
    """Retrieve blocks of tokens, `fetch` slots in total, beside the first and the last ones.

    Attributes:
        block: tokens of a block.
        representatives: keys that stand for a block, in each KV head.
        clamped: attend to all tokens before the last `recent` ones as if they were that far away; then a prompt may be
            longer than the model's context. Otherwise tokens are at their own distances.
        observed: last tokens of a prompt, and of a chunk or turn of as many, whose queries choose representatives.

    Raises:
        ValueError: an option is out of range.
    """

    takes_full_pool: ClassVar[bool] = False  # blocks are of consecutive tokens
    extends: ClassVar[bool] = True

    fetch: Budget | None = 6272
    group: Group = Group.sum
    sinks: int = 128
    recent: int = 4096
    block: int = 128
    representatives: int = 4
    clamped: bool = True
    observed: int = 256  # type: ignore[misc]  # a constant of most policies

    def __post_init__(self) -> None:
        super().__post_init__()
        require_least(self, block=1, representatives=1, observed=1)
        require(self.fetch is not None, "fetch", self.fetch, "must be given: blocks are ranked, not compared")
        require(self.late is None, "late", self.late, "does not go with infllm, which chooses for all heads together")
        if self.clamped:
            require_least(self, recent=1)

    @property
    def clamps(self) -> bool:
        return self.clamped

    def of_part(self, part: PromptPart) -> Self:
        other = super().of_part(part)
        other = copy.copy(other)
        other.recent = part.share_of(self.recent)
        return other

    def index(self, view: PromptView) -> Blocks:
        return Blocks(view, self)

    def choose(self, index: Index, q_BNH: Tensor, slots: Slots) -> Choice | None:
        assert isinstance(index, Blocks)
        need_BKn = index.need_of_slots(q_BNH, slots)
        if slots.positions_BKn is not None:
            need_BKn = need_BKn.expand(slots.positions_BKn.shape).clone()
        slots.mark(need_BKn, sinks=self.sinks, recent=self.recent)
        choice = most_needed(need_BKn, self.num_chosen(slots), slots)
        if choice is None:
            return None
        slots_BKm = choice.slots_BKm.sort(dim=-1).values  # the last ones are the window
        return Choice(slots_BKm=slots_BKm.expand(-1, index.num_kv_heads, -1))
