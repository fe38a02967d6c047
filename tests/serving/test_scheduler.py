"""The scheduler on live ranks: the same answers alone and among others, order of events, cancels, memory; times."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.adakv import AdaKV
from policies.base import Policy
from policies.snapkv import SnapKV
from policies.streaming_llm import StreamingLLM
from runahead import ContextPartition, GenerationOptions, PrefillOptions
from runahead.config import Carrier, DecodeName, Exchange, PrefillName, Speculative, Transfer
from runahead.serving.arrangement import with_slower_last
from runahead.serving.estimate import HALF_LIFE_S, PrefillTimes, Slowness, TimeEstimate
from runahead.serving.items import Cancel, Check, End, Generate, PrefillItem
from runahead.serving.limits import QueueLimits
from runahead.serving.queue import RequestRefused
from runahead.serving.request import Request
from runahead.serving.scheduler import Scheduler
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import ROPE_THRESHOLD, oracle_tokens, prompt
from tests.ranks.tasks import generate
from tests.serving import rank_tasks
from tests.serving.fakes import FakeEngine
from tests.serving.rank_tasks import Load, Served

GREEDY = GenerationOptions(max_new_tokens=9, ignore_eos=True)
KINDS = [
    GREEDY,
    replace(GREEDY, max_new_tokens=4, do_sample=True, temperature=2.0, seed=7),
    replace(GREEDY, max_new_tokens=12, repetition_penalty=3.0),
    replace(GREEDY, max_new_tokens=7, do_sample=True, top_k=9, seed=3),
]
LENGTHS = [40, 9, 31, 55, 3, 36, 22, 1, 18, 64]
PROMPTS = [prompt(length, seed=number) for number, length in enumerate(LENGTHS)]
OPTIONS = [KINDS[number % len(KINDS)] for number in range(len(PROMPTS))]
LATE = {3: 0, 4: 0, 5: 2, 6: 3, 7: 3, 8: 5, 9: 8}
"""Requests that come while others are decoded: after the second token of which one."""

MANY = Load(prompts=PROMPTS, options=OPTIONS, limits=QueueLimits(batch=6, itl_s=1e-6), after=LATE, short=20)


def alone(pools: RankPools, family: str = rank_tasks.FAMILY) -> list[list[int]]:
    """Tokens of each prompt, generated alone by one rank."""
    return [
        pools.run(1, generate, family, [ids], options)[0][0].generations[0].new_token_ids
        for ids, options in zip(PROMPTS, OPTIONS, strict=True)
    ]


def prefills(served: Served) -> list[PrefillItem]:
    return [item for item in served.items if isinstance(item, PrefillItem)]


@pytest.mark.parametrize(
    ("size", "load"),
    [
        (1, MANY),
        (2, MANY),
        (3, replace(MANY, family="gemma2")),
        (2, replace(MANY, num_shares=2)),
        (2, replace(MANY, limits=replace(MANY.limits, itl_s=1e3))),
        (3, replace(MANY, limits=replace(MANY.limits, decode_ranks=1))),
        (2, replace(MANY, prefill=PrefillOptions(name=PrefillName.zigzag))),
        (2, replace(MANY, prefill=PrefillOptions(name=PrefillName.single))),
        (2, replace(MANY, prefill=PrefillOptions(carrier=Carrier.copy))),
        (3, replace(MANY, prefill=PrefillOptions(carrier=Carrier.copy, transfer=Transfer.direct), short=0)),
    ],
    ids=[
        "1 rank",
        "2 ranks",
        "3 ranks",
        "shares",
        "no interruptions",
        "a stage that decodes",
        "zigzag",
        "single",
        "copies",
        "direct copies",
    ],
)
@pytest.mark.sampled(3)
def test_an_answer_is_the_same_alone_and_among_others(rank_pools: RankPools, size: int, load: Load) -> None:
    by_rank = rank_pools.run(size, rank_tasks.serve, load)
    if load.num_shares == 1:
        assert by_rank[0].tokens == alone(rank_pools, load.family)
    else:  # of another size of the family
        one_by_one = replace(load, limits=replace(load.limits, batch=1))
        assert by_rank[0].tokens == rank_pools.run(size, rank_tasks.serve, one_by_one)[0].tokens
    assert [len(tokens) for tokens in by_rank[0].tokens] == [each.max_new_tokens for each in OPTIONS]
    assert all((heard[0], heard[-1]) == ("start", "end") for heard in by_rank[0].heard)
    assert [each.left_bytes for each in by_rank] == [0] * size
    assert isinstance(by_rank[0].items[-1], End)


def test_an_answer_is_the_same_among_thirty_others(rank_pools: RankPools) -> None:
    load = Load(
        prompts=[*PROMPTS * 3, PROMPTS[0]],
        options=[*OPTIONS * 3, OPTIONS[0]],
        limits=QueueLimits(batch=31, itl_s=1e-3),
        after={number: number % 10 for number in range(10, 31)},
        short=20,
    )
    expected = alone(rank_pools)
    assert rank_pools.run(2, rank_tasks.serve, load)[0].tokens == [*expected * 3, expected[0]]


@pytest.mark.slow
def test_four_ranks_in_stages_of_two_serve_like_one_after_another(rank_pools: RankPools) -> None:
    load = replace(MANY, num_shares=2)
    together = rank_pools.run(4, rank_tasks.serve, load)
    one_by_one = rank_pools.run(4, rank_tasks.serve, replace(load, limits=replace(load.limits, batch=1)))
    assert together[0].tokens == one_by_one[0].tokens
    assert together[2].inside == together[3].inside != []
    assert together[0].inside == together[1].inside == []


def test_one_at_a_time_is_a_limit_of_one(rank_pools: RankPools) -> None:
    load = Load(prompts=PROMPTS[:4], options=OPTIONS[:4], limits=QueueLimits(batch=1))
    served = rank_pools.run(2, rank_tasks.serve, load)[0]
    assert [len(item.prompts) for item in prefills(served)] == [1] * 4
    assert served.tokens == alone(rank_pools)[:4]


def test_rows_are_decoded_between_the_layers_of_a_prefill(rank_pools: RankPools) -> None:
    long = replace(GREEDY, max_new_tokens=450)
    prompts, limits = [PROMPTS[0], PROMPTS[3]], QueueLimits(itl_s=1e-6)
    awaits = rank_tasks.two_prefills
    load = Load(prompts=prompts, options=[long, GREEDY], limits=limits, after={1: 0}, awaits=awaits)
    for size in (1, 2):
        by_rank = rank_pools.run(size, rank_tasks.serve, load)
        assert by_rank[-1].inside.count("step") >= 3  # a step per layer, at least
        never = replace(load, limits=QueueLimits(itl_s=1e3))
        served = rank_pools.run(size, rank_tasks.serve, never)
        if size == 1:  # on several ranks it also decodes while it waits for keys and values
            assert served[0].inside == []
        assert served[0].tokens == by_rank[0].tokens


def test_short_prompts_go_to_the_last_stage_and_long_ones_to_all(rank_pools: RankPools) -> None:
    limits = QueueLimits(itl_s=1e3)
    load = Load(prompts=PROMPTS[3:5], options=OPTIONS[3:5], limits=limits, short=10)
    by_rank = rank_pools.run(2, rank_tasks.serve, load)
    short, long = sorted(prefills(by_rank[0]), key=lambda item: len(item.prompts[0]))
    assert (short.is_short, short.boundaries) == (True, (0, 0, 3))
    assert not long.is_short and 0 < long.boundaries[1] < 55
    assert by_rank[0].tokens == alone(rank_pools)[3:5]


@pytest.mark.parametrize("prefill", [PrefillName.kv_runahead, PrefillName.zigzag])
def test_ranks_tell_when_they_were_in_which_layer(rank_pools: RankPools, prefill: PrefillName) -> None:
    load = Load(
        prompts=PROMPTS[8:], options=OPTIONS[8:], limits=QueueLimits(batch=1), prefill=PrefillOptions(name=prefill)
    )
    state = rank_pools.run(2, rank_tasks.serve, load)[0].state
    assert state is not None and state.last is not None and state.tells_layers
    assert state.last.lengths == [64] and state.prefills == [] and state.rows == []
    parts = [state.last.parts[rank] for rank in range(2)]
    assert sum(part.report.chunk_tokens for part in parts if part.report is not None) == 64
    layers = [[span for span in part.spans if span.kind == "compute" and span.layer is not None] for part in parts]
    begin, end = ({span.layer: span for span in spans} for spans in (reversed(layers[0]), layers[1]))
    assert begin.keys() == end.keys() == set(range(3))
    for layer in range(3):  # the second rank needs keys and values of the first
        assert end[layer].end_s > begin[layer].start_s


def test_sharded_decoding_does_not_tell_its_layers(rank_pools: RankPools) -> None:
    load = Load(prompts=PROMPTS[8:], options=OPTIONS[8:], limits=QueueLimits(), decode=DecodeName.sharded)
    state = rank_pools.run(2, rank_tasks.serve, load)[0].state
    assert state is not None and not state.tells_layers and state.last is None


@pytest.mark.parametrize("tree_bytes", [0, 1 << 40], ids=["", "with a tree"])
def test_requests_that_are_cancelled_end_soon_and_change_no_others(rank_pools: RankPools, tree_bytes: int) -> None:
    endless = [replace(each, max_new_tokens=450) for each in OPTIONS[:4]]
    options = [endless[0], *OPTIONS[1:3], endless[3], *OPTIONS[4:]]
    late = LATE | {6: 4, 7: 4}
    awaits = rank_tasks.two_cancellations
    load = replace(MANY, options=options, cancel={0: 30, 3: 0}, after=late, tree_bytes=tree_bytes, awaits=awaits)
    served = rank_pools.run(2, rank_tasks.serve, load)
    expected = alone(rank_pools)
    for number, tokens in enumerate(served[0].tokens):
        if number not in (0, 3):
            assert tokens == expected[number]
    assert served[0].tokens[0][:9] == expected[0] and 30 <= len(served[0].tokens[0]) < 450
    assert len(served[0].tokens[3]) < 450
    assert any(isinstance(item, Cancel) for item in served[0].items)
    assert served[1].left_bytes == 0


@pytest.mark.parametrize(
    ("size", "prefill", "knows"),
    [
        (1, PrefillOptions(), [0]),
        (2, PrefillOptions(), [0]),
        (2, PrefillOptions(), [1]),
        (2, PrefillOptions(transfer=Transfer.direct), [0, 1]),
        (3, PrefillOptions(), [1]),
        (3, PrefillOptions(), [0, 2]),
        (3, PrefillOptions(transfer=Transfer.direct), [0, 1]),
        (3, PrefillOptions(carrier=Carrier.copy), [0, 1]),
        (3, PrefillOptions(name=PrefillName.zigzag), [1]),
        (3, PrefillOptions(name=PrefillName.tsp), [0, 2]),
        (1, PrefillOptions(chunk_tokens=7), [0]),
    ],
)
@pytest.mark.sampled(3)
def test_no_rank_waits_for_one_that_was_told_to_stop(
    rank_pools: RankPools, size: int, prefill: PrefillOptions, knows: list[int]
) -> None:
    by_rank = rank_pools.run(size, rank_tasks.stop, prefill, None, [PROMPTS[9], PROMPTS[0]], knows)
    expected = alone(rank_pools)[0][:5]
    tokens = [tokens for tokens, _, _ in by_rank if tokens]
    assert tokens == [expected]
    for rank, (_, stopped, left_bytes) in enumerate(by_rank):
        assert stopped == [rank in knows, False] and left_bytes == 0


@pytest.mark.parametrize(
    "prefill",
    [
        PrefillOptions(),
        PrefillOptions(carrier=Carrier.copy),
        PrefillOptions(name=PrefillName.tsp),
        *(PrefillOptions(name=PrefillName.zigzag, exchange=exchange) for exchange in Exchange),
    ],
    ids=lambda prefill: " ".join(each.name for each in (prefill.name, prefill.carrier, prefill.exchange)),
)
def test_rows_are_decoded_in_every_wait_for_another_rank(
    rank_pools: RankPools, prefill: PrefillOptions, tmp_path: Path
) -> None:
    _, num_steps = rank_pools.run(2, rank_tasks.steps_in_a_wait, prefill, [PROMPTS[0], PROMPTS[2]], str(tmp_path))
    assert num_steps >= rank_tasks.NUM_LAYERS


def test_a_prefill_under_policies_stops_too(rank_pools: RankPools) -> None:
    policies = RankPolicies.everywhere([StreamingLLM(budget=16, sinks=2)])
    for knows in ([0], [1]):
        by_rank = rank_pools.run(2, rank_tasks.stop, PrefillOptions(), policies, [PROMPTS[9], PROMPTS[0]], knows)
        assert [stopped for _, stopped, _ in by_rank] == [[rank in knows, False] for rank in range(2)]
        assert len(by_rank[1][0]) == 5


@pytest.mark.parametrize(
    ("size", "policy"),
    [(2, StreamingLLM(budget=16, sinks=2)), (1, AdaKV(scorer=SnapKV(budget=16, window=4)))],
    ids=["streaming_llm", "adakv"],
)
def test_policies_decode_row_by_row(rank_pools: RankPools, size: int, policy: Policy) -> None:
    """On several ranks AdaKV's choice depends on where they begin, and a rank that decodes others gets less."""
    load = replace(MANY, policies=RankPolicies.everywhere([policy]), prompts=PROMPTS, short=0)
    together = rank_pools.run(size, rank_tasks.serve, load)[0]
    one_by_one = rank_pools.run(size, rank_tasks.serve, replace(load, limits=QueueLimits(batch=1)))[0]
    assert together.tokens == one_by_one.tokens


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (PrefillName.kv_runahead, DecodeName.last),
        (PrefillName.kv_runahead, DecodeName.sharded),
        (PrefillName.zigzag, DecodeName.last),
    ],
)
def test_answers_cross_the_longrope_threshold(rank_pools: RankPools, prefill: PrefillName, decode: DecodeName) -> None:
    """Rows that were computed at once do so at different steps, and one ends before."""
    lengths = [ROPE_THRESHOLD - 8, ROPE_THRESHOLD - 3, ROPE_THRESHOLD, ROPE_THRESHOLD + 1]
    prompts = [prompt(length, seed=length) for length in lengths]
    options = [replace(GREEDY, max_new_tokens=number) for number in (14, 3, 9, 12)]
    load = Load(
        prompts=prompts,
        options=options,
        limits=QueueLimits(),
        prefill=PrefillOptions(name=prefill),
        decode=decode,
        family="phi3_longrope",
    )
    served = rank_pools.run(2, rank_tasks.serve, load)[0]
    assert any(len(item.prompts) == 4 for item in served.items if isinstance(item, PrefillItem | Generate))
    for ids, each, tokens in zip(prompts, options, served.tokens, strict=True):
        assert tokens == oracle_tokens("phi3_longrope", tuple(ids), each.max_new_tokens)


def test_sharded_decoding_is_an_item_of_its_own(rank_pools: RankPools) -> None:
    load = replace(MANY, decode=DecodeName.sharded, cancel={2: 5})
    served = rank_pools.run(2, rank_tasks.serve, load)[0]
    expected = alone(rank_pools)
    assert [ids for number, ids in enumerate(served.tokens) if number != 2] == [*expected[:2], *expected[3:]]
    assert 5 <= len(served.tokens[2]) <= 12
    assert {type(item) for item in served.items} - {Check, Cancel} == {Generate, End}


@pytest.mark.parametrize("size", [1, 2])
def test_speculative_prefills_are_items_of_their_own(rank_pools: RankPools, size: int) -> None:
    """Each row is answered as alone, after what the draft has chosen of its own prompt."""
    prefill = PrefillOptions(speculative=Speculative.layers, speculative_chunk=8)
    served = rank_pools.run(size, rank_tasks.serve, replace(MANY, prefill=prefill))[0]
    one_by_one = [
        rank_pools.run(1, generate, rank_tasks.FAMILY, [ids], options, None, prefill)[0][0]
        for ids, options in zip(PROMPTS, OPTIONS, strict=True)
    ]
    assert served.tokens == [batch.generations[0].new_token_ids for batch in one_by_one]
    kept = [batch.speculative.kept_tokens[0] for batch in one_by_one if batch.speculative is not None]
    assert kept == [16, 9, 15, 15, 3, 12, 14, 1, 10, 16]
    assert {type(item) for item in served.items} - {Check} == {Generate, End}


@given(
    ends=st.lists(st.integers(0, 500), min_size=1, max_size=5),
    speed=st.floats(0, 1),
    constants=st.sampled_from([(1.0, 0.0), (0.0, 1.0), (1.0, 0.01), (0.0, 0.0)]),
)
def test_a_slower_last_rank_gets_less_work_and_at_least_a_token(
    ends: list[int], speed: float, constants: tuple[float, float]
) -> None:
    partition = ContextPartition(boundaries=(0, *sorted(ends), 501))
    slower = with_slower_last(partition, speed, *constants)
    assert slower.num_tokens == 501 and slower.num_ranks == partition.num_ranks
    assert 1 <= slower.chunk_lengths[-1] <= max(1, partition.chunk_lengths[-1])
    if speed == 1:
        assert slower == partition


def test_the_last_ranks_work_is_its_share_of_speed() -> None:
    def works(partition: ContextPartition) -> list[float]:
        return [end + 1e-3 * end**2 - start - 1e-3 * start**2 for start, end in pairwise(partition.boundaries)]

    partition = ContextPartition(boundaries=(0, 5000, 8000, 10_000))
    before, after = works(partition), works(with_slower_last(partition, 0.25, 1.0, 1e-3))
    assert after[0] / before[0] == pytest.approx(after[1] / before[1], rel=1e-3)
    assert after[2] / before[2] == pytest.approx(0.25 * after[0] / before[0], rel=1e-3)
    assert with_slower_last(partition, 0.0, 1.0, 1e-3).chunk_lengths[2] == 1


@pytest.mark.parametrize(("size", "num_shares"), [(1, 1), (3, 1), (2, 2), (4, 2)])
def test_cancelled_rows_end_after_the_next_step_on_all_ranks(rank_pools: RankPools, size: int, num_shares: int) -> None:
    prompts = [prompt(40, seed=1), prompt(31, seed=2), prompt(36, seed=3)]
    by_rank = rank_pools.run(size, rank_tasks.cancel_rows, num_shares, prompts, OPTIONS[:3], {0: 3, 2: 5})
    assert all(outcome == by_rank[0] for outcome in by_rank)
    cancelled, whole = by_rank[0][:3], by_rank[0][3:]
    assert [reason for _, reason in cancelled] == ["cancelled", "length", "cancelled"]
    assert [len(ids) for ids, _ in cancelled] == [4, 4, 6]
    assert [len(ids) for ids, _ in whole] == [9, 4, 12]
    for (ids, _), (all_ids, _) in zip(cancelled, whole, strict=True):
        assert ids == all_ids[: len(ids)]


def test_a_client_is_checked_while_the_queue_does_not_change() -> None:
    """What is predicted to a refused one reads rows and texts that the scheduler's thread changes."""
    engine: Any = FakeEngine()
    scheduler, was_locked = Scheduler(engine, QueueLimits(max_per_client=1)), list[bool]()

    def predicted_s(request: Request | None = None) -> float:
        was_locked.append(scheduler._lock.locked())
        return 1.0

    with mock.patch.object(scheduler._queue, "predicted_ttft_s", predicted_s), pytest.raises(RequestRefused):
        scheduler.check_client("a", num_read=1)
    assert was_locked == [True] and not scheduler._lock.locked()


def test_the_estimate_finds_the_constants_of_what_it_has_seen() -> None:
    times, estimate = PrefillTimes(), TimeEstimate()
    assert times.seconds([1000]) == 0
    for length in (100, 3000, 700, 8000):
        times.learn([length, length], 2 * (2e-3 * length + 1e-6 * length**2))
        estimate.learn_step(0.05)
        estimate.learn_answer(11)
    estimate.learn_answer(101)
    assert times.constants == pytest.approx((2e-3, 1e-6), rel=1e-6)
    assert times.seconds([2000]) == pytest.approx(8.0)
    assert estimate.decoding_s(1000) == pytest.approx(19 * 0.05)
    assert estimate.decoding_s(5) == pytest.approx(4 * 0.05)


def idle_s(length: int) -> float:
    """Seconds of a prefill on an idle machine."""
    return 0.02 + 3e-3 * length + 1e-7 * length**2


def warmed_up() -> TimeEstimate:
    """An estimate of a server that began on an idle machine."""
    estimate = TimeEstimate()
    for times in (estimate.alone, estimate.chain):
        for length in (8, 64, 512, 4000):
            times.learn([length], idle_s(length))
    return estimate


@pytest.mark.parametrize("times", [0.1, 3.0, 10.0])
def test_the_estimate_learns_from_short_prompts_how_busy_the_machine_is(times: float) -> None:
    estimate = warmed_up()
    for _ in range(20):
        estimate.alone.learn_served([16], times * idle_s(16))
    assert estimate.alone.seconds([16]) == pytest.approx(times * idle_s(16), rel=0.05)
    for learned in (estimate.alone, estimate.chain):  # and long ones are known to take as much longer, by and large
        ratio = learned.seconds([4000]) / idle_s(4000)
        assert (ratio > times**0.8) if times > 1 else (ratio < times**0.8)
    for _ in range(20):
        estimate.alone.learn_served([16], idle_s(16))
    assert estimate.alone.seconds([16]) == pytest.approx(idle_s(16), rel=0.1)
    assert estimate.chain.seconds([4000]) == pytest.approx(idle_s(4000), rel=0.2)


def test_long_prompts_that_were_slow_are_expected_sooner_once_short_ones_are_fast_again() -> None:
    """Else a server with serve.max_ttft_s would refuse them for ever."""
    estimate = warmed_up()
    for _ in range(5):
        estimate.chain.learn_served([4000], 8 * idle_s(4000))
    assert estimate.chain.seconds([4000]) == pytest.approx(8 * idle_s(4000), rel=0.2)
    for _ in range(10):
        estimate.alone.learn_served([16], idle_s(16))
    assert estimate.chain.seconds([4000]) < 2 * idle_s(4000)


@pytest.mark.parametrize(("longest", "length"), [(64, 8000), (512, 16_000), (4000, 16_000)])
def test_a_first_long_prompt_that_was_slow_keeps_others_out_for_a_while_alone(longest: int, length: int) -> None:
    """It may have been the machine. Nothing is computed that could show it where such prompts are refused then."""
    now = 0.0
    times = PrefillTimes(Slowness(lambda: now))
    for each in (8, 64, 512, 4000):
        if each <= longest:
            times.learn([each], idle_s(each))
    times.learn_served([length], 20 * idle_s(length))
    told_s, later_s = times.seconds([length]), times.seconds([longest])
    assert 1.1 * idle_s(length) < told_s <= 20.01 * idle_s(length) and times.longest == length
    for _ in range(100):
        times.learn_served([16], idle_s(16))
    assert times.seconds([16]) == pytest.approx(idle_s(16), rel=0.01)
    assert times.seconds([longest]) == pytest.approx(later_s, rel=0.01) == pytest.approx(idle_s(longest), rel=0.01)
    assert times.seconds([length]) < 1.01 * told_s
    now = HALF_LIFE_S
    assert times.seconds([length]) < 1.1 * idle_s(length) and times.longest == longest


@pytest.mark.parametrize("times_slower", [20.0, 1.0])
def test_a_second_long_prompt_tells_whether_the_first_was_slow_for_its_length(times_slower: float) -> None:
    now = 0.0
    times = PrefillTimes(Slowness(lambda: now))
    for length in (8, 64):
        times.learn([length], idle_s(length))
    times.learn_served([8000], 20 * idle_s(8000))
    times.learn_served([8000], times_slower * idle_s(8000))
    assert times.seconds([8000]) == pytest.approx(times_slower * idle_s(8000), rel=0.15)
    now = 2 * HALF_LIFE_S
    if times_slower > 1:
        assert times.seconds([8000]) == pytest.approx(times_slower * idle_s(8000), rel=0.15)
    else:
        assert times.seconds([8000]) < 1.1 * idle_s(8000)


def test_slowness_is_forgotten_while_nothing_is_computed() -> None:
    now = 0.0
    slowness = Slowness(lambda: now)
    for _ in range(30):
        slowness.learn(9.0)
    assert slowness.factor == pytest.approx(9.0, rel=1e-3)
    now = HALF_LIFE_S
    assert slowness.factor == pytest.approx(3.0, rel=1e-3)
    slowness.learn(3.0)
    assert slowness.factor == pytest.approx(3.0, rel=1e-3)


def test_many_short_prompts_leave_the_time_of_long_ones_as_it_was_and_one_that_hung_leaves_all() -> None:
    estimate = warmed_up()
    for _ in range(200):
        estimate.alone.learn_served([10], idle_s(10))
    assert estimate.alone.seconds([4000]) == pytest.approx(idle_s(4000), rel=0.05)
    estimate.alone.learn_served([10], 100 * idle_s(10))
    assert estimate.alone.seconds([10]) < 2 * idle_s(10)
    for _ in range(5):
        estimate.alone.learn_served([10], idle_s(10))
    assert estimate.alone.seconds([10]) == pytest.approx(idle_s(10), rel=0.1)


def test_a_prompt_of_a_length_that_is_new_tells_of_the_length_and_not_of_the_machine() -> None:
    estimate = TimeEstimate()
    for length in (8, 64, 512):
        estimate.alone.learn([length], 0.003 * length)
    estimate.alone.learn_served([8000], 0.003 * 8000 + 1e-6 * 8000**2)
    assert estimate.alone.seconds([64]) == pytest.approx(0.003 * 64, rel=0.1)
    assert estimate.alone.seconds([8000]) == pytest.approx(0.003 * 8000 + 1e-6 * 8000**2, rel=0.05)


@pytest.mark.parametrize("seconds", [{100: 1.0, 1000: 2.0}, {100: 0.01, 1000: 100.0}, {500: 1.0}])
def test_an_estimate_is_never_negative(seconds: dict[int, float]) -> None:
    times = PrefillTimes()
    for length, ttft_s in seconds.items():
        times.learn([length], ttft_s)
    assert min(times.constants) >= 0 < max(times.constants)
    assert all(times.seconds([length]) > 0 for length in (1, 100, 10_000))
