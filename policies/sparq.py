"""SparQ attention (Ribar et al., ICML 2024): scores by the few dims of all keys in which the query is largest.

In every step the r dims with the largest sum of |q| over a group's heads are taken, and approximate probabilities are
s = softmax(q_r K_r^T / sqrt(d |q_r| / |q|)) with L1 norms (Sec. 3, Algorithm 1). The tokens with the highest ones are
fetched. Of the share alpha of s that they have, attention gives the rest, 1 - alpha, to the mean of all values.

All keys are stored a second time, by dims, on the device, half again as much as keys and values. `dims` is r.
"""

# Legend: B batch, N query heads, K kv heads, G = N / K, n slots, m chosen ones, C new tokens, H key dim, V value dim,
# r columns in use.

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policies.columns import Columns
from policies.options import Budget, require_least
from policies.retriever import (
    Choice,
    Group,
    PromptView,
    Rest,
    Retriever,
    Slots,
    most_needed,
    need_of_group,
    without_padding,
)


class LargeDims(Columns):
    """Index of all columns of the keys, and the mean of all values that were ever stored."""

    how: SparQ

    def __init__(self, view: PromptView, how: SparQ) -> None:
        super().__init__(view, how)
        is_token_B1n1 = (view.positions_BKn[:, :1] >= 0).unsqueeze(3)
        wide = torch.promote_types(view.v_BKnV.dtype, torch.float32)
        self._sum_BKV = (view.v_BKnV * is_token_B1n1).sum(dim=2, dtype=wide)
        self._count_B11 = is_token_B1n1.sum(dim=2, dtype=wide)

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._sum_BKV.nbytes + self._count_B11.nbytes

    @property
    def scored_bytes(self) -> int:
        num_dims = self._columns_BKrT.shape[2]
        return self.num_bytes * min(self.how.dims, num_dims) // num_dims

    def append(self, k_BKCH: Tensor, v_BKCV: Tensor) -> None:
        super().append(k_BKCH, v_BKCV)
        self._sum_BKV = self._sum_BKV + v_BKCV.sum(dim=2, dtype=self._sum_BKV.dtype)
        self._count_B11 = self._count_B11 + v_BKCV.shape[2]

    def overwrite(self, slots_BK: Tensor, k_BKH: Tensor, v_BKV: Tensor) -> None:
        super().overwrite(slots_BK, k_BKH, v_BKV)
        self._sum_BKV, self._count_B11 = self._sum_BKV + v_BKV, self._count_B11 + 1

    def scores(self, q_BNH: Tensor) -> Tensor:
        q_BKGH = q_BNH.unflatten(1, (self.num_kv_heads, -1))
        if self.how.dims >= q_BKGH.shape[3]:
            return self.products(q_BKGH * self.scaling)
        dims_BKr = q_BKGH.abs().sum(dim=2).topk(self.how.dims, dim=-1).indices
        q_BKGr = q_BKGH.take_along_dim(dims_BKr.unsqueeze(2), dim=3)
        # A query that is 0 scores all keys alike.
        share_BKG1 = q_BKGr.abs().sum(dim=-1, keepdim=True) / q_BKGH.abs().sum(dim=-1, keepdim=True).clamp_min(1e-30)
        return self.products(q_BKGr * (self.scaling * share_BKG1.clamp_min(1e-30).rsqrt()), dims_BKr)

    def choose(self, q_BNH: Tensor, slots: Slots) -> Choice | None:
        how = self.how
        if not how.mean_value:
            return super().choose(q_BNH, slots)
        scores_BKGn = without_padding(self.scores(q_BNH), slots)
        # Only the rule of `union` overwrites the scores.
        need_BKn = need_of_group(scores_BKGn.clone() if how.group is Group.union else scores_BKGn, how.group)
        slots.mark(need_BKn, how)
        choice = most_needed(need_BKn, how.num_chosen(slots), slots)
        if choice is None:
            return None
        # Weights relative to the largest of each head: exponentials of all scores are most of a choice's time.
        weights_BKGn = scores_BKGn.sub_(scores_BKGn.amax(dim=-1, keepdim=True)).exp_()
        slots_BKGm = choice.slots_BKm.unsqueeze(2).expand(*weights_BKGn.shape[:3], -1)
        chosen_BKG, all_BKG = weights_BKGn.gather(3, slots_BKGm).sum(dim=-1), weights_BKGn.sum(dim=-1)
        least = torch.finfo(chosen_BKG.dtype).tiny
        # log((1 - alpha) / alpha); nan: nothing to choose from
        ratio_BKG = (all_BKG - chosen_BKG).clamp_min(0).log() - chosen_BKG.clamp_min(least).log()
        ratio_BKG = ratio_BKG.nan_to_num_(-torch.inf, neginf=-torch.inf)
        mean_BKV = self._sum_BKV / self._count_B11.clamp_min(1)  # a rank may have no token of a row
        out_BKGV = mean_BKV.unsqueeze(2).expand(*ratio_BKG.shape, -1)
        rest = Rest(out_BNV=out_BKGV.flatten(1, 2), lse_BN=ratio_BKG.flatten(1, 2), is_relative=True)
        return replace(choice, rest=rest)


@dataclass(kw_only=True)
class SparQ(Retriever, name="sparq"):
    """Retrieve the tokens with the highest scores in the dims in which the query is largest.

    Attributes:
        dims: r, number of these dims.
        mean_value: give the attention that the other tokens are estimated to have to the mean value.

    Raises:
        ValueError: an option is out of range.
    """

    index_class = LargeDims

    fetch: Budget | None = 0.1
    group: Group = Group.sum
    dims: int = 16
    mean_value: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_least(self, dims=1)

    @property
    def estimates_rest(self) -> bool:
        return self.mean_value
