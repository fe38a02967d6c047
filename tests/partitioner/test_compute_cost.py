"""Costs of compute: interpolation, fits, and the multiplications of a model's shape."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioner.cost.compute import ComputeCost, layer_s
from partitioner.cost.fitted import FittedCost
from partitioner.cost.measured import MeasuredCost
from tests.partitioner.clusters import llama, rank_s

CHUNKS, PREFIXES = [128, 256, 512, 1024, 2048], [256, 512, 1024, 2048, 4096]

FITTED = FittedCost(
    num_places=7,
    first_s=(1e-4, 3e-7),
    between_s=(2e-4, 1e-6),
    own_s=(5e-5, 1e-8, 2e-10),
    prefix_s=(4e-5, 2e-8, 1e-9, 4e-10),
    last_s=(3e-3, 7e-7),
)


def measured(cost: FittedCost = FITTED, noise: float = 0.0, **changes) -> MeasuredCost:
    draw = np.random.default_rng(0)

    def noisy(seconds: float) -> float:
        return float(seconds * (1 + noise * draw.uniform(-1, 1)))

    values = {
        "num_places": cost.num_places,
        "first_s": {c: noisy(cost.first(c)) for c in CHUNKS},
        "between_s": {c: noisy(cost.between(c)) for c in CHUNKS},
        "own_s": {c: noisy(cost.own(c)) for c in CHUNKS},
        "last_s": {c: noisy(cost.last(c)) for c in CHUNKS},
        "prefix_s": {(c, P): noisy(cost.prefix(c, P)) for c in CHUNKS for P in PREFIXES},
    }
    return MeasuredCost(**(values | changes))


def test_interpolation_is_exact_at_the_points():
    cost = measured(noise=0.3)
    for c in CHUNKS:
        assert cost.first(c) == cost.first_s[c]
        assert cost.between(c) == cost.between_s[c]
        assert cost.last(c) == cost.last_s[c]
        assert cost.own(c) == pytest.approx(cost.own_s[c], rel=1e-12)  # divided and multiplied by c
        assert [cost.prefix(c, P) for P in PREFIXES] == [cost.prefix_s[c, P] for P in PREFIXES]


@given(c=st.floats(1, 1e6), P=st.floats(1, 1e6))
def test_interpolation_and_what_lies_beyond_are_exact_for_bilinear_costs(c, P):
    cost = measured()
    assert cost.first(c) == pytest.approx(FITTED.first(c), rel=1e-9)
    assert cost.between(c) == pytest.approx(FITTED.between(c), rel=1e-9)
    assert cost.last(c) == pytest.approx(FITTED.last(c), rel=1e-9)
    assert cost.prefix(c, P) == pytest.approx(FITTED.prefix(c, P), rel=1e-9)


@given(c=st.floats(1, 1e6))
def test_own_attention_is_exact_for_quadratic_costs(c):
    quadratic = FittedCost(**{**vars(FITTED), "own_s": (0.0, 1e-8, 2e-10)})
    assert measured(quadratic).own(c) == pytest.approx(quadratic.own(c), rel=1e-9)


def test_there_is_no_cost_of_no_prefix():
    assert measured().prefix(100, 0) == FITTED.prefix(100, 0) == 0
    assert measured().prefix(100, 1) == pytest.approx(FITTED.prefix_s[0] + 100 * FITTED.prefix_s[1], rel=1e-2)


@given(c=st.floats(0.5, 1e5), P=st.floats(0, 1e5))
def test_noise_makes_no_cost_negative_and_none_fall_beyond_the_longest(c, P):
    cost = measured(noise=0.9)
    for seconds in (cost.first(c), cost.between(c), cost.own(c), cost.last(c), cost.prefix(c, P)):
        assert seconds >= 0
    assert cost.first(2 * CHUNKS[-1] + c) >= cost.first(CHUNKS[-1])
    assert cost.own(2 * CHUNKS[-1] + c) >= cost.own(CHUNKS[-1])


def test_points_too_long_to_measure_are_continued():
    # With c + P at most 4,608, the far corner of the grid is missing.
    staircase = {pair: seconds for pair, seconds in measured().prefix_s.items() if sum(pair) <= 4608}
    assert len(staircase) < len(CHUNKS) * len(PREFIXES)
    cost = measured(prefix_s=staircase)
    for c, P in [(2048, 4096), (1500, 3900), (1024, 4096), (9000, 12000)]:
        assert cost.prefix(c, P) == pytest.approx(FITTED.prefix(c, P), rel=1e-9)


def test_a_hole_that_cannot_be_continued_is_named():
    holed = {pair: seconds for pair, seconds in measured().prefix_s.items() if pair != (128, 256)}
    with pytest.raises(ValueError, match="a chunk of 128 tokens after 256 is missing"):
        measured(prefix_s=holed)


def fit_errors(fitted: ComputeCost, measured: MeasuredCost) -> dict[str, float]:
    """Largest relative error at the measured points, per step: "first", "between", "own", "last", "prefix"."""
    steps: dict[str, Callable[[float], float]] = {
        "first_s": fitted.first,
        "between_s": fitted.between,
        "own_s": fitted.own,
        "last_s": fitted.last,
    }
    errors = {
        name.removesuffix("_s"): max(relative(step(c), seconds) for c, seconds in getattr(measured, name).items())
        for name, step in steps.items()
    }
    errors["prefix"] = max(relative(fitted.prefix(c, P), seconds) for (c, P), seconds in measured.prefix_s.items())
    return errors


def relative(value: float, truth: float) -> float:
    return abs(value - truth) / max(truth, 1e-12)


def test_a_fit_recovers_known_coefficients():
    fitted = FittedCost.fit(measured())
    assert fitted.num_places == FITTED.num_places
    for name in ("first_s", "between_s", "own_s", "prefix_s", "last_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(FITTED, name), rel=1e-6)
    assert max(fit_errors(fitted, measured()).values()) < 1e-9


def test_a_fit_recovers_coefficients_that_are_zero():
    plain = llama()
    fitted = FittedCost.fit(measured(plain))
    assert fitted.own_s[1] == pytest.approx(0, abs=1e-12)
    assert fitted.own_s[2] == pytest.approx(plain.own_s[2], rel=1e-6)
    assert fitted.prefix(1e6, 1e6) == pytest.approx(plain.prefix(1e6, 1e6), rel=1e-6)


def test_a_fit_of_noisy_points_is_close_and_never_negative():
    noisy = measured(noise=0.05)
    fitted = FittedCost.fit(noisy)
    assert all(value >= 0 for name in ("first_s", "own_s", "prefix_s", "last_s") for value in getattr(fitted, name))
    errors = fit_errors(fitted, noisy)
    assert sorted(errors) == ["between", "first", "last", "own", "prefix"]
    assert max(errors.values()) < 0.11  # each point is off by up to 5%, and so is the fit
    for c, P in [(100_000, 900_000), (300, 700)]:
        assert layer_s(fitted, c, P) == pytest.approx(layer_s(FITTED, c, P), rel=0.1)


def test_points_that_fall_are_fitted_by_a_constant():
    fitted = FittedCost.fit(measured(first_s={c: 1.0 / c for c in CHUNKS}))
    assert fitted.first_s[0] > 0
    assert fitted.first_s[1] == 0


def test_layers_are_counted_once_each():
    cost = FITTED
    layers = cost.num_places
    attention = cost.own(300) + cost.prefix(300, 500)
    ends = cost.first(300) + (layers - 1) * cost.between(300)
    assert rank_s(cost, 300, 500, is_last=True) == pytest.approx(ends + layers * attention + cost.last(300))
    assert rank_s(cost, 300, 500, is_last=False) == pytest.approx(ends + (layers - 1) * attention)


def test_a_shape_costs_its_multiplications():
    # 2 operations per weight and token; Llama 7B has 6.48 billion weights in its layers.
    cost = llama(matmul_flops=1.0, attention_flops=1.0, step_s=0.0)
    c = 2048
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    attention = 32 * 4 * 4096 * c**2 / 2
    logits = 2 * 4096 * 32000
    behind = 4096**2 + 3 * 4096 * 11008  # the last layer's keys and values, for the last token alone
    products = 2 * (weights * c - behind * (c - 1))
    assert rank_s(cost, c, 0, is_last=True) == pytest.approx(products + attention + logits, rel=1e-12)
    # Two halves, one behind the other, are as much attention as the whole.
    assert 2 * cost.own(c / 2) + cost.prefix(c / 2, c / 2) == pytest.approx(cost.own(c))
    assert llama(batch=3, step_s=0.0).between(c) == pytest.approx(3 * llama(step_s=0.0).between(c))
    assert llama(kv_dim=512).between(c) < llama().between(c)


def test_json_round_trip():
    for cost in (measured(noise=0.1), FITTED):
        assert type(cost).from_json(cost.to_json()) == cost


def test_files_call_places_layers_as_those_of_before_hybrid_models_do():
    for cost in (measured(), FITTED):
        values = json.loads(cost.to_json())
        assert values["num_layers"] == 7 and "num_places" not in values


@pytest.mark.parametrize("kind", [MeasuredCost, FittedCost])
@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", '{"num_layers": 3}', '{"num_layers": NaN}'])
def test_text_that_is_no_cost_is_one_sentence(kind, text):
    with pytest.raises(ValueError, match="compute cost") as caught:
        kind.from_json(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("num_layers", 2.5),
        ("num_layers", True),
        ("first_s", []),
        ("first_s", [[128, 1.0]]),
        ("first_s", [[128, 1.0], [256, 2.0]]),
        ("first_s", [[[], 1.0], [256, 2.0]]),
        ("first_s", [[0.5, 1.0], [256, 2.0]]),
        ("own_s", {"128": 1.0}),
        ("own_s", [[128, -1.0], [256, 2.0], [512, 1.0], [1024, 1.0], [2048, 1.0]]),
        ("last_s", [[128, "a"], [256, 2.0], [512, 1.0], [1024, 1.0], [2048, 1.0]]),
        ("last_s", [[128, True], [256, 2.0], [512, 1.0], [1024, 1.0], [2048, 1.0]]),
        ("between_s", [[128, float("nan")], [256, 2.0], [512, 1.0], [1024, 1.0], [2048, 1.0]]),
        ("prefix_s", [[128, 256, 1.0]]),
        ("prefix_s", [[128, 256]]),
        ("prefix_s", None),
    ],
)
def test_wrong_points_are_one_sentence(field, value):
    values = json.loads(measured().to_json())
    with pytest.raises(ValueError, match="compute cost") as caught:
        MeasuredCost.from_json(json.dumps(values | {field: value}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [[1.0], [1.0, -2.0], [1.0, float("inf")], "12", None])
def test_wrong_coefficients_are_one_sentence(value):
    values = json.loads(FITTED.to_json())
    with pytest.raises(ValueError, match="compute cost: first_s"):
        FittedCost.from_json(json.dumps(values | {"first_s": value}))
