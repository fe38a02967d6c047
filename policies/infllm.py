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
# w observed tokens, H key dim. b are rows whose blocks end alike.

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from policies.block_index import BlockIndex, BlockRetriever
from policies.layer_view import PromptPart
from policies.options import Budget, require, require_least
from policies.retriever import Choice, Group, Index, Slots


class Blocks(BlockIndex):
    """Index of blocks by their mean representatives."""

    together = True

    how: InfLLM

    @property
    def block(self) -> int:
        return super().block if self.how.needs_surprise else self.how.block

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._asking_BKH.nbytes

    def see(self, q_BNwH: Tensor) -> None:
        self._asking_BKH = q_BNwH.unflatten(1, (self.num_kv_heads, -1)).sum(dim=(2, 3))

    def digest(self, rows: slice, k_bKPSH: Tensor) -> Tensor:
        scores_bKPS = (k_bKPSH @ self._asking_BKH[rows, :, None, :, None]).squeeze(-1)
        best_bKPR = scores_bKPS.topk(min(self.how.representatives, k_bKPSH.shape[3]), dim=-1).indices
        return k_bKPSH.take_along_dim(best_bKPR.unsqueeze(-1), dim=3).mean(dim=3)

    def choose(self, q_BNH: Tensor, slots: Slots) -> Choice | None:
        choice = super().choose(q_BNH, slots)
        if choice is None:
            return None
        slots_BKm = choice.slots_BKm.sort(dim=-1).values  # the last ones are the window
        return Choice(slots_BKm=slots_BKm.expand(-1, self.num_kv_heads, -1))


@dataclass(kw_only=True)
class InfLLM(BlockRetriever, name="infllm"):
    """Retrieve blocks of tokens, `fetch` slots in total, beside the first and the last ones.

    Attributes:
        block: tokens of a block, if these are all of one size (`events`).
        representatives: keys that stand for a block, in each KV head.
        clamped: attend to all tokens before the last `recent` ones as if they were that far away; then a prompt may be
            longer than the model's context. Otherwise tokens are at their own distances.
        observed: last tokens of a prompt, and of a chunk or turn of as many, whose queries choose representatives.

    Raises:
        ValueError: an option is out of range.
    """

    index_class: ClassVar[type[Index]] = Blocks
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
        if self.clamped:
            require_least(self, recent=1)
        super().__post_init__()
        require_least(self, block=1, representatives=1, observed=1)
        require(self.fetch is not None, "fetch", self.fetch, "must be given: blocks are ranked, not compared")
        require(
            self.late is None, "late", self.late, f"does not go with {self.label}, which chooses for all heads together"
        )

    @property
    def clamps(self) -> bool:
        return self.clamped

    def of_part(self, part: PromptPart) -> Self:
        other = super().of_part(part)
        other = copy.copy(other)
        other.recent = part.share_of(self.recent)
        return other
