"""Decoding by several ranks that each store a part of the KV cache: one chooses the tokens and tells the others."""

# Legend: B batch, V vocabulary.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runahead.decoding.decode import Choose
from runahead.decoding.sampling import Sampler, next_tokens
from runahead.kv_transfer.gathering import Gathering, Gatherings
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks

ENDED = -1
"""What is told of a row that has ended."""


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
    return gatherings.between(members, num_queries * model.num_query_heads * widest * itemsize)


def choose_together(gather: Gathering) -> Choose:
    """`Choose` of ranks that run the same forwards.

    Logits are merged from the same parts in the same order, but processors of two kinds may round a product
    differently, so the last rank chooses for all.
    """

    def choose(
        samplers: Sequence[Sampler | None], token_ids: Sequence[list[int]], logits_BV: Tensor | None
    ) -> list[int | None]:
        told: list[int | None] = [None] * len(samplers)
        gather.settle()
        if gather.is_last:
            assert logits_BV is not None, "the last rank has computed the last token"
            told = next_tokens(samplers, token_ids, logits_BV)
        own_B = torch.tensor([ENDED if token is None else token for token in told], device=gather.ranks.device)
        heard_B = gather(own_B, "the next token")[-1]
        gather.settle()
        return [None if token == ENDED else token for token in heard_B.tolist()]

    return choose
