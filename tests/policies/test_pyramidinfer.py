"""PyramidInfer: how many tokens each layer computes, which ones, and what follows from that."""

from __future__ import annotations

import math
from statistics import mean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policies.pyramidinfer import KeepSchedule, PyramidInfer
from tests.families import prompt
from tests.policies.running import Run
from tests.ranks.tasks import tiny_model


def test_the_cosine_schedule_is_the_authors() -> None:
    """32 layers, 1,000 tokens: what their code computes."""
    lengths = PyramidInfer(schedule="cosine").lengths(1000, 32)  # type: ignore[arg-type]
    assert lengths[:4] == [1000, 1000, 999, 998]
    assert lengths[16] == 805
    assert lengths[-3:] == [413, 392, 373]
    assert round(mean(lengths) / 1000, 3) == 0.763


@given(
    schedule=st.sampled_from(["power", "uniform", "more"]),
    keep=st.floats(0.4, 1.0),
    tokens=st.integers(500, 5000),
    layers=st.integers(8, 40),
)
def test_other_schedules_have_the_wanted_mean(schedule: str, keep: float, tokens: int, layers: int) -> None:
    policy = PyramidInfer(schedule=schedule, mean_keep=keep, min_tokens=1, recent_ratio=0.1)  # type: ignore[arg-type]
    lengths = policy.lengths(tokens, layers)
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == tokens
    # Recent tokens take one more than their share, and lengths are rounded.
    assert mean(lengths) / tokens == pytest.approx(keep, abs=0.005)


def test_shapes_differ_in_where_they_drop() -> None:
    middle = {
        name: PyramidInfer(schedule=name, mean_keep=0.8).lengths(1000, 31)[15]  # type: ignore[arg-type]
        for name in ("power", "uniform", "more")
    }
    assert middle["power"] > middle["uniform"] > middle["more"]


@pytest.mark.parametrize("schedule", list(KeepSchedule))
def test_no_layer_has_fewer_than_the_minimum(schedule: KeepSchedule) -> None:
    assert PyramidInfer(schedule=schedule, min_tokens=64).lengths(50, 12) == [50] * 12
    assert min(PyramidInfer(schedule=schedule, min_tokens=64).lengths(100, 12)) >= 64


def test_deeper_layers_store_what_the_schedule_says_and_a_subset_of_what_went_before() -> None:
    policy = PyramidInfer(mean_keep=0.6, min_tokens=8)
    run = Run(tiny_model("llama_deep"), [policy], [prompt(60), prompt(33, seed=1)])
    run.prefill()
    lengths = policy.lengths(60, 12)
    assert run.kept.slots_by_layer == lengths and lengths[-1] < 30
    recent = policy.recent(60)
    for before, layer in zip(run.kept.layers, run.kept.layers[1:], strict=False):
        for row, (prompt_tokens, pads) in enumerate(zip((60, 33), layer.pads, strict=True)):
            earlier, kept = (set(each.positions_BKn()[row, 0].tolist()) - _below_zero() for each in (before, layer))
            assert kept <= earlier
            assert set(range(4)) <= kept  # sinks
            assert set(range(prompt_tokens - recent, prompt_tokens)) <= kept
            assert pads == max(0, layer.num_slots - prompt_tokens)


def _below_zero() -> set[int]:
    return set(range(-100, 0))


def test_dropped_tokens_are_those_with_the_fewest_votes() -> None:
    """The first layer's choice, against attention probabilities that are written out."""
    model, ids = tiny_model("llama"), prompt(50)
    policy = PyramidInfer(mean_keep=0.6, min_tokens=8)
    seen = {}
    narrow = policy.narrow

    def spying(view):  # type: ignore[no-untyped-def]
        selected = narrow(view)
        if view.layer == 0:
            seen["k"], seen["signals"] = view.k_BKnH.clone(), view.signals
        return selected

    object.__setattr__(policy, "narrow", spying)
    run = Run(model, [policy], [ids])
    run.prefill()
    q, k = seen["signals"]._q_BNCH, seen["k"].repeat_interleave(2, dim=1)
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~torch.ones(50, 50).tril().bool(), -math.inf)
    recent = policy.recent(50)
    weights = torch.linspace(1.0, 1.2, recent, dtype=torch.float64)
    votes = (weights[:, None] * torch.softmax(scores, dim=-1)[0, :, -recent:]).mean(dim=(0, 1))[: 50 - recent]
    votes[:4] = math.inf
    going_on = policy.lengths(50, 3)[1] - recent
    expected = votes.topk(going_on).indices.sort().values.tolist()
    assert run.kept.layers[1].positions_BKn()[0, 0].tolist() == [*expected, *range(50 - recent, 50)]


def test_dropped_tokens_are_not_computed_deeper() -> None:
    """Seen by the layers' own inputs, and by the last layer's attention being to what is left alone."""
    model, ids = tiny_model("llama"), prompt(50)
    widths: list[int] = []
    layers = model.module.model.layers
    hooks = [layer.mlp.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1])) for layer in layers]
    try:
        policy = PyramidInfer(mean_keep=0.6, min_tokens=8)
        Run(model, [policy], [ids]).prefill()
    finally:
        for hook in hooks:
            hook.remove()
    assert widths == [*policy.lengths(50, 3)[:-1], 1], "after the last attention the last token alone is computed"


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_bigcode", "qwen3", "deepseek_v3", "opt"])
def test_a_row_in_a_padded_batch_is_what_it_is_alone_if_it_sets_the_length(family: str) -> None:
    model, ids = tiny_model(family), prompt(50)
    policy = PyramidInfer(mean_keep=0.6, min_tokens=8)
    together, alone = Run(model, [policy], [ids, prompt(20, seed=1)]), Run(model, [policy], [ids])
    both = [together.prefill(), together.decode(5)]
    for ours, theirs in zip(both, [alone.prefill(), alone.decode(5)], strict=True):
        torch.testing.assert_close(ours[0], theirs[0], atol=1e-9, rtol=0)
        assert ours.isfinite().all()


def test_top_p_keeps_more_when_it_asks_for_more() -> None:
    slots = []
    for top_p in (0.3, 0.7, 1.0):
        policy = PyramidInfer(select="top_p", top_p=top_p, decay=1.0, min_tokens=4, mean_keep=0.6)  # type: ignore[arg-type]
        run = Run(tiny_model("llama"), [policy], [prompt(60)])
        run.prefill()
        slots.append(run.kept.slots_by_layer)
    assert slots[0][-1] < slots[1][-1] < slots[2][-1]
    assert slots[2] == [60, 60, 60]


def test_the_store_stays_as_long_as_it_was_while_decoding() -> None:
    policy = PyramidInfer(mean_keep=0.6, min_tokens=8, evict_every=4)
    run = Run(tiny_model("llama"), [policy], [prompt(60), prompt(20, seed=2)])
    run.prefill()
    before = run.kept.slots_by_layer
    for token in range(3, 60):
        logits = run.decode(token)
        assert all(slots < at_first + 4 for slots, at_first in zip(run.kept.slots_by_layer, before, strict=True))
    assert logits.isfinite().all()
    newest = run.kept.layers[-1].positions_BKn()[0, 0]
    assert newest[-1] == 60 + 56 and newest[:4].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mean_keep": 0.0}, "policy.mean_keep=0.0"),
        ({"mean_keep": 0.1, "schedule": "uniform"}, "must be above policy.recent_ratio=0.2"),
        ({"recent_ratio": 1.5}, "policy.recent_ratio=1.5"),
        ({"voters": 0}, "policy.voters=0"),
        ({"min_tokens": 0}, "policy.min_tokens=0"),
        ({"newest_weight": -1.0}, "policy.newest_weight=-1.0"),
    ],
)
def test_bad_options_are_named(options: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PyramidInfer(**options)  # type: ignore[arg-type]
