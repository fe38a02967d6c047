"""Tokens for which rows need memory while they are answered.

Keys and values take memory by tokens. A state takes the same for any text, and counts as so many tokens of its row.
What rows leave unused can be lent to stored prefixes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from policies.reuse import GivenPrompt, ReusingPrompt
from runahead.config import GenerationOptions
from runahead.reuse.prefix_tree import PrefixTree

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


class TakenRoom:
    """Memory that the rows of items have taken of a room. Stored prefixes get a part of what is left.

    Args:
        tree: the prefixes; None: there are none.
    """

    def __init__(self, room: Room, tree: PrefixTree | None) -> None:
        self._room, self._tree = room, tree
        self._num_tokens, self._num_rows = dict[int, int](), Counter[int]()  # of each item
        self._written = SimpleQueue[int]()  # numbers of items, once for each file that has ended

    @property
    def num_tokens(self) -> int:
        """Tokens for which rows have room."""
        return sum(self._num_tokens.values())

    def take(self, item: int, num_rows: int, num_tokens: int) -> None:
        """Give so many rows of an item room for so many tokens together."""
        self._num_rows[item], self._num_tokens[item] = num_rows, num_tokens
        self._limit_prefixes()

    def keep_for_file(self, item: int) -> None:
        """Keep the room of an item until a file is written from its rows' memory, too: until `file_ended`."""
        self._num_rows[item] += 1

    def file_ended(self, item: int) -> None:
        """Note that a file is written, or given up; from any thread. Its room goes with the next call of `give`."""
        self._written.put(item)

    def give(self, item: int, num_rows: int) -> None:
        """Note that rows of an item need no room any more.

        That of their keys and values ends with the last of them, and of the files that are written from it.
        """
        gone = Counter({item: num_rows})
        while not self._written.empty():
            gone[self._written.get()] += 1
        for number, num in gone.items():
            self._num_rows[number] -= num
            if self._num_rows[number] == 0:
                del self._num_rows[number], self._num_tokens[number]
        self._limit_prefixes()

    def _limit_prefixes(self) -> None:
        if self._room.shared_bytes is not None and self._tree is not None:
            self._tree.limit_bytes = self._room.left_for_prefixes(self.num_tokens, self._num_rows.total())


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
