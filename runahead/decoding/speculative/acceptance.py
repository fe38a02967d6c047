"""Accepts drafted tokens: those that the rows' samplers choose from the logits of the forward that verified them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runahead.decoding.row import RowId


class Acceptance:
    """The tokens that a forward gives to rows, place after place, for as long as they are the drafted ones.

    Args:
        drafts: of each row, possibly empty.

    Attributes:
        place: how many tokens rows have got that still go on; it is that of the next logits among those of a row.
        going_on: rows whose tokens so far were the drafted ones.
        accepted: number of drafted tokens of each row that were right.
        rejected: rows of which a drafted token was wrong.
        unseen: number of tokens of each row that the forward stored, and after which nothing was chosen.
        first: the first token of each row.
        num_new: chosen tokens of all rows.
    """

    def __init__(self, drafts: Mapping[RowId, Sequence[int]]) -> None:
        self._drafts, self.place, self.going_on = drafts, 0, list(drafts)
        self.accepted, self.rejected = dict.fromkeys(drafts, 0), set[RowId]()
        self.unseen = {row: len(draft) + 1 for row, draft in drafts.items()}
        self.first: dict[RowId, int] = {}
        self.num_new = 0

    def take(self, chosen: Mapping[RowId, int | None]) -> None:
        """Take the next tokens of rows that go on; None where the logits are no numbers."""
        going_on = list[RowId]()
        for row, token in chosen.items():
            self.unseen[row] -= 1
            if token is None:
                continue
            self.num_new += 1
            draft = self._drafts[row]
            if self.place == 0:
                self.first[row] = token
            if self.place < len(draft) and token == draft[self.place]:
                self.accepted[row] += 1
                going_on.append(row)
            elif self.place < len(draft):
                self.rejected.add(row)
        self.going_on, self.place = going_on, self.place + 1
