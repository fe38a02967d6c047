"""One rank's part in a server, step by step: what is done inside a prefill, and in which order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launch.server.serving import _warm_up
from policies.pyramidinfer import PyramidInfer
from runahead import Engine, GenerationOptions, PrefillOptions
from runahead.config import Device, Guide, RanksOptions
from runahead.decoding.sampling import NOT_NUMBERS
from runahead.ranks.ranks import Ranks
from runahead.reuse import reuse
from runahead.serving.executor import Executor, NextAction
from runahead.serving.items import Alive, Cancel, Check, End, Inbox, Item, Part, PrefillItem, Progress, Stop, Tokens
from runahead.serving.limits import QueueLimits
from runahead.thinning.rank_policies import RankPolicies
from tests.families import prompt, throughout
from tests.prompt_cache.serving import random_prompt, random_segments
from tests.prompt_cache.test_blend import blended_prompt
from tests.ranks.tasks import tiny_model

GREEDY = GenerationOptions(max_new_tokens=50, ignore_eos=True)
NUM_LAYERS = 3


class Rank:
    """A rank alone with its executor; `reports` is what it tells."""

    def __init__(
        self,
        itl_s: float,
        decode_ranks: int = 0,
        chunk_tokens: int | None = None,
        policies: RankPolicies | None = None,
    ) -> None:
        ranks = Ranks.start(RanksOptions(device=Device.cpu))
        prefill = PrefillOptions(chunk_tokens=chunk_tokens)
        engine = Engine(tiny_model("llama"), ranks, prefill=prefill, policies=policies)
        self.inbox, self.reports = Inbox(), list[Any]()
        limits = QueueLimits(itl_s=itl_s, decode_ranks=decode_ranks)
        self.executor = Executor(engine, self.inbox, self.reports.append, limits, asked_to_end=lambda: True)

    def carry_out(self, item: Item) -> list[Any]:
        """Reports while an item is carried out."""
        self.reports.clear()
        with throughout(self.executor._engine.model.dtype):
            self.executor.carry_out(item)
        return list(self.reports)


def item(number: int, length: int, *, is_short: bool = False, num_new: int = 50) -> PrefillItem:
    options = [replace(GREEDY, max_new_tokens=num_new)]
    prompts = [prompt(length, seed=number)]
    return PrefillItem(
        number=number,
        prompts=prompts,
        options=options,
        boundaries=(0, length),
        is_short=is_short,
        record_timeline=not is_short,
    )


def rows(reports: list[Any]) -> list[int]:
    """Numbers of the items whose rows got a token, in order."""
    return [number for each in reports if isinstance(each, Tokens) for number, _ in each.tokens]


def test_a_step_is_decoded_after_every_layer_if_it_is_due():
    rank = Rank(itl_s=1e-9)
    assert rows(rank.carry_out(item(0, 20))) == [0]
    reports = rank.carry_out(item(1, 30))
    assert rows(reports) == [0] * NUM_LAYERS + [1]
    part = reports[-1]
    assert isinstance(part, Part) and not part.is_alone
    assert part.prefill_s > 0


NARROWING = RankPolicies.everywhere([PyramidInfer(mean_keep=0.5, min_tokens=4)])


def blended(number: int) -> PrefillItem:
    """A prompt some of whose segments' tokens are computed again, fewer in each layer."""
    asked = blended_prompt(number, share=0.4)
    return PrefillItem(number=number, prompts=[asked], options=[GREEDY], boundaries=(0, len(asked)))


@pytest.mark.parametrize(
    ("policies", "chunk_tokens", "later"),
    [(NARROWING, None, item(1, 40)), (NARROWING, 16, item(1, 40)), (None, None, blended(1))],
    ids=["narrowed", "narrowed in pieces", "blended"],
)
def test_rows_and_a_prefill_whose_layers_compute_fewer_tokens_do_not_meet(policies, chunk_tokens, later):
    def tokens(itl_s: float) -> tuple[list[int], dict[tuple[int, int], list[int]]]:
        rank, of_rows = Rank(itl_s=itl_s, policies=policies, chunk_tokens=chunk_tokens), dict[Any, list[int]]()
        first, second = rank.carry_out(item(0, 20)), rank.carry_out(later)
        rank.reports.clear()
        with throughout(torch.float64):
            rank.executor.decode_all()
        for each in [*first, *second, *rank.reports]:
            for row, token in each.tokens.items() if isinstance(each, Tokens) else ():
                of_rows.setdefault(row, []).append(token)
        return rows(second), of_rows

    (order, found), (_, expected) = tokens(1e-9), tokens(1e3)
    assert order.count(0) >= NUM_LAYERS and order[-1] == 1
    assert found == expected and {len(each) for each in found.values()} == {50}


def test_no_step_is_decoded_before_it_is_due():
    rank = Rank(itl_s=1e3)
    [part] = [each for each in rank.carry_out(item(0, 20)) if isinstance(each, Part)]
    assert part.is_alone
    reports = rank.carry_out(item(1, 30))
    assert rows(reports) == [1] and not reports[-1].is_alone


def test_a_short_prompt_is_computed_inside_a_long_one():
    rank = Rank(itl_s=1e3)
    rank.inbox.put(item(1, 5, is_short=True))
    rank.inbox.put(item(2, 5, is_short=True))
    reports = rank.carry_out(item(0, 40))
    assert rows(reports) == [1, 2, 0]
    assert [each.number for each in reports if isinstance(each, Part)] == [1, 2, 0]
    assert not rank.inbox.has_item()


def test_a_short_prompt_overtakes_a_long_one_that_was_told_before_it():
    rank = Rank(itl_s=1e3)
    rank.inbox.put(item(1, 30))
    rank.inbox.put(item(2, 5, is_short=True))
    assert rows(rank.carry_out(item(0, 40))) == [2, 0]
    assert rank.inbox.take() == item(1, 30) and not rank.inbox.has_item()


def test_a_short_prompt_is_not_interrupted_by_another_one_but_by_a_look():
    rank = Rank(itl_s=1e3)
    after_layer = rank.executor.after_layer

    def arrive(done: int, of: int) -> None:
        """While the first short prompt is computed, another one and a look arrive."""
        if len(rank.executor._under_way) == 2 and not rank.reports:
            rank.inbox.put(item(2, 5, is_short=True))
            rank.inbox.put(Check())
        after_layer(done, of)

    rank.executor.after_layer = arrive
    rank.inbox.put(item(1, 5, is_short=True))
    reports = rank.carry_out(item(0, 40))
    assert [each.number for each in reports if isinstance(each, Part)] == [1, 2, 0]
    assert reports[0] == Alive(0, True)


def test_a_short_prompt_does_not_encode_the_segment_that_is_being_encoded(monkeypatch):
    encoded, encode = list[str](), reuse.encode_segment

    def noted(model: Any, segment: Any, *rest: Any) -> Any:
        encoded.append(segment.name)
        return encode(model, segment, *rest)

    monkeypatch.setattr(reuse, "encode_segment", noted)
    asked = random_prompt(random.Random(9), random_segments(random.Random(9)))
    long, short = (
        PrefillItem(number=number, prompts=[asked], options=[GREEDY], boundaries=(0, len(asked)), is_short=number == 1)
        for number in (0, 1)
    )
    rank = Rank(itl_s=1e3)
    rank.inbox.put(short)
    assert rows(rank.carry_out(long)) == [1, 0]
    assert sorted(encoded) == sorted(use.segment.name for use in asked.uses) != []


def test_a_row_that_is_cancelled_leaves_inside_a_prefill():
    rank = Rank(itl_s=1e-9)
    rank.carry_out(item(0, 20))
    rank.carry_out(item(1, 20))
    rank.inbox.put(Cancel([(0, 0), (7, 0)]))
    reports = rank.carry_out(item(2, 20))
    assert reports[0] == Tokens(tokens={}, ended={(0, 0): "cancelled"})
    assert rows(reports) == [1] * NUM_LAYERS + [2]


def test_a_prefill_that_nobody_wants_stops_after_a_layer():
    rank = Rank(itl_s=1e3)
    rank.inbox.put(item(0, 40))
    rank.inbox.put(Stop(0))
    rank.inbox.put(Stop(7))  # which is over
    reports = rank.carry_out(rank.inbox.take())
    assert reports[0] == Tokens(tokens={}, ended={(0, 0): "cancelled"})
    assert reports[1].is_cancelled and not rank.executor.live
    assert rows(rank.carry_out(item(7, 20))) == [7]


def test_a_stage_that_only_decodes_does_so_in_every_wait():
    rank = Rank(itl_s=1e3, decode_ranks=1)
    rank.carry_out(item(0, 20))
    rank.reports.clear()
    rank.executor._step_s = 1e3  # which another stage would wait first
    with throughout(rank.executor._engine.model.dtype):
        rank.executor.until(lambda block_s: len(rows(rank.reports)) >= 1, "a prefix", [])
    assert rows(rank.reports) == [0]


@pytest.mark.parametrize(("itl_s", "num_steps"), [(1e-9, 4), (1e3, 4)])
def test_rows_are_decoded_while_a_prefix_has_not_arrived(itl_s, num_steps):
    rank = Rank(itl_s=itl_s)
    rank.carry_out(item(0, 20))
    rank.reports.clear()
    with throughout(rank.executor._engine.model.dtype):
        rank.executor.until(lambda block_s: len(rows(rank.reports)) >= num_steps, "a prefix", [])
        assert rows(rank.reports) == [0] * num_steps
        rank.reports.clear()
        rank.executor.until(lambda block_s: True, "a prefix", [])  # which is there already
    assert rows(rank.reports) == []


def test_a_short_prompt_is_computed_while_a_prefix_has_not_arrived():
    rank = Rank(itl_s=1e3)
    with throughout(rank.executor._engine.model.dtype):
        rank.executor._under_way = [item(0, 40)]  # inside a prefill, without rows
        rank.inbox.put(item(1, 30))
        rank.inbox.put(item(2, 5, is_short=True))
        rank.executor.until(lambda block_s: rows(rank.reports) == [2], "a prefix", [])
    assert rank.inbox.take() == item(1, 30)


def test_items_are_carried_out_before_the_rows_go_on():
    rank = Rank(itl_s=1e3)
    waited: list[bool] = []

    def wait(ready: Callable[[float], bool]) -> None:
        waited.append(ready(0.0))

    for each in (item(0, 9, num_new=3), Check(), item(1, 9, num_new=2)):
        rank.inbox.put(each)
    told: list[Any] = []

    def report(message: Any) -> None:
        told.append(message)
        if isinstance(message, Tokens) and message.ended.keys() >= {(0, 0)}:
            rank.inbox.put(End())

    rank.executor._report = report
    with throughout(rank.executor._engine.model.dtype):
        rank.executor.run(wait)
    assert rows(told) == [0, 1, 0, 1, 0]
    assert [each for each in told if isinstance(each, Alive)] == [Alive(0, True)]
    assert all(waited) and rank.executor.live.num_bytes == 0


def progress(reports: list[Any]) -> list[tuple[int, int, int]]:
    return [(each.number, each.layers, each.of) for each in reports if isinstance(each, Progress)]


def test_a_long_prefill_is_told_by_its_layers_and_a_short_one_is_not(monkeypatch):
    monkeypatch.setattr("runahead.serving.executor.PROGRESS_S", 0.0)
    monkeypatch.setattr("runahead.prefill.stage_run.LEAST_ASIDE_S", 0.0)
    rank = Rank(itl_s=1e3)
    rank.inbox.put(item(1, 5, is_short=True))
    reports = rank.carry_out(item(0, 20))
    assert progress(reports) == [(0, 1, NUM_LAYERS), (0, 2, NUM_LAYERS), (0, 3, NUM_LAYERS)]
    short, long = (each for each in reports if isinstance(each, Part))
    assert short.spans == [] and short.report.chunk_tokens == 5
    assert [layer for layer, _ in groupby(span.layer for span in long.spans)] == [0, 1, 2, None]
    in_order = sorted(long.spans, key=lambda span: span.start_s)
    assert all(before.end_s == after.start_s for before, after in pairwise(in_order))
    waits = [span.end_s - span.start_s for span in long.spans if span.kind == "wait"]
    assert max(waits) >= short.prefill_s
    assert long.live_bytes > 0


def test_a_rank_tells_its_times_on_another_clock():
    rank = Rank(itl_s=1e3)
    rank.executor._clock_offset_s = 1e6
    part = rank.carry_out(item(0, 20))[-1]
    began_s = part.spans[0].start_s
    assert 0 <= time.perf_counter() + 1e6 - began_s < 300


def test_a_prefill_in_pieces_is_told_by_the_layers_of_all_pieces(monkeypatch):
    monkeypatch.setattr("runahead.serving.executor.PROGRESS_S", 0.0)
    reports = Rank(itl_s=1e3, chunk_tokens=8).carry_out(item(0, 20))
    num_layers = 3 * NUM_LAYERS
    assert progress(reports) == [(0, done + 1, num_layers) for done in range(num_layers)]


def test_reports_from_inside_a_prefill_are_rare(monkeypatch):
    monkeypatch.setattr("runahead.serving.executor.PROGRESS_S", 1e3)
    assert progress(Rank(itl_s=1e3).carry_out(item(0, 20))) == []


def test_an_error_ends_the_run():
    rank = Rank(itl_s=1e3)
    rank.inbox.fail(OSError("the HTTP server has ended"))
    with pytest.raises(OSError, match="has ended"):
        rank.executor.run(lambda ready: None)


class Anything:
    """A constraint that allows every token."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def allowed(self, device: torch.device) -> torch.Tensor:
        return torch.ones(self._vocab_size, dtype=torch.bool, device=device)

    def add(self, token: int) -> None:
        pass


def test_rows_are_decoded_while_a_json_schema_is_compiled(monkeypatch):
    rank, calls = Rank(itl_s=1e3), list[str]()
    model = rank.executor._engine.model

    class Slow:
        """Compiles until the other row has four tokens more."""

        def prepare(self, guide: Guide) -> None:
            calls.append(f"prepare {guide.text}")

        def is_prepared(self, guide: Guide, block_s: float) -> bool:
            return len(rows(rank.reports)) == 4

        def constraint(self, guide: Guide) -> Anything:
            calls.append(f"constraint {guide.text}")
            return Anything(model.vocab_size)

    monkeypatch.setitem(vars(model), "grammars", Slow())
    rank.carry_out(item(0, 20))
    formatted = item(1, 30)
    formatted.options[0] = replace(formatted.options[0], json_schema="{}", ignore_eos=False)
    assert rows(rank.carry_out(formatted)) == [0, 0, 0, 0, 1]
    assert calls == ["prepare {}", "constraint {}"]


def test_a_row_whose_logits_are_no_numbers_is_reported_and_the_others_go_on(monkeypatch):
    rank = Rank(itl_s=1e3)
    model = rank.executor._engine.model
    rank.carry_out(item(0, 20))
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *args, **more: forward(*args, **more) * torch.nan)
    first, part = rank.carry_out(item(1, 20))
    assert first == Tokens(tokens={}, ended={(1, 0): NOT_NUMBERS}) and isinstance(part, Part)
    monkeypatch.setattr(model, "forward", forward)
    rank.reports.clear()
    with throughout(model.dtype):
        rank.executor.decode_all()
    assert rows(rank.reports) == [0] * 49


def test_one_rank_warms_up_a_length_once_for_all_stages_and_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: a first time is not counted. Of one stage both are the same prefill, so what is predicted is, too."""
    lengths: list[int] = []
    prefill = Executor.carry_out

    def carry_out(self: Executor, item: Any) -> None:
        lengths.append(len(item.prompts[0]))
        prefill(self, item)

    monkeypatch.setattr(Executor, "carry_out", carry_out)
    engine = Engine(tiny_model("llama"), Ranks.start(RanksOptions(device=Device.cpu)))
    with throughout(engine.model.dtype):
        estimate = _warm_up(engine)
    assert lengths == [8, 8, 64, 64, 510, 510]  # the model has 512 positions
    assert 0 < estimate.chain.seconds([64]) <= estimate.chain.seconds([512])
    assert 0 < estimate.alone.seconds([64]) <= estimate.alone.seconds([512])


@pytest.mark.parametrize("cancelled", [[], [(3, 1), (4, 0)]], ids=["none", "two rows"])
def test_shares_hear_a_decision_from_the_hosts_of_their_stage(
    cancelled: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each layer of a prefill: on a GPU it may not wait until that has computed what is queued before."""
    told, waits, left = list[torch.Tensor](), list[int](), list[list[tuple[int, int]]]()
    shares = SimpleNamespace(run=lambda tell: tell(), hosts="hosts")

    def broadcast(numbers: torch.Tensor, *, group: object, group_src: int) -> None:
        assert group == "hosts" and group_src == 0 and numbers.is_cpu
        if executor._leads:
            told.append(numbers.clone())
        else:
            numbers.copy_(told.pop(0))

    monkeypatch.setattr("runahead.serving.executor.dist.broadcast", broadcast)
    for leads in (True, False):
        executor: Any = SimpleNamespace(
            _leads=leads,
            _inbox=SimpleNamespace(take_cancelled=lambda: cancelled),
            _engine=SimpleNamespace(model=SimpleNamespace(shares=shares)),
            _await_device=lambda: waits.append(1),
            live=SimpleNamespace(cancel=lambda rows: left.append(rows)),
        )
        assert Executor._decide(executor, lambda: NextAction.step) is NextAction.step
    assert left == [cancelled, cancelled] and len(waits) == (2 if cancelled else 0) and not told
