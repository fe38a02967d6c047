"""New tokens on their way from the rank that decodes to rank 0, which shows them while they come."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from runahead.ranks.ranks import Ranks

ROW_ENDED, STREAM_ENDED = -1, -2
TAG = 3


class TokenStream:
    """Every step's tokens of one batch: ranks that decode call `send`, then all ranks call `relay`.

    Args:
        source: rank whose tokens are passed on, where several decode alike.
        num_rows: rows of the batch.
        on_tokens: what rank 0 does with a step's tokens (None for a row that has ended).
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        source: int,
        num_rows: int,
        on_tokens: Callable[[list[int | None]], None] | None,
    ) -> None:
        self._ranks, self._source, self._num_rows = ranks, source, num_rows
        self._on_tokens = on_tokens or (lambda tokens: None)

    def send(self, tokens: list[int | None]) -> None:
        """Pass a step's tokens on without waiting for rank 0."""
        self._ranks.progress()
        if self._ranks.rank != self._source:
            return
        if self._source == 0:
            self._show(tokens)
        else:
            self._post([ROW_ENDED if token is None else token for token in tokens])

    def relay(self) -> None:
        """On rank 0: hand out steps until the source has ended. On the source: end. Elsewhere: nothing."""
        if self._source == 0:
            return
        if self._ranks.rank == self._source:
            self._post([STREAM_ENDED] * self._num_rows)
        elif self._ranks.rank == 0:
            while (step := self._receive())[0] != STREAM_ENDED:
                self._show([None if token == ROW_ENDED else token for token in step])

    def _show(self, tokens: list[int | None]) -> None:
        with self._ranks.busy():  # a reader who pauses is not a rank that hangs
            self._on_tokens(tokens)

    def _post(self, values: list[int]) -> None:
        step = torch.tensor(values)
        self._ranks.post(lambda: dist.send(step, 0, tag=TAG))

    def _receive(self) -> list[int]:
        step = torch.empty(self._num_rows, dtype=torch.long)
        what = f"the next token of rank {self._source}"
        self._ranks.control(what, lambda: dist.recv(step, self._source, tag=TAG))
        return step.tolist()
