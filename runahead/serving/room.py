"""Tokens for which rows need memory while they are answered.

Keys and values take memory by tokens. A state takes the same for any text, and counts as so many tokens of its row.
What rows leave unused can be lent to stored prefixes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from policies.base import GivenPrompt, ReusingPrompt
from runahead.config import GenerationOptions

MEMORY_SHARE = 0.8
"""Share of the free memory that the KV caches of all rows and their activations may take."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """Memory of a server for the rows that it answers.

    Attributes:
        max_tokens: most tokens; None is no limit.
        row_tokens: tokens of these that take as much memory as the states of a row.
        shared_bytes: memory that rows and stored prefixes share; None: prefixes have a limit of their own.
        token_bytes, row_bytes: most bytes of it that a token of a row takes, and the states of a row, on any rank.
    """

    max_tokens: int | None
    row_tokens: int = 0
    shared_bytes: float | None = None
    token_bytes: float = 0.0
    row_bytes: int = 0

    def __str__(self) -> str:
        tokens = f"{self.max_tokens:,} tokens of prompts and answers at a time"
        return f"{tokens}, of which the states of each answer take {self.row_tokens:,}" if self.row_tokens else tokens

    def left_for_prefixes(self, num_tokens: int, num_rows: int) -> int:
        """Most bytes of prefixes beside so many rows: half of what these leave of the shared memory.

        So a row that has room as if there were no prefixes has memory, too: they make way before it begins.

        Args:
            num_tokens: for which these rows have memory, without their states.
        """
        assert self.shared_bytes is not None, "prefixes have a limit of their own"
        left_bytes = self.shared_bytes - num_tokens * self.token_bytes - num_rows * self.row_bytes
        return max(0, int(left_bytes) // 2)


def num_tokens_of(
    prompts: Sequence[GivenPrompt], options: Sequence[GenerationOptions], prompt_of: Sequence[int] | None = None
) -> int:
    """Tokens for which rows need memory that are computed at once, with the segments that they reuse.

    Args:
        prompts, options: of each row.
        prompt_of: number of each row's prompt, if rows of the same prompt share its memory.
    """
    num_prompts, num_answers = num_places(len(prompts), prompt_of)
    most_new = max(each.max_new_tokens for each in options)
    return num_prompts * max(map(len, prompts)) + num_answers * most_new + num_held(prompts)


def num_places(num_rows: int, prompt_of: Sequence[int] | None) -> tuple[int, int]:
    """Places for prompts, and for answers: where rows share a prompt each has its own, and its prompt has one, too."""
    if prompt_of is None:
        return num_rows, num_rows
    counts = Counter(prompt_of)
    return len(counts), len(counts) + sum(count for count in counts.values() if count > 1)


def num_held(prompts: Sequence[GivenPrompt]) -> int:
    """Tokens for which segments need memory: prompts keep them, also once the store has evicted them."""
    return sum(prompt.num_held for prompt in prompts if isinstance(prompt, ReusingPrompt))
