"""Assumptions of InfiniGen, on a real model and a real text: relations with margins, not values.

Queries of a few layers, behind a prompt, from the input of the layer before; the measure is the attention probability
on what 5% of the prompt's tokens, chosen by some columns of the keys, hold.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import mean

import pytest
import torch

from launch.skew import skew_of
from runahead import Model, ModelOptions
from tests.policies.attention_mass import (
    ALL_COLUMNS,
    HINDSIGHT,
    NONE,
    ORACLE,
    OURS,
    OWN_INPUT,
    PER_QUERY_HEAD,
    PROMPT_BY_SIZE,
    SAMPLE_TURNED,
    Reading,
    Setup,
    Variant,
    read,
)

TEXT = Path(__file__).resolve().parents[2] / "examples" / "frankenstein_letters.txt"
SAMPLE, PROMPT, BEHIND = 512, 640, 128
START = 2100
"""First token of the prompt in the text, after the sample."""
RATIOS = (0.1, 0.2, 0.3, 1.0)
VARIANTS = (NONE, PROMPT_BY_SIZE, SAMPLE_TURNED, OURS, PER_QUERY_HEAD, HINDSIGHT)
LAYERS = range(3, 30, 4)


@cache
def reading() -> Reading:
    model = Model.load(ModelOptions(), torch.device("cpu"))
    assert model.tokenizer is not None
    ids = model.tokenizer(TEXT.read_text(encoding="utf-8"), verbose=False).input_ids
    setup = Setup(
        prompt_tokens=PROMPT,
        sample=skew_of(model, ids[:SAMPLE], rotaries=model.rotaries, chunk=SAMPLE),
        variants=VARIANTS,
        ratios=RATIOS,
        every=8,
        layers=LAYERS,
    )
    return read(model, torch.tensor(ids[START : START + PROMPT + BEHIND]), setup)


def mass(variant: Variant, ratio: float) -> float:
    return reading().mean_mass(variant.name, ratio)


def mean_similarity(what: str) -> float:
    """Over the layers from layer 3 on."""
    return mean(reading().similarity[what][2:])


def test_inputs_of_consecutive_layers_are_alike_and_what_layers_add_is_not() -> None:
    """Table 1 of InfiniGen. Layers 0 and 1 left out: layer 1 makes the outlier channels."""
    block, attention = (mean_similarity(f"{what} input") for what in ("block", "attention"))
    assert block > 0.88
    assert attention > 0.85
    for what in ("attention output", "FFN output"):
        assert mean_similarity(what) < block - 0.4


def test_little_is_lost_by_queries_from_the_layer_before() -> None:
    best, own, ahead = (reading().mean_mass(name) for name in (ORACLE, OWN_INPUT, ALL_COLUMNS))
    assert best >= own >= ahead
    assert ahead > best - 0.04


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_more_columns_find_more_and_all_find_what_keys_find(variant: Variant) -> None:
    masses = [mass(variant, ratio) for ratio in RATIOS]
    assert masses == sorted(masses)
    # An orthogonal basis changes scores by rounding, which now and then swaps two tokens.
    assert masses[-1] == pytest.approx(reading().mean_mass(ALL_COLUMNS), abs=1e-4)


def test_skewing_helps_most_where_columns_are_few() -> None:
    gains = [mass(OURS, ratio) - mass(NONE, ratio) for ratio in (0.1, 0.2, 0.3)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 0.04
    assert gains[1] > 0.01
    assert gains[2] > 0.004
    assert mass(OURS, 0.3) > reading().mean_mass(ALL_COLUMNS) - 0.025


def test_queries_have_to_be_turned_to_where_they_ask() -> None:
    """The same queries where they were, and columns by size as in the paper, are worse than no skewing at all."""
    for ratio in (0.1, 0.2, 0.3):
        assert mass(OURS, ratio) > mass(PROMPT_BY_SIZE, ratio) + 0.03
    assert mass(PROMPT_BY_SIZE, 0.2) < mass(NONE, 0.2)


def test_turned_queries_are_nearly_as_good_as_those_that_will_ask() -> None:
    for ratio in (0.1, 0.2, 0.3):
        assert mass(OURS, ratio) > mass(HINDSIGHT, ratio) - 0.04


def test_queries_of_another_text_do_nearly_as_well() -> None:
    """Those of a file of python -m policies.skew, turned to behind the prompt."""
    for ratio in (0.1, 0.2):
        assert mass(SAMPLE_TURNED, ratio) > mass(NONE, ratio) + 0.005
        assert mass(SAMPLE_TURNED, ratio) > mass(OURS, ratio) - 0.03


def test_one_basis_for_the_heads_that_share_keys_is_enough() -> None:
    """With one for each query head, a group's partial keys would be kept as many times as it has heads."""
    for ratio, margin in ((0.1, 0.03), (0.2, 0.015), (0.3, 0.01)):
        assert mass(OURS, ratio) > mass(PER_QUERY_HEAD, ratio) - margin
