"""The queue of a server: order, room, predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies.h2o import H2O
from policies.streaming_llm import StreamingLLM
from runahead import GenerationOptions
from runahead.config import Positions
from runahead.ranks.mesh import Mesh
from runahead.serving.batch import Batch
from runahead.serving.estimate import TimeEstimate
from runahead.serving.items import PrefillItem, Progress
from runahead.serving.limits import QueueLimits
from runahead.serving.queue import SLACK, RequestQueue, RequestRefused
from runahead.serving.request import Request
from runahead.serving.room import Room
from runahead.serving.state import share_computed
from runahead.thinning.rank_policies import RankPolicies
from tests.serving.fakes import POSITIONS, FakeEngine
from tests.serving.rank_tasks import Kept


def queue_of(room: Room | None = None, **limits: Any) -> RequestQueue:
    """A queue whose prefills take a second per token."""
    estimate = TimeEstimate()
    estimate.alone.learn([100], 100.0)
    estimate.learn_step(2.0)
    estimate.learn_answer(11)
    return RequestQueue(FakeEngine(), QueueLimits(**limits), estimate, room=room)  # type: ignore[arg-type]


def request(length: int, *, num_rows: int = 1, arrived_s: float = 0.0, num_new: int = 100) -> Request:
    options = [GenerationOptions(max_new_tokens=num_new)] * num_rows
    prompts = [[5 + row] * length for row in range(num_rows)]
    return Request(prompts=prompts, options=options, listener=Kept(num_rows), arrived_s=arrived_s)


def begin(queue: RequestQueue, requests: list[Request]) -> Batch:
    """Begin requests as the scheduler does."""
    number = len(queue.batches)
    prompts = [ids for each in requests for ids in each.prompts]
    item = PrefillItem(
        number=number,
        prompts=prompts,
        options=[options for each in requests for options in each.options],
        boundaries=(0, max(map(len, prompts))),
    )
    owners = [(each, row) for each in requests for row in range(len(each.prompts))]
    is_short = queue.is_short(requests)
    queue.waiting = [each for each in queue.waiting if each not in requests]
    queue.running += requests
    queue.batches[number] = batch = Batch(
        item=item, owners=owners, predicted_s=queue.prefill_s(requests), is_short=is_short, is_alone=False
    )
    return batch


def test_short_prompts_go_first_and_long_ones_do_not_wait_for_ever():
    queue = queue_of()
    long = request(100, arrived_s=0.0)
    for each in (long, request(10, arrived_s=50.0), request(10, arrived_s=SLACK * 90 + 1)):
        queue.add(each)
    assert [each.longest for each in queue.by_deadline()] == [10, 100, 10]
    assert queue.by_deadline()[1] is long


def test_short_prompts_do_not_wait_for_a_long_one():
    queue = queue_of(itl_s=5.0)
    queue.add(request(100))
    batch = begin(queue, queue.choose())
    assert not batch.is_short
    queue.add(request(80))
    assert queue.choose() == []  # the first one is still computed
    queue.add(short := request(4))
    assert queue.choose() == [short]
    assert begin(queue, [short]).is_short
    queue.add(request(4))
    assert queue.choose() == []  # one of each kind at a time
    batch.is_decoded = True
    assert [each.longest for each in queue.choose()] == [80]


def test_a_length_that_all_ranks_never_computed_goes_to_all_of_them():
    queue = queue_of(itl_s=5.0)
    queue._engine.ranks.mesh = Mesh(2)
    for length in (64, 512):  # as if a prompt gained nothing from several ranks
        queue._estimate.chain.learn([length], 1.1 * length)
    assert queue.is_short([request(400)])
    assert not queue.is_short([request(4000)])
    queue._estimate.chain.learn([4000], 8000.0)
    assert queue.is_short([request(4000)])


def test_requests_wait_for_rows_and_for_memory():
    queue = queue_of(batch=4, max_tokens=1000, itl_s=1e3)
    for each in (request(50, num_rows=2), request(50, num_rows=3), request(50)):
        queue.add(each)
    assert sorted(len(each.prompts) for each in queue.choose()) == [1, 2]  # those that fit, of similar length
    batch = begin(queue, queue.choose())
    batch.is_decoded = True
    assert queue.choose() == []
    batch.left -= {0, 1}  # memory stays until the last row has ended
    assert queue.num_rows == 1 and queue.choose() == [queue.waiting[0]]
    batch.left.clear()
    queue.batches.clear()
    queue.add(request(900, num_new=50))
    begin(queue, [queue.waiting[-1]]).is_decoded = True
    assert queue.choose() == []


def test_states_take_room_for_each_row_that_has_not_ended():
    """A row of 150 tokens with a state that takes the memory of 200: two fit into 1,000, and a third without states."""
    queue = queue_of(Room(max_tokens=1000, row_tokens=200), batch=9, itl_s=1e3)
    for number in range(4):
        queue.add(request(50, num_rows=1, arrived_s=number))
    batch = begin(queue, queue.choose())
    batch.is_decoded = True
    assert len(batch.owners) == 2 and queue.choose() == []
    batch.left -= {0}  # 300 of keys and values stay, one state does not
    assert len(queue.choose()) == 1
    one, two = ([[5] * 50] * 1, [GenerationOptions(max_new_tokens=750)]), ([[5] * 50] * 4, [GenerationOptions()] * 4)
    queue.check(*one)
    assert queue.longest_text == 800
    assert queue.fitting(one[0], 5000, is_chosen=False) == 750
    with pytest.raises(ValueError, match="1 x 801 tokens of prompt and answer, with states that take the"):
        queue.check(one[0], [GenerationOptions(max_new_tokens=751)])
    with pytest.raises(ValueError, match="with states that take the memory of 800, are more than this server has"):
        queue.check(*two)


def test_what_is_larger_than_all_room_is_computed_alone():
    queue = queue_of(batch=2, max_tokens=100)
    queue.add(large := request(300, num_rows=3))
    assert queue.choose() == [large]


def test_the_predicted_ttft_counts_prefills_and_the_rounds_of_answers():
    queue = queue_of(batch=2)
    assert queue.predicted_ttft_s(request(10)) == pytest.approx(10.0)
    queue.add(request(20, num_rows=2))
    batch = begin(queue, queue.choose())
    # 40 s of the first two rows and 10 s; then half of a round of answers of 11 tokens.
    assert queue.predicted_ttft_s(request(10)) == pytest.approx(40 + 10 + 0.5 * 20, abs=1)
    batch.is_decoded = True
    assert queue.predicted_ttft_s(request(10)) == pytest.approx(10 + 0.5 * 20)
    queue.add(request(30))
    assert queue.predicted_ttft_s(request(10, arrived_s=100.0)) == pytest.approx(30 + 10 + 20)
    assert queue.predicted_ttft_s(request(10)) == pytest.approx(10 + 0.5 * 20), "it is due before the other one"
    assert queue.predicted_ttft_s() == pytest.approx(30 + 0.5 * 20)


def test_the_predicted_ttft_of_a_short_prompt_is_not_that_of_the_long_ones_around_it():
    queue = queue_of(itl_s=5.0)
    queue.add(request(100))
    begin(queue, queue.choose())
    queue.add(request(80))
    assert queue.predicted_ttft_s(request(4)) == pytest.approx(4.0)
    assert queue.predicted_ttft_s(request(200)) == pytest.approx(100 + 80 + 200, abs=1)
    queue.add(request(3))
    assert queue.predicted_ttft_s(request(4)) == pytest.approx(7.0)
    begin(queue, queue.choose())
    assert queue.predicted_ttft_s(request(4)) == pytest.approx(7.0, abs=1)


def test_the_share_that_is_computed_is_the_mean_of_the_rows():
    queue, mine, other = queue_of(), request(10, num_rows=2), request(9)
    batches = [begin(queue, [each]) for each in (mine, other)]
    again = begin(queue, [request(10)])
    batches[0].owners, again.owners = [(mine, 0)], [(mine, 1)]  # as with policies
    batches[1].progress[3] = Progress(number=1, rank=3, layers=2, of=4)
    assert share_computed(queue, mine, 3) is None
    assert share_computed(queue, other, 3) == 0.5 and share_computed(queue, other, 0) is None
    batches[0].progress[3] = Progress(number=0, rank=3, layers=1, of=4)
    assert share_computed(queue, mine, 3) == 0.125
    again.is_decoded = True
    assert share_computed(queue, mine, 3) == 0.625


def test_a_refused_request_is_told_when_to_come_back():
    queue = queue_of(max_waiting=1, max_ttft_s=15.0)
    queue.add(request(10))
    with pytest.raises(RequestRefused, match="1 requests are waiting") as refused:
        queue.add(request(4))
    assert refused.value.retry_after_s == pytest.approx(10.0), "until the one that waits has begun to be answered"
    queue.waiting.clear()
    with pytest.raises(RequestRefused, match="predicted after 20 s, which is longer than 15 s") as refused:
        queue.add(request(20))
    assert refused.value.retry_after_s == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("policy", "positions", "new_tokens"),
    [
        (None, Positions.original, 96),
        (H2O(budget=16), Positions.original, 96),
        (StreamingLLM(budget=16), Positions.reencoded, 500),
    ],
)
def test_an_answer_without_a_length_has_the_positions_that_are_left(policy, positions, new_tokens):
    queue = queue_of()
    policies = RankPolicies() if policy is None else RankPolicies.everywhere([policy], positions=positions)
    queue._engine.policies = policies
    queue._prompt_limits = replace(queue._prompt_limits, policies=policies)
    prompts = [[5] * (POSITIONS - 96), [5] * 10]
    assert queue.fitting(prompts, 500, is_chosen=False) == new_tokens
    queue.check(prompts, [GenerationOptions(max_new_tokens=new_tokens)] * 2)
    assert queue.fitting(prompts, 500, is_chosen=True) == 500
