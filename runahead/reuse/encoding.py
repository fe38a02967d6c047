"""Encoding of a segment: one forward over its tokens at their positions, which see no other segment."""

# Legend: N query heads, K kv heads, C tokens of the segment and of its context before it, H head dim, V value dim.

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from policies.base import Segment
from runahead.attention.causal import nothing
from runahead.attention.partial import AttentionTerms
from runahead.cache.attention import CausalAttention
from runahead.model.model import Model, PrefillEndsHere
from runahead.ranks.ranks import Ranks
from runahead.reuse.cache import ReusedCache
from runahead.reuse.reused_kv import ReusedKV
from runahead.reuse.segment import SegmentKV


def check_reuse(model: Model) -> None:
    """Check that a model's keys and values depend only on the tokens and their positions. Raises: ValueError."""
    why = None
    if model.rotates_by_length:
        why = "rotates by angles that depend on the length of the text"
    elif model.counts_positions:
        why = "counts positions on its own"
    if why is not None:
        raise ValueError(
            f"model {model.name} ({model.config.model_type}) {why}, so keys and values cannot be reused in other "
            "prompts; use policy=full"
        )


class _EncodingAttention(CausalAttention):
    """Attention that ends the forward once the last layer's keys and values are stored."""

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        if layer == len(self.cache.layers) - 1:
            self.cache.layers[layer].append(k_BKCH, v_BKCV, self.tokens)
            raise PrefillEndsHere
        return super().attend(layer, q_BNCH, k_BKCH, v_BKCV, terms)


def encode_segment(model: Model, segment: Segment, ranks: Ranks | None = None) -> SegmentKV:
    """Compute keys and values of the segment's stored tokens.

    Args:
        ranks: notified of this rank's progress.

    Raises:
        ValueError: the model does not support reuse, the segment exceeds its positions, or memory is too small.
    """
    check_reuse(model)
    ids = (*segment.context_ids, *segment.ids)
    positions = (*segment.context_positions, *segment.positions)
    if model.max_positions is not None and positions[-1] >= model.max_positions:
        raise ValueError(
            f"segment {segment.name} reaches position {positions[-1] + 1:,} of the {model.max_positions:,} that model "
            f"{model.name} has; shorten it"
        )
    cache = model.empty_cache(len(ids))
    at_positions = ReusedKV(parts=[], positions_BS=torch.tensor([positions]), ends=[positions[-1] + 1])
    on_layer = nothing if ranks is None else ranks.progress
    attention = _EncodingAttention(ReusedCache(cache, at_positions), start=0, pads=[0], on_layer=on_layer)
    with suppress(PrefillEndsHere):
        model.forward(torch.tensor([ids], device=model.device), attention, start=0, pads=[0], length=positions[-1] + 1)
    stored = torch.tensor(segment.stored, device=model.device) + len(segment.context_ids)
    # A copy even if all tokens are stored, since the cache's memory has another size and layout.
    return SegmentKV(
        layers_TKX=[cache.layer(layer).slab_TBKX[:, 0].index_select(0, stored) for layer in range(model.num_layers)]
    )
