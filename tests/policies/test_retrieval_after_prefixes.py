"""Policies that retrieve, with a prefix tree: what they compute after stored prefixes, and what others find of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from policies.base import Policy
from policies.pool import Victim
from policies.skewing import Skew
from runahead import Engine, GenerationOptions, Model, PrefillOptions, Ranks
from runahead.config import Device, RanksOptions
from runahead.reuse.prefix_tree import PrefixTree
from runahead.thinning.rank_policies import RankPolicies
from tests.families import prompt, throughout
from tests.policies.test_retrieval import NAMES, SOME, policy
from tests.ranks.tasks import tiny_model
from tests.reuse.test_prefixes import ROOMY, computed_and_cached, num_common, require_same

OPTIONS = GenerationOptions(max_new_tokens=3, ignore_eos=True, logprobs=5)
OBSERVED = {"infinigen": 16, "squeezed_attention": 16, "infllm": 16, "retrieval_attention": 16}
"""Last tokens of a prompt that are always computed, where these are more than one."""


def made(name: str, **options: Any) -> Policy:
    seen = {"observed": OBSERVED[name]} if name in OBSERVED else {}
    return policy(name, SOME[name] | seen | options)


def engine_of(
    model: Model, tree: PrefixTree | None, *policies: Policy, prefill: PrefillOptions | None = None
) -> Engine:
    ranks = Ranks.start(RanksOptions(device=Device.cpu))
    return Engine(model, ranks, policies=RankPolicies.everywhere(policies), tree=tree, prefill=prefill)


def found(ids: list[int], texts: list[list[int]], least_new: int) -> int:
    """Tokens of a prompt that it reuses."""
    return max((num_common(ids[: max(0, len(ids) - least_new)], text) for text in texts), default=0)


def slowly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


TEXT = prompt(60)
BATCHES = [[TEXT], [TEXT + prompt(20, seed=1), prompt(25, seed=2), TEXT[:45] + prompt(5, seed=3)]]
AT_ONCE, IN_PIECES = PrefillOptions(), PrefillOptions(chunk_tokens=7)
REUSING = [name for name in NAMES if name != "em_llm"]  # whose prompts are computed whole
CASES = [
    ("infinigen", "llama", AT_ONCE),
    ("infinigen", "llama", IN_PIECES),
    ("quest", "gemma2", AT_ONCE),  # with windows in every other layer
    ("quest", "gemma2", IN_PIECES),
    ("exact_topk", "llama", AT_ONCE),
    slowly("infinigen", "gpt2", AT_ONCE),  # no rotations
    *(slowly(name, family, AT_ONCE) for name in REUSING for family in ("qwen3", "gpt_oss")),
    *(slowly(name, "llama", IN_PIECES) for name in REUSING if name not in ("infinigen", "quest")),
    slowly("offload", "gemma2", AT_ONCE),
]


@pytest.mark.parametrize(
    ("name", "family", "prefill"), CASES, ids=lambda each: each if isinstance(each, str) else each.chunk_tokens
)
def test_what_is_retrieved_after_a_stored_prefix_is_what_is_retrieved_without_one(
    name: str, family: str, prefill: PrefillOptions
) -> None:
    model, known, tree = tiny_model(family), list[list[int]](), PrefixTree(ROOMY)
    ours, theirs = engine_of(model, tree, made(name), prefill=prefill), engine_of(model, None, made(name))
    for prompts in BATCHES:
        reused = [found(ids, known, OBSERVED.get(name, 1)) for ids in prompts]
        with throughout(model.dtype):
            batch = ours.generate(prompts, OPTIONS)
            require_same(batch, theirs.generate(prompts, OPTIONS))
        lengths = [len(ids) - num for ids, num in zip(prompts, reused, strict=True)]
        assert computed_and_cached(batch) == (max(lengths), sum(reused))
        [report] = batch.ranks
        if name != "offload":
            assert report.retrieval is not None
            assert any(share is not None and share < 0.8 for share in report.retrieval.fetched_share)
        known += prompts  # and no answers, whose keys and values are of what was retrieved
    assert sum(reused) > 90
    assert all(node.holds == 0 for node in tree.nodes())


def test_policies_that_retrieve_and_none_share_what_they_store() -> None:
    model, tree, text = tiny_model("llama"), PrefixTree(ROOMY), prompt(40)
    assert model.fingerprint  # others use the model, too, and `throughout` changes what it computes
    turns = [(made("infinigen"),), (), (made("exact_topk"),)]
    with throughout(model.dtype):
        for turn, policies in enumerate(turns):
            ids = text + prompt(20, seed=turn)
            ours = engine_of(model, tree, *policies).generate([ids], OPTIONS)
            require_same(ours, engine_of(model, None, *policies).generate([ids], OPTIONS))
            assert computed_and_cached(ours)[1] == (40 if turn else 0)
            [key] = {node.key for node in tree.nodes()}
            # The tokens of an answer have attended to what was retrieved alone.
            assert tree.num_stored(ids + ours.generations[0].new_token_ids, key) == (60 if policies else 62)


@pytest.mark.parametrize(
    ("victim", "least_new"), [(Victim.fifo, 1), slowly(Victim.lru, 32), slowly(Victim.counter, 32)]
)
def test_a_full_pool_drops_what_it_drops_without_a_stored_prefix(victim: Victim, least_new: int) -> None:
    model, tree, text = tiny_model("llama"), PrefixTree(ROOMY), prompt(80)
    pool = {"bytes": 48 * sum(shape.bytes_per_token() for shape in model.kv_shapes), "victim": victim}
    ours, theirs = (engine_of(model, each, made("exact_topk", pool=dict(pool))) for each in (tree, None))
    with throughout(model.dtype):
        ours.generate([text], OPTIONS)
        for ids in (text, text + prompt(9, seed=1)):
            batch = ours.generate([ids], OPTIONS)
            require_same(batch, theirs.generate([ids], OPTIONS))
            assert computed_and_cached(batch)[1] == min(80, len(ids) - least_new)
    assert sum(batch.ranks[0].retrieval.evicted) > 0
    assert tree.num_stored(text, next(tree.nodes()).key) == 80


def test_with_typical_queries_of_a_file_only_the_last_token_is_computed(tmp_path: Path) -> None:
    model, tree, ids = tiny_model("llama"), PrefixTree(ROOMY), prompt(60)
    shapes = [(shape.num_kv_heads, shape.key_dim, shape.key_dim) for shape in model.kv_shapes]
    skew = Skew(queries=[torch.rand(shape, dtype=torch.float32) for shape in shapes], at_position_0=True)
    (tmp_path / "skew").write_bytes(skew.packed(model.fingerprint))
    ours, theirs = (engine_of(model, each, made("infinigen", skew=str(tmp_path / "skew"))) for each in (tree, None))
    with throughout(model.dtype):
        ours.generate([ids], OPTIONS)
        batch = ours.generate([ids], OPTIONS)
        require_same(batch, theirs.generate([ids], OPTIONS))
    assert computed_and_cached(batch) == (1, 59)
