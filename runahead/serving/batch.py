"""The rows of one work item, as rank 0 knows them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from runahead.report import PromptLogprobs
from runahead.serving.items import Generate, Part, PrefillItem, Progress, Tokens
from runahead.serving.request import Request
from runahead.serving.room import num_tokens_of


@dataclass(kw_only=True)
class Batch:
    """The rows of one item, from the moment that it is told.

    Attributes:
        owners: request of each row, and the row's number in it.
        predicted_s: seconds of the prefill.
        is_short: one stage computes it alone.
        is_alone: no other row was computed or decoded when it began.
        is_decoded: its rows have their first tokens.
        left: rows that have not ended.
        parts: of the prefill, by rank, as far as they were reported.
        progress: last report of each rank from inside the prefill.
        new_tokens: number of new tokens of each row.
        cached: tokens of each prompt that were not computed.
        shares_prompts: rows of the same prompt share its keys and values.
        computed: the rows whose prompts are computed: one of each different prompt, or all if `Engine.generate` does.
        held: reports of tokens that are heard once all ranks have reported their scores.
    """

    item: PrefillItem | Generate
    owners: list[tuple[Request, int]]
    predicted_s: float
    is_short: bool
    is_alone: bool
    is_decoded: bool = False
    began_s: float = field(default_factory=time.monotonic)
    parts: dict[int, Part] = field(default_factory=dict)
    progress: dict[int, Progress] = field(default_factory=dict)
    shares_prompts: bool = False
    held: list[Tokens] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left, self.new_tokens = set(range(len(self.owners))), [0] * len(self.owners)
        self.cached = [0] * len(self.owners)
        self._prompt_of = self.item.different[1]
        self.computed = list(range(len(self.owners)))
        if isinstance(self.item, PrefillItem):
            self.computed = [self._prompt_of.index(number) for number in sorted(set(self._prompt_of))]

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.item.prompts]

    @cached_property
    def num_tokens(self) -> int:
        """Tokens for which the rows have memory, until the last of them has ended."""
        return num_tokens_of(self.item.prompts, self.item.options, self._prompt_of if self.shares_prompts else None)

    def of_computed(self, of_rows: Sequence[int]) -> list[int]:
        """The numbers of those rows whose prompts are computed, of one number per row."""
        return [of_rows[row] for row in self.computed]

    @property
    def scores(self) -> bool:
        """Whether the prompts' tokens are scored."""
        return isinstance(self.item, PrefillItem) and self.item.scores is not None

    def scores_of(self, row: int) -> PromptLogprobs:
        """The scores of a row's prompt, of which all ranks have reported theirs."""
        number = self._prompt_of[row]
        return PromptLogprobs.join(
            [each for part in self.parts.values() if part.scores for each in part.scores[number]]
        )

    @property
    def reuses(self) -> bool:
        """Whether some of its tokens are not computed, so that its times say nothing of other prompts."""
        return isinstance(self.item, PrefillItem) and self.item.reuses
