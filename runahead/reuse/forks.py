"""Several rows after one prompt: its keys and values are computed once, and all rows attend to them together."""

# Legend: T tokens of the prompt, K kv heads, X = H + V key and value dims, S new tokens of a prompt.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from policies.reuse import GivenPrompt, ReusingPrompt
from runahead.cache.base import KVStore
from runahead.model.model import Model
from runahead.reuse.cache import reused_by, reusing
from runahead.reuse.reused_kv import ReusedKV, ReusedPart


def each_once(prompts: Sequence[GivenPrompt], salts: Sequence[str] = ()) -> tuple[list[GivenPrompt], list[int]]:
    """Different prompts in the order in which they first appear, and for each given one its index among them.

    Args:
        salts: of the prompts; those of different salts are different.
    """
    places: dict[tuple[ReusingPrompt | tuple[int, ...], str], int] = {}
    of_row = [
        places.setdefault((prompt if isinstance(prompt, ReusingPrompt) else tuple(prompt), salt), len(places))
        for prompt, salt in zip(prompts, salts or [""] * len(prompts), strict=True)
    ]
    return [prompts[of_row.index(number)] for number in range(len(places))], of_row


def attends_together(model: Model) -> bool:
    """Whether rows can attend to the same keys and values of a prompt.

    That needs positions that the runtime gives, and no marks: a token's mark is in the key of the next one, which each
    row has for the prompt's last token. And queries see their own token.
    """
    is_plain = model.marks is None and not model.runs_in_passes
    return model.uneven_limit is None and not model.rotates_by_length and is_plain


def fork(row: KVStore, count: int, model: Model, *, num_tokens: int, num_new: int) -> tuple[list[KVStore], int]:
    """Caches of several rows that go on after the same prompt.

    They share the prompt's keys and values where these lie whole in slabs (`attends_together`): each then stores its
    own new tokens alone. Otherwise each has a copy, or shares memory until it stores a token.

    Args:
        row: cache of the prompt, in place of which the new ones are used.
        num_tokens: tokens that it stores, without those that it reuses.
        num_new: tokens for which each row has room.

    Returns:
        the caches, and how many of the `num_tokens` they share.
    """
    layers_TKX = row.row_kv(0, 0, num_tokens) if attends_together(model) else None
    if not layers_TKX:
        return [row, *(row.fork() for _ in range(count - 1))], 0
    reused = reused_by(row)
    if reused is None:
        reused = ReusedKV.nothing(num_tokens, [0])
    assert reused.positions_BS.shape == (1, num_tokens), (reused.positions_BS.shape, num_tokens)
    given = ReusedPart(layers_TKX=layers_TKX, positions_T=reused.positions_BS[0], rows=(0,))
    after = replace(reused, parts=[*reused.parts, given], positions_BS=reused.positions_BS[:, num_tokens:])
    rows: list[KVStore] = [
        reusing(model.empty_cache(num_new).slabs, after, shared_TKX=layers_TKX) for _ in range(count)
    ]
    if row.states is not None:
        for each in rows[1:]:
            each.states = row.states.fork()
        rows[0].states = row.states
    return rows, num_tokens
