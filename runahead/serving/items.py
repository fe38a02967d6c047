"""Work items that rank 0 tells to all ranks, in one global sequence, and what the ranks report of them."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from runahead.config import GenerationOptions
from runahead.decoding.live_rows import RowId


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """Prefill these prompts together. Their rows then join those that the last stage decodes.

    Attributes:
        number: of the item; unique.
        prompts, options: of each row.
        boundaries: of the stages' chunks, in tokens of the longest prompt.
        is_short: the last stage computes it alone, and may do so between two layers of another prefill.
    """

    number: int
    prompts: list[list[int]]
    options: list[GenerationOptions]
    boundaries: tuple[int, ...]
    is_short: bool = False


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Generate from these prompts on all ranks to the end, as `Engine.generate` does, for sharded decoding."""

    number: int
    prompts: list[list[int]]
    options: list[GenerationOptions]


@dataclass(frozen=True)
class Cancel:
    """End these rows, which have their first token. It is obeyed before the next step, not in the order of items."""

    rows: list[RowId]


@dataclass(frozen=True)
class Check:
    """All ranks report that they live."""


@dataclass(frozen=True)
class End:
    """There will be no other item."""


Item = Prefill | Generate | Cancel | Check | End


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """New tokens of a step, and how rows ended.

    Attributes:
        step_s: seconds of a decoding step; None for first tokens, and where several ranks decode.
    """

    tokens: dict[RowId, int]
    ended: dict[RowId, str] = field(default_factory=dict)
    step_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """A rank has computed its part of a prefill, or has none.

    Attributes:
        number: of the item.
        prefill_s: seconds, without those in which it did something else.
        wait_s: of these, for other ranks.
        is_alone: it did nothing else meanwhile.
    """

    number: int
    rank: int
    prefill_s: float
    wait_s: float
    is_alone: bool


@dataclass(frozen=True)
class Alive:
    """Answer to `Check`: the rank, and whether its process was asked to end."""

    rank: int
    asked_to_end: bool


Report = Tokens | Part | Alive


class Inbox:
    """Items of one rank that have arrived. Threads put them in; the main thread takes them out."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._cancelled: list[RowId] = []
        self._changed = threading.Condition()
        self.error: BaseException | None = None
        self.is_cut_off = False

    # From any thread.

    def put(self, item: Item) -> None:
        with self._changed:
            if isinstance(item, Cancel):
                self._cancelled += item.rows
            else:
                self._items.append(item)
            self._changed.notify()

    def fail(self, error: BaseException, *, is_cut_off: bool = False) -> None:
        """Let the main thread end with an error, or because a connection is lost."""
        with self._changed:
            self.error, self.is_cut_off = self.error or error, self.is_cut_off or is_cut_off
            self._changed.notify()

    # In the main thread.

    def has_item(self, block_s: float = 0.0) -> bool:
        """Whether there is an item or an error. Blocks for `block_s` seconds at most until there is."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._items) or self.error is not None, block_s)

    @property
    def next(self) -> Item | None:
        """The next item, which stays here; None if there is none."""
        with self._changed:
            return self._items[0] if self._items else None

    def take(self) -> Item:
        """Take out the next item, which is there."""
        with self._changed:
            return self._items.popleft()

    def take_cancelled(self) -> list[RowId]:
        """Rows that were cancelled since the last call."""
        with self._changed:
            cancelled, self._cancelled = self._cancelled, []
        return cancelled
