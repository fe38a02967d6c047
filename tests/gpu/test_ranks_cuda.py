"""Ranks on GPUs say what one GPU says: by copies and over the backend, with shared models, with sharded decoding.

Over Gloo ranks may share a GPU, so one GPU is enough. NCCL wants a GPU per rank.
"""

from __future__ import annotations

from typing import Any

import pytest

from runahead import DecodeOptions, PrefillOptions
from runahead.config import Carrier, DecodeName, PrefillName, Transfer
from tests.conftest import RankPools
from tests.gpu import rank_tasks
from tests.gpu.models import CPU, alone

ALWAYS = {
    (2, Carrier.copy, Transfer.direct, DecodeName.last),
    (2, Carrier.backend, Transfer.direct, DecodeName.sharded),
    (3, Carrier.copy, Transfer.relay, DecodeName.sharded),
    (3, Carrier.backend, Transfer.relay, DecodeName.last),
}
"""Size, carrier, transfer and decoding; the others are slow tests."""

CASES = [
    pytest.param(*case, marks=[] if case in ALWAYS else pytest.mark.slow)
    for case in (
        (size, carrier, transfer, decode)
        for size in (2, 3)
        for carrier in (Carrier.copy, Carrier.backend)
        for transfer in Transfer
        for decode in (DecodeName.last, DecodeName.sharded)
    )
]


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    return rank_tasks.answers(alone())


def test_arenas_are_kept_for_the_next_prompts_and_freed_when_no_rank_has_them_mapped(gpu_ranks: RankPools) -> None:
    """Arenas are made for the first prompt, the second and the fifth."""
    gpu_ranks.close()  # ranks whose arenas are of no other test
    first, last = gpu_ranks.run(2, rank_tasks.arenas, [20, 40, 40, 30, 60, 60, 60])
    assert first == [(0, 0)] * 7  # the first rank receives nothing
    assert [made for made, _ in last] == [1, 2, 2, 2, 3, 3, 3]
    assert max(held for _, held in last) <= 2


def test_one_gpu_says_what_the_cpu_says(expected: object) -> None:
    assert rank_tasks.answers(alone(CPU)) == expected


@pytest.mark.parametrize(("size", "carrier", "transfer", "decode"), CASES)
def test_ranks_that_share_a_gpu_say_what_one_says(
    gpu_ranks: RankPools,
    expected: object,
    size: int,
    carrier: Carrier,
    transfer: Transfer,
    decode: DecodeName,
) -> None:
    options = PrefillOptions(transfer=transfer, carrier=carrier), DecodeOptions(name=decode)
    assert gpu_ranks.run(size, rank_tasks.answers, *options) == [expected] * size


@pytest.mark.parametrize(
    ("size", "transfer", "decode"),
    [
        (2, Transfer.relay, DecodeName.sharded),
        (2, Transfer.direct, DecodeName.last),
        (3, Transfer.relay, DecodeName.last),
    ],
)
@pytest.mark.parametrize("carrier", [Carrier.backend, Carrier.copy])
def test_ranks_over_nccl_say_what_one_says(
    nccl_ranks: RankPools, expected: object, size: int, carrier: Carrier, transfer: Transfer, decode: DecodeName
) -> None:
    options = PrefillOptions(transfer=transfer, carrier=carrier), DecodeOptions(name=decode)
    assert nccl_ranks.run(size, rank_tasks.answers, *options) == [expected] * size


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_sharded_steps_are_replayed_with_their_exchanges(nccl_ranks: RankPools, size: int) -> None:
    for replayed, eager, num_graphs in nccl_ranks.run(size, rank_tasks.sharded_answers):
        assert replayed == eager and num_graphs == 1


SHARED: dict[str, Any] = {"prefill": PrefillOptions(name=PrefillName.tensor)}


@pytest.mark.parametrize(
    ("size", "options"),
    [(2, SHARED), pytest.param(4, {"prefill": PrefillOptions(carrier=Carrier.copy)}, marks=pytest.mark.slow)],
    ids=["one stage", "two stages"],
)
def test_ranks_that_share_a_model_say_what_one_says(
    gpu_ranks: RankPools, expected: object, size: int, options: dict[str, Any]
) -> None:
    found = gpu_ranks.run(size, rank_tasks.answers, options["prefill"], None, rank_tasks.LENGTHS, 2)
    assert found == [expected] * size


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_changes_no_token(gpu_ranks: RankPools, expected: list[object], late: int) -> None:
    """A receiver waits for what arrives late, a sender for slabs that are free late, as the prefix is not kept."""
    sharded = DecodeOptions(name=DecodeName.sharded)
    found = gpu_ranks.run(2, rank_tasks.answers, rank_tasks.COPY, sharded, rank_tasks.LENGTHS[1:3], 1, late)
    assert found == [expected[1:3]] * 2
