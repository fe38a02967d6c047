"""Checkpoints trained with DMS (Łańcucki et al., NeurIPS 2025, arXiv 2506.05345): tokens decide what is evicted.

In the published format (nvidia/Qwen3-8B-DMS-8x, shisa-ai/Llama-3.2-1B-DMS-8x) the last dim of the first query head of
each KV head's group, before RoPE, is no part of the query: it is a logit by which a token marks the token before it.
A marked token is seen by the queries of `dms_window_size` tokens, its own first. The model's own code stays as it is;
hooks take the logit out (taking.py), and the mark is stored and sent as one more dim of the key.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim, X = H + 1.

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runahead.attention.partial import AttentionTerms


@dataclass(frozen=True, kw_only=True)
class Marks:
    """How tokens mark others.

    Attributes:
        window: a marked token is seen by the queries of so many tokens, its own first.
        scale, offset: a logit is the dim times the scale, minus the offset; above 0 it marks.
    """

    window: int
    scale: float
    offset: float

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

    def take(self, forward: Any, attention: Any, name: str, x_BCNH: Tensor) -> Tensor:
        """Take what marks out of a layer's queries ("q") or keys ("k") into `forward.taken`.

        Args:
            forward: the `SeamCache` of the forward.
            attention: the layer's attention module.

        Returns:
            What is given to RoPE in their place.
        """
        if name == "k":
            return x_BCNH
        x_BCNH = x_BCNH.clone()
        forward.taken["heads"] = slice(None, None, getattr(attention, "num_key_value_groups", 1))
        spare_BCK = x_BCNH[:, :, forward.taken["heads"], -1]
        forward.taken["marks"] = self._marking(spare_BCK)
        spare_BCK.zero_()
        return x_BCNH

    def marked(
        self, forward: Any, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms
    ) -> tuple[Tensor, Tensor, Tensor, AttentionTerms]:
        """Queries, keys and values of a layer with one more dim of the first two, and terms that say what it means.

        In the key of a token that marks the one before it the dim is 1; in queries it is 0.
        """
        q_BNCX = functional.pad(q_BNCH, (0, 1))
        # RoPE has put a part of another dim where the logit was.
        q_BNCX[:, forward.taken["heads"], :, -2] = 0
        k_BKCX = torch.cat([k_BKCH, forward.taken.pop("marks")[..., None].to(k_BKCH.dtype)], dim=-1)
        return q_BNCX, k_BKCX, v_BKCV, replace(terms, marked_window=self.window)

    def _marking(self, spare_BCK: Tensor) -> Tensor:
        """Whether tokens mark the one before them, (B, K, C)."""
        return (spare_BCK * self.scale - self.offset > 0).transpose(1, 2)
