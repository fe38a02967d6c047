"""A prefill on several ranks has few kernels per layer, and the host never waits for a value.

What one GPU is asked for, also while decoding, is in test_budgets.py.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from policies import POLICIES
from policies.row_values import row_values
from runahead.config import Exchange, PrefillOptions, Transfer
from runahead.prefill import Prefill
from runahead.prefill.kv_runahead import KVRunahead
from runahead.prefill.zigzag import Zigzag
from tests.virtual.deferred import Deferred
from tests.virtual.device import transfers_early
from tests.virtual.jobs import prefill
from tests.virtual.test_sharded import answers

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
        (KVRunahead(), BOUNDARIES, PrefillOptions(transfer=Transfer.relay), [0, 5, 5]),
        (KVRunahead(), BOUNDARIES, PrefillOptions(transfer=Transfer.direct), [0, 5, 5]),
        (Zigzag(), ZIGZAG, PrefillOptions(exchange=Exchange.all_gather), [5, 12, 7]),
    ],
    ids=["relay", "direct", "zigzag"],
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


@pytest.mark.parametrize("name", [None, *OPTIONS])
@pytest.mark.sampled(2)
def test_the_host_waits_for_no_value_and_copies_none(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt has no padding."""
    monkeypatch.setattr("runahead.cache.kept.require_pads", lambda *_: None)  # a check that only a CPU makes
    policies = [] if name is None else [POLICIES[name](**OPTIONS[name])]
    outcome = prefill(KVRunahead(), BOUNDARIES, PrefillOptions(), policies=policies)
    assert (outcome.synchronizations, outcome.uploads) == (0, 0)


STEP = [(47.0, 1.0), (47.0, 2.0)]
"""Kernels of each rank per layer and step, and waits of its host per step. The last one chooses the tokens besides."""


def test_a_step_of_several_ranks_asks_for_no_more_than_before() -> None:
    """Each of two ranks stores a part, and all of them compute what follows from their merged attention."""
    found = []
    for num_layers in (2, 4):
        seen: dict[int, list[tuple[int, int]]] = defaultdict(list)

        def note(rank: int, device: Deferred, seen: dict[int, list[tuple[int, int]]] = seen) -> None:
            seen[rank].append((device.gpu.num_kernels, device.num_synchronizations))

        answers((0, 9, 16), transfers_early, num_layers=num_layers, on_step=note)
        ranks_steps = [seen[rank] for rank in sorted(seen)]
        found.append([[(b - a) / 3 for a, b in zip(steps[0], steps[3], strict=True)] for steps in ranks_steps])
    few, more = found
    assert [((b[0] - a[0]) / 2, b[1]) for a, b in zip(few, more, strict=True)] == STEP


@pytest.mark.parametrize("values", [[3], [0, 0, 0], [2, 0, 5]])
def test_values_of_rows(values: list[int]) -> None:
    assert torch.equal(row_values(values, torch.device("cpu")), torch.tensor(values))
