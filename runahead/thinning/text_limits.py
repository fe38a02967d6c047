"""How long a text may be: as long as the model, or any length where policies bound what positions there are."""

from __future__ import annotations

from policies.base import Phase
from runahead.config import Positions, PrefillName, PrefillOptions
from runahead.thinning.rank_policies import RankPolicies

PIECE_TOKENS = 512
"""Of a prompt that is longer than the model, computed at a time where `prefill.chunk_tokens` does not say."""


def check_chunk_tokens(prefill: PrefillOptions, num_ranks: int) -> None:
    """Raise a ValueError if a prompt that several ranks share is to be computed in chunks by each."""
    if prefill.chunk_tokens is not None and prefill.takes_partition and num_ranks > 1:
        raise ValueError(
            f"prefill.chunk_tokens={prefill.chunk_tokens} is for a prompt that one rank has for itself; use "
            "prefill=single, or leave it out: several ranks have a chunk each"
        )


def pieces_of(
    num_tokens: int, *, max_positions: int | None, num_layers: int, policies: RankPolicies, prefill: PrefillOptions
) -> int | None:
    """Tokens of a prompt to compute at a time on one rank; None is all of them."""
    if prefill.chunk_tokens is not None:
        return prefill.chunk_tokens
    stay = policies.most_slots(num_layers, Phase.prefill)
    if max_positions is None or num_tokens <= max_positions or stay is None:
        return None
    return max(1, min(PIECE_TOKENS, max_positions - stay))


def remedy(
    num_tokens: int,
    num_new: int,
    *,
    max_positions: int | None,
    num_layers: int,
    policies: RankPolicies,
    prefill: PrefillOptions,
    num_ranks: int,
) -> str | None:
    """What helps where a prompt of so many tokens and its new ones need more positions than the model has, else None.

    Args:
        num_new: tokens to generate.
        num_ranks: among which `prefill` splits the prompt.
    """
    if max_positions is None or num_tokens + num_new <= max_positions:
        return None
    fitting = max_positions - num_tokens
    shorter = f"generation.max_new_tokens={fitting} or less, or a shorter prompt" if fitting > 0 else "a shorter prompt"
    stay = policies.most_slots(num_layers, Phase.prefill)
    if stay is None:
        budget = max(1, min(1024, max_positions // 2))
        streams = f"policy=streaming_llm policy.budget={budget} policy.positions=reencoded"
        if policies:
            streams = f"a policy that keeps a fixed number of tokens, such as {streams}"
        return f"{shorter}, or {streams}"
    if policies.positions is not Positions.reencoded:
        return f"{shorter}, or policy.positions=reencoded"
    if num_tokens > max_positions and num_ranks > 1 and prefill.name is not PrefillName.single:
        return f"{shorter}, or one rank (prefill=single), which takes such a prompt chunk by chunk"
    pieces = pieces_of(
        num_tokens, max_positions=max_positions, num_layers=num_layers, policies=policies, prefill=prefill
    )
    in_prefill = num_tokens if pieces is None else min(num_tokens, stay + pieces)
    if in_prefill > max_positions:
        return f"{shorter}, or a cache that leaves room for a chunk: a smaller policy.budget or prefill.chunk_tokens"
    stay_later = policies.most_slots(num_layers, Phase.decode)
    while_answering = min(stay, num_tokens) + num_new if stay_later is None else stay_later + 1
    if while_answering > max_positions:
        return f"{shorter}, or a policy that also forgets while it answers, such as streaming_llm"
    return None
