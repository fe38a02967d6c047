"""A prefill has few kernels per layer, and the host never waits for a value."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from policies import POLICIES
from policies.base import Policy
from policies.expected_attention import ExpectedAttention
from policies.h2o import H2O
from policies.r_kv import RKV
from policies.row_values import row_values
from policies.snapkv import SnapKV
from policies.tova import TOVA
from runahead.config import Exchange, PrefillOptions, Transfer
from runahead.prefill import Prefill
from runahead.prefill.kv_runahead import KVRunahead
from runahead.prefill.zigzag import Zigzag
from runahead.thinning.rank_policies import RankPolicies
from tests.families import prompt
from tests.policies.running import Run
from tests.ranks.tasks import tiny_model
from tests.virtual.deferred import Deferred
from tests.virtual.device import Job, VirtualRanks, transfers_early
from tests.virtual.jobs import prefill

BOUNDARIES = (0, 7, 11, 16)
ZIGZAG = (0, 3, 6, 8, 11, 13, 16)

LAYER = 40
"""Kernels of a Llama layer on one rank: 7 matrix products, attention, and operations element by element."""

OPTIONS: dict[str, dict[str, Any]] = {
    "snapkv": {"budget": 6, "window": 3, "kernel": 3},
    "keydiff": {"budget": 6},
    "tova": {"budget": 6},
    "expected_attention": {"budget": 6, "future_tokens": 8},
    "chunkkv": {"budget": 6, "window": 3, "chunk": 2},
    "r_kv": {"budget": 6, "window": 3, "kernel": 3},
    "scissorhands": {"budget": 6, "recent": 2, "window": 3},
    "keyformer": {"budget": 6},
    "k_centers": {"budget": 6},
    "lagkv": {"budget": 6, "sinks": 2, "lag": 3},
    "streaming_llm": {"budget": 6, "sinks": 2},
    "h2o": {"budget": 6},
    "pyramidinfer": {"mean_keep": 0.6},
}


@pytest.mark.parametrize(
    ("strategy", "boundaries", "options", "more"),
    [
        (KVRunahead(), (0, 16), PrefillOptions(), [0]),
        (KVRunahead(), BOUNDARIES, PrefillOptions(transfer=Transfer.relay), [0, 6, 6]),
        (KVRunahead(), BOUNDARIES, PrefillOptions(transfer=Transfer.direct), [0, 6, 6]),
        (Zigzag(), ZIGZAG, PrefillOptions(exchange=Exchange.all_gather), [6, 14, 8]),
    ],
    ids=["single", "relay", "direct", "zigzag"],
)
def test_a_layer_has_few_kernels(
    strategy: Prefill,
    boundaries: tuple[int, ...],
    options: PrefillOptions,
    more: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More than these: attention to the prefix, and its merge with that to the own chunk."""
    monkeypatch.setattr("runahead.attention.partial.FEW_QUERIES", 1)  # what a CPU copies for short chunks
    shallow, deep = (prefill(strategy, boundaries, options, num_layers=layers).kernels for layers in (3, 4))
    assert [b - a for a, b in zip(shallow, deep, strict=True)] == [LAYER + each for each in more]


@pytest.mark.parametrize("boundaries", [(0, 16), BOUNDARIES], ids=["one rank", "three ranks"])
@pytest.mark.parametrize("name", [None, *OPTIONS])
@pytest.mark.sampled(2)
def test_the_host_waits_for_no_value_and_copies_none(
    name: str | None, boundaries: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a prefill of a prompt without padding."""
    monkeypatch.setattr("runahead.cache.kept.require_pads", lambda *_: None)  # a check that only a CPU makes
    policies = [] if name is None else [POLICIES[name](**OPTIONS[name])]
    outcome = prefill(KVRunahead(), boundaries, PrefillOptions(), policies=policies)
    assert (outcome.synchronizations, outcome.uploads) == (0, 0)


@pytest.mark.parametrize(
    "policy",
    [
        SnapKV(budget=12, window=3, kernel=3, evict_every=6),
        TOVA(budget=12, evict_every=6),
        RKV(budget=12, window=3, kernel=3, evict_every=6),
        H2O(budget=12, evict_every=6),
        ExpectedAttention(budget=12, future_tokens=8, evict_every=6),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_rows_of_different_lengths_are_cut_back_without_a_wait(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a prompt, and while decoding each row at a step of its own."""
    monkeypatch.setattr("runahead.cache.kept.require_pads", lambda *_: None)  # a check that only a CPU makes
    run = Run(tiny_model("llama"), [policy], [prompt(14), prompt(9, seed=1)])
    RankPolicies.everywhere([policy]).check(run.model)  # as `Engine` does before the first prompt
    waits, slots = [], []

    def body(ranks: VirtualRanks) -> None:
        with Deferred(ranks.accelerator) as device:
            run.prefill()
            for token in range(14):
                run.decode(token)
                slots.append(run.kept.slots_by_layer[0])
        waits.append(device.num_synchronizations)

    Job(1, choose=transfers_early).run(body)
    assert max(slots) < 14 + 14
    assert waits == [0]


@pytest.mark.parametrize("values", [[3], [0, 0, 0], [2, 0, 5]])
def test_values_of_rows(values: list[int]) -> None:
    assert torch.equal(row_values(values, torch.device("cpu")), torch.tensor(values))
