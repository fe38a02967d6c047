"""Log-probabilities of a prompt's tokens, each computed by the rank that has the token before it."""

# Legend: B batch, S tokens of the padded prompt, C tokens of this rank, T some of them, V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from runahead.attention.op import nothing
from runahead.model.head import Head
from runahead.model.model import Model
from runahead.report import LEAST_LOGPROB, PromptLogprobs

MOST_LOGITS = 2**24
"""Logits that are in memory at a time: 64 MiB of float32, and as much for their log-probabilities."""


class PromptScorer:
    """Computes the log-probabilities of a batch's tokens that come after those of this rank, in blocks of tokens.

    Args:
        ids_BS: the batch, padded on the left.
        pads: left padding of each row.
        number: of the most likely tokens at each place that are given, too. None: nothing is given but `surprise`.
        between: called after each block.
    """

    def __init__(
        self, model: Model, ids_BS: Tensor, pads: list[int], number: int | None, between: Callable[[], object] = nothing
    ) -> None:
        self._ids_BS, self._pads, self._number, self._between = ids_BS, pads, number, between
        self._model, self._head, self._vocab_size = model, Head(model.module), model.vocab_size
        self._found: list[tuple[int, Tensor]] = []

    def keeping(self) -> AbstractContextManager[None]:
        """Context manager in which the hidden states of a forward over this rank's tokens are kept."""
        return self._head.keeping()

    def score(self, runs: Sequence[range]) -> None:
        """Score what comes after the tokens of these ranges, which the forward had, in order."""
        hidden_BCD, at, last = self._head.hidden, 0, self._ids_BS.shape[1] - 1
        for run in runs:
            for first, end in _blocks(range(run.start, min(run.stop, last)), self._block):
                offset = at - run.start
                logits_BTV = self._head.logits(hidden_BCD[:, first + offset : end + offset])
                self._found.append((first + 1, self._scores(logits_BTV, self._ids_BS[:, first + 1 : end + 1])))
                self._between()
            at += len(run)

    @property
    def _block(self) -> int:
        """Tokens of a block, of which all rows are scored at once."""
        return max(1, MOST_LOGITS // (self._vocab_size * len(self._pads)))

    def _scores(self, logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
        """Each token's log-probability, the largest ones at its place and their ids, side by side."""
        logprobs_BTV = logits_BTV.log_softmax(dim=-1)
        own_BT1 = logprobs_BTV.gather(-1, ids_BT[..., None])
        largest, ids = logprobs_BTV.topk(self._number or 0)
        return torch.cat([own_BT1.double(), largest.double(), ids.double()], dim=-1).clamp_min(LEAST_LOGPROB)

    def surprise(self, tokens: range) -> Tensor:
        """-log p (B, T), float64, on the host, of some tokens; NaN of those that were not scored. The host waits.

        Ranks that share the model have the first one's, since rounding may let unlike ones end blocks elsewhere.
        """
        surprise_BT = torch.full((len(self._pads), len(tokens)), torch.nan, dtype=torch.float64)
        for first, scores in self._found:
            start, end = max(first, tokens.start), min(first + scores.shape[1], tokens.stop)
            if start < end:
                scores_BT = scores[:, start - first : end - first, 0]
                surprise_BT[:, start - tokens.start : end - tokens.start] = -scores_BT.cpu()
        for row, pad in enumerate(self._pads):
            surprise_BT[row, : max(0, pad + 1 - tokens.start)] = torch.nan
        return self._model.of_first_share(surprise_BT)

    def found(self) -> list[list[PromptLogprobs]]:
        """The log-probabilities of each row's prompt so far, if they are given. The host waits for the device."""
        if self._number is None:
            return []
        rows = [list[PromptLogprobs]() for _ in self._pads]
        for first, scores in self._found:
            for row, pad in enumerate(self._pads):
                skipped = max(0, pad + 1 - first)  # padding, and the first token, before which there is none
                of_row = scores[row, skipped:].tolist()
                if of_row:
                    rows[row].append(
                        PromptLogprobs(
                            first=first + skipped - pad,
                            logprobs=[each[0] for each in of_row],
                            top_logprobs=[each[1 : 1 + self._number] for each in of_row],
                            top_ids=[[int(id) for id in each[1 + self._number :]] for each in of_row],
                        )
                    )
        return rows


def _blocks(run: range, length: int) -> Iterator[tuple[int, int]]:
    """The first token of each block of a range, and the one after it."""
    return ((first, min(first + length, run.stop)) for first in range(run.start, run.stop, length))
