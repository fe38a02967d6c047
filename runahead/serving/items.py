"""Work items that rank 0 tells to all ranks, in one global sequence, and what the ranks report of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from policies.reuse import GivenPrompt, reuse_segments
from runahead.config import GenerationOptions
from runahead.decoding.row import RowId
from runahead.report import PromptLogprobs, RankReport
from runahead.reuse.forks import each_once
from runahead.reuse.prefix_tree import Change
from runahead.reuse.tiers.folder import SUFFIX
from runahead.timeline.trace import TraceSpan

PROGRESS_S = 0.5
"""Least seconds between two reports of a rank from inside a prefill."""


@dataclass(frozen=True, kw_only=True)
class RowsItem:
    """An item with rows.

    Attributes:
        number: of the item; unique.
        prompts, options: of each row. A prompt that reuses segments has them encoded where they are not stored.
        salts: of the prompts, which reuse and are reused by those with the same alone; () is none.
    """

    number: int
    prompts: Sequence[GivenPrompt]
    options: list[GenerationOptions]
    salts: Sequence[str] = ()

    @property
    def different(self) -> tuple[list[GivenPrompt], list[int]]:
        """The different prompts, and the number of each row's among them: equal ones of other salts are different."""
        return each_once(self.prompts, self.salts)

    @property
    def reuses(self) -> bool:
        """Whether a prompt reuses segments."""
        return reuse_segments(self.prompts)

    @property
    def finds_prefixes(self) -> bool:
        """Whether its prompts may reuse prefixes, where there are any."""
        return not self.reuses


@dataclass(frozen=True, kw_only=True)
class PrefillItem(RowsItem):
    """Prefill these prompts together. Their rows then join those that the last stage decodes.

    Attributes:
        boundaries: of the stages' chunks, in tokens of the longest prompt that are computed.
        stored: number of first tokens of each prompt that all stages reuse, which the last one had stored when rank 0
            heard of it last; none where that one computes alone, which looks itself.
        is_short: the last stage computes it alone, and may do so between two layers of another prefill.
        scores: as of `PrefillPlan`.
        handovers: of each row, the name of the file in which its prompt is handed over, "" for none; () is none of all.
        record_timeline: ranks report from inside it, and when they were in which layer.
        to_prefetch: what is stored of prompts that will come after it, each with its salt.
    """

    boundaries: tuple[int, ...]
    stored: Sequence[int] = ()
    is_short: bool = False
    scores: int | None = None
    handovers: Sequence[str] = ()
    record_timeline: bool = True
    to_prefetch: Sequence[tuple[Sequence[int], str]] = ()

    @property
    def finds_prefixes(self) -> bool:
        return self.scores is None and not self.reuses


@dataclass(frozen=True, kw_only=True)
class Generate(RowsItem):
    """Generate from these prompts on all ranks to the end, as `Engine.generate` does, for sharded decoding."""


@dataclass(frozen=True)
class Cancel:
    """End these rows, which have their first token. It is obeyed before the next step, not in the order of items."""

    rows: list[RowId]


@dataclass(frozen=True)
class Stop:
    """Compute no more of this prefill, whose prompts nobody wants. Obeyed after a layer, not in the order of items."""

    number: int


@dataclass(frozen=True)
class Check:
    """All ranks report that they live."""


@dataclass(frozen=True)
class End:
    """There will be no other item."""


Item = PrefillItem | Generate | Cancel | Stop | Check | End


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """New tokens of a step, and how rows ended.

    Attributes:
        step_s: seconds of a decoding step; None for first tokens, and where several ranks decode.
        cached: with first tokens, tokens of prompts that were not computed for them.
    """

    tokens: dict[RowId, int]
    ended: dict[RowId, str] = field(default_factory=dict)
    step_s: float | None = None
    cached: dict[RowId, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A rank has computed its part of a prefill, or has none.

    Attributes:
        number: of the item.
        prefill_s: seconds, without those in which it did something else.
        wait_s: of these, for other ranks.
        is_alone: it did nothing else meanwhile.
        is_cancelled: it was stopped before its end.
        report: of the engine, with the memory of the rank's process; None after `Generate`.
        live_bytes: KV caches of the rows that it decodes, those of this prefill among them.
        stored_bytes: memory of the texts that it keeps for later prompts.
        spans: when it computed, and when it waited or did something else, if that is recorded; seconds of rank 0's
            `time.perf_counter`.
        prefix_bytes: of the texts that it keeps, by tier.
        prefix_found_tokens: tokens of prompts that it has found in them so far, by tier; none after `Generate`, for
            which stages look several times, and each finds what others have.
        scores: of each different prompt's tokens that it has scored, in runs.
    """

    number: int
    rank: int
    prefill_s: float
    wait_s: float
    is_alone: bool
    is_cancelled: bool = False
    report: RankReport | None = None
    live_bytes: int = 0
    stored_bytes: int = 0
    spans: list[TraceSpan] = field(default_factory=list)
    prefix_bytes: dict[str, int] = field(default_factory=dict)
    prefix_found_tokens: dict[str, int] = field(default_factory=dict)
    scores: list[list[PromptLogprobs]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A rank is in its part of a prefill whose timeline is recorded.

    Attributes:
        number: of the item.
        layers: layers whose attention is computed.
        of: number of layers of its part: those of the model, for each piece if it computes the prompt in pieces.
    """

    number: int
    rank: int
    layers: int
    of: int


@dataclass(frozen=True)
class Alive:
    """Answer to `Check`: the rank, and whether its process was asked to end."""

    rank: int
    asked_to_end: bool


CANCELLED = "cancelled"
"""Error of a prompt that is not handed over as nobody wants it any more."""


@dataclass(frozen=True, kw_only=True)
class Handed:
    """The end of handing a row's prompt over to another engine.

    Attributes:
        name: of the file, without the suffix that `file` has.
        folder, host: where it is.
        num_bytes, is_new, error: as of `Outcome` in `runahead/reuse/handover.py`.
    """

    row: RowId
    name: str
    folder: str = ""
    host: str = ""
    num_bytes: int = 0
    is_new: bool = False
    error: str = ""

    @property
    def file(self) -> str:
        """Name of the file in its folder."""
        return f"{self.name}{SUFFIX}"


@dataclass(frozen=True)
class Stopping:
    """The last stage will neither store nor decode what comes of a prefill, so that other stages may stop it."""

    number: int


Report = Tokens | Part | Progress | Handed | Change | Alive | Stopping


class Inbox:
    """Items of one rank that have arrived. Threads put them in; the main thread takes them out.

    Attributes:
        on_stop: called with the number of a prefill, by the thread that puts in that it is to stop, once
            `is_stopped` knows.
        error: why there are no more items.
    """

    def __init__(self) -> None:
        self.on_stop: Callable[[int], object] = lambda number: None
        self._items: deque[Item] = deque()
        self._cancelled: list[RowId] = []
        self._begun: set[int] = set()
        self._stopped: set[int] = set()
        self._changed = threading.Condition()
        self.error: BaseException | None = None

    # From any thread.

    def put(self, item: Item) -> None:
        with self._changed:
            if isinstance(item, Cancel):
                self._cancelled += item.rows
            elif isinstance(item, Stop):  # of a prefill that is there, under way or over
                waiting = {each.number for each in self._items if isinstance(each, PrefillItem)}
                self._stopped |= {item.number} & (self._begun | waiting)
            else:
                self._items.append(item)
            self._changed.notify()
        if isinstance(item, Stop):
            self.on_stop(item.number)

    def fail(self, error: BaseException) -> None:
        """Let the main thread end with an error; of several, with the first."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify()

    # In the main thread.

    def has_item(self, block_s: float = 0.0) -> bool:
        """Whether there is an item or an error. Blocks for `block_s` seconds at most until there is."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._items) or self.error is not None, block_s)

    def has_aside(self, block_s: float = 0.0, *, shorts: bool) -> bool:
        """Whether there is an item for `take_aside`, or an error. Blocks for `block_s` seconds at most until then."""
        with self._changed:
            return self._changed.wait_for(lambda: self._aside(shorts) is not None or self.error is not None, block_s)

    def take(self) -> Item:
        """Take out the next item, which is there."""
        with self._changed:
            return self._begin(self._items.popleft())

    def take_aside(self, *, shorts: bool) -> Item:
        """Take out the first item, which is there, that needs no other rank: a look, or with `shorts` a short prompt.

        It may overtake others, such as a long prompt that was told before the one that is being computed has ended.
        """
        with self._changed:
            item = self._aside(shorts)
            assert item is not None
            self._items.remove(item)
            return self._begin(item)

    def _begin(self, item: Item) -> Item:
        if isinstance(item, PrefillItem):
            self._begun.add(item.number)
        return item

    def is_stopped(self, number: int) -> bool:
        """Whether this prefill, which was taken out, is not to be computed to its end."""
        return number in self._stopped

    def done(self, number: int) -> None:
        """Forget a prefill that has ended on this rank."""
        with self._changed:
            self._begun.discard(number)
            self._stopped.discard(number)

    def _aside(self, shorts: bool) -> Item | None:
        return next(
            (
                item
                for item in self._items
                if isinstance(item, Check) or (shorts and isinstance(item, PrefillItem) and item.is_short)
            ),
            None,
        )

    def take_cancelled(self) -> list[RowId]:
        """Rows that were cancelled since the last call."""
        with self._changed:
            cancelled, self._cancelled = self._cancelled, []
        return cancelled
