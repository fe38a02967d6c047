"""Checkpoints trained with DMC (Nawrot et al., ICML 2024, arXiv 2403.09636): a token joins the slot before it, or not.

The last dims of keys and queries, before RoPE, are no part of these. A key's minus `dmc_init_val` is a logit: above 0
the token joins the one before it, in its KV head, and both become one slot. The slot holds the mean of their keys and
values, weighed by sigmoid(mean of the last dims of the KV head's queries + `dmc_init_val`), and is rotated to the
position of the newest token. A query sees the slots as they are once its token has come: earlier ones as they ended,
its own as it is so far. So each token has the mean so far as its key and value, and a token that joins the one before
it marks that, whose mean only its own query has seen: DMS with a window of one query (marks.py).

Means need the tokens before them, which may be in an earlier chunk or on another rank: that is a state of the layer.
Constants are those of the published code (Megatron-LM, megatron/contrib/dmc): means of at most `dmc_window_size`
tokens, of any number if that is 0. Its one checkpoint has no config of transformers, so these names are ours.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens, P what is kept of those before, S = P + C, H head dim,
# V value dim, X = H + V + 1.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from policies.row_values import row_values
from runahead.model.marking.marks import Marks


@dataclass(frozen=True, kw_only=True)
class Means(Marks):
    """How tokens join those before them.

    Attributes:
        most: tokens of a mean, at most; 0: any number.
    """

    most: int

    @classmethod
    def from_config(cls, config: Any) -> Means | None:
        """As of `Marks`."""
        most = getattr(config, "dmc_window_size", None)
        if most is None:
            return None
        if type(most) is not int or most < 0 or most == 1:
            raise ValueError(f"has dmc_window_size {most!r} in its config, which must be 0 or at least 2")
        return cls(window=1, scale=1.0, offset=float(getattr(config, "dmc_init_val", 5.0)), most=most)

    @property
    def num_before(self) -> int:
        """P: the last tokens before, or their sum where any number may be in a mean."""
        return self.most - 1 if self.most else 1

    def _taken(
        self, forward: Any, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide, device = torch.promote_types(k_BKCH.dtype, torch.float32), k_BKCH.device
        importance_BKC = q_BNCH[..., -1].unflatten(1, (k_BKCH.shape[1], -1)).mean(dim=2) / self.factor
        # As published, so that no mean is divided by 0.
        weights_BKC = torch.sigmoid(importance_BKC.to(wide) + self.offset) + torch.finfo(k_BKCH.dtype).eps
        if max(forward.pads, default=0) > forward.start:
            index_C = torch.arange(forward.start, forward.start + k_BKCH.shape[2], device=device)
            is_token_B1C = index_C >= row_values(forward.pads, device)[:, None, None]
            weights_BKC = weights_BKC * is_token_B1C
        logits_BKC = self._logits(k_BKCH[..., -1])
        k_BKCH = functional.pad(k_BKCH[..., :-1], (0, 1))
        kv_BKCX = torch.cat([k_BKCH.to(wide), v_BKCV.to(wide), torch.ones_like(weights_BKC[..., None])], dim=-1)
        means_BKCX = self._means(forward, layer, kv_BKCX * weights_BKC[..., None], logits_BKC > 0).to(k_BKCH.dtype)
        return *means_BKCX.split([k_BKCH.shape[-1], v_BKCV.shape[-1]], dim=-1), logits_BKC

    def _means(self, forward: Any, layer: int, new_BKCX: Tensor, joins_BKC: Tensor) -> Tensor:
        """Means (B, K, C, X - 1) of each new token and those before it that it has joined; the layer's state goes on.

        Args:
            new_BKCX: keys, values and 1 of each token, times its weight.
        """
        num_before, before_BKPX = self.num_before, forward.states[layer].recurrent_states[0]
        if before_BKPX is None:
            before_BKPX = torch.zeros_like(new_BKCX[:, :, :1]).expand(-1, -1, num_before, -1)
        x_BKSX = torch.cat([before_BKPX, new_BKCX], dim=2)
        joins_BKS = functional.pad(joins_BKC, (num_before, 0), value=True)  # what is not of the last slot is 0
        sums_BKSX, firsts_BKS = sums_so_far(x_BKSX, joins_BKS, self.most)
        after_BKPX = (x_BKSX if self.most else sums_BKSX)[:, :, -num_before:]
        index_P1 = torch.arange(x_BKSX.shape[2] - num_before, x_BKSX.shape[2], device=x_BKSX.device)[:, None]
        forward.update_recurrent_state(after_BKPX * (index_P1 >= firsts_BKS[:, :, -1:, None]), layer)
        sums_BKCX = sums_BKSX[:, :, num_before:]
        totals_BKC1 = sums_BKCX[..., -1:]
        return sums_BKCX[..., :-1] / totals_BKC1.clamp_min(torch.finfo(totals_BKC1.dtype).tiny)  # 0 on padding

    def _spare(self, q_BNCH: Tensor, num_kv_heads: int) -> tuple[Any, ...]:
        return ..., -1


def sums_so_far(x_BKSX: Tensor, joins_BKS: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Sum (B, K, S, X) over each token and those before it in its slot, the last `most` of these, and the first of all.

    Sums of half as many tokens are put together: in the steps of the number's bits, and never by differences.

    Args:
        joins_BKS: whether each token is in the slot of the one before it.
        most: 0: any number.

    Returns:
        the sums, and the index (B, K, S) of the first token of each token's slot.
    """
    num = x_BKSX.shape[2]
    index_S = torch.arange(num, device=x_BKSX.device)
    firsts_BKS = index_S.where(~joins_BKS, 0).cummax(dim=-1).values

    def before(sums_BKSX: Tensor, by: int) -> Tensor:
        """The sums of so many tokens before, 0 where these are not in the slot."""
        return functional.pad(sums_BKSX, (0, 0, by, -by)) * (index_S - by >= firsts_BKS)[..., None]

    def last(count: int) -> Tensor:
        """The sums over at most so many tokens."""
        if count == 1:
            return x_BKSX
        half = count // 2
        sums_BKSX = last(half)
        sums_BKSX = sums_BKSX + before(sums_BKSX, half)
        return x_BKSX + before(sums_BKSX, 1) if count % 2 else sums_BKSX

    enough = 1 << (num - 1).bit_length()
    return last(min(most or enough, enough)), firsts_BKS
