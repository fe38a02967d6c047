"""All ranks of a host, or of several: TTFT of KV-Runahead against one rank, and what the doctor's probe finds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.doctor import tasks
from benchmarks.doctor.checks import check_decoding, check_devices, check_exactness, check_links
from benchmarks.doctor.facts import Facts
from benchmarks.first_day.speed import ttft_sizes
from benchmarks.first_day.visit import Visit
from benchmarks.harness.random_prompts import random_ids
from partitioner.auto.partition import AutoPartition
from runahead.config import (
    Carrier,
    DecodeName,
    DecodeOptions,
    GenerationOptions,
    PrefillName,
    PrefillOptions,
    Transfer,
)
from runahead.engine import Engine
from runahead.model.shares import load_model
from runahead.report import GenerationBatch

LENGTHS, SMALL_LENGTHS = (16384, 65536), (96, 192)
NEW_TOKENS = (8, 40)
"""Tokens of short and long answers, in turn: the difference of their times has no capture of a graph in it."""

ROUNDS = 4
"""Prompts of each length that count, after one that does not, from which the split learns most."""


def probe(visit: Visit) -> None:
    """Links, memory, matrix products, exactness and decoding, with the doctor's verdicts."""
    length = 128 if visit.is_small else 4096
    task = tasks.JobTask(kind="probe", model=tasks.plain(visit.model_to_measure()), ranks={}, length=length)
    visit.say("the doctor's probe")
    found = tasks.probe(task, visit.ranks)
    gathered = visit.ranks.gather(Facts.here().as_json(), "facts of the hosts")
    facts = [Facts.from_json(each) for each in gathered]
    for finding in (
        *check_links(found, facts),
        *check_devices(found),
        *check_exactness(found, visit.ranks.size),
        *check_decoding(found),
    ):
        visit.figures.found(finding)
    if found["links"] and len({each.place for each in facts}) == 1:
        links = found["links"].values()
        visit.figures.note("the slowest link", min(link["bandwidth_Bps"] for link in links) / 1e9, "a link")
        visit.figures.note("the longest latency", max(link["latency_s"] for link in links) * 1e6, "latency")


def race(
    visit: Visit,
    *,
    transfer: Transfer = Transfer.relay,
    carrier: Carrier = Carrier.backend,
    decode: DecodeName = DecodeName.last,
) -> None:
    """One stage alone, then all, by length."""
    ranks, figures = visit.ranks, visit.figures
    visit.say("loading the model")
    model = load_model(visit.model_to_measure(), ranks)
    prefill = PrefillOptions(transfer=transfer, carrier=carrier)
    visit.say("the first split")
    split = AutoPartition.start(model, ranks, prefill=prefill, folder=visit.folder / "splits", tell=visit.say)
    alone = Engine(model, ranks, prefill=PrefillOptions(name=PrefillName.single), lends=False)
    chain = Engine(model, ranks, prefill=prefill, partition=split, decode=DecodeOptions(name=decode), lends=False)
    dtype = str(model.dtype).removeprefix("torch.")
    for length in SMALL_LENGTHS if visit.is_small else LENGTHS:
        if length > (model.max_positions or length) or not visit.has_room(model, length):
            continue
        ids = random_ids(length - 64, model.vocab_size)
        batches: dict[str, list[GenerationBatch]] = {"single": [], "kv_runahead": []}
        for n in range(1 + ROUNDS):
            options = GenerationOptions(max_new_tokens=NEW_TOKENS[n % 2], ignore_eos=True)
            for name, engine in (("single", alone), ("kv_runahead", chain)):
                visit.say(f"{length:,} tokens, {name}")
                batches[name].append(engine.generate([ids], options))
        one_s, ours_s = (statistics.median(batch.ttft_s for batch in each[1:]) for each in batches.values())
        num = ranks.num_stages
        names = (f"TTFT of {length:,} tokens, one stage", f"TTFT of {length:,} tokens, {num} stages")
        if ranks.num_shares == 1:
            sizes = ttft_sizes(model, length - 64)
            figures.note(names[0], one_s * 1e3, "TTFT", *sizes)
            figures.note(names[1], ours_s * 1e3, "TTFT of a chain", num, *sizes)
        else:  # nothing is estimated of models that ranks share
            figures.note(names[0], one_s * 1e3, "ms")
            figures.note(names[1], ours_s * 1e3, "ms")
        figures.note(f"speed-up at {length:,}", one_s / ours_s, "speed-up", num)
        step_ms = 1e3 * _step_s(batches["kv_runahead"][1:])
        if ranks.num_shares == 1 and decode is DecodeName.last:
            step_bytes = tasks.decoded_bytes(model, length)
            figures.note(f"a token after {length:,}", step_ms, "a replayed step", step_bytes, model.num_layers)
        else:
            figures.note(f"a token after {length:,}", step_ms, "ms")
        runs: dict[str, Any] = {name: _spoken(each[-2]) for name, each in batches.items()}  # of the long answers
        about = {"runs": runs, "length": length, "dtype": dtype}
        for finding in check_exactness(about, ranks.size):
            figures.found(finding)


def _step_s(batches: Sequence[GenerationBatch]) -> float:
    """Seconds of a replayed step: how much longer long answers take than short ones, per token."""
    times: dict[int, list[float]] = {}
    for batch in batches:
        [generation] = batch.generations
        steps = len(generation.new_token_ids) - 1
        times.setdefault(steps, []).append(steps * (batch.tpot_s or 0.0))
    (short, short_s), (long, long_s) = sorted((steps, statistics.median(each)) for steps, each in times.items())
    return (long_s - short_s) / (long - short)


def _spoken(batch: GenerationBatch) -> dict[str, Any]:
    """Tokens and logits that the doctor's check of exactness compares."""
    [generation] = batch.generations
    return {"tokens": generation.new_token_ids, "top5": generation.first_token_logits_top5}
