"""The queue of a server: which requests are taken, and which one begins when. The scheduler's lock protects it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from policies.reuse import GivenPrompt, PromptTooLong, ReusingPrompt, ids_of, reuse_segments
from runahead.config import GenerationOptions, PrefillName
from runahead.engine import Engine
from runahead.features.slower import Way
from runahead.prefill.prompt_check import check_prompts
from runahead.reuse.forks import each_once
from runahead.serving.batch import Batch
from runahead.serving.estimate import PrefillTimes, TimeEstimate
from runahead.serving.known_texts import KnownTexts
from runahead.serving.limits import QueueLimits
from runahead.serving.request import Request
from runahead.serving.room import Room, num_held, num_places, num_tokens_of

SIMILAR = 0.75
"""Least ratio of the lengths of prompts that are computed at once: the shorter ones are padded."""

MOST_KEYS = 1 << 16
"""Segments that are remembered as encoded, for predictions: the last ones."""

MOST_PREFETCHED = 16
"""Requests that wait, the next ones, whose prefixes the last stage is told to keep at hand."""

SLACK = 3.0
"""A prefill is due within this many times its seconds. So short ones go first, and no request waits for ever."""


class RequestRefused(Exception):
    """A request is not taken.

    Attributes:
        retry_after_s: seconds after which it may be tried again; None: not on this server.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestQueue:
    """Requests that wait, and those that are answered.

    Args:
        room: for the rows that are answered; by default for the tokens of the limits.

    Attributes:
        waiting, running: requests.
        batches: rows that are computed or decoded, by number of their item.
        written: tokens of items whose rows have ended, and whose prompts' files are still written from their memory.
        stored: the texts that the last stage has reported to store.
    """

    def __init__(
        self, engine: Engine, limits: QueueLimits, estimate: TimeEstimate, *, room: Room | None = None
    ) -> None:
        self._engine, self._limits, self._estimate = engine, limits, estimate
        self._room = room or Room(max_tokens=limits.max_tokens)
        self._prompt_limits = engine.prompt_limits
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.batches: dict[int, Batch] = {}
        self.written: dict[int, int] = {}
        self._encoded: OrderedDict[str, None] = OrderedDict()
        step = None if engine.prefixes is None else engine.prefixes.step
        self.stored = KnownTexts(max(1, engine.policies.num_observed), step)

    @property
    def num_rows(self) -> int:
        """Rows that are computed or decoded."""
        return sum(len(batch.left) for batch in list(self.batches.values()))

    @property
    def num_tokens(self) -> int:
        """Tokens for which these have room."""
        return self._num_stateless + self._room.row_tokens * self.num_rows  # rows that left have given theirs back

    @property
    def _num_stateless(self) -> int:
        """Tokens for which they have room, without the states of their rows."""
        return sum(batch.num_tokens for batch in list(self.batches.values())) + sum(list(self.written.values()))

    @property
    def share_in_use(self) -> float | None:
        """Share of the room for tokens that these have, from 0 to 1; None if it has no limit."""
        return None if self._room.max_tokens is None else min(1.0, self.num_tokens / self._room.max_tokens)

    @property
    def most_stored_bytes(self) -> float:
        """Most bytes of stored prefixes now; 0 if none are stored."""
        if self._engine.prefixes is None or self._room.shared_bytes is None:
            return 0 if self._engine.prefixes is None else self._engine.prefixes.tree.limit_bytes
        return self._room.left_for_prefixes(self._num_stateless, self.num_rows)

    # Which requests are taken.

    def check(self, prompts: Sequence[GivenPrompt], options: Sequence[GenerationOptions]) -> None:
        """Check that prompts can be generated from at once, as the engine does. Raises: PromptTooLong, ValueError."""
        num_new = [each.max_new_tokens for each in options]
        check_prompts(prompts, self._prompt_limits, num_new=num_new, names=["the prompt"] * len(prompts))
        prompt_of = each_once(prompts)[1] if self._engine.takes(Way.shared_prompt) else None
        limit, num_tokens = self._room.max_tokens, num_tokens_of(prompts, options, prompt_of)
        of_states = self._room.row_tokens * len(prompts)
        if limit is not None and num_tokens + of_states > limit:
            count = f"{len(prompts)} x {num_tokens // len(prompts):,}"
            if prompt_of is not None and len(set(prompt_of)) < len(prompts):
                count = f"{num_tokens:,}"
            states = f", with states that take the memory of {of_states:,}," if of_states else ""
            raise PromptTooLong(
                f"{count} tokens of prompt and answer{states} are more than this server has memory for, which is "
                f"{limit:,}"
            )

    @property
    def longest_text(self) -> int | None:
        """Most tokens of a prompt and its answer, for which there are positions and memory; None is no limit."""
        max_tokens = self._room.max_tokens
        in_memory = None if max_tokens is None else max_tokens - self._room.row_tokens
        limits = [self._prompt_limits.longest_text, in_memory]
        return min((limit for limit in limits if limit is not None), default=None)

    def fitting(self, prompts: Sequence[GivenPrompt], wanted: int, *, is_chosen: bool) -> int:
        """The new tokens of a row: `wanted`, or if no client has chosen that, at most what has positions and memory."""
        return wanted if is_chosen else max(1, min([wanted, *self._numbers_left(prompts, wanted)]))

    def _numbers_left(self, prompts: Sequence[GivenPrompt], wanted: int) -> Iterator[int]:
        """New tokens of each row for which there are positions and memory, where these are fewer than `wanted`."""
        most, ends = self._prompt_limits.max_positions, list(map(_end, prompts))
        if most is not None and any(self._prompt_limits.remedy(end, wanted) for end in ends):
            yield most - max(ends)
        if self._room.max_tokens is not None:
            prompt_of = each_once(prompts)[1] if self._engine.takes(Way.shared_prompt) else None
            num_prompts, num_answers = num_places(len(prompts), prompt_of)
            num_free = self._room.max_tokens - num_held(prompts) - num_prompts * max(map(len, prompts))
            yield (num_free - self._room.row_tokens * len(prompts)) // num_answers

    def check_client(self, client: str, num_read: int = 0) -> None:
        """Check that a client may have a request beside `num_read` that are being read. Raises: RequestRefused."""
        ours = num_read + sum(each.client == client for each in [*self.waiting, *self.running])
        if ours >= self._limits.max_per_client:
            message = f"this client has {ours} requests, which is the most it may have at a time"
            raise RequestRefused(message, self.predicted_ttft_s())

    def add(self, request: Request) -> None:
        """Let a request wait. Raises: RequestRefused: too many do, or too many of this client."""
        limits, ttft_s = self._limits, self.predicted_ttft_s(request)
        self.check_client(request.client)
        if len(self.waiting) >= limits.max_waiting:
            told = f"{len(self.waiting)} requests are waiting, which is the most that may"
            raise RequestRefused(told, self.predicted_ttft_s())
        if limits.max_ttft_s is not None and ttft_s > limits.max_ttft_s:
            told = f"the first token is predicted after {ttft_s:.0f} s, which is longer than {limits.max_ttft_s:g} s"
            raise RequestRefused(told, ttft_s - limits.max_ttft_s)
        request.predicted_ttft_s = ttft_s
        self.waiting.append(request)

    def predicted_ttft_s(self, request: Request | None = None) -> float:
        """Seconds until the first token of a request that would come now; None: until all that wait have theirs.

        Prefills that are due before it come one after another, as if none were computed together, but a short prompt is
        computed inside of long ones. Then come as many rounds of answers as it takes until there is room for all rows.
        """
        now, others, is_short = time.monotonic(), self.waiting, False
        if request is not None:
            is_short, due_s = self.is_short([request]), self._due_s(request)
            others = [each for each in others if self._due_s(each) <= due_s and self.is_short([each]) >= is_short]
            others = [*others, request]
        begun_s = sum(
            max(0.0, batch.predicted_s - (now - batch.began_s))
            for batch in self.batches.values()
            if not batch.is_decoded and batch.is_short >= is_short
        )
        rows = self.num_rows + sum(len(each.prompts) for each in others)
        rounds = max(0, rows - self._limits.batch) / self._limits.batch
        longest = max((each.max_new_tokens for each in [*self.running, *others]), default=1)
        prefills_s = sum(self.prefill_s([each]) for each in others)
        return begun_s + prefills_s + rounds * self._estimate.decoding_s(longest)

    # Which one begins when.

    def times(self, *, is_short: bool) -> PrefillTimes:
        """The estimate for prompts that one stage computes, or all."""
        return self._estimate.alone if is_short or not self._has_chain else self._estimate.chain

    def prefill_s(self, requests: Sequence[Request]) -> float:
        """Predicted seconds of a prefill."""
        lengths, reused = self._lengths(requests), self._reusable(requests)
        if self.is_short(requests) or not self._has_chain:
            return self._estimate.alone.seconds(lengths, reused)
        return self._in_chain(lengths, reused)[0]

    def stored_in_chain(self, requests: Sequence[Request]) -> Sequence[int]:
        """First tokens of each row's prompt that all stages reuse; none if one computes alone, or all do all."""
        if self.is_short(requests) or not self._has_chain:
            return ()
        reused = self._in_chain(self._lengths(requests), self._reusable(requests))[1]
        return [reused[number] for number in prompts_of_rows(requests)] if reused else ()

    def found_alone(self, requests: Sequence[Request]) -> list[int]:
        """Tokens of each row's prompt that are known to be stored, where the last stage computes the prompts alone."""
        numbers = prompts_of_rows(requests)
        if self._engine.prefixes is None or not (self.is_short(requests) or not self._has_chain):
            return [0] * len(numbers)
        found = self._reusable(requests)
        return [found[number] for number in numbers]

    def _in_chain(self, lengths: Sequence[int], reused: Sequence[int]) -> tuple[float, Sequence[int]]:
        """Seconds in which all stages compute prompts, whole or after what is stored, and what they reuse then.

        Args:
            reused: tokens of each prompt that are stored.
        """
        whole_s, prefixes = self._estimate.chain.seconds(lengths), self._engine.prefixes
        if prefixes is None or not any(reused):
            return whole_s, ()
        rest_s = self._estimate.after_prefixes_s(lengths, reused, sum(reused) * prefixes.token_bytes)
        return (rest_s, reused) if rest_s < whole_s else (whole_s, ())

    def is_short(self, requests: Sequence[Request]) -> bool:
        """Whether the last stage computes these prompts alone: soon enough for the rows that it decodes, or sooner than
        all stages would.

        A prompt longer than any that all stages have computed goes to them, which shows how long they take. Predicted
        from short prompts, which gain little from several ranks, one stage might look sooner and never be compared.
        """
        if self._limits.decode_ranks or not self._engine.takes_stage_alone or self._engine.may_shard:
            return False
        return self._is_short(self._lengths(requests), self._reusable(requests))

    def _is_short(self, lengths: Sequence[int], reused: Sequence[int]) -> bool:
        chain = self._estimate.chain
        knows_chain = self._has_chain and (max(lengths) <= chain.longest or any(reused))
        in_chain_s = self._in_chain(lengths, reused)[0] if knows_chain else 0.0
        return self._estimate.alone.seconds(lengths, reused) <= max(self._limits.itl_s, in_chain_s)

    def _reusable(self, requests: Sequence[Request]) -> list[int]:
        """Tokens of each computed prompt that need not be computed; none for all if prefixes are not reused."""
        if self._engine.prefixes is None:
            return []
        key = self._engine.prefixes.key
        return [num for each in requests for num in self._of_computed(each, self._found(each, key))]

    def _found(self, request: Request, key: str) -> Sequence[int]:
        """Tokens of each different prompt that need not be computed."""
        return self.stored.found(request, key) if request.scores is None else [0] * len(request.different)

    def _found_after(self, request: Request, others: Iterable[Request]) -> list[int]:
        """The result of `_found` after the prompts of others are stored, of those for which there is room."""
        prefixes = self._engine.prefixes
        assert prefixes is not None
        most = self.most_stored_bytes - prefixes.state_bytes
        if self._engine.may_shard:  # each stage stores its part
            most *= self._engine.ranks.num_stages

        def has_room(num_tokens: int) -> bool:
            return 0 < most >= num_tokens * prefixes.token_bytes

        def is_kept(other: Request) -> bool:
            lengths = [len(ids_of(each)) for each in other.different]
            found = lengths if all(map(has_room, lengths)) else self.stored.found(other, prefixes.key)
            return all(has_room(length - num) for length, num in zip(lengths, found, strict=True))

        return self.stored.found_after(request, filter(is_kept, others), prefixes.key)

    def _of_computed(self, request: Request, found: Sequence[int]) -> list[int]:
        """Numbers of the different prompts of a request as those of the prompts that are computed."""
        return [found[number] for number in request.prompt_of] if self._engine.may_shard else list(found)

    def _waits_for_prefix(self, request: Request) -> bool:
        """Whether a long prompt begins like one that is being computed, after which it takes less than half as long."""
        if self._engine.prefixes is None or not self._has_chain or request.scores is not None:
            return False
        if self.is_short([request]):
            return False
        under_way = [batch for batch in self.batches.values() if not batch.is_decoded]
        begun = {owner: None for batch in under_way for owner, _ in batch.owners}
        later = self._of_computed(request, self._found_after(request, begun))
        lengths = self._lengths([request])
        if not self._limits.decode_ranks and self._is_short(lengths, later):
            return True
        return 2 * self._in_chain(lengths, later)[0] < self._in_chain(lengths, self._reusable([request]))[0]

    def _gains_by_waiting(self, request: Request, others: Sequence[Request]) -> bool:
        """Whether a request has less than half to compute if it is not computed at once with others, but after them."""
        if self._engine.prefixes is None or request.scores is not None:
            return False
        now = sum(self._reusable([request]))
        later = sum(self._of_computed(request, self._found_after(request, others)))
        return 2 * (later - now) > sum(self._lengths([request])) - now

    def _most_new(self, request: Request) -> int:
        """Most tokens of a row of a request that the last stage would compute."""
        prompts = self._computed(request)
        reusable = self._reusable([request]) or [0] * len(prompts)
        return max(len(ids) - num for ids, num in zip(prompts, reusable, strict=True))

    def _computed(self, request: Request) -> Sequence[GivenPrompt]:
        """The prompts of a request that are computed: each once, unless `Engine.generate` computes that of each row."""
        return request.prompts if self._engine.may_shard else request.different

    @property
    def _has_chain(self) -> bool:
        return self._engine.ranks.num_stages > 1 and self._engine.prefill_options.name is not PrefillName.single

    def note_encoded(self, prompts: Sequence[GivenPrompt]) -> None:
        """From now on the segments of these prompts count as encoded."""
        for key in _segments(prompts):
            self._encoded[key] = None
            self._encoded.move_to_end(key)
        while len(self._encoded) > MOST_KEYS:
            self._encoded.popitem(last=False)

    def _lengths(self, requests: Sequence[Request]) -> list[int]:
        """Tokens to compute: of each prompt, and of each segment that no prompt has used before."""
        prompts = [prompt for request in requests for prompt in self._computed(request)]
        new = [length for key, length in _segments(prompts).items() if key not in self._encoded]
        return [*map(len, prompts), *new]

    def by_deadline(self) -> list[Request]:
        """The requests that wait, that which is due first in front."""
        return sorted(self.waiting, key=self._due_s)

    def _due_s(self, request: Request) -> float:
        """`time.monotonic` at which the prefill of a request is due."""
        return request.arrived_s + SLACK * self.prefill_s([request])

    def to_prefetch(self) -> list[tuple[list[int], str]]:
        """The stored beginnings of the prompts that are due next, with salts, for the last stage to keep at hand."""
        if self._engine.prefixes is None:
            return []
        key, stored = self._engine.prefixes.key, list[tuple[list[int], str]]()
        for request in self.by_deadline()[:MOST_PREFETCHED]:
            found = self._found(request, key)
            texts = zip(request.different, found, strict=True)
            stored += [(ids_of(each)[:num], request.salt) for each, num in texts if num]
        return stored

    def choose(self) -> list[Request]:
        """The requests whose prefill begins now; none if there is no room, or enough is being computed."""
        waiting = self.by_deadline()
        for request in waiting:
            if not (self._is_blocked(is_short=self.is_short([request])) or self._waits_for_prefix(request)):
                chosen = self._with_similar(request, waiting)
                return chosen if self._has_room(chosen) else []  # no other one may take the room for which it waits
        return []

    def _is_blocked(self, *, is_short: bool) -> bool:
        """Whether a prefill has to wait for another one.

        A chain begins once rank 0 has computed its part of the one before. A short prompt waits for short ones alone.
        """
        if self._engine.may_shard:
            return bool(self.batches)
        return any(
            batch.is_short == is_short and not batch.is_decoded and (is_short or 0 not in batch.parts)
            for batch in self.batches.values()
        )

    def _with_similar(self, first: Request, waiting: Sequence[Request]) -> list[Request]:
        """A request and those of similar length that can be computed at once with it.

        A batch reuses segments or prefixes.
        """
        chosen, stores = [first], self._engine.prefixes is not None
        for other in waiting if self._engine.takes(Way.prompts_together) else []:
            together = [*chosen, other]
            rows = sum(len(self._computed(each)) for each in together)
            lengths = [self._most_new(each) for each in together]
            if (
                other is first
                or other.scores != first.scores
                or (stores and reuse_segments(other.prompts) != reuse_segments(first.prompts))
                or self.is_short(together) != self.is_short(chosen)
                or min(lengths) < SIMILAR * max(lengths)
                or rows * max(lengths) > self._limits.batch_tokens
                or not self._has_room(together)
                or self._waits_for_prefix(other)
                or self._gains_by_waiting(other, chosen)
            ):
                continue
            try:
                self.check(*rows_of(together))
            except ValueError:  # each can be generated from alone, but not at once
                continue
            chosen = together
        return chosen

    def _has_room(self, requests: Sequence[Request]) -> bool:
        """Whether there is room for these requests beside all that are answered."""
        prompts, options = rows_of(requests)
        prompt_of = prompts_of_rows(requests) if self._engine.takes(Way.shared_prompt) else None
        num_tokens = self.num_tokens + num_tokens_of(prompts, options, prompt_of)
        num_tokens += self._room.row_tokens * len(prompts)
        num_rows = self.num_rows + len(prompts)
        is_over = self._room.max_tokens is not None and num_tokens > self._room.max_tokens
        return not (num_rows > self._limits.batch or is_over) or not (self.batches or self.written or requests[1:])


def prompts_of_rows(requests: Sequence[Request]) -> list[int]:
    """The number of each row's prompt among the different prompts of all requests."""
    numbers, before = list[int](), 0
    for request in requests:
        numbers += [before + number for number in request.prompt_of]
        before += len(request.different)
    return numbers


def rows_of(requests: Sequence[Request]) -> tuple[list[GivenPrompt], list[GenerationOptions]]:
    """Prompts and options of all rows."""
    prompts = [ids for request in requests for ids in request.prompts]
    return prompts, [each for request in requests for each in request.options]


def _end(prompt: GivenPrompt) -> int:
    """Position of the first token that is generated."""
    return prompt.end if isinstance(prompt, ReusingPrompt) else len(prompt)


def _segments(prompts: Sequence[GivenPrompt]) -> dict[str, int]:
    """Tokens of the segments that prompts reuse, by content key."""
    uses = [use for prompt in prompts if isinstance(prompt, ReusingPrompt) for use in prompt.all_uses]
    return {use.segment.content_key: len(use.segment.ids) for use in uses}
