"""One rank's part in a server: it carries out the work items, and decodes all live rows between and inside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from policies.reuse import GivenPrompt, ReusingPrompt, ids_of
from runahead.config import Guide, Speculate
from runahead.context import ContextPartition
from runahead.decoding.lanes import Lane, Lanes
from runahead.decoding.row import NewToken, Row
from runahead.decoding.rows import Rows
from runahead.decoding.sampling import NOT_NUMBERS
from runahead.decoding.speculative.drafts import LookupDrafter
from runahead.decoding.speculative.lead import lead_among
from runahead.decoding.speculative.payoff import Payoff
from runahead.decoding.speculative.proposals import PayingDrafts
from runahead.engine import Engine
from runahead.features.slower import Way
from runahead.prefill.base import NeverCancelled, PrefillCancelled, Prefilled, PrefillPlan
from runahead.reuse.handover import LATE_S, Handover, HandoverFolder, Outcome
from runahead.reuse.prefixes import RowPrefix, store_prompts
from runahead.serving.items import (
    CANCELLED,
    PROGRESS_S,
    Alive,
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
    Stopping,
    Tokens,
)
from runahead.serving.limits import QueueLimits
from runahead.serving.mail.mail import LostConnection
from runahead.serving.room import Room, TakenRoom, num_tokens_of

Wait = Callable[[Callable[[float], bool]], None]
"""Waits until the given function, which may block for the given seconds, returns true."""


class NextAction(IntEnum):
    """The next action of all ranks of a stage."""

    go_on = 0
    step = 1
    item = 2
    wait = 3


class Executor:
    """Carries out items in order. The last stage decodes a step of its live rows whenever no item is there.

    Inside a prefill it decodes between two layers, once `itl_s` have passed since the last step, and while it waits for
    keys and values of earlier stages. The stack then holds two forwards, which share nothing but the weights: what a
    forward works on is passed to it. It also computes a short prompt between two layers of another one.

    Where a stage has several ranks, they must do the same in the same order, though items reach each at its own time.
    So the first of them decides and tells the others.

    Args:
        engine: this rank's.
        inbox: where items arrive.
        report: called with what rank 0 should know. Of ranks that do the same, the first reports.
        limits: of the queue.
        asked_to_end: whether this process was asked to end, which rank 0 is told when it asks.
        clock_offset_s: seconds to add to this rank's `time.perf_counter` to get rank 0's.
        reuses: reuse prefixes, if the engine does.
        room: of which rows may leave memory to stored prefixes; by default these have a limit of their own.
        handover: where the last stage puts prompts that are handed over; None: none are.
    """

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        report: Callable[[Report], object],
        limits: QueueLimits,
        asked_to_end: Callable[[], bool] = lambda: False,
        clock_offset_s: float = 0.0,
        reuses: bool = True,
        room: Room | None = None,
        handover: HandoverFolder | None = None,
    ) -> None:
        self._engine, self._ranks, self._inbox, self._report = engine, engine.ranks, inbox, report
        self._limits, self._asked_to_end, self._clock_offset_s = limits, asked_to_end, clock_offset_s
        self._reuses, self._prefixes = reuses, dict[RowId, RowPrefix]()
        self._room = room or Room(max_tokens=None)
        self._taken_room = TakenRoom(self._room, None if engine.prefixes is None else engine.prefixes.tree)
        lanes = Lanes(engine.model, engine.policies, most_tokens=self._room.max_tokens)
        payoff, lead = Payoff(warm_up=lanes.warm_up), lead_among(engine.model)
        self.drafts = PayingDrafts(LookupDrafter(), payoff, name=Speculate.lookup.name, lead=lead)
        self.live = Rows(lanes, drafts=self.drafts, anew=self._computed_anew, on_leave=self._keep)
        self._num_anew = 0  # rows that were computed anew
        decodes = self._ranks.stage == self._ranks.num_stages - 1
        self._leads = decodes and self._ranks.share == 0
        self._handover = handover
        self._stores = reuses and self._leads and engine.prefixes is not None
        if engine.prefixes is not None and self._stores:
            engine.prefixes.tree.listen(report)
            inbox.on_stop = lambda number: report(Stopping(number))
        self._interrupts = decodes
        self._stops = engine.takes(Way.stopped)
        self._under_way: list[PrefillItem] = []  # the prefills on the stack
        self._encodes = False  # the last of them is encoding a segment
        # A GPU computes later than its work is queued, so there the host knows of no layer that it is computed.
        self._tells_progress = self._ranks.share == 0 and self._ranks.accelerator is None
        self._told_s = 0.0
        self._stepped_s = time.monotonic()
        self._step_s = 0.0
        self._aside_s = 0.0  # seconds inside prefills in which something else was done
        self._waited_s = 0.0  # and in which nothing was, for want of keys and values

    def run(self, wait: Wait) -> None:
        """Carry out items until the last.

        Args:
            wait: used while there is nothing to do.

        Raises:
            PeerFailure: another rank is gone or silent.
        """
        while not isinstance(item := self._next(wait), End):
            self.carry_out(item)

    def _next(self, wait: Wait) -> Item:
        """The next item. Rows are decoded until it has come."""
        while (
            self.live
            and self._decide(lambda: NextAction.item if self._inbox.has_item() else NextAction.step) is NextAction.step
        ):
            self._step()
        wait(self._inbox.has_item)
        return self._taken()

    def _taken(self) -> Item:
        """The next item, which is there, or the reason why there is none."""
        self._raise_error()
        return self._inbox.take()

    def _raise_error(self) -> None:
        if isinstance(self._inbox.error, LostConnection):
            raise self._ranks.lost_connection("the next work item") from self._inbox.error
        if self._inbox.error is not None:
            raise self._inbox.error

    def decode_all(self) -> None:
        """Decode until every row has ended."""
        while self.live:
            self._step()

    def carry_out(self, item: Item) -> None:
        """Do what an item says, but for the decoding that follows."""
        if isinstance(item, PrefillItem):
            self._prefill(item)
        elif isinstance(item, Generate):
            self._generate(item)
        elif isinstance(item, Check):
            self._report(Alive(self._ranks.rank, self._asked_to_end()))

    def _prefill(self, item: PrefillItem) -> None:
        aside_s, waited_s, was_idle = self._aside_s, self._waited_s, not self.live
        self._prepare_guides(item)
        if self._engine.prefixes is not None and self._stores:
            self._engine.prefixes.prefetch(item.to_prefetch)
        self._take_room(item)
        self._under_way.append(item)
        if item.record_timeline:
            self._told_s = time.monotonic()
        prompts, prompt_of = item.different
        plan = PrefillPlan(
            prompts=prompts,
            partition=ContextPartition(boundaries=item.boundaries),
            num_new=max(options.max_new_tokens for options in item.options),
            reuses=self._reuses and item.finds_prefixes,
            stored=[item.stored[prompt_of.index(number)] for number in range(len(prompts))] if item.stored else (),
            salts=[item.salts[prompt_of.index(number)] for number in range(len(prompts))] if item.salts else (),
            scores=item.scores,
            record=item.record_timeline,
            hands_over=bool(item.handovers),
        )
        handovers = self._handovers(item, prompt_of) if item.handovers and self._leads else {}
        prefilled = self._engine.prefill(plan, self, handovers)
        if self._stores and self._inbox.is_stopped(self._under_way[-1].number):
            # Other stages may have stopped, and what was computed from their zeros must not be found as a prefix.
            prefilled.cache, prefilled.is_cancelled = None, True
        self._inbox.done(self._under_way.pop().number)
        aside_s, waited_s = self._aside_s - aside_s, self._waited_s - waited_s
        for number, handover in handovers.items():
            handover.end(_why_not_handed_over(prefilled, number))
        if prefilled.cache is not None:
            self._join(item, prompts, prompt_of, prefilled, was_idle=was_idle)
        else:
            self._taken_room.give(item.number, len(item.prompts))
            for prefix in prefilled.prefixes:
                prefix.release()
        report = prefilled.report
        if self._leads and prefilled.is_cancelled:
            self._report(Tokens(tokens={}, ended={(item.number, row): "cancelled" for row in range(len(item.prompts))}))
        report.memory = self._engine.model.memory_after(
            kv_bytes=report.kv_peak_bytes,
            batch=len(prompts),
            num_tokens=report.chunk_tokens,
            row_tokens=report.row_tokens,
        )
        self._report(
            Part(
                number=item.number,
                rank=self._ranks.rank,
                prefill_s=report.prefill_s - aside_s,
                wait_s=report.wait_s + waited_s,
                is_alone=was_idle and aside_s == 0,
                is_cancelled=prefilled.is_cancelled,
                report=report,
                live_bytes=self.live.num_bytes,
                stored_bytes=0 if self._engine.prefixes is None else self._engine.prefixes.tree.num_bytes,
                scores=prefilled.scores if self._ranks.share == 0 else [],  # which are the same on all of them
                **self._prefix_facts(),
                spans=[span.shifted(self._clock_offset_s) for span in prefilled.spans if span.kind != "send"],
            )
        )

    def _join(
        self,
        item: PrefillItem,
        prompts: Sequence[GivenPrompt],
        prompt_of: Sequence[int],
        prefilled: Prefilled,
        *,
        was_idle: bool,
    ) -> None:
        """Let the rows of a computed item join those that are decoded, store its prompts, and tell the first tokens.

        Args:
            prompts, prompt_of: as of `PrefillItem.different`.
            was_idle: whether no row was decoded when the prefill began.
        """
        assert prefilled.cache is not None and prefilled.logits_BV is not None, "it was computed to its end"
        self._await_guides(item)
        rows = [
            Row(self._engine.model, ids_of(prompt), options, seed=options.seed)
            for prompt, options in zip(item.prompts, item.options, strict=True)
        ]
        ids = [(item.number, row) for row in range(len(rows))]
        # Under policies the cache has what is reused, too, as one text with what was computed.
        lengths = [len(ids_of(each)) if self._engine.policies else len(each) for each in prompts]
        if (prefixes := prefilled.prefixes) and prefilled.given is None:
            store_prompts(prefixes, list(map(ids_of, prompts)), prefilled.cache, prefilled.logits_BV)
            lengths = [length - prefix.num_tokens for length, prefix in zip(lengths, prefixes, strict=True)]
            self._prefixes |= self._prefixes_of_rows(ids, item, prefixes, prompt_of)
        elif prefilled.given is not None:  # what the rows reuse is in their own memory, too
            store_prompts(prefixes, list(map(ids_of, prompts)), prefilled.given, prefilled.logits_BV)
            prefilled.given = None
            for prefix in prefixes:
                prefix.release()
        if was_idle and not self.live:
            self._stepped_s = time.monotonic()
        new = self.live.join(ids, rows, prefilled.logits_BV, prefilled.cache, lengths, prompt_of)
        cached = {
            id: sum(use.num_tokens for use in prompt.all_uses if use.segment.content_key not in prefilled.encoded)
            for id, prompt in zip(ids, item.prompts, strict=True)
            if isinstance(prompt, ReusingPrompt)
        }
        if prefilled.prefixes:
            cached |= {id: prefilled.prefixes[number].num_cached for id, number in zip(ids, prompt_of, strict=True)}
        self._tell(new, cached=cached)

    def _handovers(self, item: PrefillItem, prompt_of: Sequence[int]) -> dict[int, Handover]:
        """Begin to hand over each of the different prompts of an item that some row asks for, by its number.

        Where bytes of earlier ones still wait to be written, the item waits for a while, once, unless others wait then.
        """
        assert self._handover is not None, "serve.handover is on all ranks or on none"
        handovers, folder = dict[int, Handover](), self._handover
        until_s = time.monotonic() + (0.0 if self.live or len(self._under_way) > 1 else LATE_S)
        for number in dict.fromkeys(number for number, name in zip(prompt_of, item.handovers, strict=True) if name):
            rows = [row for row, name in enumerate(item.handovers) if name and prompt_of[row] == number]
            name, num_tokens = item.handovers[rows[0]], len(ids_of(item.prompts[rows[0]]))

            def tell(outcome: Outcome, name: str = name, rows: Sequence[int] = rows) -> None:
                if self._ranks.accelerator is None:
                    self._taken_room.file_ended(item.number)
                for row in rows:
                    where: dict[str, Any] = {"folder": folder.place.path, "host": folder.place.host}
                    self._report(Handed(row=(item.number, row), name=name, **where, **vars(outcome)))

            if self._ranks.accelerator is None:  # the file is written from the memory of the rows
                self._taken_room.keep_for_file(item.number)
            handovers[number] = folder.begin(name, num_tokens, self._ranks.device, tell, until_s=until_s)
        return handovers

    def _prefix_facts(self) -> dict[str, Any]:
        if self._engine.prefixes is None or not self._stores:
            return {}
        tree = self._engine.prefixes.tree
        found = {tier.value: num_tokens for tier, num_tokens in tree.found_tokens.items()}
        return {"prefix_bytes": tree.bytes_by_tier, "prefix_found_tokens": found}

    def _prepare_guides(self, item: PrefillItem) -> None:
        """Begin to compile the JSON schemas and grammars of rows that this rank will decode."""
        if self._ranks.stage == self._ranks.num_stages - 1:
            for guide in _guides(item):
                self._engine.model.grammars.prepare(guide)

    def _await_guides(self, item: PrefillItem) -> None:
        """Decode other rows until the JSON schemas and grammars of these are compiled."""
        for guide in _guides(item):
            self.until(partial(self._engine.model.grammars.is_prepared, guide), "a grammar", ())

    def _tell_progress(self, done: int, of: int) -> None:
        item, now = self._under_way[-1], time.monotonic()
        if self._tells_progress and item.record_timeline and now - self._told_s >= PROGRESS_S:
            self._told_s = now
            self._report(Progress(number=item.number, rank=self._ranks.rank, layers=done, of=of))

    def _prefixes_of_rows(
        self, ids: Sequence[RowId], item: PrefillItem, prefixes: Sequence[RowPrefix], prompt_of: Sequence[int]
    ) -> dict[RowId, RowPrefix]:
        """The prefix of each row: the first row of a prompt has the prompt's, the others hold the same."""
        found: dict[RowId, RowPrefix] = {}
        for row, (id, number) in enumerate(zip(ids, prompt_of, strict=True)):
            is_first = prompt_of.index(number) == row
            found[id] = prefixes[number] if is_first else prefixes[number].fork(ids_of(item.prompts[row]))
        return found

    def _keep(self, id: RowId, row: Row, lane: Lane) -> None:
        """Store the text of a row that leaves, in memory that it had room for."""
        self._taken_room.give(id[0], 1)
        if (prefix := self._prefixes.pop(id, None)) is not None:
            num_stored = prefix.num_tokens + lane.num_after_prefix
            if num_stored < len(row.ids):  # else the last forward gave no token, as its logits are no numbers
                own = lane.cache.row_kv(0, 0, lane.num_tokens)
                prefix.note_states(lane.num_after_prefix, lane.states)
                is_in_arena = lane.region is not None  # whose slots other rows will have
                prefix.store(row.ids[:num_stored], own, num_shared=lane.num_shared, copies=is_in_arena)
            prefix.release()

    def _take_room(self, item: PrefillItem | Generate) -> None:
        """Let prefixes have what is left of the room once the rows of an item have theirs.

        They make way once those of these prompts are found, and so held; at once if none are looked for.
        """
        prompt_of = item.different[1] if self._engine.takes(Way.shared_prompt) else None
        num_tokens = num_tokens_of(item.prompts, item.options, prompt_of)
        self._taken_room.take(item.number, len(item.prompts), num_tokens)
        if self._room.max_tokens is not None:
            self.live.trim(self._taken_room.num_tokens, self._room.max_tokens)
        if self._engine.prefixes is not None and not (self._reuses and item.finds_prefixes):
            self._engine.prefixes.tree.make_room()

    def _computed_anew(self, lanes: Lanes, rows: Mapping[RowId, Row]) -> tuple[torch.Tensor, Lanes]:
        """Let rows leave, and join again once this stage has computed their texts; meanwhile it decodes the others."""
        logits = list[torch.Tensor]()
        for id, row in rows.items():
            lanes.leave(id, row.ids[-1])  # its memory is free then
        for id, row in rows.items():
            _, prefilled = self._engine.alone([row.ids], row.num_left, NeverCancelled(self))
            assert prefilled.cache is not None and prefilled.logits_BV is not None, "it is computed to its end"
            lanes.join([id], [row], prefilled.cache, [len(row.ids)], [0])
            logits.append(prefilled.logits_BV)
        self._num_anew += len(rows)
        return torch.cat(logits), lanes

    def _generate(self, item: Generate) -> None:
        def on_tokens(tokens: list[int | None]) -> list[int]:
            new = {(item.number, row): token for row, token in enumerate(tokens) if token is not None}
            self._report(Tokens(tokens=new))
            return [row for number, row in self._inbox.take_cancelled() if number == item.number]

        self._take_room(item)
        result = self._engine.generate(
            item.prompts, item.options, on_tokens=on_tokens, cancellable=True, salts=item.salts
        )
        self._taken_room.give(item.number, len(item.prompts))
        if self._ranks.rank == 0:
            ends = {(item.number, row): each.finish_reason for row, each in enumerate(result.generations)}
            cached = {(item.number, row): num for row, num in enumerate(result.cached_tokens)}
            self._report(Tokens(tokens={}, ended=ends, step_s=result.tpot_s, cached=cached))
            tree = None if self._engine.prefixes is None else self._engine.prefixes.tree
            self._report(
                Part(
                    number=item.number,
                    rank=0,
                    prefill_s=result.ttft_s,
                    wait_s=0.0,
                    is_alone=True,
                    stored_bytes=0 if tree is None else tree.num_bytes,
                    prefix_bytes={} if tree is None else tree.bytes_by_tier,
                )
            )

    def _step(self) -> None:
        if not self.live:  # all rows were cancelled
            return
        began_s, num_anew = time.monotonic(), self._num_anew
        places = self.live.step()
        self._stepped_s = time.monotonic()
        self._ranks.progress()
        is_plain = num_anew == self._num_anew  # other steps do not tell how long one takes
        if is_plain:
            self._step_s = self._stepped_s - began_s
        for tokens in places:
            self._tell(tokens, self._step_s / len(places) if is_plain else None)

    def _tell(
        self, new: Sequence[NewToken], step_s: float | None = None, cached: Mapping[RowId, int] = MappingProxyType({})
    ) -> None:
        if self._leads and new:
            ended = {each.row: each.ended for each in new if each.ended is not None}
            tokens = {each.row: each.token for each in new if each.token is not None}
            self._report(Tokens(tokens=tokens, ended=ended, step_s=step_s, cached=dict(cached)))

    # Inside a prefill: `InterleavedWork`.

    def after_layer(self, done: int, of: int) -> None:
        self._tell_progress(done, of)
        self._look_aside()
        if self._stops and self._inbox.is_stopped(self._under_way[-1].number):
            raise PrefillCancelled

    def after_segment_layer(self) -> None:
        self._encodes = True
        self._look_aside()
        self._encodes = False

    def _look_aside(self) -> None:
        """Do what is due or can be done aside."""

        def choice() -> NextAction:
            if self._has_aside():
                return NextAction.item
            return NextAction.step if self._is_due else NextAction.go_on

        if self._interrupts:
            self._do(self._decide(choice))

    def until(self, arrived: Callable[[float], bool], what: str, peers: Iterable[int]) -> None:
        if not self._interrupts:
            return
        # Waiting as long as a step takes before the first one costs at most twice what knowing the wait's length
        # would: most waits are shorter, and a step would hold up the prefill. A stage that only decodes has one token
        # of it, and nothing else to do.
        patience_s = 0.0 if self._limits.decode_ranks else self._step_s
        started_s, aside_s = time.monotonic(), self._aside_s

        def ready(block_s: float) -> bool:
            nonlocal patience_s

            def choice() -> NextAction:
                if self._has_aside():
                    return NextAction.item
                if not self.live:
                    return NextAction.go_on if arrived(block_s) else NextAction.wait
                began_s = time.monotonic()
                if arrived(0.0 if self._is_due else min(block_s, max(0.0, patience_s))):
                    return NextAction.go_on
                has_waited = patience_s <= time.monotonic() - began_s
                return NextAction.step if self._is_due or has_waited else NextAction.wait

            began_s = time.monotonic()
            if (chosen := self._decide(choice)) is NextAction.go_on:
                return True
            self._do(chosen)
            patience_s -= time.monotonic() - began_s
            return False

        self._ranks.wait_until(ready, what, peers)
        self._waited_s += time.monotonic() - started_s - (self._aside_s - aside_s)

    @property
    def _takes_shorts(self) -> bool:
        # A short prompt is not interrupted by another one, and none encodes the segment that is being encoded again.
        return len(self._under_way) == 1 and not self._encodes

    def _has_aside(self, block_s: float = 0.0) -> bool:
        return self._inbox.has_aside(block_s, shorts=self._takes_shorts)

    @property
    def _is_due(self) -> bool:
        return bool(self.live) and time.monotonic() - self._stepped_s >= self._limits.itl_s

    def _do(self, choice: NextAction) -> None:
        """Do something else inside a prefill."""
        if choice not in (NextAction.step, NextAction.item):
            return
        self._await_device()
        began_s, before_s = time.monotonic(), self._aside_s
        if choice is NextAction.step:
            self._step()
        else:
            # On the other ranks of the stage it may still be on its way, in the same order as here.
            self._ranks.wait_until(self._has_aside, "the next work item", [0])
            self._raise_error()
            self.carry_out(self._inbox.take_aside(shorts=self._takes_shorts))
        self._aside_s = before_s + time.monotonic() - began_s

    def _await_device(self) -> None:
        """Wait, watched, until the GPU has caught up, before the host asks it for values after the KV of a prefill."""
        if self._ranks.accelerator is None:
            return
        chains = [ContextPartition(boundaries=item.boundaries).chain for item in self._under_way]
        awaits_ranks = self._engine.model.shares is not None or any(len(chain) > 1 for chain in chains)
        self._ranks.await_device("the KV that is on its way", range(self._ranks.size if awaits_ranks else 0))

    def _decide(self, choose: Callable[[], NextAction]) -> NextAction:
        """The choice of the first rank of this stage, on all its ranks. Rows that were cancelled by then have left."""
        chosen, cancelled = NextAction.go_on, list[RowId]()
        if self._leads:
            chosen, cancelled = choose(), self._inbox.take_cancelled()
        if (shares := self._engine.model.shares) is not None:
            head, rows = torch.tensor([chosen, len(cancelled)]), torch.tensor(cancelled, dtype=torch.long)

            def share() -> torch.Tensor:
                dist.broadcast(head, group=shares.hosts, group_src=0)
                who = rows if self._leads else torch.empty(int(head[1]), 2, dtype=torch.long)
                if len(who):
                    dist.broadcast(who, group=shares.hosts, group_src=0)
                return who

            cancelled = [(number, row) for number, row in shares.run(share).tolist()]
            chosen = NextAction(int(head[0]))
        if cancelled:
            self._await_device()
        dropped = self.live.cancel(cancelled)
        if self._leads and dropped:
            self._report(Tokens(tokens={}, ended=dict.fromkeys(dropped, "cancelled")))
        return chosen


def _why_not_handed_over(prefilled: Prefilled, number: int) -> str:
    """Why the n-th prompt of a prefill is not handed over; "" if it is."""
    if prefilled.cache is None or prefilled.logits_BV is None:
        return CANCELLED
    return NOT_NUMBERS if bool(prefilled.logits_BV[number].isnan().any()) else ""


def _guides(item: PrefillItem) -> list[Guide]:
    return [each.guide for each in item.options if each.guide is not None]
