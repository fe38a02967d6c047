"""The scheduler of a server: a queue of requests on rank 0, and the loop in which all ranks serve them.

There is one global sequence of work items. Rank 0 decides it and tells every item to all ranks, which carry out the
same items in the same order. An item is a batch to generate, a look at whether all ranks live, or the end.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runahead.config import GenerationOptions
from runahead.engine import Engine
from runahead.failures import first_line
from runahead.prefill.prompt_check import PromptLimits, check_prompts
from runahead.serving.estimate import TimeEstimate
from runahead.serving.request import Request

LOOK_S = 0.25
"""Seconds after which an idle rank 0 looks for failures and shows that it is alive."""

CHECK_S = 10.0
"""Most seconds between two looks at whether all ranks live, while the server is idle."""

SIMILAR = 0.75
"""Least ratio of the lengths of prompts that share a batch: the shorter ones are padded."""


@dataclass(frozen=True)
class Generate:
    """Work item: generate from these prompts as one batch."""

    prompts: list[list[int]]
    options: list[GenerationOptions]


@dataclass(frozen=True)
class Check:
    """Work item: all ranks show that they live, and whether one of them was asked to end."""


@dataclass(frozen=True)
class End:
    """Work item: there will be no other."""


Item = Generate | Check | End


class Refused(Exception):
    """A request is not taken.

    Attributes:
        retry_after_s: seconds after which it may be tried again; None: not on this server.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """Limits of the queue and of a batch.

    Attributes:
        batch: most rows that are generated at once.
        batch_tokens: most tokens of prompts, padding included, of several requests in one batch.
        batch_wait_s: seconds that a request waits for others that may share its batch.
        max_tokens: most tokens of a batch: rows times the longest prompt and answer. It bounds the KV cache's memory.
        max_waiting: most requests that wait.
        max_per_client: most requests of a client, waiting or running.
        max_ttft_s: a request whose predicted TTFT is longer is refused; None: none is.
    """

    batch: int = 8
    batch_tokens: int = 4096
    batch_wait_s: float = 0.01
    max_tokens: int | None = None
    max_waiting: int = 64
    max_per_client: int = 32
    max_ttft_s: float | None = None


class Scheduler:
    """Queue and loop of rank 0. `submit`, `cancel`, `drain` and what they read may be called from any thread.

    Args:
        engine: this rank's engine; the other ranks call `follow` with theirs.
        limits: of the queue.
        estimate: of times; learns from every batch.
    """

    def __init__(self, engine: Engine, limits: QueueLimits, estimate: TimeEstimate | None = None) -> None:
        self._engine, self.limits, self.estimate = engine, limits, estimate or TimeEstimate()
        self._prompt_limits = PromptLimits.of_model(
            engine.model, engine.policies, engine.prefill, engine.ranks.num_stages
        )
        self._lock = threading.Lock()
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._started_s = 0.0
        self._draining = False
        self._failure: str | None = None
        # Its put() may be called by a signal handler, at any moment of the thread that waits.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    # From any thread.

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def refuses(self) -> str | None:
        """Why no request is taken; None if requests are taken."""
        if self._failure is not None:
            return self._failure
        return "the server is shutting down" if self._draining else None

    def check(self, prompts: Sequence[list[int]], options: Sequence[GenerationOptions]) -> None:
        """Check that prompts can be generated from at once, as the engine does. Raises: ValueError."""
        num_new = max(each.max_new_tokens for each in options)
        check_prompts(prompts, self._prompt_limits, num_new=num_new, names=["the prompt"] * len(prompts))
        limit, num_tokens = self.limits.max_tokens, len(prompts) * (max(map(len, prompts)) + num_new)
        if limit is not None and num_tokens > limit:
            raise ValueError(
                f"{len(prompts)} x {num_tokens // len(prompts):,} tokens of prompt and answer are more than this "
                f"server has memory for, which is {limit:,}"
            )

    def fitting(self, prompts: Sequence[list[int]], wanted: int) -> int:
        """The most new tokens, up to `wanted`, for which there are positions and memory; at least 1."""
        longest, bounds = max(map(len, prompts)), [wanted]
        if self._prompt_limits.max_positions is not None and not self._engine.policies:
            bounds.append(self._prompt_limits.max_positions - longest)
        if self.limits.max_tokens is not None:
            bounds.append(self.limits.max_tokens // len(prompts) - longest)
        return max(1, min(bounds))

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            Refused: too many requests wait, or of this client, or the server ends.
        """
        with self._lock:
            if self.refuses is not None:
                raise Refused(self.refuses)
            ttft_s = self._predicted_ttft_s(request)
            ours = sum(each.client == request.client for each in [*self._waiting, *self._running])
            if ours >= self.limits.max_per_client:
                raise Refused(f"this client has {ours} requests, which is the most it may have at a time", ttft_s)
            if len(self._waiting) >= self.limits.max_waiting:
                raise Refused(f"{len(self._waiting)} requests are waiting, which is the most that may", ttft_s)
            limit = self.limits.max_ttft_s
            if limit is not None and ttft_s > limit:
                told = f"the first token is predicted after {ttft_s:.0f} s, which is longer than {limit:g} s"
                raise Refused(told, ttft_s - limit)
            self._waiting.append(request)
        self._wake.put(None)

    def cancel(self, request: Request) -> None:
        """Drop a request that waits; end one that is decoded after its next token, and one in its prefill after it."""
        with self._lock:
            request.cancelled = True
            self._waiting = [each for each in self._waiting if each is not request]
        self._wake.put(None)

    def num_before(self, request: Request) -> int | None:
        """Number of requests that wait before this one; None if it does not wait."""
        with self._lock:
            return self._waiting.index(request) if request in self._waiting else None

    def predicted_ttft_s(self, request: Request) -> float:
        """Seconds until the first token of a request that would come now, as if none shared a batch with it."""
        with self._lock:
            return self._predicted_ttft_s(request)

    def _predicted_ttft_s(self, request: Request) -> float:
        running_s = self._total_s(self._running) - (time.monotonic() - self._started_s)
        waiting_s = sum(self._total_s([each]) for each in self._waiting)
        return max(0.0, running_s) + waiting_s + self.estimate.prefill_s(_lengths([request]))

    def _total_s(self, batch: list[Request]) -> float:
        longest_answer = max((each.max_new_tokens for each in batch), default=1)
        return self.estimate.prefill_s(_lengths(batch)) + self.estimate.decoding_s(longest_answer)

    def drain(self) -> None:
        """Take no more requests, and end once those that were taken are answered. A signal handler may call it."""
        self._draining = True
        self._wake.put(None)

    # In the main thread.

    def run(self) -> None:
        """Serve until `drain` was called, here or on another rank, and every request is answered.

        Raises:
            Exception: whatever ends this rank; the requests have been told.
        """
        try:
            checked_s = time.monotonic()
            while (batch := self._next_batch(checked_s)) is not None:
                if batch:
                    self._generate(batch)
                else:
                    _tell(self._engine, Check())
                    if any(_asked_to_end(self._engine, self._draining)):
                        self.drain()
                    checked_s = time.monotonic()
            _tell(self._engine, End())
        except BaseException as error:
            self._fail(f"the server has failed: {first_line(error)}")
            raise

    def _next_batch(self, checked_s: float) -> list[Request] | None:
        """The next batch, waited for; empty when it is time to look at the ranks, None when there will be none."""
        ranks = self._engine.ranks
        check_at = checked_s + min(CHECK_S, ranks.timeout_s / 2)
        while True:
            if time.monotonic() >= check_at and ranks.size > 1:
                return []
            with self._lock:
                wait_s = self._batch_wait_s()
                if self._waiting and wait_s <= 0:
                    self._running, self._started_s = self._choose(), time.monotonic()
                    self._waiting = [each for each in self._waiting if each not in self._running]
                    return self._running
                if self._draining and not self._waiting:
                    return None
            ranks.progress()
            try:
                look_s = min(LOOK_S, ranks.timeout_s / 4)
                self._wake.get(timeout=min(look_s, wait_s) if wait_s > 0 else look_s)
            except queue.Empty:
                continue

    def _batch_wait_s(self) -> float:
        """Seconds that the first request still waits for others to share its batch."""
        if not self._waiting or self._draining or sum(len(each.prompts) for each in self._waiting) >= self.limits.batch:
            return 0.0
        return self._waiting[0].arrived_s + self.limits.batch_wait_s - time.monotonic()

    def _choose(self) -> list[Request]:
        """The request that came first, with those of similar length that fit into one batch with it."""
        chosen = self._waiting[:1]
        for other in self._waiting[1:]:
            if len(chosen) == self.limits.batch:
                break
            together = [*chosen, other]
            lengths = [each.longest for each in together]
            rows = sum(len(each.prompts) for each in together)
            if (
                rows > self.limits.batch
                or min(lengths) < SIMILAR * max(lengths)
                or rows * max(lengths) > self.limits.batch_tokens
            ):
                continue
            try:
                item = _item_of(together)
                self.check(item.prompts, item.options)
            except ValueError:  # each can be generated from alone, but not at once
                continue
            chosen = together
        return chosen

    def _generate(self, batch: list[Request]) -> None:
        owners = [(request, row) for request in batch for row in range(len(request.prompts))]

        def on_tokens(tokens: list[int | None]) -> list[int]:
            start = 0
            for request in batch:
                end = start + len(request.prompts)
                if not request.cancelled:
                    request.listener.on_tokens(tokens[start:end])
                start = end
            return [number for number, (request, _) in enumerate(owners) if request.cancelled]

        for request in batch:
            request.listener.on_start()
        item = _item_of(batch)
        _tell(self._engine, item)
        result = self._engine.generate(item.prompts, item.options, on_tokens=on_tokens, cancellable=True)
        new_tokens = [len(each.new_token_ids) for each in result.generations]
        self.estimate.learn(_lengths(batch), result.ttft_s, result.tpot_s, new_tokens)
        with self._lock:
            self._running = []
        for request in batch:
            request.listener.on_end()

    def _fail(self, reason: str) -> None:
        with self._lock:
            self._failure = reason
            requests, self._waiting, self._running = [*self._running, *self._waiting], [], []
        for request in requests:
            request.listener.on_failure(reason)


def follow(engine: Engine, asked_to_end: Callable[[], bool]) -> None:
    """Carry out the work items of rank 0 on another rank, until the last.

    Args:
        asked_to_end: whether this process was asked to end, which rank 0 is told at its next look.
    """
    while not isinstance(item := _tell(engine, None), End):
        if isinstance(item, Generate):
            engine.generate(item.prompts, item.options, cancellable=True)
        else:
            _asked_to_end(engine, asked_to_end())


def _tell(engine: Engine, item: Item | None) -> Item:
    """The next work item, which rank 0 gives to all ranks."""
    told = engine.ranks.broadcast(item, 0, "the next request")
    assert told is not None
    return told


def _asked_to_end(engine: Engine, asked: bool) -> list[bool]:
    """Whether each rank was asked to end."""
    return engine.ranks.gather(asked, "all ranks, while the server is idle")


def _item_of(batch: Sequence[Request]) -> Generate:
    prompts = [ids for request in batch for ids in request.prompts]
    return Generate(prompts, [each for request in batch for each in request.options])


def _lengths(batch: Sequence[Request]) -> list[int]:
    return [len(ids) for request in batch for ids in request.prompts]
