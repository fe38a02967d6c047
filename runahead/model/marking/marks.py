"""Checkpoints trained with DMS (Łańcucki et al., NeurIPS 2025, arXiv 2506.05345): tokens decide what is evicted.

In the published format (nvidia/Qwen3-8B-DMS-8x, shisa-ai/Llama-3.2-1B-DMS-8x) the last dim of the first query head of
each KV head's group, before RoPE, is no part of the query: it is a logit by which a token marks the token before it.
The model's own code is given position 0 for every token, so that attention gets queries and keys without RoPE: they
are rotated here, once the logits are taken. The mark is stored and sent as one more dim of the key.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim, X = H + 1.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from runahead.attention.partial import AttentionTerms
from runahead.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class Marks:
    """How tokens mark others.

    Attributes:
        window: a marked token is seen by the queries of so many tokens, its own first.
        scale, offset: a logit is the query's dim times the scale, minus the offset; above 0 it marks.
        rotaries: of each layer of the model.
        factor: of the model's rotary tables, which queries and keys have at position 0, too.
    """

    window: int
    scale: float
    offset: float
    rotaries: Sequence[Rotary] = ()
    factor: float = 1.0

    @classmethod
    def from_config(cls, config: Any) -> Marks | None:
        """The marks of a model by its config; None if it makes none.

        Raises:
            ValueError: they are of another form. The message has no remedy.
        """
        window = getattr(config, "dms_window_size", None)
        if window is None:
            return None
        if getattr(config, "dms_separate_alpha", False):
            raise ValueError("marks tokens (DMS) by an adapter of its own, dms_separate_alpha=true in its config")
        if getattr(config, "dms_alpha_per", "head") != "head":
            raise ValueError(f"marks tokens (DMS) per {config.dms_alpha_per}, dms_alpha_per in its config")
        if type(window) is not int or window < 2:
            raise ValueError(f"has dms_window_size {window!r} in its config, which must be at least 2")
        is_off = getattr(config, "dms_disable_eviction", False)
        offset = math.inf if is_off else getattr(config, "dms_initial_alpha_offset", 5.0)
        return cls(window=window, scale=float(getattr(config, "dms_alpha_scale", 100.0)), offset=float(offset))

    def on(self, module: nn.Module, rotaries: Sequence[Rotary]) -> Self:
        """The same for a model with these rotations."""
        own = [vars(child) for child in module.modules()]
        factors = [float(each["attention_scaling"]) for each in own if "attention_scaling" in each]
        return replace(self, rotaries=rotaries, factor=max(factors, default=1.0))

    def marked(
        self, forward: Any, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms
    ) -> tuple[Tensor, Tensor, Tensor, AttentionTerms]:
        """Queries and keys of a layer, rotated, with one more dim; values; and terms that say what the dim means.

        In the key of a token that marks the one before it the dim is 1; in queries it is 0.

        Args:
            forward: the `SeamCache` of the forward.
            q_BNCH, k_BKCH: at position 0.
        """
        q_BNCH = q_BNCH.clone()
        k_BKCH, v_BKCV, logits_BKC = self._taken(forward, layer, q_BNCH, k_BKCH, v_BKCV)
        spare = self._spare(q_BNCH, k_BKCH.shape[1])
        q_BNCH[spare] = 0
        q_BNCH, k_BKCH = (self.rotaries[layer].turned(x, forward.positions_BC) for x in (q_BNCH, k_BKCH))
        q_BNCH[spare] = 0  # RoPE has put a part of another dim there
        k_BKCX = torch.cat([k_BKCH, (logits_BKC > 0).to(k_BKCH.dtype).unsqueeze(-1)], dim=-1)
        return functional.pad(q_BNCH, (0, 1)), k_BKCX, v_BKCV, replace(terms, marked_window=self.window)

    def _taken(
        self, forward: Any, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values that are stored, and the logits (B, K, C)."""
        return k_BKCH, v_BKCV, self._logits(q_BNCH[self._spare(q_BNCH, k_BKCH.shape[1])])

    def _logits(self, x: Tensor) -> Tensor:
        return x / self.factor * self.scale - self.offset

    def _spare(self, q_BNCH: Tensor, num_kv_heads: int) -> tuple[Any, ...]:
        """Index of the dims that are no part of queries."""
        return slice(None), slice(None, None, q_BNCH.shape[1] // num_kv_heads), slice(None), -1
