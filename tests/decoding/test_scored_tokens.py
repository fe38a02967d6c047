"""A step's tokens arrive as they were sent, with and without log-probabilities."""

from __future__ import annotations

import pickle

import pytest
import torch

from runahead.decoding.scored_tokens import TOKEN_BYTES, ScoredToken, pack, unpack
from runahead.report import TokenLogprobs


def scored(token: int, number: int) -> ScoredToken:
    top = [(token + place, -0.25 - place) for place in range(number)]
    return ScoredToken(token, TokenLogprobs(logprob=-0.125 * token, top=top))


def test_ids_alone_are_whole_numbers() -> None:
    message = pack([5, None, 2**40], [None, None, None])
    assert message.dtype == torch.long and len(message) == 3
    assert unpack(message, [None, None, None]) == [5, None, 2**40]


@pytest.mark.parametrize("ended", [[], [0], [1], [0, 1, 2]])
def test_log_probabilities_come_with_their_rows(ended: list[int]) -> None:
    rows: list[int | None] = [scored(7, 2), 262_143, scored(9, 0)]
    rows = [None if row in ended else token for row, token in enumerate(rows)]
    asked = [2, None, 0]
    message = pack(rows, asked)
    assert len(message) == len(pack([None, None, None], asked)), "both ends know the length"
    told = unpack(message, asked)
    assert told == rows
    for ours, theirs in zip(told, rows, strict=True):
        assert type(ours) is type(theirs)
        if isinstance(ours, ScoredToken):
            assert isinstance(theirs, ScoredToken) and ours.logprobs == theirs.logprobs


def test_the_largest_token_has_room() -> None:
    assert pack([scored(7, 20)], [20]).nbytes <= TOKEN_BYTES


def test_a_scored_token_is_its_id_and_can_be_pickled() -> None:
    token = pickle.loads(pickle.dumps(scored(7, 2)))
    assert token == 7 and {7: "x"}[token] == "x" and token.logprobs == scored(7, 2).logprobs
