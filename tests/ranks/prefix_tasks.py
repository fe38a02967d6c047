"""Tasks of the tests of prefixes that the last stage has stored and all stages use."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import cache
from math import inf
from pathlib import Path

import torch

from runahead import ContextPartition, Engine, GenerationOptions, Model, PrefillOptions, Ranks, even
from runahead.config import DecodeName, DecodeOptions
from runahead.failures import SharedError
from runahead.report import GenerationBatch
from runahead.reuse.prefix_tree import PrefixTree
from runahead.thinning.rank_policies import RankPolicies
from tests.families import build, throughout
from tests.ranks.tasks import tiny_model
from tests.reuse.prefix_tasks import damage

LAST = DecodeOptions(name=DecodeName.last)


@cache
def deep_model() -> Model:
    """A model with more layers than stored prefixes are sent ahead."""
    module = build("llama", num_hidden_layers=8)
    with throughout(torch.float64):
        return Model(module, name="deep")


@dataclass(frozen=True)
class Split:
    """Splits prompts evenly, or as `ratios` say; those of up to `short` tokens are the last stage's by default."""

    short: int = 0
    ratios: tuple[float, ...] = ()
    short_ratios: tuple[float, ...] = ()

    def __call__(self, num_tokens: int, num_ranks: int) -> ContextPartition:
        ratios = self.short_ratios if num_tokens <= self.short else self.ratios
        if num_tokens <= self.short and not ratios:
            return ContextPartition(boundaries=(0,) * num_ranks + (num_tokens,))
        if not ratios:
            return even(num_tokens, num_ranks)
        ends = [round(num_tokens * sum(ratios[: at + 1])) for at in range(num_ranks)]
        return ContextPartition(boundaries=(0, *ends))


@dataclass(kw_only=True)
class Turns:
    """Results of batches that one engine with a tree generated from.

    Attributes:
        ours: with the tree.
        theirs: the same without one.
        num_held: hits that are held afterwards.
    """

    ours: list[GenerationBatch] = field(default_factory=list)
    theirs: list[GenerationBatch] = field(default_factory=list)
    num_held: int = 0


def generate_in_turn(
    ranks: Ranks,
    family: str,
    batches: list[list[list[int]]],
    options: GenerationOptions,
    split: Split,
    prefill: PrefillOptions,
    limit_bytes: float,
    policies: RankPolicies | None = None,
    snapshot_tokens: int = 0,
) -> Turns:
    """Generate from batches in turn with a tree; each once more without one."""
    model = deep_model() if family == "deep" else tiny_model(family)
    tree, turns = PrefixTree(limit_bytes, snapshot_tokens=snapshot_tokens), Turns()
    ours = Engine(model, ranks, prefill=prefill, partition=split, policies=policies, decode=LAST, tree=tree)
    theirs = Engine(model, ranks, prefill=prefill, partition=split, policies=policies, decode=LAST)
    with throughout(model.dtype):
        for prompts in batches:
            turns.ours.append(ours.generate(prompts, options))
            turns.theirs.append(theirs.generate(prompts, options))
    turns.num_held = sum(node.holds for node in tree.nodes())
    return turns


def generate_from_damaged_files(
    ranks: Ranks,
    folder: Path,
    prompts: list[list[int]],
    options: GenerationOptions,
    prefill: PrefillOptions,
    layer: int,
) -> tuple[Turns, list[str]]:
    """Generate in turn after a restart on files of the first prompt whose numbers of a layer are wrong.

    Returns also what this rank was told.
    """
    model, turns, is_last = tiny_model("llama"), Turns(), ranks.rank == ranks.size - 1

    def engine() -> tuple[Engine, PrefixTree]:
        tree = PrefixTree(inf, folder=folder if is_last else None)
        return Engine(model, ranks, prefill=prefill, decode=LAST, tree=tree), tree

    theirs = Engine(model, ranks, prefill=prefill, decode=LAST)
    assert model.fingerprint  # outside of `throughout`, which changes what it computes
    with throughout(model.dtype), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        before, tree = engine()
        before.generate([prompts[0]], options)
        if is_last:
            tree.save()
            damage(folder, layer % model.num_layers)
        after, tree = engine()
        for ids in prompts[1:]:
            turns.ours.append(after.generate([ids], options))
            turns.theirs.append(theirs.generate([ids], options))
    turns.num_held = sum(node.holds for node in tree.nodes())
    return turns, [str(each.message) for each in told]


def tree_on_rank_0_alone(ranks: Ranks, ids: list[int]) -> str:
    """The error of a call in which only rank 0 has a tree."""
    model = tiny_model("llama")
    engine = Engine(model, ranks, decode=LAST, tree=PrefixTree(1e9) if ranks.rank == 0 else None)
    try:
        engine.generate([ids], GenerationOptions(max_new_tokens=1))
    except (ValueError, SharedError) as error:
        return str(error)
    return "none"


@dataclass(kw_only=True)
class Parts:
    """Results of batches that one engine generated from, each stage of which stores a part of every text.

    Attributes:
        num_stored: tokens that this rank has stored afterwards.
        num_held: hits that are held then.
    """

    results: list[GenerationBatch] = field(default_factory=list)
    num_stored: int = 0
    num_held: int = 0


def generate_in_parts(
    ranks: Ranks,
    family: str,
    batches: list[list[list[int]]],
    options: GenerationOptions,
    split: Split,
    prefill: PrefillOptions,
    limits: list[float],
    decode: DecodeOptions,
    salts: list[list[str]] | None = None,
) -> Parts:
    """Generate from batches in turn, with a tree on each rank that has so many bytes."""
    model, tree, parts = tiny_model(family), PrefixTree(limits[ranks.rank]), Parts()
    engine = Engine(model, ranks, prefill=prefill, partition=split, decode=decode, tree=tree)
    with throughout(model.dtype):
        for number, prompts in enumerate(batches):
            parts.results.append(engine.generate(prompts, options, salts=salts[number] if salts else ()))
    parts.num_stored = sum(node.num_tokens for node in tree.nodes())
    parts.num_held = sum(node.holds for node in tree.nodes())
    return parts


def generate_alone(
    ranks: Ranks, family: str, batches: list[list[list[int]]], options: GenerationOptions
) -> list[GenerationBatch]:
    """Generate from batches without a tree."""
    model = tiny_model(family)
    with throughout(model.dtype):
        return [Engine(model, ranks).generate(prompts, options) for prompts in batches]


def sharded_then(
    ranks: Ranks,
    family: str,
    batches: list[list[list[int]]],
    options: GenerationOptions,
    decode: DecodeOptions,
    later: GenerationOptions | None = None,
) -> list[GenerationBatch]:
    """Generate from the first batch sharded, and from the others by an engine with the same tree that decodes so."""
    model, tree = tiny_model(family), PrefixTree(inf)
    sharded = Engine(model, ranks, decode=DecodeOptions(name=DecodeName.sharded), tree=tree)
    other = Engine(model, ranks, decode=decode, tree=tree)
    with throughout(model.dtype):
        return [
            sharded.generate(batches[0], options),
            *(other.generate(each, later or options) for each in batches[1:]),
        ]


def restarted_in_parts(
    ranks: Ranks, folder: Path, family: str, batches: list[list[list[int]]], options: GenerationOptions
) -> list[GenerationBatch]:
    """Generate from each batch after a restart on the files of those before; each rank has a folder."""
    model, results = tiny_model(family), list[GenerationBatch]()
    assert model.fingerprint  # outside of `throughout`, which changes what it computes
    with throughout(model.dtype):
        for prompts in batches:
            tree = PrefixTree(inf, folder=folder / str(ranks.rank))
            engine = Engine(model, ranks, decode=DecodeOptions(name=DecodeName.sharded), tree=tree)
            results.append(engine.generate(prompts, options))
            tree.save()
    return results
