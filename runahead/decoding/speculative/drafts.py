"""Drafts of the next tokens of each row, which one forward verifies together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from runahead.config import MAX_DRAFT_TOKENS, Speculate
from runahead.decoding.row import Row, RowId
from runahead.decoding.sampling import Sampler
from runahead.report import SpeculationReport


class Drafter(ABC):
    """Drafts the next tokens of the rows of a batch. Wrong drafts cost time and change no token.

    Attributes:
        is_free: drafting takes so little time that a draft is made before it is known whether it is verified. It
            depends on texts alone, so all ranks that decode them make the same.
        runs_on_all: drafting needs all ranks that share the model; otherwise the one that leads drafts alone.
        within: statistics of the drafts for this drafter, if another one drafts for it.
    """

    is_free = True
    runs_on_all = False
    within: SpeculationReport | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values that drafts are made from, besides those of the prompts' cache."""
        return 0

    @abstractmethod
    def join(self, id: RowId, row: Row) -> None:
        """Take a row that asks for drafts."""

    def leave(self, id: RowId) -> None:  # noqa: B027 (what drafts over the memory of a batch keeps it)
        """Forget a row that has ended."""

    @property
    def tokens_to_begin(self) -> float:
        """Tokens whose forwards by the verifying model take about as long as `begin`."""
        return 0.0

    def get_ready(self) -> bool:
        """Called before each step until it has begun: whether it can begin. By its texts alone, on all ranks alike."""
        return True

    def begin(self) -> None:  # noqa: B027 (most have nothing to prepare)
        """Prepare for the first draft, once the prompts' first tokens are there; new ones may have come since."""

    @abstractmethod
    def draft(
        self, texts: Mapping[RowId, Sequence[int]], most: Mapping[RowId, int], samplers: Mapping[RowId, Sampler]
    ) -> dict[RowId, list[int]]:
        """Tokens that may follow.

        Args:
            texts: token ids of rows. Of an earlier call's text up to MAX_DRAFT_TOKENS last ones may
                be gone, which were drafts themselves.
            most: most tokens of the draft of each row.
            samplers: of each row, which will choose its next tokens; they are left as they are.
        """


class LookupDrafter(Drafter):
    """Prompt look-up: what followed the last tokens of a text when they stood earlier in it."""

    def __init__(self) -> None:
        self._rows: dict[RowId, Lookup] = {}

    def join(self, id: RowId, row: Row) -> None:
        self._rows[id] = Lookup(row.options.speculate_match)

    def leave(self, id: RowId) -> None:
        self._rows.pop(id, None)

    def draft(
        self, texts: Mapping[RowId, Sequence[int]], most: Mapping[RowId, int], samplers: Mapping[RowId, Sampler]
    ) -> dict[RowId, list[int]]:
        return {row: self._rows[row].draft(text, most[row]) if row in self._rows else [] for row, text in texts.items()}


class DraftsByKind(Drafter):
    """Drafts of a batch whose rows ask for different kinds of them.

    Args:
        drafters: by kind.
    """

    is_free = False

    def __init__(self, drafters: Mapping[Speculate, Drafter]) -> None:
        self._drafters, self._kinds = dict(drafters), dict[RowId, Speculate]()
        self.runs_on_all = any(each.runs_on_all for each in drafters.values())

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._drafters.values())

    @property
    def tokens_to_begin(self) -> float:
        return sum(each.tokens_to_begin for each in self._drafters.values())

    def join(self, id: RowId, row: Row) -> None:
        self._kinds[id] = row.options.speculate
        self._drafters[row.options.speculate].join(id, row)

    def leave(self, id: RowId) -> None:
        if id in self._kinds:
            self._drafters[self._kinds.pop(id)].leave(id)

    def get_ready(self) -> bool:
        return all([each.get_ready() for each in self._drafters.values()])

    def begin(self) -> None:
        for each in self._drafters.values():
            each.begin()
            self.within = self.within or each.within

    def draft(
        self, texts: Mapping[RowId, Sequence[int]], most: Mapping[RowId, int], samplers: Mapping[RowId, Sampler]
    ) -> dict[RowId, list[int]]:
        drafts = {row: list[int]() for row in texts}
        for kind, drafter in self._drafters.items():
            of_kind = {row: text for row, text in texts.items() if self._kinds.get(row) is kind}
            drafts |= drafter.draft(of_kind, most, samplers) if of_kind else {}
        return drafts


class Lookup:
    """Look-up in one text.

    Of all earlier places those count at which the longest run of tokens is the same, and of these the last one. A draft
    that reaches the end of the text goes on with itself, so that what repeats with a period is drafted at any length.

    Args:
        match: number of tokens that have to be the same.
    """

    MOST_PLACES, MOST_MATCH = 16, 32
    """Places that are compared, the last ones, and tokens that are compared at each: they bound the work of a draft."""

    def __init__(self, match: int) -> None:
        self._match = match
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._known: list[int] = []

    def draft(self, text: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow the text, which is that of the last call as `Drafter.draft` says."""
        end, known = len(text), self._known
        self._forget(text)
        for place in range(max(len(known), self._match), end):  # each with a token after it
            self._places.setdefault(tuple(text[place - self._match : place]), []).append(place)
        known += text[len(known) :]
        found = self._places.get(tuple(text[end - self._match :]), [])[-self.MOST_PLACES :] if most > 0 else []
        if not found:
            return []
        place = max(found, key=lambda place: (self._length_of_match(text, place), place))
        drafted: list[int] = []
        for index in range(place, place + most):
            drafted.append(text[index] if index < end else drafted[index - end])
        return drafted

    def _forget(self, text: Sequence[int]) -> None:
        """Forget the last tokens of the text of the last call that are not in this one."""
        known = self._known
        recent = range(max(0, len(known) - MAX_DRAFT_TOKENS), len(known))
        num_left = next((place for place in recent if place >= len(text) or known[place] != text[place]), len(known))
        for place in reversed(range(max(num_left, self._match), len(known))):
            self._places[tuple(known[place - self._match : place])].pop()
        del known[num_left:]

    def _length_of_match(self, text: Sequence[int], place: int) -> int:
        """Number of tokens before a place that are those at the end of the text."""
        most = min(place, self.MOST_MATCH)
        return next((num for num in range(most) if text[place - 1 - num] != text[len(text) - 1 - num]), most)
