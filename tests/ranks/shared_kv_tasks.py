"""Tasks of ranks in the tests of models whose layers share keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from runahead import ContextPartition, DecodeOptions, Engine, GenerationOptions, Ranks
from runahead.config import DecodeName
from runahead.thinning.rank_policies import RankPolicies
from tests.families import throughout
from tests.ranks.tasks import tiny_model


@dataclass(kw_only=True)
class Computed:
    """Tokens that each decoder layer of a rank's model computed, and the bytes of its keys and values."""

    tokens_by_layer: list[int] = field(default_factory=list)
    kept_bytes: int = 0
    sent_bytes: int = 0


def computed(ranks: Ranks, family: str, ids: list[int], boundaries: tuple[int, ...]) -> Computed:
    """Tokens and bytes that a rank computes and stores of a prompt from which one token is generated."""
    model, found = tiny_model(family), Computed()
    engine = Engine(model, ranks, partition=lambda *_: ContextPartition(boundaries=boundaries))

    def note(_module: nn.Module, args: tuple[Any, ...]) -> None:
        found.tokens_by_layer.append(args[0].shape[1])

    def projections() -> list[nn.Module]:
        return [module for name, module in model.module.named_modules() if name.endswith("self_attn.q_proj")]

    hooks = [module.register_forward_pre_hook(note) for module in projections()]
    try:
        with throughout(model.dtype):
            batch = engine.generate([ids], GenerationOptions(max_new_tokens=1))
    finally:
        for hook in hooks:
            hook.remove()
    own = batch.ranks[ranks.rank]
    found.kept_bytes, found.sent_bytes = own.kv_peak_bytes, own.kv_sent_bytes
    return found


def decode_together(
    ranks: Ranks,
    family: str,
    prompts: list[list[int]],
    options: GenerationOptions,
    bounds: tuple[int, ...],
    policies: RankPolicies | None,
) -> tuple[list[list[int]], str]:
    """New tokens of each row with decode=sharded, and where keys and values were."""
    model, partition = tiny_model(family), ContextPartition(boundaries=bounds)
    decode = DecodeOptions(name=DecodeName.sharded)
    with throughout(model.dtype):
        engine = Engine(model, ranks, partition=lambda *_: partition, policies=policies, decode=decode)
        batch = engine.generate(prompts, options)
    return [generation.new_token_ids for generation in batch.generations], batch.decode
