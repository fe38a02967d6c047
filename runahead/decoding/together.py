"""Decoding by several ranks that each store a part of the KV cache: one chooses the tokens and tells the others."""

# Legend: B batch, V vocabulary.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runahead.decoding.rows import Choose
from runahead.decoding.sampling import Sampler, next_tokens
from runahead.decoding.scored_tokens import TOKEN_BYTES, pack, unpack
from runahead.kv_transfer.gathering import Gathering, Gatherings
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks


def gathering_between(
    stages: Sequence[int], gatherings: Gatherings, ranks: Ranks, model: Model, num_queries: int
) -> Gathering | None:
    """The gathering of this rank's share of these stages; None on a rank of another stage. Every rank calls it.

    Args:
        num_queries: most queries, of all rows, of one forward.
    """
    widest = max(shape.value_dim for shape in model.kv_shapes) + 1
    itemsize = torch.promote_types(model.dtype, torch.float32).itemsize
    members = [ranks.mesh.rank(stage, ranks.share) for stage in stages]
    query_bytes = max(model.num_query_heads * widest * itemsize, TOKEN_BYTES)
    if model.boundary is not None:  # stages have layers of other shapes, and gather no more than tokens
        query_bytes = TOKEN_BYTES
    return gatherings.between(members, num_queries * query_bytes)


def choose_together(gather: Gathering) -> Choose:
    """`Choose` of ranks that run the same forwards.

    Logits are merged from the same parts in the same order, but processors of two kinds may round a product
    differently, so the last rank chooses for all.
    """

    def choose(samplers: Sequence[Sampler | None], logits_BV: Tensor | None) -> list[int | None]:
        num_logprobs = [None if sampler is None else sampler.num_logprobs for sampler in samplers]
        gather.await_device()
        if gather.is_last:
            assert logits_BV is not None, "the last rank has computed the last token"
            own = pack(next_tokens(samplers, logits_BV), num_logprobs)
        else:
            own = pack([None] * len(samplers), num_logprobs)
        heard = gather(own.to(gather.ranks.device), "the next token")[-1]
        gather.await_device()
        return unpack(heard, num_logprobs)

    return choose
