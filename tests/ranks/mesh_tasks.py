"""Tasks of ranks in test_mesh_places.py: top-level functions, since they run in other processes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from launch.infer import INFER, infer
from partitioner.auto.partition import AutoPartition
from partitioner.search import SEARCH, search
from runahead import ContextPartition, DecodeOptions, Engine, GenerationOptions, PrefillOptions, Ranks, even
from runahead.config import DecodeName
from runahead.prefill import PREFILLS, PrefillJob, PromptBatch, chain_run
from runahead.report import GenerationBatch, ReuseReport
from runahead.reuse.prefix_tree import PrefixTree
from runahead.reuse.store import SegmentStore
from runahead.thinning.rank_policies import RankPolicies
from tests.families import prompt, throughout
from tests.prompt_cache.serving import random_prompt, random_segments, serve
from tests.ranks.tasks import Steps
from tests.ranks.tensor_tasks import arranged, shared_model

Case = tuple[PrefillOptions, tuple[int, ...] | None]
"""A prefill, and the boundaries of the stages' chunks; None where the prefill splits by itself."""


def first_logits(
    ranks: Ranks,
    num_shares: int,
    family: str,
    ids: list[int],
    cases: Sequence[Case],
    stores_first: bool | None = None,
    **sizes: Any,
) -> list[tuple[list[float] | None, int, int, int]]:
    """This rank's logits (V) after the prompt of each case, if it decodes; bytes sent, received and held at most.

    Args:
        stores_first: what a stage decides on blocks of rows; None: as it does.
    """
    outcomes = []
    decided = chain_run.chunk_projects_twice if stores_first is None else lambda *_: stores_first
    with arranged(ranks, num_shares), patch.object(chain_run, "chunk_projects_twice", decided):
        model = shared_model(ranks, family, torch.float64, num_shares, **sizes)
        batch = PromptBatch.from_prompts([ids], ranks.device)
        for options, boundaries in cases:
            strategy = PREFILLS[options.name]()
            chosen = even if boundaries is None else lambda *_, to=boundaries: ContextPartition(boundaries=to)
            partition = strategy.split(len(ids), ranks.num_stages, chosen)
            strategy.connect(ranks, partition, options)
            job = PrefillJob(
                model=model, ranks=ranks, batch=batch, partition=partition, capacity=len(ids), options=options
            )
            done = strategy.run(job)
            logits = None if done.logits_BV is None else done.logits_BV[0].tolist()
            report = done.report
            assert (
                options.row_tokens is None
                or report.row_tokens == options.row_tokens
                or (report.chunk_tokens <= options.row_tokens)
            )
            outcomes.append((logits, report.kv_sent_bytes, report.kv_received_bytes, report.kv_peak_bytes))
    return outcomes


def generate(
    ranks: Ranks,
    num_shares: int,
    family: str,
    prompts: list[list[int]],
    options: GenerationOptions,
    *,
    boundaries: tuple[int, ...] | None = None,
    prefill: PrefillOptions | None = None,
    policies: RankPolicies | None = None,
    decode: DecodeName = DecodeName.auto,
    **sizes: Any,
) -> tuple[GenerationBatch, Steps]:
    """Result of `Engine.generate` on this rank, and the calls of `on_tokens` there. Chunks are even by default."""
    steps: Steps = []
    with arranged(ranks, num_shares), throughout(torch.float64):
        model = shared_model(ranks, family, torch.float64, num_shares, **sizes)
        partition = even if boundaries is None else lambda *_: ContextPartition(boundaries=boundaries)
        decodes = DecodeOptions(name=decode)
        engine = Engine(model, ranks, prefill=prefill, partition=partition, policies=policies, decode=decodes)
        batch = engine.generate(prompts, options, on_tokens=steps.append, record_timeline=True)
    return batch, steps


def generate_in_turn(
    ranks: Ranks,
    num_shares: int,
    family: str,
    batches: list[list[list[int]]],
    options: GenerationOptions,
    limits: Sequence[float] | None,
    prefill: PrefillOptions,
) -> list[GenerationBatch]:
    """Generate from batches in turn, with a prefix tree of so many tokens on each rank, or without trees."""
    with arranged(ranks, num_shares), throughout(torch.float64):
        model = shared_model(ranks, family, torch.float64, num_shares)
        token_bytes = sum(shape.bytes_per_token() for shape in model.kv_shapes)
        tree = None if limits is None else PrefixTree(limits[ranks.rank] * token_bytes)
        last = DecodeOptions(name=DecodeName.last)
        engine = Engine(model, ranks, prefill=prefill, decode=last, tree=tree)
        found = [engine.generate(prompts, options) for prompts in batches]
        assert tree is None or all(node.holds == 0 for node in tree.nodes())
    return found


def serve_segments(
    ranks: Ranks, num_shares: int, family: str, num_prompts: int, lengths: list[int], folder: str | None, seed: int
) -> tuple[list[Tensor] | None, ReuseReport | None, int]:
    """Logits of prompts that reuse segments, the report, and the segments' bytes; see `serve`."""
    draw = random.Random(seed)
    segments = random_segments(draw)
    prompts = [random_prompt(draw, segments) for _ in range(num_prompts)]
    with arranged(ranks, num_shares):
        model = shared_model(ranks, family, torch.float64, num_shares)
        store = SegmentStore(model, folder)
        longest = max(len(prompt.new_ids) for prompt in prompts)
        shares = [longest * length // sum(lengths) for length in lengths[:-1]]
        chunks = [*shares, longest - sum(shares)]
        served = serve(model, prompts, store=store, ranks=ranks, lengths=chunks, following=(5, 7))
        stored = sum(store.bytes_by_tier().values())
    return (None, None, stored) if served is None else (served.logits, served.report, stored)


def run_program(ranks: Ranks, num_shares: int, overrides: list[str], folder: str) -> dict[str, Any]:
    """The report of launch/infer.py on ranks that are arranged so."""
    with arranged(ranks, num_shares):
        infer(INFER.compose([*overrides, f"report={folder}/run.json", f"timeline={folder}/trace.json"]), ranks, even)
    report: dict[str, Any] = json.loads(Path(folder, "run.json").read_text())
    return report


def make_ready(ranks: Ranks, num_shares: int) -> None:
    with arranged(ranks, num_shares):
        shared_model(ranks, "llama", torch.float32, num_shares)


def split_by_auto(
    ranks: Ranks, num_shares: int, folder: Path, lengths: list[int]
) -> tuple[list[list[int]], list[float] | None]:
    """Boundaries of prompts under partition=auto, and on rank 0 what was learned of each stage's speed."""
    with arranged(ranks, num_shares):
        model = shared_model(ranks, "llama", torch.float32, num_shares)
        partition = AutoPartition.start(model, ranks, folder=folder, tell=lambda sentence: None)
        engine = Engine(model, ranks, partition=partition)
        options = GenerationOptions(max_new_tokens=2)
        boundaries = [engine.generate([prompt(length)], options).boundaries for length in lengths]
    learned = None if partition.balance is None else partition.balance.cluster.speed
    return boundaries, None if learned is None else list(learned)


def search_table(ranks: Ranks, num_shares: int, overrides: list[str]) -> tuple[int, list[tuple[int, ...]]]:
    """The ranks.tensor in the table of a search, and its boundaries."""
    with arranged(ranks, num_shares):
        table = search(SEARCH.compose(overrides), ranks)
    return table.fingerprint.tensor, [entry.boundaries for entry in table.entries]
