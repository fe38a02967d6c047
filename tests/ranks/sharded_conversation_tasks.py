"""Tasks of ranks in test_sharded_conversation.py: top-level functions, since they run in other processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest import mock

import torch

from runahead import GenerationOptions, PrefillOptions, Ranks, ShardedConversation
from runahead.conversation import sharded as conversation
from tests.families import throughout
from tests.ranks.tasks import tiny_model


@dataclass(kw_only=True)
class Talk:
    """One rank's part of a conversation: answers and logits after each turn, stored tokens and bytes."""

    answers: list[list[list[int]]] = field(default_factory=list)
    logits: list[list[list[float]]] = field(default_factory=list)
    stored: list[list[int]] = field(default_factory=list)
    kv_bytes: list[int] = field(default_factory=list)
    peeked: list[list[list[float]]] = field(default_factory=list)


def talk(
    ranks: Ranks,
    family: str,
    turns: list[list[list[int]]],
    pads: list[int] | None,
    options: GenerationOptions,
    *,
    piece: int = conversation.PIECE_TOKENS,
    branches: bool = False,
) -> Talk:
    """Feed turns of one or several rows, each answered.

    Args:
        piece: most tokens of a turn that are computed at a time.
        branches: look ahead at each turn, and let a fork answer it first.
    """
    model, found = tiny_model(family), Talk()
    with throughout(model.dtype), mock.patch.object(conversation, "PIECE_TOKENS", piece):
        ours = ShardedConversation(model, ranks)
        for turn, rows in enumerate(turns):
            ids_BC = torch.tensor(rows)
            if branches and turn:
                found.peeked.append(ours.peek(ids_BC)[:, -1].tolist())
                branch = ours.fork()
                branch.feed(ids_BC[:, :2])
                branch.generate(options)
            logits_BV = ours.feed(ids_BC, pads=None if turn else pads)
            found.logits.append(logits_BV.tolist())
            assert ours.cache is not None
            found.stored.append([layer.num_slots for layer in ours.cache.layers])
            found.kv_bytes.append(ours.kv_bytes)
            found.answers.append([row.new_ids for row in ours.generate(options).rows])
    return found


def refused_conversation(ranks: Ranks) -> list[str]:
    """Errors of a conversation for turns that differ between ranks, and for a prefill that collects everything."""
    from runahead.config import PrefillName

    said, model = [], tiny_model("llama")
    for prefill, ids in ((PrefillName.kv_runahead, [5, 6 + ranks.rank]), (PrefillName.zigzag, [5, 6])):
        try:
            with throughout(model.dtype):
                ours = ShardedConversation(model, ranks, prefill=PrefillOptions(name=prefill))
                ours.feed(torch.tensor([ids]))
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    return said


def piecewise(ranks: Ranks, family: str, turns: list[list[list[int]]], options: GenerationOptions) -> Talk:
    """`talk` with small pieces, and with branches."""
    return talk(ranks, family, turns, None, options, piece=3, branches=True)
