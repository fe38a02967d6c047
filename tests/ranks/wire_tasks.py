"""Tasks of ranks that send keys and values in few bits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import pairwise
from unittest import mock

import torch

from runahead import PrefillOptions, Ranks
from runahead.prefill.chain_run import ChainRun
from tests.ranks import tasks


@dataclass
class Records:
    """Digests of the records of a rank, by (layer, first token, end): what it encoded, and what it decoded."""

    encoded: dict[tuple[int, int, int], str] = field(default_factory=dict)
    decoded: dict[tuple[int, int, int], str] = field(default_factory=dict)


def records(
    ranks: Ranks, family: str, ids: list[int], bounds: tuple[int, ...], options: PrefillOptions, dtype: torch.dtype
) -> Records:
    """Prefill a prompt, and tell the records that this rank wrote and read."""
    found, pack, await_prefix = Records(), ChainRun._pack, ChainRun._await_prefix

    def digest(run: ChainRun, place: int, start: int, end: int) -> str:
        return hashlib.sha256(bytes(run._carried.tokens(place, start, end).flatten().tolist())).hexdigest()

    def packing(run: ChainRun, place: int, start: int, end: int) -> None:
        pack(run, place, start, end)
        found.encoded[place, start, end] = digest(run, place, start, end)

    def awaiting(run: ChainRun, place: int) -> None:
        await_prefix(run, place)
        for each in run.transfer.schedule.receives(place):
            for start, end in _chunks(bounds, each.start, each.end):
                found.decoded[place, start, end] = digest(run, place, start, end)

    with mock.patch.multiple(ChainRun, _pack=packing, _await_prefix=awaiting):
        tasks.prefill(ranks, family, [ids], bounds, options, 1, dtype)
    return found


def _chunks(bounds: tuple[int, ...], start: int, end: int) -> list[tuple[int, int]]:
    """The chunks of which a message consists."""
    return [(a, b) for a, b in pairwise(bounds) if start <= a < b <= end]
