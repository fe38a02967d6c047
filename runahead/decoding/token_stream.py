"""Stream of new tokens from the rank that decodes to rank 0, which shows them as they arrive."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from runahead.ranks.ranks import Ranks

ROW_ENDED, STREAM_ENDED = -1, -2
TAG = 3


class TokenStream:
    """Tokens of every step of one batch. Ranks that decode call `send` per step, then all ranks call `relay`.

    Args:
        source: rank whose tokens are sent, as several ranks may decode the same.
        num_rows: rows of the batch.
        on_tokens: called on rank 0 with each step's tokens, None for rows that have ended.
    """

    def __init__(
        self, ranks: Ranks, *, source: int, num_rows: int, on_tokens: Callable[[list[int | None]], None] | None
    ) -> None:
        self._ranks, self._source, self._num_rows = ranks, source, num_rows
        self._on_tokens = on_tokens or (lambda tokens: None)

    def send(self, tokens: list[int | None]) -> None:
        """Send a step's tokens to rank 0, without waiting for it."""
        self._ranks.progress()
        if self._ranks.rank != self._source:
            return
        if self._source == 0:
            self._show(tokens)
        else:
            self._post([ROW_ENDED if token is None else token for token in tokens])

    def relay(self) -> None:
        """Receive steps on rank 0 until the source has ended, and tell it so on the source. Other ranks do nothing."""
        if self._source == 0:
            return
        if self._ranks.rank == self._source:
            self._post([STREAM_ENDED] * self._num_rows)
        elif self._ranks.rank == 0:
            step = torch.empty(self._num_rows, dtype=torch.long)
            what = f"the next token of {self._ranks.name(self._source)}"
            while True:
                self._ranks.control(what, lambda: dist.recv(step, self._source, tag=TAG))
                if step[0] == STREAM_ENDED:
                    return
                self._show([None if token == ROW_ENDED else token for token in step.tolist()])

    def _show(self, tokens: list[int | None]) -> None:
        with self._ranks.busy():  # a reader of the output that pauses must not count as silence
            self._on_tokens(tokens)

    def _post(self, values: list[int]) -> None:
        step = torch.tensor(values)
        self._ranks.post(lambda: dist.send(step, 0, tag=TAG))
