"""Earlier prompts of a run and their answers, of which later prompts reuse what they begin with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from launch.inputs.options import RunOptions
from launch.program.ending import say
from runahead.features.setup import Setup
from runahead.features.slower import PREFIXES, in_the_way_of_prefixes
from runahead.model.loading.memory import free_bytes
from runahead.model.memory import row_state_bytes, token_bytes
from runahead.model.model import Model
from runahead.ranks.ranks import Ranks
from runahead.reuse.prefix_tree import PrefixTree, Stored
from runahead.serving.room import MEMORY_SHARE, Room
from runahead.thinning.rank_policies import RankPolicies

LEAST_SHARED = 32
"""Fewest tokens that a prompt has in common with an earlier one for which these are kept where nobody has asked for it:
computing fewer takes no longer than to look for them."""


@dataclass(frozen=True, kw_only=True)
class KeptPrefixes:
    """The tree of a run, with the memory that it shares with the prompts that run; None: it has a limit of its own."""

    tree: PrefixTree
    room: Room | None = None

    def make_way(self, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        """Leave memory to prompts that run next, each with so many new tokens."""
        if self.room is not None:
            num_tokens = len(prompts) * (max(map(len, prompts)) + num_new)
            self.tree.limit_bytes = self.room.left_for_prefixes(num_tokens, len(prompts))


def kept_prefixes(
    run: RunOptions, model: Model, ranks: Ranks, policies: RankPolicies, calls: Sequence[Sequence[Sequence[int]]]
) -> KeptPrefixes | None:
    """The tree of a run whose prompts are computed in these calls; None for none. Every rank makes the same call.

    Without a given size there is one where later prompts begin as earlier ones, and nothing is in the way, which is
    said otherwise.
    """
    size = run.prompt.prefix_cache_bytes
    if not isinstance(size, str):
        return KeptPrefixes(tree=PrefixTree(size)) if size else None
    if num_shared(calls, has_states=model.held is not None) < LEAST_SHARED:
        return None
    reason = in_the_way(run.setup, model, ranks, policies)
    if reason is not None:
        say(f"prompts that begin alike are computed whole: {reason}")
        return None
    drafts, in_chain = run.generation.asks_for_drafts, ranks.num_stages > 1
    row_bytes = row_state_bytes(model, in_chain=in_chain, drafts=drafts, stores=True)
    own = free_bytes(ranks.device, ranks.local_size) - model.kernel_bytes(), token_bytes(model), row_bytes
    free, of_token, of_row = zip(*ranks.gather(own, "the free memory"), strict=True)
    room = Room(
        max_tokens=None,
        shared_bytes=MEMORY_SHARE * min(free),
        token_bytes=max(of_token),
        row_bytes=max(of_row),
    )
    return KeptPrefixes(tree=PrefixTree(room.left_for_prefixes(0, 0)), room=room)


def in_the_way(setup: Setup, model: Model, ranks: Ranks, policies: RankPolicies) -> str | None:
    """Why a run reuses no prefixes, which nobody has asked for; None if nothing is in the way.

    Args:
        setup: of the run's options.
    """
    return in_the_way_of_prefixes(
        replace(
            setup,
            prefixes=PREFIXES,
            policies=policies,
            model=model,
            num_stages=ranks.num_stages,
            num_shares=ranks.num_shares,
            device=ranks.device.type,
            backend=ranks.backend,
        )
    )


def num_shared(calls: Iterable[Sequence[Sequence[int]]], *, has_states: bool = False) -> int:
    """Most tokens of a prompt that need not be computed as a prompt of an earlier call begins with them.

    Args:
        has_states: layers hold states, so that a text goes on after all of an earlier prompt alone.
    """
    texts, most = PrefixTree(math.inf), 0
    for prompts in calls:
        most = max([most, *(texts.num_stored(ids[:-1], "") for ids in prompts)])
        for ids in map(tuple, prompts):
            for states in (False, True) if has_states else (None,):
                texts.apply(Stored(key="", ids=ids, states=states))
    return most
