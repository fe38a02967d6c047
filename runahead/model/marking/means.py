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

# Legend: B batch, N query heads, K kv heads, G = N / K, C new tokens, P what is kept of those before, S = P + C, H head
# dim, V value dim, X = H + V + 1.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from policies.row_values import row_values
from runahead.model.layers.hooks import hook_after, hook_before
from runahead.model.marking.marks import Marker, Marks, Taking
from runahead.model.seam import SeamCache


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

    def marker_on(self, module: nn.Module, config: Any) -> Marker:
        return Averager.on(module, self, config)


class Averager(Marker):
    """Replaces keys and values of a model by the means so far. Raises: ValueError, as `Marker`.

    Attributes:
        forward: that of the attention whose forward has begun last; None while transformers' own attention computes.
    """

    marks: Means
    forward: SeamCache | None = None

    def _hook(self, attention: Any) -> None:
        hook_before(attention, _Entering(self))
        for name in "qk":
            last = getattr(attention, f"{name}_norm", None) or getattr(attention, f"{name}_proj")
            hook_after(last, Taking(self, attention, name))
        hook_after(attention.v_proj, Taking(self, attention, "v"))  # the last of the three

    def take(self, attention: Any, name: str, x_BCY: Tensor) -> Tensor:
        """The rows given to RoPE, or the values, in place of a layer's queries, keys or values.

        Memory for keys is filled once the values are there.
        """
        forward = self.forward
        if forward is None:
            return x_BCY
        if name != "v":
            forward.taken[name] = taken = x_BCY.view(*x_BCY.shape[:2], -1, self._head_dim)
            given = taken.clone()
            given[..., -1] = 0
            forward.taken[f"given {name}"] = given
            return given.view(x_BCY.shape)
        q_BCNH, k_BCKH, given_BCKH = (forward.taken.pop(each) for each in ("q", "k", "given k"))
        del forward.taken["given q"]
        v_BCKV = x_BCY.view(*k_BCKH.shape[:3], -1)
        wide = torch.promote_types(x_BCY.dtype, torch.float32)
        logits_BCK = k_BCKH[..., -1] * self.marks.scale - self.marks.offset
        importance_BCK = q_BCNH[..., -1].unflatten(-1, (k_BCKH.shape[2], -1)).mean(dim=-1)
        # As published, so that no mean is divided by 0.
        weights_BCK = torch.sigmoid(importance_BCK.to(wide) + self.marks.offset) + torch.finfo(x_BCY.dtype).eps
        if max(forward.pads, default=0) > forward.start:
            index_C = torch.arange(forward.start, forward.start + x_BCY.shape[1], device=x_BCY.device)
            is_token_BC = index_C >= row_values(forward.pads, x_BCY.device)[:, None]
            weights_BCK = weights_BCK * is_token_BC[..., None]
        kv_BCKX = torch.cat([given_BCKH.to(wide), v_BCKV.to(wide), torch.ones_like(weights_BCK[..., None])], dim=-1)
        new_BKCX = (kv_BCKX * weights_BCK[..., None]).transpose(1, 2)
        means_BCKX = self._means(forward, attention.layer_idx, new_BKCX, logits_BCK.transpose(1, 2) > 0).transpose(1, 2)
        forward.taken["logits"] = logits_BCK.transpose(1, 2)
        given_BCKH.copy_(means_BCKX[..., : self._head_dim])
        return means_BCKX[..., self._head_dim :].to(x_BCY.dtype).reshape(x_BCY.shape)

    def _means(self, forward: Any, layer: int, new_BKCX: Tensor, joins_BKC: Tensor) -> Tensor:
        """Means (B, K, C, X - 1) of each new token and those before it that it has joined; the layer's state goes on.

        Args:
            new_BKCX: keys, values and 1 of each token, times its weight.
        """
        num_before, before_BKPX = self.marks.num_before, forward.states[layer].recurrent_states[0]
        if before_BKPX is None:
            before_BKPX = torch.zeros_like(new_BKCX[:, :, :1]).expand(-1, -1, num_before, -1)
        x_BKSX = torch.cat([before_BKPX, new_BKCX], dim=2)
        joins_BKS = functional.pad(joins_BKC, (num_before, 0), value=True)  # what is not of the last slot is 0
        sums_BKSX, firsts_BKS = sums_so_far(x_BKSX, joins_BKS, self.marks.most)
        after_BKPX = (x_BKSX if self.marks.most else sums_BKSX)[:, :, -num_before:]
        index_P1 = torch.arange(x_BKSX.shape[2] - num_before, x_BKSX.shape[2], device=x_BKSX.device)[:, None]
        forward.update_recurrent_state(after_BKPX * (index_P1 >= firsts_BKS[:, :, -1:, None]), layer)
        sums_BKCX = sums_BKSX[:, :, num_before:]
        totals_BKC1 = sums_BKCX[..., -1:]
        return sums_BKCX[..., :-1] / totals_BKC1.clamp_min(torch.finfo(totals_BKC1.dtype).tiny)  # 0 on padding

    def taken(self, forward: Any, layer: int) -> Tensor:
        logits_BKC: Tensor = forward.taken.pop("logits")
        return logits_BKC

    def _spare(self, group: int) -> slice:
        return slice(None)


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


@dataclass(frozen=True, eq=False)
class _Entering:
    """The hook on a layer's attention, which knows the forward."""

    marker: Averager

    def __call__(self, module: nn.Module, args: Any, keywords: Any) -> None:
        self.marker.forward = SeamCache.among(args, keywords)
