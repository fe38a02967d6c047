"""Computes a segment's K,V: one forward over its tokens at their positions, each seeing the segment alone."""

# Legend: N query heads, K kv heads, C tokens of the segment and in front of it, H head dim, V value dim.

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from policies.base import Segment
from runahead.attention.causal import nothing
from runahead.attention.partial import AttentionTerms
from runahead.cache.attention import CausalAttention
from runahead.cache.kv_cache import KVCache
from runahead.model.model import Model, PrefillEndsHere
from runahead.ranks.ranks import Ranks
from runahead.reuse.cache import ReusedCache
from runahead.reuse.reused_kv import ReusedKV
from runahead.reuse.segment import SegmentKV


def check_reuse(model: Model) -> None:
    """Raise a ValueError for a model whose K,V are not those of a token and its position alone."""
    why = None
    if model.rotates_by_length:
        why = "rotates by angles that depend on the length of the text"
    elif model.counts_positions:
        why = "counts positions on its own"
    if why is not None:
        raise ValueError(
            f"model {model.name} ({model.config.model_type}) {why}, so K,V cannot be used in other prompts; "
            "use policy=full"
        )


class _EncodingAttention(CausalAttention):
    """Ends the forward once the last layer's keys and values are stored; its output is not needed."""

    def attend(self, layer: int, q_BNCH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, terms: AttentionTerms) -> Tensor:
        if layer == len(self.cache.layers) - 1:
            self.cache.layers[layer].append(k_BKCH, v_BKCV, self.tokens)
            raise PrefillEndsHere
        return super().attend(layer, q_BNCH, k_BKCH, v_BKCV, terms)


def encode_segment(model: Model, segment: Segment, ranks: Ranks | None = None) -> SegmentKV:
    """K,V of the segment's stored tokens.

    Args:
        ranks: are told that this one is at work.

    Raises:
        ValueError: the model cannot do it, the segment is beyond its positions, or memory is too small.
    """
    check_reuse(model)
    ids = (*segment.context_ids, *segment.ids)
    positions = (*segment.context_positions, *segment.positions)
    if model.max_positions is not None and positions[-1] >= model.max_positions:
        raise ValueError(
            f"segment {segment.name} reaches position {positions[-1] + 1:,} of the {model.max_positions:,} that model "
            f"{model.name} has; shorten it"
        )
    cache = KVCache(
        model.kv_shapes,
        batch=1,
        spans=[(0, len(ids))] * model.num_layers,
        num_slabs=model.num_layers,
        device=model.device,
    )
    at_positions = ReusedKV(parts=[], positions_BS=torch.tensor([positions]), ends=[positions[-1] + 1])
    on_layer = nothing if ranks is None else ranks.progress
    attention = _EncodingAttention(ReusedCache(cache, at_positions), start=0, pads=[0], on_layer=on_layer)
    with suppress(PrefillEndsHere):
        model.forward(torch.tensor([ids], device=model.device), attention, start=0, pads=[0], length=positions[-1] + 1)
    stored = torch.tensor(segment.stored, device=model.device) + len(segment.context_ids)
    # Memory of its own, even where all tokens are stored: the cache's is of another size and layout.
    return SegmentKV(
        layers_TKX=[cache.layer(layer).slab_TBKX[:, 0].index_select(0, stored) for layer in range(model.num_layers)]
    )
