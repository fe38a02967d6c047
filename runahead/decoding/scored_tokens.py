"""Tokens that carry log-probabilities: their type, and the form in which a step's tokens go from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runahead.config import MAX_LOGPROBS
from runahead.report import LEAST_LOGPROB, TokenLogprobs

ROW_ENDED = -1
"""Sent in place of a token of a row that had ended before."""

TOKEN_BYTES = 8 * (2 + 2 * MAX_LOGPROBS)
"""Most bytes of a token in a message."""


class ScoredToken(int):
    """A token id with its log-probabilities. It is given for rows that asked for them, in place of the plain id."""

    logprobs: TokenLogprobs

    def __new__(cls, token: int, logprobs: TokenLogprobs) -> ScoredToken:
        made = super().__new__(cls, token)
        made.logprobs = logprobs
        return made

    def __getnewargs__(self) -> tuple[int, TokenLogprobs]:  # type: ignore[override]  # for pickle
        return int(self), self.logprobs


def pack(tokens: Sequence[int | None], num_logprobs: Sequence[int | None]) -> Tensor:
    """The tokens of one step as a message: int64, or float64 if a row asked for log-probabilities.

    It has the id of every row, then of each row that asked for k log-probabilities that of its token, the k largest,
    and their k ids.

    Args:
        tokens: of each row; None for a row that had ended before.
        num_logprobs: k of each row; None for rows that did not ask.
    """
    values: list[float] = [ROW_ENDED if token is None else int(token) for token in tokens]
    if all(number is None for number in num_logprobs):
        return torch.tensor(values, dtype=torch.long)
    for token, number in zip(tokens, num_logprobs, strict=True):
        if number is None:
            continue
        if token is None:
            values += [0.0] * (1 + 2 * number)
            continue
        assert isinstance(token, ScoredToken), token
        top = token.logprobs.top
        values += [token.logprobs.logprob, *(value for _, value in top), *(each for each, _ in top)]
    return torch.tensor(values, dtype=torch.float64)


def unpack(message: Tensor, num_logprobs: Sequence[int | None]) -> list[int | None]:
    """The tokens of one step from a message of `pack`. The host waits for the device once."""
    values = message.tolist()
    tokens: list[int | None] = []
    start = len(num_logprobs)
    for value, number in zip(values, num_logprobs, strict=False):
        token: int | None = None if value == ROW_ENDED else int(value)
        if number is not None:
            own, largest, ids = values[start], values[start + 1 :][:number], values[start + 1 + number :][:number]
            start += 1 + 2 * number
            if token is not None:
                top = [(int(each), max(value, LEAST_LOGPROB)) for each, value in zip(ids, largest, strict=True)]
                token = ScoredToken(token, TokenLogprobs(logprob=max(own, LEAST_LOGPROB), top=top))
        tokens.append(token)
    return tokens
