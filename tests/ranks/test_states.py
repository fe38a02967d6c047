"""Hybrid models in a chain: each stage begins from the states of the one before, and sends its own to the next one."""

from __future__ import annotations

import pytest

from policies.adakv import AdaKV
from policies.snapkv import SnapKV
from runahead import GenerationOptions, PrefillOptions
from runahead.config import CacheOptions, Carrier, DecodeName, PrefillName, Speculate, Transfer
from runahead.thinning.rank_policies import RankPolicies
from tests.conftest import RankPools
from tests.families import HYBRIDS, largest_difference, oracle_logits, oracle_tokens, prompt
from tests.ranks import state_tasks, tasks
from tests.ranks.test_exactness import TOLERANCE, WAYS, first_logits
from tests.ranks.test_policies import NUM_TOKENS, assert_same_answer, generate

BOUNDS = [(0, 41, 70), (0, 69, 70), (0, 1, 70), (0, 30, 31, 70), (0, 2, 4, 70), (0, 0, 70, 70)]
"""Uneven chunks, of one token and of fewer than the kernel of a convolution, and an empty one."""


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.sampled(24)
def test_first_logits_of_hybrids_equal_transformers(
    rank_pools: RankPools, family: str, bounds: tuple[int, ...]
) -> None:
    ids = prompt(70)
    for transfer, carrier in WAYS:
        options = PrefillOptions(transfer=transfer, carrier=carrier)
        ours = first_logits(rank_pools, family, ids, bounds, options)
        assert largest_difference(ours, oracle_logits(family, tuple(ids))) < TOLERANCE, (transfer, carrier)


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("bounds", [(0, 41, 70), (0, 1, 2, 70)], ids=str)
@pytest.mark.sampled(12)
def test_batches_of_hybrids_are_what_rows_are_alone(
    rank_pools: RankPools, family: str, bounds: tuple[int, ...]
) -> None:
    prompts = [prompt(70, seed=1), prompt(3, seed=3), prompt(52, seed=4)]
    options = GenerationOptions(max_new_tokens=5, ignore_eos=True)
    for batch, _ in rank_pools.run(len(bounds) - 1, tasks.generate, family, prompts, options, bounds):
        for ids, row in zip(prompts, batch.generations, strict=True):
            assert row.new_token_ids == oracle_tokens(family, tuple(ids), 5)


def test_the_last_stage_speculates(rank_pools: RankPools) -> None:
    """Its rows begin from states that came from the stage before. Look-up finds drafts in a prompt that repeats."""
    prompts = [prompt(18) * 4, prompt(9, seed=3) * 3]
    options = GenerationOptions(
        max_new_tokens=8, ignore_eos=True, speculate=Speculate.lookup, speculate_match=1, speculate_always=True
    )
    for batch, _ in rank_pools.run(2, tasks.generate, "qwen3_next", prompts, options, (0, 41, 72)):
        assert batch.ranks[1].speculation is not None and batch.ranks[1].speculation.drafted > 0
        for ids, row in zip(prompts, batch.generations, strict=True):
            assert row.new_token_ids == oracle_tokens("qwen3_next", tuple(ids), 8)


@pytest.mark.parametrize("budget", [1.0, 0.2])
def test_the_last_stage_drafts_by_a_policy(rank_pools: RankPools, budget: float) -> None:
    """With all tokens kept each draft is right, which shows that it begins from the states that came to this stage."""
    prompts = [prompt(72), prompt(27, seed=3)]
    options = GenerationOptions(
        max_new_tokens=20, ignore_eos=True, speculate=Speculate.policy, speculate_tokens=3, speculate_always=True
    )
    by = RankPolicies.everywhere([SnapKV(budget=budget, window=4)])
    args = "qwen3_next", prompts, options, (0, 41, 72), None, 0, None, DecodeName.last, by
    for batch, _ in rank_pools.run(2, tasks.generate, *args):
        report = batch.ranks[1].speculation
        assert report is not None and (report.accepted == report.drafted) == (budget == 1.0) and report.drafted > 5
        for ids, row in zip(prompts, batch.generations, strict=True):
            assert row.new_token_ids == oracle_tokens("qwen3_next", tuple(ids), 20)


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_pieces_of_one_rank_carry_the_states(rank_pools: RankPools, family: str) -> None:
    ids, options = prompt(70), GenerationOptions(max_new_tokens=5, ignore_eos=True)
    prefill = PrefillOptions(name=PrefillName.single, chunk_tokens=16)
    for batch, _ in rank_pools.run(2, tasks.generate, family, [ids], options, None, prefill):
        assert batch.generations[0].new_token_ids == oracle_tokens(family, tuple(ids), 5)


@pytest.mark.parametrize(
    "policies",
    [
        RankPolicies.everywhere([SnapKV(budget=16, window=4)]),
        RankPolicies.everywhere([AdaKV(scorer=SnapKV(budget=16, window=4))]),
        RankPolicies(storage=CacheOptions(bits=4, residual=8)),
    ],
    ids=["equal heads", "unequal heads", "few bits"],
)
def test_policies_of_hybrids_do_in_a_chain_what_they_do_on_one_rank(
    rank_pools: RankPools, policies: RankPolicies
) -> None:
    prompts = [prompt(NUM_TOKENS), prompt(44, seed=3)]
    alone, together = (
        generate(rank_pools, bounds, policies, "qwen3_next", num_new=24, prompts=prompts)
        for bounds in ((0, NUM_TOKENS), (0, 20, 35, NUM_TOKENS))
    )
    assert_same_answer(together, alone)
    assert len(alone.ranks[0].kept_tokens) == 2, "layers with attention"
    _, states = rank_pools.run(1, state_tasks.bytes_of, "qwen3_next")[0]
    assert [rank.state_bytes for rank in (alone.ranks[0], together.ranks[-1])] == [2 * states] * 2
    assert alone.ranks[0].kv_peak_bytes >= alone.ranks[0].kv_kept_bytes > 2 * states


@pytest.mark.parametrize("carrier", [Carrier.copy, Carrier.backend])
@pytest.mark.parametrize("transfer", Transfer)
def test_states_are_counted_in_the_bytes(rank_pools: RankPools, transfer: Transfer, carrier: Carrier) -> None:
    """Their size does not depend on the prompt, and each goes to the next rank alone."""
    sent = {}
    for num_tokens in (60, 90):
        third = num_tokens // 3
        bounds = (0, third, 2 * third, num_tokens)
        options = PrefillOptions(transfer=transfer, carrier=carrier)
        outcomes = rank_pools.run(3, tasks.prefill, "qwen3_next", [prompt(num_tokens)], bounds, options)
        sent[num_tokens] = [outcome.kv_sent_bytes for outcome in outcomes]
        assert sum(sent[num_tokens]) == sum(outcome.kv_received_bytes for outcome in outcomes)
    kv, states = rank_pools.run(1, state_tasks.bytes_of, "qwen3_next")[0]
    tokens = {Transfer.relay: (1, 2), Transfer.direct: (2, 1)}[transfer]  # chunks that each rank sends
    for num_tokens, by_rank in sent.items():
        assert by_rank == [states + each * num_tokens // 3 * kv for each in tokens] + [0]


@pytest.mark.parametrize("carrier", [Carrier.copy, Carrier.backend])
@pytest.mark.parametrize(
    ("family", "things"),
    [
        ("qwen3_next", ["state 0", "KV 1", "state 2", "KV 3"]),
        ("nemotron_h", ["state 0", "KV 2", "state 4", "KV 6"]),  # other layers hold nothing
    ],
)
def test_layers_have_the_numbers_of_the_model(
    rank_pools: RankPools, family: str, things: list[str], carrier: Carrier
) -> None:
    """In timelines, in records of messages and in what ranks say that they wait for."""
    options = PrefillOptions(carrier=carrier)
    first, last = rank_pools.run(2, state_tasks.named_layers, family, prompt(70), (0, 41, 70), options)
    numbers = [int(thing.split()[1]) for thing in things]
    details = ["state to rank 1" if thing.startswith("state") else "tokens 0-41 to rank 1" for thing in things]
    assert first[0] == last[0] == numbers
    assert first[1] == dict(zip(numbers, details, strict=True)) and last[1] == {}
    assert first[2] == last[2] == sorted(things)
    assert {*first[3], *last[3]} <= {thing.replace(" ", " of layer ") for thing in things}


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("bounds", [(0, 70), (0, 41, 70), (0, 20, 45, 70), (0, 0, 70, 70)], ids=str)
def test_states_are_in_the_reported_bytes(rank_pools: RankPools, family: str, bounds: tuple[int, ...]) -> None:
    """To the byte, as looked at from outside. A stage alone has no memory for states on their way, the last stage of a
    chain has it for those that arrive."""
    num_ranks, prompts, num_new = len(bounds) - 1, [prompt(70), prompt(52, seed=4)], 5
    options = GenerationOptions(max_new_tokens=num_new, ignore_eos=True)
    results = rank_pools.run(num_ranks, state_tasks.bytes_in_layers, family, prompts, options, bounds)
    kv, states = rank_pools.run(1, state_tasks.bytes_of, family)[0]
    chain = [rank for rank in range(num_ranks) if bounds[rank] < bounds[rank + 1]]
    for rank, (most, of_states, report) in enumerate(results):
        assert report.kv_peak_bytes == most
        assert report.state_bytes == of_states == (2 * states if rank in chain else 0)
        if rank == chain[-1]:
            on_their_way = 2 * states if len(chain) > 1 else 0
            assert report.kv_peak_bytes == 2 * (70 + num_new - 1) * kv + 2 * states + on_their_way
            assert report.kv_kept_bytes == 2 * (70 + num_new - 1) * kv + 2 * states


@pytest.mark.parametrize(
    ("family", "projections"),
    [
        ("qwen3_next", ["in_proj_qkvz", "in_proj_ba"]),
        ("falcon_h1", ["in_proj"]),
        ("mamba2", ["in_proj"]),
        ("zaya", []),  # which reads its convolution's state before it updates it
    ],
)
def test_projections_are_computed_while_a_state_is_on_its_way(
    rank_pools: RankPools, family: str, projections: list[str]
) -> None:
    """On the rank that receives it, as on the first one. Without `Held.reads_late` each layer begins with the wait."""
    args = state_tasks.computed_before_states, family, prompt(70), (0, 41, 70)
    for by_layer in rank_pools.run(2, *args):
        assert by_layer and all(computed == projections for computed in by_layer)
    for by_layer in rank_pools.run(2, *args, False):
        assert not any(by_layer)


def test_transformers_asks_for_padding_where_the_host_is_watched(rank_pools: RankPools) -> None:
    """A rank whose tokens begin with padding of a row waits for its device before its forward, and no other one."""
    prompts = [prompt(70), prompt(15, seed=3)]
    waits = rank_pools.run(3, state_tasks.waits_before_padding, prompts, (0, 41, 60, 70))
    states = ["state"] * 2
    assert waits == [["device", *states], ["device", *states], states]
    assert rank_pools.run(2, state_tasks.waits_before_padding, prompts[:1], (0, 41, 70)) == [states] * 2


@pytest.mark.parametrize("lost", ["conv_states", "recurrent_states"])
def test_a_state_that_does_not_arrive_shows(rank_pools: RankPools, lost: str) -> None:
    ids, expected = prompt(70), oracle_logits("qwen3_next", tuple(prompt(70)))
    outcomes = rank_pools.run(2, state_tasks.prefill_without, lost, "qwen3_next", [ids], (0, 68, 70), PrefillOptions())
    assert largest_difference(outcomes[1].logits[0], expected) > 1e-5
