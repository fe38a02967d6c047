"""Refusals of the engine before any work starts: with the value, the rule and the remedy, in one line."""

from __future__ import annotations

import pytest

from runahead import Engine, GenerationOptions, Model, Ranks, RanksOptions, from_ratios
from runahead.config import Device
from runahead.model.loading.position_limit import max_positions
from tests.families import FAMILIES, ROPE_THRESHOLD, VOCAB_SIZE, build, prompt


@pytest.fixture(scope="module")
def engine() -> Engine:
    ranks = Ranks.start(RanksOptions(device=Device.cpu, threads=1))
    return Engine(Model(build("llama")), ranks)


@pytest.mark.parametrize(
    ("prompts", "num_new", "message"),
    [
        ([], 1, "no prompt was given"),
        ([[5], []], 1, "prompt 1 is empty; it needs at least one token"),
        ([[5, -1]], 1, f"prompt 0 holds token ids outside 0..{VOCAB_SIZE - 1}"),
        ([[5], [VOCAB_SIZE]], 1, f"prompt 1 holds token ids outside 0..{VOCAB_SIZE - 1}"),
        (
            [prompt(510)],
            3,
            "prompt 0 has 510 tokens, and with generation.max_new_tokens=3 it is longer than the model's 512 positions",
        ),
    ],
)
def test_prompt_that_cannot_be_right_is_refused(
    engine: Engine, prompts: list[list[int]], num_new: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        engine.generate(prompts, GenerationOptions(max_new_tokens=num_new))
    assert "\n" not in str(caught.value)


def test_prompt_may_fill_all_positions(engine: Engine) -> None:
    batch = engine.generate([prompt(510)], GenerationOptions(max_new_tokens=2, ignore_eos=True))
    assert len(batch.generations[0].new_token_ids) == 2


def test_partition_for_other_ranks_is_refused(engine: Engine) -> None:
    other = Engine(engine.model, engine.ranks, partition=from_ratios([0.5, 0.5]))
    with pytest.raises(ValueError, match="has 2 shares for 1 rank; use --nproc-per-node 2"):
        other.generate([[5, 6]])


def test_refusals_leave_the_engine_usable(engine: Engine) -> None:
    before = engine.generate([[5, 6, 7]]).generations
    with pytest.raises(ValueError, match="is empty"):
        engine.generate([[]])
    assert engine.generate([[5, 6, 7]]).generations == before


def test_dynamic_ntk_reaches_as_far_as_its_factor() -> None:
    """Its max_position_embeddings is the length before scaling."""
    module = build("llama_dynamic_ntk")
    assert max_positions(module.config) == 8 * ROPE_THRESHOLD
    assert max_positions(build("phi3_longrope").config) == 512


@pytest.mark.parametrize("family", FAMILIES)
def test_longest_prompt_of_every_family_is_known(family: str) -> None:
    assert max_positions(build(family).config) in {512, 8 * ROPE_THRESHOLD}
