"""The scheduler of a server: rank 0 decides which work items all ranks carry out, and hears what they report.

There is one global sequence of items (`items.py`), which every rank carries out in its order (`executor.py`). The last
stage decodes all rows that have their first token, between and inside the prefills, so a request never waits for the
answers of others, but for room. Items and reports travel as mail, which needs no rank's main thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count

from policies.reuse import GivenPrompt
from runahead.config import GenerationOptions
from runahead.context import ContextPartition
from runahead.decoding.sampling import NOT_NUMBERS
from runahead.engine import Engine
from runahead.failures import first_line
from runahead.features.slower import Way
from runahead.reuse.handover import HandoverFolder
from runahead.reuse.prefix_tree import Dropped, Stored
from runahead.serving.arrangement import chunks
from runahead.serving.batch import Batch
from runahead.serving.estimate import TimeEstimate
from runahead.serving.executor import Executor
from runahead.serving.items import (
    PROGRESS_S,
    Alive,
    Cancel,
    Check,
    End,
    Generate,
    Handed,
    Inbox,
    Item,
    Part,
    PrefillItem,
    Progress,
    Report,
    RowId,
    Stop,
    Stopping,
    Tokens,
)
from runahead.serving.lessons import Lesson, learn_prefill
from runahead.serving.limits import QueueLimits
from runahead.serving.mail.mail import Mail
from runahead.serving.queue import RequestQueue, RequestRefused
from runahead.serving.request import Request
from runahead.serving.room import Room
from runahead.serving.state import PrefillState, ServerState, share_computed

LOOK_S = 0.25
"""Seconds after which an idle rank 0 looks for failures and shows that it is alive."""

CHECK_S = 10.0
"""Most seconds between two looks at whether all ranks live."""

OTHERS = "what other ranks compute"


class Scheduler:
    """Queue of rank 0, and its part in the work. `submit`, `cancel`, `drain` and what they read serve any thread.

    A thread of its own decides which item is next, while the main thread computes as on every other rank.

    Args:
        engine: this rank's engine; the other ranks call `follow` with theirs.
        limits: of the queue.
        estimate: of times; learns from every request.
        room: as of `RequestQueue`.
        when_draining: called once, when no more requests are taken.
        handover: as of `Executor`.

    Attributes:
        busy_s: seconds that ranks have spent so far, by rank and "prefill", "waiting" (for keys and values in a
            prefill) or "decoding" (known of one rank alone; the other shares of its stage decode as long).
    """

    def __init__(
        self,
        engine: Engine,
        limits: QueueLimits,
        estimate: TimeEstimate | None = None,
        *,
        room: Room | None = None,
        when_draining: Callable[[], object] = lambda: None,
        handover: HandoverFolder | None = None,
    ) -> None:
        self._engine, self._ranks, self.limits = engine, engine.ranks, limits
        self.estimate, self._room, self._handover = estimate or TimeEstimate(), room, handover
        self._queue = RequestQueue(engine, limits, self.estimate, room=room)
        self._lock = threading.Lock()
        self._numbers = count()
        self._unread: dict[int, Batch] = {}  # of whose prefill some rank has not reported its part
        self._handing: dict[RowId, Request] = {}  # whose prompts are not handed over yet
        self._last_recorded: PrefillState | None = None
        self._parts: dict[int, Part] = {}  # the last one of each rank
        self._unchecked: set[int] = set()
        self._checked_s = time.monotonic()
        self._when_draining, self._draining = when_draining, False
        self._drain_lock = threading.RLock()  # a signal may come while this thread holds it
        self._failure: str | None = None
        self._inbox = Inbox()
        self._mail: Mail | None = None
        self._leader = self._ranks.mesh.rank(self._ranks.num_stages - 1, 0)
        # Its put() may be called by a signal handler, at any moment of the thread that waits.
        self._events: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        self._lessons: list[Lesson] = []
        self.busy_s: defaultdict[tuple[int, str], float] = defaultdict(float)

    # From any thread.

    @property
    def num_waiting(self) -> int:
        return len(self._queue.waiting)

    @property
    def num_running(self) -> int:
        return len(self._queue.running)

    @property
    def share_in_use(self) -> float | None:
        """Share of the memory for tokens that rows have, from 0 to 1; None if it has no limit."""
        return self._queue.share_in_use

    @property
    def last_part(self) -> Part | None:
        """The last report of the rank that decodes, of its part of a prefill; of rank 0 where all stages may."""
        return self._parts.get(0 if self._engine.may_shard else self._leader)

    @property
    def refuses(self) -> str | None:
        """Why no request is taken; None if requests are taken."""
        if self._failure is not None:
            return self._failure
        return "the server is shutting down" if self._draining else None

    def check(self, prompts: Sequence[GivenPrompt], options: Sequence[GenerationOptions]) -> None:
        """Check that prompts can be generated from at once, as the engine does. Raises: PromptTooLong, ValueError."""
        self._queue.check(prompts, options)

    def check_scores(self) -> None:
        """Check that the tokens of prompts can be scored. Raises: ValueError."""
        self._engine.check_scores()

    @property
    def longest_text(self) -> int | None:
        """Most tokens of a prompt and its answer; None is no limit."""
        return self._queue.longest_text

    def fitting(self, prompts: Sequence[GivenPrompt], wanted: int, *, is_chosen: bool) -> int:
        """The new tokens of a row, at most `wanted`, as the queue has it."""
        return self._queue.fitting(prompts, wanted, is_chosen=is_chosen)

    def check_client(self, client: str, num_read: int) -> None:
        """Check that a client may have a request beside `num_read` that are being read. Raises: RequestRefused."""
        with self._lock:
            self._queue.check_client(client, num_read)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestRefused: too many requests wait, or of this client, or the server ends.
        """
        with self._lock:
            if self.refuses is not None:
                raise RequestRefused(self.refuses)
            self._queue.add(request)
        self._events.put(None)

    def cancel(self, request: Request) -> None:
        """Drop a request that waits; end one that is decoded before its next step, one in its prefill after a layer.

        A prefill of several requests is stopped once all of them are cancelled. Where stages share the model, it is
        never: its rows end after it.
        """
        with self._lock:
            request.cancelled = True
            self._queue.waiting = [each for each in self._queue.waiting if each is not request]
            for batch in self._queue.batches.values():
                if any(each is request for each, _ in batch.owners):
                    self._cancel_rows(batch)
        self._events.put(None)

    def num_before(self, request: Request) -> int | None:
        """Number of requests that are due before this one; None if it does not wait."""
        with self._lock:
            waiting = self._queue.by_deadline()
            return waiting.index(request) if request in waiting else None

    def share_computed(self, request: Request) -> float | None:
        """Share of the layers of a request's prompts that is computed; None if it is not known."""
        with self._lock:
            return share_computed(self._queue, request, self._leader)

    def state(self) -> ServerState:
        """Return the server's present state."""
        with self._lock:
            return ServerState.from_queue(self._engine, self._queue, self._last_recorded, self._parts)

    def predicted_ttft_s(self, request: Request) -> float:
        """Seconds until the first token of a request that would come now."""
        with self._lock:
            return self._queue.predicted_ttft_s(request)

    def drain(self) -> None:
        """Take no more requests, and end once those that were taken are answered. A signal handler may call it."""
        with self._drain_lock:
            is_first, self._draining = not self._draining, True
        if is_first:
            self._when_draining()
            self._events.put(None)

    def fail(self, error: BaseException) -> None:
        """Let `run` end with an error."""
        self._inbox.fail(error)

    # In the main thread.

    def run(self) -> None:
        """Serve until `drain` was called, here or on another rank, and every request is answered.

        Raises:
            Exception: whatever ends this rank; the requests have been told.
        """
        try:
            with self._ranks.announcing_failure(), self._ranks.watching(OTHERS, range(self._ranks.size)):
                if self._ranks.size > 1:
                    self._mail = Mail(self._ranks, self._events.put, self._inbox.fail)
                threading.Thread(target=self._decide, name="scheduler", daemon=True).start()
                executor = Executor(
                    self._engine, self._inbox, self._events.put, self.limits, room=self._room, handover=self._handover
                )
                executor.run(self._await)
                if self._mail is not None:
                    self._mail.close()
        except BaseException as error:
            self._fail(f"the server has failed: {first_line(error)}")
            raise

    def _await(self, ready: Callable[[float], bool]) -> None:
        """Wait for an item. While other ranks are at work, one that falls silent ends the server."""

        def is_busy() -> bool:
            return bool(self._queue.batches or self._unread or self._handing or self._unchecked)

        look_s = min(LOOK_S, self._ranks.timeout_s / 4)
        while not ready(0.0):
            if self._ranks.size == 1 or not is_busy():
                self._ranks.progress()
                ready(look_s)
                continue

            def is_over(block_s: float) -> bool:
                return ready(block_s) or not is_busy()

            self._ranks.wait_until(is_over, OTHERS, range(self._ranks.size))

    def _fail(self, reason: str) -> None:
        with self._lock:
            self._failure = reason
            requests = list(dict.fromkeys([*self._queue.running, *self._queue.waiting, *self._handing.values()]))
            self._queue.running, self._queue.waiting, self._handing = [], [], {}
        for request in requests:
            request.listener.on_failure(reason)

    # In the scheduler's thread.

    def _decide(self) -> None:
        """Hear reports and tell items, until the last."""
        try:
            while True:
                try:
                    report = self._events.get(timeout=min(LOOK_S, self._ranks.timeout_s / 4))
                except queue.Empty:
                    report = None
                with self._lock:
                    if self._failure is not None:
                        return
                    self._hear(report)
                    while requests := self._queue.choose():
                        self._begin(requests)
                    is_busy = self._queue.waiting or self._queue.batches or self._handing or self._unchecked
                    is_over = self._draining and not is_busy
                while self._lessons:  # without the lock: what is learned may be written to a file
                    self._engine.learn(*self._lessons.pop(0))
                if is_over:
                    self._tell(End())
                    return
                self._check_ranks()
        except BaseException as error:
            self._inbox.fail(error)

    def _begin(self, requests: list[Request]) -> None:
        """Tell all ranks to compute the prompts of these requests."""
        queue = self._queue
        queue.waiting = [each for each in queue.waiting if each not in requests]
        queue.running += requests
        is_short, predicted_s = queue.is_short(requests), queue.prefill_s(requests)
        in_chain = queue.stored_in_chain(requests)
        owners = [(request, row) for request in requests for row in range(len(request.prompts))]
        stored_of = dict(zip(owners, in_chain, strict=True)) if in_chain else {}
        found = iter(in_chain or queue.found_alone(requests))
        for request in requests:
            request.found_tokens = [next(found) for _ in request.prompts]
            request.listener.on_start()
        for some in self._of_items(owners):
            prompts, options = [each.prompts[row] for each, row in some], [each.options[row] for each, row in some]
            stored = [stored_of[owner] for owner in some] if stored_of else []
            number, salts = next(self._numbers), [each.salt for each, _ in some]
            item: PrefillItem | Generate = Generate(number=number, prompts=prompts, options=options, salts=salts)
            if not self._engine.may_shard:
                new = [len(ids) - num for ids, num in zip(prompts, stored or [0] * len(prompts), strict=True)]
                boundaries = self._partition(max(new), is_short=is_short, num_stored=max(stored, default=0)).boundaries
                item = PrefillItem(
                    number=number,
                    prompts=prompts,
                    options=options,
                    boundaries=boundaries,
                    stored=stored,
                    is_short=is_short,
                    scores=requests[0].scores,
                    handovers=[each.handover for each, _ in some] if any(each.handover for each, _ in some) else (),
                    record_timeline=not is_short or predicted_s >= PROGRESS_S,  # else it costs more than it tells
                    to_prefetch=queue.to_prefetch(),
                    salts=salts,
                )
            batch = Batch(
                item=item,
                owners=some,
                predicted_s=predicted_s,
                is_short=is_short,
                is_alone=not queue.batches,
                shares_prompts=self._engine.takes(Way.shared_prompt),
            )
            queue.batches[number] = self._unread[number] = batch
            self._handing |= {(number, row): each for row, (each, _) in enumerate(some) if each.handover}
            queue.note_encoded(prompts)
            self._tell(item)

    def _of_items(self, owners: list[tuple[Request, int]]) -> list[list[tuple[Request, int]]]:
        """The rows of each item: all, or those of one prompt each."""
        if self._engine.takes(Way.prompts_together):
            return [owners]
        if self._engine.may_shard:
            return [[owner] for owner in owners]
        rows: dict[tuple[Request, int], list[tuple[Request, int]]] = {}
        for request, row in owners:
            rows.setdefault((request, request.prompt_of[row]), []).append((request, row))
        return list(rows.values())

    def _partition(self, num_tokens: int, *, is_short: bool, num_stored: int) -> ContextPartition:
        """The chunks of a prompt. The last stage has so much of its speed as its decoding leaves.

        Args:
            num_stored: tokens before them that are not computed.
        """
        if is_short:
            return ContextPartition(boundaries=(0,) * self._ranks.num_stages + (num_tokens,))
        busy = min(1.0, self.estimate.step_s / self.limits.itl_s) if self._queue.batches else 0.0
        speed = 0.0 if self.limits.decode_ranks else 1.0 - busy
        return chunks(self._engine, num_tokens, speed, self.estimate.chain.constants, num_stored=num_stored)

    def _hear(self, report: Report | None) -> None:
        if isinstance(report, Tokens):
            if report.step_s is not None:
                self.estimate.learn_step(report.step_s)
                self.busy_s[self._leader, "decoding"] += report.step_s
            for number in dict.fromkeys(number for number, _ in [*report.tokens, *report.ended]):
                batch = self._queue.batches[number]
                if batch.scores and number in self._unread:
                    batch.held.append(report)
                else:
                    self._hear_tokens(batch, report)
        elif isinstance(report, Part):
            self._hear_part(self._unread[report.number], report)
        elif isinstance(report, Progress):
            self._unread[report.number].progress[report.rank] = report
        elif isinstance(report, Handed):
            if (request := self._handing.pop(report.row, None)) is not None:
                request.listener.on_handed(report)
            if not self._writes(report.row[0]):
                self._queue.written.pop(report.row[0], None)
        elif isinstance(report, Stored | Dropped):
            self._queue.stored.apply(report)
        elif isinstance(report, Stopping):
            if report.number in self._unread and self._ranks.size > 1:
                others = [rank for rank in range(self._ranks.size) if rank != self._leader]
                self._tell(Stop(report.number), others)
        elif isinstance(report, Alive):
            self._unchecked.discard(report.rank)
            if report.asked_to_end:
                self.drain()

    def _hear_tokens(self, batch: Batch, report: Tokens) -> None:
        number, told = batch.item.number, dict[Request, list[int | None]]()
        for row, (request, index) in enumerate(batch.owners):
            if (cached := report.cached.get((number, row))) is not None:
                batch.cached[row] = request.cached_tokens[index] = cached
            if (token := report.tokens.get((number, row))) is not None:
                told.setdefault(request, [None] * len(request.prompts))[index] = token
                batch.new_tokens[row] += 1
        for request, tokens in told.items():
            if not request.cancelled:
                request.listener.on_tokens(tokens)
        for row in sorted(batch.left):
            if (how := report.ended.get((number, row))) is not None:
                self._end_row(batch, row, how)
        if not batch.left:
            del self._queue.batches[number]
            if self._ranks.accelerator is None and self._writes(number):
                self._queue.written[number] = batch.num_tokens
        elif not batch.is_decoded:
            batch.is_decoded = True
            self._cancel_rows(batch)

    def _writes(self, number: int) -> bool:
        """Whether prompts of an item are not handed over yet."""
        return any(row[0] == number for row in self._handing)

    def _end_row(self, batch: Batch, row: int, how: str) -> None:
        batch.left.discard(row)
        if how not in ("cancelled", NOT_NUMBERS):
            self.estimate.learn_answer(batch.new_tokens[row])
        request, _ = batch.owners[row]
        if how == NOT_NUMBERS:
            request.listener.on_failure(how)
        request.rows_left -= 1
        if request.rows_left == 0:
            self._queue.running.remove(request)
            request.listener.on_end()

    def _cancel_rows(self, batch: Batch) -> None:
        """Let the rows of cancelled requests end, or stop a prefill of which all are cancelled."""
        if not batch.is_decoded:
            if isinstance(batch.item, PrefillItem) and all(request.cancelled for request, _ in batch.owners):
                self._tell(Stop(batch.item.number))
            return
        rows: list[RowId] = [(batch.item.number, row) for row in sorted(batch.left) if batch.owners[row][0].cancelled]
        if rows:
            self._tell(Cancel(rows))

    def _hear_part(self, batch: Batch, part: Part) -> None:
        batch.parts[part.rank] = self._parts[part.rank] = part
        self.busy_s[part.rank, "prefill"] += part.prefill_s - part.wait_s
        self.busy_s[part.rank, "waiting"] += part.wait_s
        if isinstance(batch.item, PrefillItem) and len(batch.parts) < self._ranks.size:
            return
        del self._unread[part.number]
        self._hear_held(batch)
        if any(each.is_cancelled for each in batch.parts.values()):
            return
        if isinstance(batch.item, PrefillItem) and batch.item.record_timeline:
            self._last_recorded = PrefillState.from_batch(batch)
        lesson = learn_prefill(batch, self.estimate, self._queue.times(is_short=batch.is_short))
        if lesson is not None:
            self._lessons.append(lesson)

    def _hear_held(self, batch: Batch) -> None:
        """Give requests the scores of their prompts, and hear of their tokens."""
        if batch.scores and not any(each.is_cancelled for each in batch.parts.values()):
            for row, (request, index) in enumerate(batch.owners):
                request.prompt_scores[index] = batch.scores_of(row)
        for report in batch.held:
            self._hear_tokens(batch, report)
        batch.held = []

    def _check_ranks(self) -> None:
        """Ask all ranks now and then whether they live, and whether one of them was asked to end."""
        period_s = min(CHECK_S, self._ranks.timeout_s / 2)
        if self._ranks.size > 1 and not self._unchecked and time.monotonic() - self._checked_s >= period_s:
            self._checked_s, self._unchecked = time.monotonic(), set(range(self._ranks.size))
            self._tell(Check())

    def _tell(self, item: Item, receivers: Sequence[int] | None = None) -> None:
        """Put an item into the inbox of these ranks, by default of every rank.

        By default a `Cancel` goes only where it is decided which rows go on. So does a `Stop` where prefixes are kept:
        the others hear of it once that rank does not store the prompt any more (`Stopping`).
        """
        if receivers is None:
            receivers = range(self._ranks.size)
            if isinstance(item, Cancel):
                receivers = [0 if self._engine.may_shard else self._leader]
            elif isinstance(item, Stop) and self._engine.prefixes is not None:
                receivers = [self._leader]
        if self._mail is not None and (others := [rank for rank in receivers if rank != 0]):
            self._mail.post(item, others)
        if 0 in receivers:
            self._inbox.put(item)
