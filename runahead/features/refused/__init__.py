"""The table of combinations that are refused, and the one check of it.

A row names facts that do not go together, says why, and what to do instead. Programs check their options before ranks
start, and with the policies and the model's config before its weights are read; `Engine` and `Conversation` check with
the model. The table of docs/combinations.md and the tests of all rows are made from this one. Missing inputs, ranges
and files are checked where they are read, and options of one policy in policies/.

Each subject has a file. A user is told the first row that holds, so the order of files and rows decides which one.
"""

from __future__ import annotations

from runahead.features.combination import that_hold
from runahead.features.refused import (
    cache_bits,
    drafts,
    handover,
    layers,
    policies,
    prefill,
    prefixes,
    prompt_cache,
    prompt_scores,
    sharded,
    sparse_prefill,
    speculative_prefill,
    weights,
)
from runahead.features.refused.row import Refused
from runahead.features.setup import Setup


def check(setup: Setup) -> None:
    """Check that what is known of a run goes together. Raises: ValueError, with the first row that refuses it."""
    for _, message in that_hold(REFUSED, setup):
        raise ValueError(message)


REFUSED: tuple[Refused, ...] = (
    *prefill.ROWS,
    *speculative_prefill.ROWS,
    *sparse_prefill.ROWS,
    *prompt_cache.ROWS,
    *sharded.ROWS,
    *cache_bits.ROWS,
    *drafts.ROWS,
    *prefixes.ROWS,
    *prompt_scores.ROWS,
    *handover.ROWS,
    *layers.ROWS,
    *policies.ROWS,
    *weights.ROWS,
)
"""Rows whose facts do not go together. The first one that holds is what the user is told."""
