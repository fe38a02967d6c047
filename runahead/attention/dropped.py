"""Tokens that were dropped, for which the mean of all stands (RazorAttention)."""

# Legend: B batch, N query heads, K kv heads, C new tokens, n stored slots, m kept ones, H key dim, V value dim,
# X = H + V, D = C times query heads per KV head.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runahead.attention.partial import AttentionTerms


@dataclass(frozen=True, kw_only=True)
class DroppedTokens:
    """Tokens that the KV heads of a layer dropped. Attention takes each of them for the mean of all (RazorAttention).

    Attributes:
        sum_BKX: sum of their keys and values, in at least float32.
        count_BK: their number, in the same dtype.
    """

    sum_BKX: Tensor
    count_BK: Tensor

    @classmethod
    def from_slots(
        cls, kv_BKnX: Tensor, is_token_BKn: Tensor, slots_BKm: Tensor, before: DroppedTokens | None
    ) -> DroppedTokens:
        """The tokens of a layer that are in no slot of `slots_BKm`, and those that it dropped before."""
        stays_BKn = torch.zeros(*kv_BKnX.shape[:2], kv_BKnX.shape[2] + 1, dtype=torch.bool, device=kv_BKnX.device)
        stays_BKn = stays_BKn.scatter_(2, slots_BKm + 1, True)[..., 1:]  # without the place of -1
        stays_BKn |= ~is_token_BKn  # padding, which may hold anything
        wide = torch.promote_types(kv_BKnX.dtype, torch.float32)
        sum_BKX = kv_BKnX.masked_fill(stays_BKn[..., None], 0).sum(dim=2, dtype=wide)
        count_BK = (~stays_BKn).sum(dim=2).to(wide)
        if before is not None:
            sum_BKX, count_BK = sum_BKX + before.sum_BKX, count_BK + before.count_BK
        return cls(sum_BKX=sum_BKX, count_BK=count_BK)

    def row(self, row: int) -> DroppedTokens:
        """The dropped tokens of one row."""
        return DroppedTokens(sum_BKX=self.sum_BKX[row : row + 1], count_BK=self.count_BK[row : row + 1])

    @property
    def num_bytes(self) -> int:
        return self.sum_BKX.nbytes + self.count_BK.nbytes

    def attend(self, q_BNCH: Tensor, key_dim: int, terms: AttentionTerms) -> tuple[Tensor, Tensor]:
        """Output (B, N, C, V) and log-sum-exp (B, N, C) of attention to the mean, as often as there are tokens."""
        mean_BKX = self.sum_BKX / self.count_BK.clamp_min(1)[..., None]
        k_BK1H, v_BK1V = (x[:, :, None] for x in mean_BKX.tensor_split([key_dim], dim=-1))
        q_BKDH = q_BNCH.unflatten(1, (mean_BKX.shape[1], -1)).flatten(2, 3).to(k_BK1H.dtype)
        scores_BNC = (q_BKDH @ k_BK1H.mT * terms.scaling).reshape(q_BNCH.shape[:3])
        if terms.softcap is not None:
            scores_BNC = terms.softcap * torch.tanh(scores_BNC / terms.softcap)
        group = q_BNCH.shape[1] // mean_BKX.shape[1]
        weights_BN1 = self.count_BK.log().repeat_interleave(group, dim=1)[..., None]  # of none: minus infinity
        out_BNCV = v_BK1V.repeat_interleave(group, dim=1).expand(-1, -1, q_BNCH.shape[2], -1)
        return out_BNCV, scores_BNC + weights_BN1
