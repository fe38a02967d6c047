"""Checkpoints trained with DMS (Łańcucki et al., NeurIPS 2025, arXiv 2506.05345): tokens decide what is evicted.

In the published format (nvidia/Qwen3-8B-DMS-8x, shisa-ai/Llama-3.2-1B-DMS-8x) the last dim of the first query head of
each KV head's group, before RoPE, is no part of the query: it is a logit by which a token marks the token before it.
The model's own code stays as it is; hooks take the logit out, and the mark is stored and sent as one more dim of the
key.
"""

# Legend: B batch, N query heads, K kv heads, C new tokens, H head dim, V value dim, X = H + 1.

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from runahead.attention.partial import AttentionTerms
from runahead.model.layers.hooks import hook_after


@dataclass(frozen=True, kw_only=True)
class Marks:
    """How tokens mark others.

    Attributes:
        window: a marked token is seen by the queries of so many tokens, its own first.
        scale, offset: a logit is the query's dim times the scale, minus the offset; above 0 it marks.
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

    def marker_on(self, module: nn.Module, config: Any) -> Marker:
        """Return the marker of a model's modules, which they have once. Raises: ValueError, as `Marker`."""
        return Marker.on(module, self, config)


class Marker:
    """Takes the logits out of the queries of a model.

    Attributes:
        marks: as given.
        logits: (B, K, C) by layer, from a layer's projection of its queries until its attention.

    Raises:
        ValueError: an attention module projects queries otherwise. The message has no remedy.
    """

    def __init__(self, marks: Marks, module: nn.Module, config: Any) -> None:
        self.marks, self.logits = marks, dict[int, Tensor]()
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        found = [child for child in module.modules() if hasattr(child, "q_proj") and hasattr(child, "layer_idx")]
        if len(found) != config.num_hidden_layers:
            raise ValueError("marks tokens (DMS, DMC) by a dim of its queries, which no layer projects alone")
        for attention in found:
            self._hook(attention)

    def _hook(self, attention: Any) -> None:
        """Take what is needed from a layer's modules."""
        hook_after(getattr(attention, "q_norm", None) or attention.q_proj, Taking(self, attention))

    @classmethod
    def on(cls, module: nn.Module, marks: Marks, config: Any) -> Marker:
        """Return the marker of a model's modules, which they have once. Raises: ValueError, as the class."""
        taking = [hook for child in module.modules() for hook in child._forward_hooks.values()]
        found = next((hook.marker for hook in taking if isinstance(hook, Taking)), None)
        if found is None:
            return cls(marks, module, config)
        found.marks = marks
        return found

    def take(self, attention: Any, name: str, q: Tensor) -> Tensor:
        """Keep the logits of a layer, and return its queries without them."""
        q_BCNH = q.view(*q.shape[:2], -1, self._head_dim).clone()
        marking_BCK = q_BCNH[:, :, :: attention.num_key_value_groups, -1]
        self.logits[attention.layer_idx] = (marking_BCK * self.marks.scale - self.marks.offset).transpose(1, 2)
        marking_BCK.zero_()
        return q_BCNH.view(q.shape)

    def taken(self, forward: Any, layer: int) -> Tensor:
        """The logits of a layer of a forward, a `SeamCache`; called once, at its attention."""
        return self.logits.pop(layer)

    def marked(
        self, logits_BKC: Tensor, q_BNCH: Tensor, k_BKCH: Tensor, terms: AttentionTerms
    ) -> tuple[Tensor, Tensor, AttentionTerms]:
        """Queries and keys of a layer with one more dim, and terms that say what it means.

        In the key of a token that marks the one before it the dim is 1; in queries it is 0.
        """
        q_BNCX = torch.cat([q_BNCH, q_BNCH.new_zeros(*q_BNCH.shape[:3], 1)], dim=-1)
        # RoPE has put a part of another dim where the logit was.
        q_BNCX[:, self._spare(q_BNCH.shape[1] // k_BKCH.shape[1]), :, -2] = 0
        k_BKCX = torch.cat([k_BKCH, (logits_BKC > 0).to(k_BKCH.dtype).unsqueeze(-1)], dim=-1)
        return q_BNCX, k_BKCX, replace(terms, marked_window=self.marks.window)

    def _spare(self, group: int) -> slice:
        """The query heads that have a dim which is no part of them, in groups of so many for a KV head."""
        return slice(None, None, group)


@dataclass(frozen=True, eq=False)
class Taking:
    """The hook on a module that gives a layer's queries, or its keys or values."""

    marker: Marker
    attention: Any
    name: str = "q"

    def __call__(self, module: nn.Module, args: Any, keywords: Any, x: Tensor) -> Tensor:
        return self.marker.take(self.attention, self.name, x)
