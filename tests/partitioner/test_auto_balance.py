"""Learning from prompts: splits end up within 3% of the best, whatever was wrong before, and noise does little harm.

The machine is the simulation of the chain with a cost of its own; what a rank computes there is disturbed by noise.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from partitioner.auto.balance import Balance
from partitioner.auto.slowness import ALIKE, MEMORY, SeenPrompt, Slowness
from partitioner.cost.link import Link, Links
from partitioner.searches.best_split import best_split
from partitioner.searches.equal_work import equal_work
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from tests.partitioner.clusters import llama

NOISE = 0.02
"""Standard deviation of a rank's log seconds from prompt to prompt."""
SEEDS = range(12)
BEST_S: dict[tuple[tuple[float, ...], Link, int], float] = {}
"""TTFT of the best split by speeds, link and length, of the machines that tests make."""


def small(**changes: float) -> dict[str, object]:
    """SmolLM2-135M on a core of a laptop."""
    shape = {"num_layers": 30, "model_dim": 576, "kv_dim": 192, "mlp_dim": 1536, "vocab_size": 49152}
    return {**shape, "matmul_flops": 45e9, "attention_flops": 25e9, "step_s": 1e-4, **changes}


def machine(num_ranks: int = 2, *, speed: list[float] | None = None, gbps: float = 20, **changes: float) -> Cluster:
    return Cluster(
        compute=llama(**small(**changes)),
        speed=speed or [1.0] * num_ranks,
        links=Links(num_ranks, Link.from_gbps(gbps, latency_s=1e-4)),
        kv_bytes_per_token=1536,
    )


def ready(num_ranks: int = 2, *, start: list[float] | None = None, **changes: float) -> Balance:
    return Balance(machine(num_ranks, **changes), Slowness(start or [0.0] * num_ranks))


def run(balance: Balance, on: Cluster, num_tokens: int, noise: random.Random | None = None, prompts: int = 3) -> None:
    """Prefill prompts on a machine, each split by what is known before it."""
    for _ in range(prompts):
        partition = balance.split(num_tokens)
        factors = [math.exp(noise.gauss(0, NOISE)) if noise else 1.0 for _ in range(on.num_ranks)]
        disturbed = replace(on, speed=[speed / factor for speed, factor in zip(on.speed, factors, strict=True)])
        simulated = simulate(partition, disturbed)
        balance.learn(partition, balance.expected_s(partition), simulated.compute_s, simulated.wait_s)


def loss(balance: Balance, on: Cluster, num_tokens: int) -> float:
    """Share by which the next prompt takes longer than with the best split."""
    assert on.links is not None
    key = (tuple(on.speed), on.links.default, num_tokens)
    if key not in BEST_S:
        best = best_split(num_tokens, on.num_ranks, on, min_stride=max(1, num_tokens // 512), max_evaluations=200)
        BEST_S[key] = best.cost_s
    return simulate(balance.split(num_tokens), on).ttft_s / BEST_S[key] - 1


def wrong_start(num_ranks: int, num_tokens: int) -> list[float]:
    """Slowness that makes the first chunk too short by a tenth of the prompt."""
    right = equal_work(num_tokens, num_ranks, machine(num_ranks).compute).boundaries[1]
    low, high = 0.0, 3.0
    for _ in range(30):
        middle = (low + high) / 2
        first = ready(num_ranks, start=[middle, *[0.0] * (num_ranks - 1)]).split(num_tokens).boundaries[1]
        low, high = (middle, high) if right - first < num_tokens / 10 else (low, middle)
    return [low, *[0.0] * (num_ranks - 1)]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("num_tokens", [1024, 8000])
def test_a_split_that_is_wrong_by_a_tenth_is_mended_in_three_prompts(num_ranks: int, num_tokens: int) -> None:
    on, start = machine(num_ranks), wrong_start(num_ranks, num_tokens)
    assert loss(ready(num_ranks, start=start), on, num_tokens) > 0.1
    for seed in SEEDS:
        balance = ready(num_ranks, start=start)
        run(balance, on, num_tokens, random.Random(seed))
        assert loss(balance, on, num_tokens) < 0.03, seed


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("num_tokens", [1024, 8000])
def test_a_rank_that_slows_down_is_relieved_in_three_prompts(num_ranks: int, num_tokens: int) -> None:
    for seed in SEEDS:
        balance, noise = ready(num_ranks), random.Random(seed)
        run(balance, machine(num_ranks), num_tokens, noise, prompts=1 + seed)
        speed = [1.0] * num_ranks
        speed[seed % num_ranks] /= 1.5
        slowed = machine(num_ranks, speed=speed)
        assert loss(balance, slowed, num_tokens) > 0.1
        run(balance, slowed, num_tokens, noise)
        assert loss(balance, slowed, num_tokens) < 0.03, seed


@pytest.mark.parametrize(("num_ranks", "slower"), [(2, 0.25), (4, 0.25), (4, 4.0)])
def test_a_machine_that_is_slower_as_a_whole_weighs_a_slow_link_anew(num_ranks: int, slower: float) -> None:
    """The link alone, beside a compute that is not what was timed, would look slower or faster than it is."""
    on = machine(num_ranks, speed=[1 / slower] * num_ranks, gbps=0.05)
    balance = ready(num_ranks, gbps=0.05)
    run(balance, on, 4000)
    assert loss(balance, on, 4000) < 0.03
    assert balance.cluster.links is not None
    assert balance.cluster.links.default.bandwidth_Bps == pytest.approx(0.05e9 / 8, rel=0.3)


@pytest.mark.parametrize("attention_flops", [10e9, 60e9])
def test_wrong_constants_are_mended_at_the_length_of_the_prompts(attention_flops: float) -> None:
    """A shape that is wrong looks like a slow rank, at that length."""
    on = machine()
    balance = ready(attention_flops=attention_flops)
    assert loss(balance, on, 8000) > 0.05
    run(balance, on, 8000)
    assert loss(balance, on, 8000) < 0.01
    run(balance, on, 1024)
    assert loss(balance, on, 1024) < 0.01
    assert loss(balance, on, 8000) < 0.01, "what shorter prompts tell does not hold for long ones"


def test_lengths_in_turn_are_each_learned() -> None:
    on, balance, noise = machine(), ready(attention_flops=10e9), random.Random(0)
    for _ in range(4):
        for num_tokens in (1024, 8000):
            run(balance, on, num_tokens, noise, prompts=1)
    assert max(loss(balance, on, 1024), loss(balance, on, 8000)) < 0.03


def test_the_longer_it_learns_the_less_noise_moves_the_split() -> None:
    on = machine()

    def losses(prompts: int) -> list[float]:
        found = []
        for seed in SEEDS:
            balance = ready(start=wrong_start(2, 4096))
            run(balance, on, 4096, random.Random(seed), prompts=prompts)
            found.append(loss(balance, on, 4096))
        return found

    assert sum(losses(20)) < sum(losses(2)) / 1.5


def test_one_disturbed_prompt_changes_little() -> None:
    on, balance = machine(), ready()
    run(balance, on, 4096, random.Random(0), prompts=5)
    before = balance.split(4096).boundaries[1]
    partition = balance.split(4096)
    simulated = simulate(partition, on)
    balance.learn(
        partition, balance.expected_s(partition), [simulated.compute_s[0] * 3, simulated.compute_s[1]], simulated.wait_s
    )
    assert abs(balance.split(4096).boundaries[1] - before) < 0.02 * 4096


def test_a_machine_that_is_slower_as_a_whole_is_split_as_before() -> None:
    balance = ready()
    before = balance.split(4096)
    run(balance, machine(speed=[0.4, 0.4]), 4096)
    assert abs(balance.split(4096).boundaries[1] - before.boundaries[1]) <= 8


def test_a_link_that_is_slower_than_measured_is_found_by_the_waits_and_so_is_a_faster_one() -> None:
    slow = machine(gbps=0.02)
    balance = ready(gbps=20)
    assert loss(balance, slow, 2048) > 0.1
    run(balance, slow, 2048, prompts=4)
    assert loss(balance, slow, 2048) < 0.03
    run(balance, machine(gbps=20), 2048, prompts=4)
    assert loss(balance, machine(gbps=20), 2048) < 0.03


@pytest.mark.parametrize("rank", [0, 1])
def test_waits_for_a_slow_rank_are_not_taken_for_those_of_a_slow_link(rank: int) -> None:
    balance, speed = ready(), [1.0, 1.0]
    run(balance, machine(), 4096, prompts=5)
    speed[rank] /= 2
    run(balance, machine(speed=speed), 4096, prompts=1)
    assert balance.cluster.links is not None
    assert balance.cluster.links.default.bandwidth_Bps == pytest.approx(20e9 / 8)


def test_waits_for_unlike_layers_leave_a_fast_link_alone() -> None:
    on, balance = machine(), ready()
    partition = balance.split(4096)
    simulated = simulate(partition, on)
    balance.learn(
        partition,
        balance.expected_s(partition),
        simulated.compute_s,
        [wait + 0.05 * simulated.ttft_s for wait in simulated.wait_s],
    )
    assert balance.cluster.links is not None and on.links is not None
    assert balance.cluster.links.default == on.links.default


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 17])
@pytest.mark.parametrize("gbps", [20, 0.0001])
def test_prompts_shorter_than_the_ranks_are_split_and_learned_from(num_tokens: int, gbps: float) -> None:
    balance, on = ready(4, gbps=gbps), machine(4, gbps=gbps)
    run(balance, on, num_tokens)
    balance.split(num_tokens).check(num_tokens, 4)
    balance.split(4096).check(4096, 4)


def test_a_rank_alone_tells_nothing_of_the_others() -> None:
    slowness = Slowness([0.0, 0.1])
    slowness.learn(100, [0.0, 1.0], [0.0, 2.0])
    slowness.learn(100, [0.0, 0.0], [0.0, 0.0])
    assert slowness.prompts == [] and slowness.at(100) == [0.0, 0.1]


def test_ranks_without_tokens_keep_what_is_known_of_them() -> None:
    slowness = Slowness([0.0, 0.0, 0.3])
    slowness.learn(100, [1.0, 1.0, 0.0], [1.0, 1.5, 0.0])
    first, second, third = slowness.at(100)
    assert second - first == pytest.approx(math.log(1.5)) and third == 0.3


def test_the_nearest_length_tells_of_one_that_was_never_seen() -> None:
    def seen(tokens: int, log: float) -> SeenPrompt:
        return SeenPrompt(tokens=tokens, slowness=(-log, log), surprise=(0.0, 0.0))

    slowness = Slowness([0.0, 0.0], [seen(1000, 0.1), seen(1100, 0.2), seen(8000, 0.3)])
    assert slowness.at(900)[1] == pytest.approx(0.15)
    assert slowness.at(9000)[1] == 0.3
    assert slowness.at(round(8000 * math.exp(ALIKE / 2)))[1] == 0.3


def test_memory_is_bounded() -> None:
    slowness = Slowness([0.0, 0.0])
    for _ in range(2 * MEMORY):
        slowness.learn(100, [1.0, 1.0], [1.0, 1.0])
    assert len(slowness.prompts) == MEMORY


def test_unlike_speeds_of_the_cluster_are_replaced_by_what_is_learned() -> None:
    balance = Balance(replace(machine(), speed=[5.0, 1.0]), Slowness([0.0, 0.0]))
    assert balance.split(4096) == ready().split(4096)


def test_a_rank_that_seemed_to_stand_still_gets_tokens_and_so_its_chance() -> None:
    on, balance = machine(), ready(start=[0.0, 20.0])
    assert 0 < balance.split(4096).chunk_lengths[1] < 100
    run(balance, on, 4096)
    assert loss(balance, on, 4096) < 0.03
