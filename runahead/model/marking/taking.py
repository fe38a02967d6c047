"""Hooks that give queries and keys before RoPE to the marks of a model, tried with one token."""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim, J = N + K.

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from runahead.attention.partial import AttentionTerms
from runahead.model.layers.hooks import hook_after, hook_before
from runahead.model.marking.marks import Marks
from runahead.model.seam import SeamCache
from runahead.rotary import rounding


@dataclass
class Taking:
    """The hook on a layer's attention, and on the last module that gives its queries ("q") or keys ("k").

    Attributes:
        forward: the one that the attention has begun; None while transformers' own attention computes.
    """

    attention: Any
    name: str
    forward: SeamCache | None = field(default=None, compare=False)

    def __call__(self, module: nn.Module, args: Any, keywords: Any, x: Tensor | None = None) -> Tensor | None:
        if module is self.attention:
            self.forward = SeamCache.among(args, keywords)
            return None
        forward, self.forward = self.forward, None
        if x is None or forward is None or forward.marks is None:
            return x
        x_BCNH = x.view(*x.shape[:2], -1, self.attention.head_dim)
        return forward.marks.take(forward, self.attention, self.name, x_BCNH).reshape(x.shape)


def hook_layers(module: nn.Module) -> None:
    """Let a model's layers give queries and keys to the marks of a forward, if it has any. May be called again."""
    for attention, name in product(module.modules(), "qk"):
        last = getattr(attention, f"{name}_norm", None) or getattr(attention, f"{name}_proj", None)
        if last is not None and hasattr(attention, "head_dim"):
            taking = Taking(attention, name)
            hook_before(attention, taking)
            hook_after(last, taking)


@dataclass(frozen=True, kw_only=True)
class Trial(Marks):
    """What is in place of a model's marks for one token at position 0, to find layers that do not go with marks.

    Queries and keys are numbers of its own, since those of a model may be zeros or rounded away. Heads have sizes and
    signs that differ, which shows what is done to them but for RoPE: that multiplies dims at most.

    Attributes:
        found: what does not go with marks.
    """

    found: list[str]

    def take(self, forward: Any, attention: Any, name: str, x_BCNH: Tensor) -> Tensor:
        gains_N = (-2.0) ** (torch.arange(x_BCNH.shape[2]) % 8)
        own_NH = gains_N[:, None] * (1 + torch.rand(x_BCNH.shape[2:], generator=torch.Generator().manual_seed(0)))
        forward.taken[name] = own_NH.to(x_BCNH).expand_as(x_BCNH)
        return forward.taken[name].clone()

    def marked(
        self, forward: Any, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms
    ) -> tuple[Tensor, Tensor, Tensor, AttentionTerms]:
        given = [forward.taken.pop(name) for name in "qk" if name in forward.taken]
        reasons = {
            "attends to later tokens, as an encoder does": terms.rule is not None and terms.rule.sees_later_keys,
            "has windows or chunks": terms.rule is not None,
            "caps or biases scores": terms.needs_scores,
            "has attention sinks": terms.sinks_N is not None,
            "does not see the token itself": not terms.sees_own,
            "has no q_proj and k_proj of its own": len(given) < 2,
            "does more than RoPE after q_proj and k_proj, or q_norm and k_norm": not _is_rope(given, q_BNCH, k_BKCH),
        }
        self.found.extend(f"a layer {why}" for why, holds in reasons.items() if holds)
        return q_BNCH, k_BKCH, v_BKCV, terms


def _is_rope(given: list[Tensor], q_1N1H: Tensor, k_1K1H: Tensor) -> bool:
    """Whether queries and keys are those that were given, each dim of all heads times the same factor."""
    if [x.shape for x in given] != [x.transpose(1, 2).shape for x in (q_1N1H, k_1K1H)]:
        return False
    given_JH, got_JH = torch.cat(given, dim=2)[0, 0].float(), torch.cat([q_1N1H, k_1K1H], dim=1)[0, :, 0].float()
    return torch.allclose(got_JH, given_JH * (got_JH[0] / given_JH[0]), rtol=rounding(q_1N1H.dtype))
