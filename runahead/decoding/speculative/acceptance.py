"""Accepts drafted tokens: those that the rows' samplers choose from the logits of the forward that verified them."""

# Legend: C verified tokens, V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a verification.

    Attributes:
        accepted: number of drafted tokens of each row that were right.
        rejected: rows of which a drafted token was wrong.
        unseen: number of tokens of each row that were verified, and after which nothing was chosen.
        num_new: chosen tokens of all rows.
    """

    accepted: dict[int, int]
    rejected: set[int]
    unseen: dict[int, int]
    num_new: int


def accept(
    drafts: Mapping[int, Sequence[int]],
    logits: Mapping[int, Tensor],
    choose: Callable[[dict[int, Tensor]], Mapping[int, int]],
    goes_on: Callable[[int], bool],
) -> Outcome:
    """Choose the next tokens of rows, place after place, for as long as they are the drafted ones.

    Args:
        drafts: of each row, possibly empty.
        logits: (1 + tokens of the draft, V) of each row: after its last token, and after each drafted one.
        choose: chooses the next token of rows from logits (V) of each, and takes it; it may leave out rows.
        goes_on: whether a row has not ended.
    """
    unseen = {row: len(draft) + 1 for row, draft in drafts.items()}
    accepted, rejected, going_on, num_new, place = dict.fromkeys(drafts, 0), set[int](), list(drafts), 0, 0
    while going_on:
        chosen = choose({row: logits[row][place] for row in going_on})
        num_new += len(chosen)
        going_on = []
        for row, token in chosen.items():
            unseen[row] -= 1
            if place < len(drafts[row]) and token != drafts[row][place]:
                rejected.add(row)
            elif place < len(drafts[row]):
                accepted[row] += 1
                if goes_on(row):
                    going_on.append(row)
        place += 1
    return Outcome(accepted=accepted, rejected=rejected, unseen=unseen, num_new=num_new)
