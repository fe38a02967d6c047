"""No way of decoding makes more torch calls than it did. Pinned as found; a commit that changes a number says why."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from torch import Tensor

from runahead.kv_transfer.gathering import LoneGathering
from tests.virtual.calls import Calls, calls_of
from tests.virtual.ways import (
    CPU,
    FEW_LAYERS,
    FROM_TOKEN,
    HAS_PINNED_VERSIONS,
    TO_TOKEN,
    UNDER_POLICIES,
    WAYS,
    Window,
    llama,
)

CALLS: dict[str, Calls] = {
    "static": Calls(10, 3, 0),
    "served": Calls(10, 3, 0),
    "served under a policy": Calls(10, 3, 5),
    "sampled": Calls(10, 3, 0),
    "drafted": Calls(18, 8, 0),
    "4 bits": Calls(96, 34, 5),
    "2 bits": Calls(112, 46, 5),
    "unequal heads": Calls(21, 8, 5),
    "unequal heads in 4 bits": Calls(150, 59, 35.75),
    "static, padded": Calls(33, 7, 0),
    "served, padded": Calls(23, 7, 0),
    "served under a policy, padded": Calls(35, 11, 15),
    "sampled, padded": Calls(33, 7, 0),
    "drafted, padded": Calls(68, 26, 0),
    "4 bits, padded": Calls(232, 82.75, 6),
    "2 bits, padded": Calls(266, 108.75, 6),
    "unequal heads, padded": Calls(37, 12, 6),
    "unequal heads in 4 bits, padded": Calls(201.875, 76.875, 45.75),
    "4 bits of 512 tokens": Calls(96, 34, 5),
    "unequal heads in 4 bits of 512 tokens": Calls(133.75, 52, 70),
    "4 bits of 4,096 tokens": Calls(538, 182, 5),
    "unequal heads in 4 bits of 4,096 tokens": Calls(399, 134, 5),
    "prefix hit": Calls(23, 8, 0),
    "1 joined rows": Calls(10, 3, 0),
    "4 joined rows": Calls(27, 8, 0),
    "8 joined rows": Calls(43, 12, 0),
    "16 joined rows": Calls(75, 20, 0),
    "4 padded rows": Calls(42, 8, 0),
    "8 answers of one prompt": Calls(107, 32, 0),
    "slabs": Calls(10, 3, 0),
    "sharded": Calls(20, 7, 0),
    "4 tokens in turn, 4 bits": Calls(409.75, 148.25, 20),
    "64 tokens after 128": Calls(15, 8, -5),
    "snapkv": Calls(10, 3, 5),
    "h2o": Calls(87.5, 36.25, 5),
    "quest": Calls(74, 31, -123),
    "infinigen": Calls(32, 9, -17),
    "offload": Calls(10, 3, 7),
}
"""Inside attention, on a CPU: per layer and step, those of them that are no views, and once a step."""

NOT_PINNED = {
    "ungrouped": "on a CPU it is the way `static`",
    "replayed": "a CPU has no graphs",
    "replayed ungrouped": "a CPU has no graphs",
}
"""Ways by their names' first part, and why they are not counted; policies are in `test_budgets.py`, but for some."""


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.skipif(not HAS_PINNED_VERSIONS, reason="other versions of torch and transformers make other calls")
def test_a_step_makes_no_more_calls_than_before(name: str) -> None:
    found = calls_of(name)
    assert found == CALLS[name], f"pinned: {CALLS[name]}, found: {found}"


def test_every_way_is_counted() -> None:
    pinned = {name for name in WAYS if name.split(",")[0] not in NOT_PINNED and name not in UNDER_POLICIES}
    assert pinned <= CALLS.keys() <= WAYS.keys()


def test_a_step_over_shards_has_one_exchange_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, gather = Counter[str](), LoneGathering.__call__

    def counted(self: LoneGathering, own: Tensor, *what: str) -> Tensor:
        counts["exchanges"] += 1
        return gather(self, own, *what)

    monkeypatch.setattr(LoneGathering, "__call__", counted)
    decode, num_kv_heads = WAYS["sharded"]
    window = Window(partial(Counter, counts))
    decode(llama(FEW_LAYERS, num_kv_heads, CPU), window)
    assert window.between(FROM_TOKEN, TO_TOKEN) == {"exchanges": FEW_LAYERS}
