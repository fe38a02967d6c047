"""The cost of sparse attention by counts of blocks made by hand, and of splits that are simulated with it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest

from partitioner.cost.compute import ComputeCost
from partitioner.cost.fitted import FittedCost
from partitioner.cost.link import Link
from partitioner.cost.sparse import CHOICE, SparseCost, Sparsity, cost_of
from partitioner.cost.streaming import Streams
from partitioner.searches.equal_work import equal_work
from partitioner.simulation.bounds import chain_tokens, streamed_tokens
from partitioner.simulation.chain import simulate
from partitioner.simulation.cluster import Cluster
from runahead import ContextPartition, PrefillOptions
from runahead.config import Attention, Transfer
from tests.partitioner.clusters import LLAMA_KV_BYTES, llama

PAIR_S = 1e-9
COST = FittedCost(
    num_places=4,
    first_s=(0.0, 0.0),
    between_s=(0.0, 1e-4),
    own_s=(0.0, 0.0, PAIR_S / 2),
    prefix_s=(0.0, 0.0, 0.0, PAIR_S),
    last_s=(0.0, 0.0),
)
"""Attention is all pairs, a nanosecond each."""


def sparse(**options: object) -> PrefillOptions:
    return PrefillOptions(attention=Attention.xattention, **options)  # type: ignore[arg-type]


def attention_s(cost: ComputeCost, c: int, P: int) -> float:
    return cost.own(c) + cost.prefix(c, P)


@pytest.mark.parametrize(
    ("density", "chosen"),
    [
        (0.25, [1, 2, 2, 2, 2, 2, 2, 2, 3, 3]),  # a quarter of 1 to 10, rounded up, and the first and own one
        (0.5, [1, 2, 2, 2, 3, 3, 4, 4, 5, 5]),
        (1.0, [*range(1, 11)]),
    ],
)
def test_attention_takes_the_pairs_of_chosen_blocks(density: float, chosen: list[int]) -> None:
    """Each block of 128 x 128 pairs, of the own one half, and the choice of cells of 16 x 16 pairs."""
    cost = cost_of(COST, sparse(density=density))
    for first, end in ((0, 10), (0, 4), (4, 10), (9, 10)):
        c, P = 128 * (end - first), 128 * first
        blocks = sum(chosen[first:end]) - (end - first) / 2
        all_pairs = c * P + c * c / 2
        known = PAIR_S * (128**2 * blocks + all_pairs * CHOICE / 256)
        assert attention_s(cost, c, P) == pytest.approx(known, rel=1e-12)
        assert cost.between(c) == COST.between(c)


@pytest.mark.parametrize("exact", [[0], [1, 3], [0, 1, 2, 3]])
def test_exact_layers_take_all_pairs(exact: list[int]) -> None:
    """Of four; their own chunk is attended to before the wait. One that holds a state does not attend."""
    c, P, all_pairs = 256, 384, 256 * 384 + 256 * 128
    chosen = [2, 3]  # blocks of queries 3 and 4: half of 4 and of 5, rounded up
    sparse_s = PAIR_S * (128**2 * (sum(chosen) - 1) + all_pairs * CHOICE / 256)
    cost = cost_of(COST, sparse(density=0.5, exact_layers=exact))
    assert 4 * attention_s(cost, c, P) == pytest.approx(
        len(exact) * PAIR_S * all_pairs + (4 - len(exact)) * sparse_s, rel=1e-12
    )
    assert 4 * cost.own(c) == pytest.approx(len(exact) * PAIR_S * c * c / 2)
    hybrid = cost_of(replace(COST, states=(2,), state_s=(0.0, 0.0)), sparse(density=0.5, exact_layers=[0]))
    assert 3 * attention_s(hybrid, c, P) == pytest.approx(PAIR_S * all_pairs + 2 * sparse_s, rel=1e-12)
    assert Sparsity.of(sparse(density=0.5, exact_layers=[0])).mean_share(c, P, 4) == pytest.approx(  # type: ignore[union-attr]
        1 / 4 + 3 / 4 * Sparsity(density=0.5).share(c, P)
    )


@pytest.mark.parametrize(("threshold", "density"), [(0.9, 0.37), (0.95, 0.48), (0.97, 0.59)])
def test_thresholds_see_what_was_measured(threshold: float, density: float) -> None:
    """Chosen over visible blocks of SmolLM2 at 4,096 tokens, as docs/log.md has them; the fit has two constants."""
    num = 4096 // 128
    pairs = Sparsity(threshold=threshold).share(4096, 0) * num**2 / 2
    assert (pairs + num / 2) / (num * (num + 1) / 2) == pytest.approx(density, abs=0.04)


def test_halves_of_a_longer_prompt_see_what_was_measured() -> None:
    """The first 4,224 of 8,000 tokens saw 46% of the blocks, the others 23%."""
    for start, end, density in ((0, 33, 0.46), (33, 63, 0.234)):
        seen = range(start + 1, end + 1)
        pairs = Sparsity(threshold=0.95).share(128 * len(seen), 128 * start) * (len(seen) * start + len(seen) ** 2 / 2)
        assert (pairs + len(seen) / 2) / sum(seen) == pytest.approx(density, abs=0.03)


@pytest.mark.parametrize("given", [sparse(threshold=1.0), sparse(density=1.0)])
def test_all_blocks_cost_all_pairs_and_their_choice(given: PrefillOptions) -> None:
    cost = cost_of(COST, given)
    for c, P in ((1000, 0), (128, 5000), (77, 333)):
        assert attention_s(cost, c, P) == pytest.approx((1 + CHOICE / 256) * attention_s(COST, c, P), rel=1e-9)
    assert cost_of(COST, PrefillOptions()) is COST


def test_longer_prompts_than_are_counted_go_on_alike() -> None:
    sparsity, at = Sparsity(density=0.1), (1 << 20) * 128.0
    assert sparsity.share(at, 0) == pytest.approx(0.1, rel=1e-3)
    assert sparsity.share(at, 4 * at) == pytest.approx(0.1, rel=1e-3)
    assert 0 < Sparsity().share(1 << 40, 0) < 1e-3


def test_the_split_goes_towards_even_chunks() -> None:
    """Later chunks see a smaller share of the keys before them, and so have less to do than with all keys."""
    ends = [
        equal_work(32_768, 4, cost_of(llama(), given)).boundaries[1]
        for given in (PrefillOptions(), sparse(), sparse(density=0.05))
    ]
    assert ends[0] > ends[1] > ends[2] > 32_768 / 4
    last = equal_work(32_768, 4, cost_of(llama(), sparse())).boundaries
    assert last[1] - last[0] > last[4] - last[3]


def test_a_rank_attends_after_its_wait_and_in_blocks() -> None:
    """So the second rank's own attention does not overlap the way of the first one's keys."""
    link, split = Link(latency_s=0.0, bandwidth_Bps=1e9), ContextPartition(boundaries=(0, 1000, 2048))
    exact, all_blocks, one = (
        Cluster.chain(COST, 2, link, kv_bytes_per_token=LLAMA_KV_BYTES, state_bytes=0.0, prefill=given, backend="gloo")
        for given in (PrefillOptions(), sparse(density=1.0), sparse(density=0.01))
    )
    assert one.block == 128 and exact.block == 1
    found = simulate(split, all_blocks)
    rounded = ContextPartition(boundaries=(0, 1024, 2048))
    assert found == simulate(rounded, all_blocks)
    after = replace(all_blocks, compute=_waiting(COST))
    assert found.wait_s == pytest.approx(simulate(rounded, after).wait_s)
    assert simulate(rounded, exact).ttft_s < found.ttft_s and simulate(rounded, one).ttft_s < found.ttft_s
    assert isinstance(one.compute, SparseCost) and math.isfinite(one.compute.prefix(0, 1024))


def _waiting(cost: FittedCost) -> FittedCost:
    """Attention of 1,024 tokens after as many, all of it after the wait."""
    own, factor = cost.own(1024), 1 + CHOICE / 256

    class Waiting(FittedCost):
        def own(self, c: float) -> float:
            return 0.0

        def prefix(self, c: float, P: float) -> float:
            return factor * (own + super().prefix(c, P))

    return Waiting(**vars(cost))


@pytest.mark.parametrize("boundaries", [(0, 1000), (0, 700, 2000), (0, 90, 150, 2000), (0, 800, 1500, 2000)])
@pytest.mark.parametrize("transfer", list(Transfer))
def test_heads_that_stream_send_their_first_and_last_tokens(boundaries: tuple[int, ...], transfer: Transfer) -> None:
    """As the bench's formula says, by which runs send (tests/ranks/test_streaming_prefill.py), and attend to less."""
    partition, streams = ContextPartition(boundaries=boundaries), Streams(share=0.25, tokens=100)
    given = {"kv_bytes_per_token": 8.0, "state_bytes": 0.0, "backend": "gloo"}
    make = partial(Cluster.chain, COST, len(boundaries) - 1, Link(latency_s=0.0, bandwidth_Bps=1e9), **given)  # type: ignore[arg-type]
    exact, few = (make(prefill=PrefillOptions(transfer=transfer), streams=each) for each in (None, streams))
    tokens = 0.75 * chain_tokens(partition) + 0.25 * streamed_tokens(partition, 100)
    assert sum(simulate(partition, few).sent_bytes) == pytest.approx(4 * 8 * tokens)
    for c, P in ((50, 0), (800, 0), (800, 1200)):
        seen = min(c * c / 2, 100 * c)
        assert few.compute.own(c) == pytest.approx(PAIR_S * (0.75 * c * c / 2 + 0.25 * seen))
        assert few.compute.prefix(c, P) == pytest.approx(0.75 * exact.compute.prefix(c, P))
    none = make(prefill=PrefillOptions(transfer=transfer), streams=Streams(share=0.0, tokens=100))
    assert simulate(partition, none).ttft_s == simulate(partition, exact).ttft_s >= simulate(partition, few).ttft_s
