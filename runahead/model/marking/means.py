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
# V value dim, Y = H or V, X = Y + 1.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from policies.row_values import row_values
from runahead.attention.partial import AttentionTerms
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

    def take(self, forward: Any, attention: Any, name: str, x_BCNH: Tensor) -> Tensor:
        """As of `Marks`: the weights of the tokens out of queries; logits out of keys, which become means so far."""
        spare_BCN, given_BCNH = x_BCNH[..., -1], functional.pad(x_BCNH[..., :-1], (0, 1))
        if name == "q":
            forward.taken["importance"], forward.taken["heads"] = spare_BCN, slice(None)
            return given_BCNH
        importance_BCK = forward.taken["importance"].unflatten(-1, (x_BCNH.shape[2], -1)).mean(dim=-1)
        wide = torch.promote_types(x_BCNH.dtype, torch.float32)
        # As published, so that no mean is divided by 0.
        weights_BCK = torch.sigmoid(importance_BCK.to(wide) + self.offset) + torch.finfo(x_BCNH.dtype).eps
        if max(forward.pads, default=0) > forward.start:
            index_C = torch.arange(forward.start, forward.start + x_BCNH.shape[1], device=x_BCNH.device)
            weights_BCK = weights_BCK * (index_C >= row_values(forward.pads, x_BCNH.device)[:, None])[..., None]
        forward.taken["weights"], forward.taken["marks"] = weights_BCK.transpose(1, 2), self._marking(spare_BCN)
        return self._means(forward, attention.layer_idx, 0, given_BCNH.transpose(1, 2)).transpose(1, 2)

    def marked(
        self, forward: Any, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms
    ) -> tuple[Tensor, Tensor, Tensor, AttentionTerms]:
        v_BKCV = self._means(forward, layer, 1, v_BKCV)
        return super().marked(forward, layer, q_BNCH, k_BKCH, v_BKCV, terms)

    def _means(self, forward: Any, layer: int, part: int, x_BKCY: Tensor) -> Tensor:
        """Means of each new token's keys or values and those before it that it has joined; the layer's state goes on.

        Args:
            part: of the state: 0 for keys, 1 for values.
        """
        weights_BKC, joins_BKC = forward.taken["weights"], forward.taken["marks"]
        new_BKCX = functional.pad(x_BKCY.to(weights_BKC.dtype), (0, 1), value=1.0) * weights_BKC[..., None]
        num_before = self.most - 1 if self.most else 1  # the last tokens before, or their sum where any number may be
        before_BKPX = forward.states[layer].recurrent_states[part]
        if before_BKPX is None:
            before_BKPX = torch.zeros_like(new_BKCX[:, :, :1]).expand(-1, -1, num_before, -1)
        x_BKSX = torch.cat([before_BKPX, new_BKCX], dim=2)
        joins_BKS = functional.pad(joins_BKC, (num_before, 0), value=True)  # what is not of the last slot is 0
        sums_BKSX, firsts_BKS = sums_so_far(x_BKSX, joins_BKS, self.most)
        after_BKPX = (x_BKSX if self.most else sums_BKSX)[:, :, -num_before:]
        index_P1 = torch.arange(x_BKSX.shape[2] - num_before, x_BKSX.shape[2], device=x_BKSX.device)[:, None]
        forward.update_recurrent_state(after_BKPX * (index_P1 >= firsts_BKS[:, :, -1:, None]), layer, part)
        sums_BKCY, totals_BKC1 = sums_BKSX[:, :, num_before:].tensor_split([-1], dim=-1)
        means_BKCY = sums_BKCY / totals_BKC1.clamp_min(torch.finfo(totals_BKC1.dtype).tiny)  # 0 on padding
        return means_BKCY.to(x_BKCY.dtype)


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

    sums_BKSX, count, enough = x_BKSX, 1, 1 << (num - 1).bit_length()
    for bit in f"{min(most or enough, enough):b}"[1:]:
        sums_BKSX, count = sums_BKSX + before(sums_BKSX, count), 2 * count
        if bit == "1":
            sums_BKSX, count = x_BKSX + before(sums_BKSX, 1), count + 1
    return sums_BKSX, firsts_BKS
