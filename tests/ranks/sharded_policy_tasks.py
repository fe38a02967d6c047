"""Tasks of ranks in test_sharded_policies.py: top-level functions, since they run in other processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor

from policies.retriever import Choice
from runahead import (
    GenerationOptions,
    PrefillOptions,
    Ranks,
)
from runahead.cache.base import KVStore
from runahead.cache.kept import KeptLayer
from runahead.config import DecodeName
from runahead.decoding import together
from runahead.decoding.forward import Forward, forward_over
from runahead.decoding.sampling import Sampler
from runahead.report import GenerationBatch
from runahead.retrieval.fetched import Fetches
from runahead.thinning.rank_policies import RankPolicies
from tests.families import throughout
from tests.ranks import policy_tasks
from tests.ranks.tasks import tiny_model

Positions = list[list[list[int]]]
"""Positions of some slots by row and KV head (or one for all), below 0 on padding."""


@dataclass(kw_only=True)
class Seen:
    """Contents of one rank's cache.

    Attributes:
        batch: what `Engine.generate` returned.
        logits: of each new token, where they are chosen (steps, B, V).
        stored: positions of the slots before each decoding step, by layer.
        carried: what policies have stored of these slots, by layer.
        fetched: positions that a retrieving policy chose, by layer and step.
    """

    batch: GenerationBatch
    logits: list[list[list[float]]] = field(default_factory=list)
    stored: list[list[Positions]] = field(default_factory=list)
    carried: list[list[list[Tensor]]] = field(default_factory=list)
    fetched: dict[int, list[Positions]] = field(default_factory=dict)


def generate(
    ranks: Ranks,
    family: str,
    prompts: list[list[int]],
    bounds: tuple[int, ...],
    policies: RankPolicies,
    options: GenerationOptions,
    prefill: PrefillOptions | None = None,
    decode: DecodeName = DecodeName.sharded,
) -> Seen:
    """Generate under policies, and look at the cache before every step."""
    model, engine = tiny_model(family), policy_tasks.engine(ranks, family, bounds, policies, prefill, decode)
    logits, stored, carried = list[list[list[float]]](), list[list[Positions]](), list[list[list[Tensor]]]()
    fetched: dict[int, list[Positions]] = {}
    choose, start = together.next_tokens, Fetches.start

    def next_tokens(samplers: Sequence[Sampler | None], logits_BV: Tensor) -> list[int | None]:
        logits.append(logits_BV.tolist())
        return choose(samplers, logits_BV)

    def looked_at(model: Any, cache: KVStore, *args: Any, **kwargs: Any) -> Forward:
        forward = forward_over(model, cache, *args, **kwargs)

        def step(ids_B1: Tensor, start: int) -> Tensor:
            layers = [layer for layer in cache.layers if isinstance(layer, KeptLayer)]
            stored.append([layer.positions_BKn().tolist() for layer in layers])
            values = [[layer.carried_BKn(policy) for policy in layer.carried] for layer in layers]
            carried.append([[each_BKn.clone() for each_BKn in of_layer if each_BKn is not None] for of_layer in values])
            return forward(ids_B1, start)

        return step

    def noted(self: Fetches, layer: int, kept: KeptLayer, choice: Choice | None, *args: Any, **more: Any) -> None:
        positions_BKn = kept.positions_BKn()
        if choice is not None:
            positions_BKn = positions_BKn.expand(-1, choice.slots_BKm.shape[1], -1).gather(2, choice.slots_BKm)
        fetched.setdefault(layer, []).append(positions_BKn.tolist())
        start(self, layer, kept, choice, *args, **more)

    with (
        throughout(model.dtype),
        mock.patch.object(together, "next_tokens", next_tokens),
        mock.patch("runahead.decoding.batch.forward_over", looked_at),
        mock.patch.object(Fetches, "start", noted),
    ):
        batch = engine.generate(prompts, options)
    return Seen(batch=batch, logits=logits, stored=stored, carried=carried, fetched=fetched)
