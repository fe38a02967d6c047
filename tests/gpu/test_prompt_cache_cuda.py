"""Reuse of modules on a GPU: what the CPU says, from the device's memory, from the host's and from files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from policies.clusterkv import ClusterKV
from policies.reuse import ReusingPrompt, Segment, SegmentUse
from runahead import Engine, GenerationOptions
from runahead.reuse.store import SegmentStore, StoreLimits
from runahead.thinning.rank_policies import RankPolicies
from tests.gpu.models import CPU, alone, model


def asked() -> list[ReusingPrompt]:
    """Two prompts that share a module and have another each, and tokens between and behind them."""
    ids = torch.randint(211, (700,), generator=torch.Generator().manual_seed(4)).tolist()
    segments = [
        Segment(name=f"{start}", ids=tuple(ids[start : start + 200]), positions=tuple(range(start, start + 200)))
        for start in (0, 210, 420)
    ]
    prompts = []
    for chosen in (segments[:2], segments[::2]):
        uses = tuple(SegmentUse(segment=each, parts=(range(4, 200),)) for each in chosen)
        again = {each.positions[index]: each.ids[index] for each in chosen for index in range(4)}
        new = sorted(again.items()) + [(650 + index, token) for index, token in enumerate(ids[:20])]
        prompts.append(
            ReusingPrompt(uses=uses, new_ids=tuple(i for _, i in new), new_positions=tuple(p for p, _ in new))
        )
    return prompts


CLUSTERS = ClusterKV(fetch=1.0, first_layer=0, min_tokens=0, cluster=10)
"""Stores clusters with modules, and attends to all tokens, since a rounding may move a token to another cluster."""


@contextmanager
def first_clusters() -> Iterator[list[tuple[Segment, str, list[Tensor]]]]:
    """Clusters that are stored meanwhile, as they were on the device: segment, key and layers."""
    stored, put = list[tuple[Segment, str, list[Tensor]]](), SegmentStore.put

    def noted(self: SegmentStore, segment: Segment, layers_TKX: list[Tensor], clusters_key: str = "") -> None:
        if clusters_key:
            stored.append((segment, clusters_key, [layer.cpu().clone() for layer in layers_TKX]))
        put(self, segment, layers_TKX, clusters_key)

    with patch.object(SegmentStore, "put", noted):
        yield stored


def require_found(store: SegmentStore, stored: list[tuple[Segment, str, list[Tensor]]], tier: str) -> None:
    """The clusters are in this tier, with the same numbers, which differ between tokens."""
    for segment, clusters_key, layers in stored:
        found = store.find(segment, clusters_key)
        assert found is not None and found.tier.value == tier
        for ours, theirs in zip(found.layers_TKX, layers, strict=True):
            assert len(theirs.unique()) > 1 and torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("policies", [[], [CLUSTERS]], ids=["full", "clusters"])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_every_tier_answers_as_the_cpu_does(tmp_path: Path, tier: str, policies: list[ClusterKV]) -> None:
    """Each gives back the clusters that were put into it; answers do not show them, since all tokens are fetched."""
    options, prompts = GenerationOptions(max_new_tokens=8), asked()
    cpu, gpu = alone(CPU), alone()
    expected = Engine(model(cpu.device), cpu).generate(prompts, options)
    limits = StoreLimits(
        device_bytes=2**30 if tier == "device" else 0, host_bytes=2**30 if tier == "host" else 0, disk_bytes=2**30
    )
    store = SegmentStore(model(gpu.device), tmp_path, limits)
    engine = Engine(model(gpu.device), gpu, store=store, policies=RankPolicies.everywhere(policies))
    with first_clusters() as first:
        engine.generate(prompts, options)
    batch = engine.generate(prompts, options)
    reuse = batch.ranks[0].reuse
    assert reuse is not None and list(reuse.found_bytes) == [tier]
    for ours, theirs in zip(batch.generations, expected.generations, strict=True):
        assert ours.new_token_ids == theirs.new_token_ids
    require_found(store, first, tier)
    assert len(first) == (3 if policies else 0)
