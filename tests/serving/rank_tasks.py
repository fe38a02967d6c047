"""Tasks of the scheduler's tests on live ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from policies.reuse import GivenPrompt, Segment
from runahead import Engine, GenerationOptions, Model, PrefillOptions
from runahead.attention.states import StateLayer, States
from runahead.cache.attention import LayerCall
from runahead.config import DecodeName, DecodeOptions
from runahead.context import ContextPartition
from runahead.prefill.base import PrefillCancelled, PrefillPlan
from runahead.prefill.chain_run import ChainRun
from runahead.ranks.ranks import Ranks
from runahead.report import PromptLogprobs
from runahead.reuse import reuse
from runahead.reuse.prefix_tree import PrefixTree
from runahead.reuse.store import SegmentStore, StoreLimits
from runahead.serving.arrangement import chunks
from runahead.serving.estimate import TimeEstimate
from runahead.serving.executor import Executor, NextAction
from runahead.serving.follower import follow
from runahead.serving.items import Cancel, Inbox, Item, Part, PrefillItem, Report, Stop, Tokens
from runahead.serving.limits import QueueLimits
from runahead.serving.request import Request
from runahead.serving.scheduler import Scheduler
from runahead.serving.state import ServerState
from runahead.thinning.rank_policies import RankPolicies
from tests.families import throughout
from tests.ranks.prefix_tasks import deep_model
from tests.ranks.tasks import tiny_model
from tests.ranks.tensor_tasks import arranged, shared_model
from tests.waiting import until

FAMILY = "llama"
LAST = DecodeOptions(name=DecodeName.last)
LONG = GenerationOptions(max_new_tokens=50, ignore_eos=True)
NUM_LAYERS = 3


def cancel_rows(
    ranks: Ranks, num_shares: int, prompts: list[list[int]], options: list[GenerationOptions], cancel: dict[int, int]
) -> list[tuple[list[int], str]]:
    """New tokens and end of each row, of which rank 0 cancels some (row: step); then the same again without that."""
    steps = [0]

    def on_tokens(tokens: list[int | None]) -> list[int]:
        steps[0] += 1
        return [row for row, step in cancel.items() if step == steps[0]]

    with arranged(ranks, num_shares):
        if num_shares > 1:
            model = shared_model(ranks, FAMILY, torch.float64, num_shares)
        else:
            model = tiny_model(FAMILY)
        engine = Engine(model, ranks)
        with throughout(model.dtype):
            first = engine.generate(prompts, options, on_tokens=on_tokens, cancellable=True)
            second = engine.generate(prompts, options, cancellable=True)
    return [(each.new_token_ids, each.finish_reason) for each in [*first.generations, *second.generations]]


def stop(
    ranks: Ranks, prefill: PrefillOptions, policies: RankPolicies | None, prompts: list[list[int]], knows: list[int]
) -> tuple[list[int], list[bool], int]:
    """Prefill two prompts, the first of which some ranks (`knows`) are told to stop after its first layer.

    Returns the tokens of the second one, whether the ranks' parts of both were stopped, and bytes that stay.
    """
    model = tiny_model(FAMILY)
    engine, inbox, reports = Engine(model, ranks, prefill=prefill, policies=policies), Inbox(), list[Report]()
    for number, ids in enumerate(prompts):
        partition = chunks(engine, len(ids), 1.0, (0.0, 0.0))
        options = [GenerationOptions(max_new_tokens=5, ignore_eos=True)]
        inbox.put(PrefillItem(number=number, prompts=[ids], options=options, boundaries=partition.boundaries))
    if ranks.rank in knows:
        inbox.put(Stop(0))
    with throughout(model.dtype):
        executor = Executor(engine, inbox, reports.append, QueueLimits(itl_s=1e3))
        for _ in prompts:
            executor.carry_out(inbox.take())
        executor.decode_all()
    tokens = [each.tokens[1, 0] for each in reports if isinstance(each, Tokens) and (1, 0) in each.tokens]
    stopped = [each.is_cancelled for each in reports if isinstance(each, Part)]
    return tokens, stopped, executor.live.num_bytes


def steps_in_a_wait(ranks: Ranks, prefill: PrefillOptions, prompts: list[list[int]], folder: str) -> int:
    """Decoding steps of this rank inside the prefill of the second prompt, while the first one's row is live.

    The first rank sends its keys and values of each layer when the last one has decoded another step, so the last one
    has to do so while it waits for them.
    """
    model, num_steps = tiny_model(FAMILY), [0]
    engine = Engine(model, ranks, prefill=prefill)
    executor = Executor(engine, Inbox(), lambda report: None, QueueLimits(itl_s=1e3))
    step, save = executor._step, ChainRun.save

    def noted() -> None:
        step()
        Path(folder, str(num_steps[0])).touch()
        num_steps[0] += 1

    def sending(run: ChainRun, call: LayerCall) -> None:
        if ranks.rank == 0:
            until(Path(folder, str(call.layer)).exists)
        save(run, call)

    with throughout(model.dtype):
        for number, ids in enumerate(prompts):
            boundaries = chunks(engine, len(ids), 1.0, (0.0, 0.0)).boundaries
            item = PrefillItem(number=number, prompts=[ids], options=[LONG], boundaries=boundaries)
            if number == 0:
                executor.carry_out(item)
            else:
                with mock.patch.object(executor, "_step", noted), mock.patch.object(ChainRun, "save", sending):
                    executor.carry_out(item)
    return num_steps[0]


@dataclass(kw_only=True)
class Dropped:
    """Outcome of `prefill_after_drops`: tokens and cached tokens of each prompt, and hits that are still held."""

    tokens: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    num_held: int = 0


def prefill_after_drops(
    ranks: Ranks,
    prefill: PrefillOptions,
    prompts: list[list[int]],
    options: GenerationOptions,
    family: str = FAMILY,
) -> Dropped:
    """Carry out prefills by all stages whose prefixes were there when they were told, but not all of them later.

    The first prompt is the one that the others begin with. For the third one nothing is left of it, for the fourth one
    its first 20 tokens are, and for the fifth one the tree has room for no token.
    """
    model, tree = tiny_model(family), PrefixTree(1 << 40)
    engine, outcome = Engine(model, ranks, prefill=prefill, decode=LAST, tree=tree), Dropped()
    assert engine.prefixes is not None

    def hear(report: Report) -> None:
        if isinstance(report, Tokens):
            for (number, _), token in report.tokens.items():
                outcome.tokens[number].append(token)
            outcome.cached += report.cached.values()

    executor = Executor(engine, Inbox(), hear, QueueLimits(itl_s=1e3))
    with throughout(model.dtype):
        for number, ids in enumerate(prompts):
            if number >= 2:
                tree.limit_bytes = 0
                tree.make_room()
                tree.limit_bytes = 0 if number == 4 else 1 << 40
            if number == 3 and ranks.stage == ranks.num_stages - 1:
                alone = PrefillPlan(prompts=[ids[:20]], partition=_alone(ranks, 20), num_new=1, reuses=True)
                engine.prefill(alone).prefixes[0].release()
                done = engine.prefill(alone)
                done.prefixes[0].store(ids[:20], done.cache.row_kv(0, 0, 20))
                done.prefixes[0].release()
            stored = 0 if number == 0 else sum(one == other for one, other in zip(ids, prompts[0], strict=False))
            item = PrefillItem(
                number=number,
                prompts=[ids],
                options=[options],
                boundaries=chunks(engine, len(ids) - stored, 1.0, (0.0, 0.0)).boundaries,
                stored=[stored] if stored else (),
            )
            outcome.tokens.append([])
            executor.carry_out(item)
            executor.decode_all()
    outcome.num_held = sum(node.holds for node in tree.nodes())
    return outcome


def _alone(ranks: Ranks, num_tokens: int) -> ContextPartition:
    return ContextPartition(boundaries=(0,) * ranks.num_stages + (num_tokens,))


class Stopping:
    """Nothing else inside a prefill but its end after the first layer."""

    def after_layer(self, done: int, of: int) -> None:
        raise PrefillCancelled

    def after_segment_layer(self) -> None:
        pass

    def until(self, arrived: Callable[[float], bool], what: str, peers: object) -> None:
        pass


def stop_after_prefix(ranks: Ranks, prefill: PrefillOptions, prompts: list[list[int]], knows: list[int]) -> list[int]:
    """First token of the third prompt, and as it is if all of it is computed.

    All stages compute it after the first prompt, as the second one, which some stop.
    """
    model, found = deep_model(), list[int]()
    engine = Engine(model, ranks, prefill=prefill, decode=LAST, tree=PrefixTree(1 << 40))
    with throughout(model.dtype):
        for number, ids in enumerate(prompts):
            stored = [len(prompts[0])] if number else []
            partition = chunks(engine, len(ids) - sum(stored), 1.0, (0.0, 0.0))
            meanwhile = Stopping() if number == 1 and ranks.rank in knows else None
            plan = PrefillPlan(prompts=[ids], partition=partition, num_new=1, reuses=True, stored=stored)
            done = engine.prefill(plan, meanwhile)
            assert done.is_cancelled == (meanwhile is not None)
            for prefix in done.prefixes:
                if number == 0 and done.cache is not None:
                    prefix.store(ids, done.cache.row_kv(0, 0, len(ids)))
                prefix.release()
        split = chunks(engine, len(ids), 1.0, (0.0, 0.0))
        whole = engine.prefill(PrefillPlan(prompts=[ids], partition=split, num_new=1))
        for each in (done, whole):
            if each.logits_BV is not None:
                found += each.logits_BV.argmax(dim=-1).tolist()
    return found


class Kept:
    """A listener that keeps what it hears.

    Attributes:
        rows: tokens of each row.
        heard: what happened, in order: "start", a number of tokens so far, "end" or a failure.
    """

    def __init__(self, num_rows: int, when: dict[int, Callable[[], object]] | None = None) -> None:
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]
        self.heard: list[str | int] = []
        self._when = when or {}
        self.when_started: Callable[[], object] = lambda: None

    @property
    def is_over(self) -> bool:
        return len(self.heard) > 0 and self.heard[-1] != "start" and isinstance(self.heard[-1], str)

    def on_start(self) -> None:
        self.heard.append("start")
        threading.Thread(target=self.when_started).start()

    def on_tokens(self, tokens: Sequence[int | None]) -> None:
        for row, token in zip(self.rows, tokens, strict=True):
            if token is not None:
                row.append(token)
        self.heard.append(sum(map(len, self.rows)))
        if (call := self._when.pop(max(map(len, self.rows)), None)) is not None:
            threading.Thread(target=call).start()  # the scheduler's thread must not wait for itself

    def on_end(self) -> None:
        self.heard.append("end")

    def on_failure(self, reason: str) -> None:
        self.heard.append(reason)


@dataclass(kw_only=True)
class Load:
    """Requests of a test, and how they are served.

    Attributes:
        after: by request, the one after whose second token it comes; the others come at once.
        cancel: by request, the number of tokens after which it is cancelled; 0 is when its prefill begins.
        short: prompts up to this length are computed by one stage.
        chain_token_s: seconds per token of prompts that all stages compute, as they are estimated; 0 is unknown.
        store_bytes: size of the store of reused segments; None is the default.
        tree_bytes, snapshot_tokens: of prefixes that are reused.
        num_answers: to each prompt, with seeds that count up.
        scores: by request whose prompt is scored, the number of most likely tokens at each place.
        awaits: by the items that a rank was told, whether what the test is about has come to it. Until then it decodes
            slowly after its first steps, so that rows do not end before, however late another rank is.
    """

    prompts: Sequence[GivenPrompt]
    options: list[GenerationOptions]
    limits: QueueLimits
    after: dict[int, int] = field(default_factory=dict)
    cancel: dict[int, int] = field(default_factory=dict)
    family: str = FAMILY
    policies: RankPolicies | None = None
    prefill: PrefillOptions | None = None
    decode: DecodeName = DecodeName.last
    num_shares: int = 1
    short: int = 0
    store_bytes: int | None = None
    tree_bytes: int = 0
    snapshot_tokens: int = 0
    chain_token_s: float = 0.0
    num_answers: int = 1
    scores: dict[int, int] = field(default_factory=dict)
    awaits: Callable[[Sequence[Item]], bool] | None = None


def two_prefills(told: Sequence[Item]) -> bool:
    """Whether two prefills have come; for `Load.awaits`."""
    return sum(isinstance(item, PrefillItem) for item in told) >= 2


def two_cancellations(told: Sequence[Item]) -> bool:
    """Whether two prefills, or rows of them, have been cancelled; for `Load.awaits`."""
    rows = {number for item in told if isinstance(item, Cancel) for number, _ in item.rows}
    return len(rows | {item.number for item in told if isinstance(item, Stop)}) >= 2


@dataclass(kw_only=True)
class Served:
    """Records of rank 0: tokens per answer, what the listeners heard, items that were told, the state at the end; per
    rank, bytes that stay in live rows, decoding steps and prefills that were carried out inside a prefill, and segments
    that were encoded. `cached` are tokens per request that were found in the store, `scores` those of each answer's
    prompt."""

    tokens: list[list[int]] = field(default_factory=list)
    heard: list[list[str | int]] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    state: ServerState | None = None
    left_bytes: int = 0
    inside: list[str] = field(default_factory=list)
    encoded: list[str] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    scores: list[dict[int, PromptLogprobs]] = field(default_factory=list)


def serve(ranks: Ranks, load: Load) -> Served:
    """Serve a load, and drain. Every rank makes the same call."""
    served = Served()
    with arranged(ranks, load.num_shares), noting(served), awaiting(load.awaits):
        if load.num_shares > 1:
            model = shared_model(ranks, load.family, torch.float64, load.num_shares)
        else:
            model = tiny_model(load.family)
        store = None
        if load.store_bytes is not None:
            store = SegmentStore(model, limits=StoreLimits(host_bytes=load.store_bytes))
        engine = Engine(
            model,
            ranks,
            policies=load.policies,
            prefill=load.prefill,
            decode=DecodeOptions(name=load.decode),
            store=store,
            tree=PrefixTree(load.tree_bytes, snapshot_tokens=load.snapshot_tokens) if load.tree_bytes else None,
        )
        with throughout(model.dtype):
            if ranks.rank == 0:
                _serve(engine, load, served)
            else:
                follow(engine, load.limits)
    return served


def serve_with_wrong_states(ranks: Ranks, fault: str, load: Load) -> Served:
    """Serve a load while states are handled in a wrong way, which answers have to show."""
    read, together = StateLayer.read, States.together

    def read_nothing(self: StateLayer, *given: Any) -> None:
        read(self, *given)
        self.clear(range(len(given[0])))

    def in_other_order(rows: Sequence[States]) -> States:
        return together([*rows[1:], rows[0]])

    def of_the_first(rows: Sequence[States]) -> States:
        joined = together(rows)
        for layer in joined.layers:
            for *_, state in layer.tensors():
                state[1:] = state[:1]
        return joined

    faults = {
        "not sent": mock.patch.object(StateLayer, "read", read_nothing),
        "of another row": mock.patch.object(States, "together", in_other_order),
        "of the first row": mock.patch.object(States, "together", of_the_first),
    }
    with faults[fault]:
        return serve(ranks, load)


def _serve(engine: Engine, load: Load, served: Served) -> None:
    estimate = TimeEstimate()
    # A second per token beyond what is short, so that lengths alone decide.
    estimate.alone.learn([100], 100.0 * load.limits.itl_s / (load.short + 0.5))
    if load.chain_token_s:
        estimate.chain.learn([100], 100.0 * load.chain_token_s)
    scheduler = Scheduler(engine, load.limits, estimate)
    requests: list[Request] = []
    later = dict[int, list[int]]()
    for number, other in load.after.items():
        later.setdefault(other, []).append(number)

    def submitting(number: int) -> Callable[[], object]:
        return lambda: [scheduler.submit(requests[other]) for other in later[number]]

    def cancelling(number: int) -> Callable[[], object]:
        return lambda: scheduler.cancel(requests[number])

    for number, (ids, options) in enumerate(zip(load.prompts, load.options, strict=True)):
        when: dict[int, Callable[[], object]] = {}
        if number in later:
            when[2] = submitting(number)
        if load.cancel.get(number):
            when[load.cancel[number]] = cancelling(number)
        listener = Kept(load.num_answers, when)
        if load.cancel.get(number) == 0:
            listener.when_started = cancelling(number)
        rows = [replace(options, seed=options.seed + row) for row in range(load.num_answers)]
        prompts, scores = [ids] * load.num_answers, load.scores.get(number)
        requests.append(Request(prompts=prompts, options=rows, listener=listener, scores=scores))
    kept = [request.listener for request in requests]
    tell = scheduler._tell

    def noted(item: Item, receivers: Sequence[int] | None = None) -> None:
        served.items.append(item)
        tell(item, receivers)

    scheduler._tell = noted  # type: ignore[method-assign]
    for times in (estimate.alone, estimate.chain):
        times.learn = lambda *_: None  # type: ignore[method-assign]
    for number, request in enumerate(requests):
        if number not in load.after:
            scheduler.submit(request)
    waits = threading.Thread(target=_drain_at_the_end, args=(scheduler, kept), daemon=True)
    waits.start()
    scheduler.run()
    served.tokens = [tokens for each in kept for tokens in each.rows]
    served.heard = [each.heard for each in kept]
    served.state = scheduler.state()
    served.cached = [request.cached_tokens[0] for request in requests]
    served.scores = [request.prompt_scores for request in requests]


def _drain_at_the_end(scheduler: Scheduler, listeners: list[Kept]) -> None:
    while not all(each.is_over for each in listeners):
        time.sleep(0.005)
    scheduler.drain()


@contextmanager
def noting(served: Served) -> Iterator[None]:
    """While it is open, what is done inside prefills on this rank is noted."""
    run, do, encode = Executor.run, Executor._do, reuse.encode_segment

    def noted_run(self: Executor, wait: Any) -> None:
        run(self, wait)
        served.left_bytes = self.live.num_bytes

    def noted_do(self: Executor, choice: NextAction) -> None:
        if choice in (NextAction.step, NextAction.item):
            served.inside.append(choice.name)
        do(self, choice)

    def noted_encode(model: Model, segment: Segment, *rest: Any) -> list[Tensor]:
        served.encoded.append(segment.name)
        return encode(model, segment, *rest)

    with (
        mock.patch.object(Executor, "run", noted_run),
        mock.patch.object(Executor, "_do", noted_do),
        mock.patch.object(reuse, "encode_segment", noted_encode),
    ):
        yield


@contextmanager
def awaiting(has_come: Callable[[Sequence[Item]], bool] | None) -> Iterator[None]:
    """While it is open, this rank decodes as `Load.awaits` says."""
    if has_come is None:
        yield
        return
    told: list[Item] = []
    put, step, steps = Inbox.put, Executor._step, count()

    def noted_put(self: Inbox, item: Item) -> None:
        put(self, item)
        told.append(item)

    def slow_step(self: Executor) -> None:
        if next(steps) >= 100 and not has_come(told):
            time.sleep(0.05)
        step(self)

    with mock.patch.object(Inbox, "put", noted_put), mock.patch.object(Executor, "_step", slow_step):
        yield
