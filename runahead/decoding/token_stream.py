"""Stream of new tokens from the rank that decodes to rank 0, which shows them as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from runahead.decoding.scored_tokens import pack, unpack
from runahead.ranks.ranks import Ranks

STREAM_ENDED = -2
TAG, ANSWER_TAG = 3, 4

OnTokens = Callable[[list[int | None]], Iterable[int] | None]
"""Receives the new token id of every row after each step, None for rows that have ended. May return rows to cancel.

It is a `ScoredToken` for rows that asked for log-probabilities."""


class TokenStream:
    """Tokens of every step of one batch. Ranks that decode call `send` per step, then all ranks call `relay`.

    Rank 0 can cancel rows if it is `cancellable`: it answers each step with the rows that it does not want any more,
    and all ranks that decode obey the answer in the step after, so that they stay in step.

    Args:
        source: rank whose tokens are sent, as several ranks may decode the same.
        num_logprobs: of each row of the batch, how many log-probabilities come with its tokens; None for none.
        on_tokens: called on rank 0 with each step's tokens.
        decoders: ranks that decode. Rank 0 is one of them only if it is the source.
        cancellable: whether rank 0 answers each step; the same on all ranks.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        source: int,
        num_logprobs: Sequence[int | None],
        on_tokens: OnTokens | None,
        decoders: Collection[int] = (),
        cancellable: bool = False,
    ) -> None:
        self._ranks, self._source, self._num_logprobs = ranks, source, num_logprobs
        self._on_tokens = on_tokens or (lambda tokens: None)
        self._cancellable = cancellable
        self._answered = [rank for rank in decoders if rank != 0] if cancellable else []
        self._num_sent = 0
        self._own_answer: list[int] = []

    def send(self, tokens: list[int | None]) -> list[int]:
        """Send a step's tokens to rank 0, without waiting for it to read them. Returns the rows to cancel."""
        self._ranks.progress()
        # Taken before the tokens are sent: both ends then send and receive in the same order.
        cancelled = self._next_answer() if self._num_sent else []
        self._num_sent += 1
        if self._ranks.rank == self._source:
            if self._source == 0:
                self._own_answer = self._show(tokens)
            else:
                self._post(pack(tokens, self._num_logprobs), 0, TAG)
        return cancelled

    def relay(self) -> None:
        """Receive steps on rank 0 until the source has ended, and tell it so on the source. Other ranks do nothing."""
        if self._ranks.rank != 0 and self._num_sent:
            self._next_answer()  # to the last step, which needs none
        if self._source == 0:
            return
        if self._ranks.rank == self._source:
            self._post(torch.full_like(self._message(), STREAM_ENDED), 0, TAG)
        elif self._ranks.rank == 0:
            step = self._message()
            what = f"the next token of {self._ranks.name(self._source)}"
            while True:
                self._ranks.control(what, lambda: dist.recv(step, self._source, tag=TAG))
                if step[0] == STREAM_ENDED:
                    return
                self._show(unpack(step, self._num_logprobs))

    def _show(self, tokens: list[int | None]) -> list[int]:
        """Show a step's tokens on rank 0, and answer the ranks that decode. Returns the rows to cancel."""
        with self._ranks.busy():  # a reader of the output that pauses must not count as silence
            cancelled = list(self._on_tokens(tokens) or ())
        if not self._cancellable:
            return []
        for rank in self._answered:
            answer = [int(row in cancelled) for row in range(len(self._num_logprobs))]
            self._post(torch.tensor(answer), rank, ANSWER_TAG)
        return cancelled

    def _next_answer(self) -> list[int]:
        """Rows that rank 0 cancels, as of the step before."""
        if self._ranks.rank == 0:
            return self._own_answer
        if self._ranks.rank not in self._answered:
            return []
        answer = torch.empty(len(self._num_logprobs), dtype=torch.long)
        self._ranks.control("rank 0 to take a token", lambda: dist.recv(answer, 0, tag=ANSWER_TAG), [0])
        return [row for row, is_cancelled in enumerate(answer.tolist()) if is_cancelled]

    def _message(self) -> Tensor:
        """A message of one step, without values."""
        return torch.empty_like(pack([None] * len(self._num_logprobs), self._num_logprobs))

    def _post(self, message: Tensor, rank: int, tag: int) -> None:
        self._ranks.post(lambda: dist.send(message, rank, tag=tag))
