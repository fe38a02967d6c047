"""All ranks of a host, or of several: TTFT of KV-Runahead against one rank, and what the doctor's probe finds."""

from __future__ import annotations

from typing import Any

from benchmarks.doctor import tasks
from benchmarks.doctor.checks import check_decoding, check_devices, check_exactness, check_links
from benchmarks.doctor.facts import Facts
from benchmarks.first_day.visit import Visit
from benchmarks.harness.text_samples import random_ids
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
ROUNDS = 4
"""Prompts of each length; the split learns from each, so the last one is the best."""


def probe(visit: Visit) -> None:
    """Links, memory, matrix products, exactness and decoding, with the doctor's verdicts."""
    length = 128 if visit.is_small else 4096
    task = tasks.Task(kind="probe", model=tasks.plain(visit.model_to_measure()), ranks={}, length=length)
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
    alone = Engine(model, ranks, prefill=PrefillOptions(name=PrefillName.single))
    chain = Engine(model, ranks, prefill=prefill, partition=split, decode=DecodeOptions(name=decode))
    dtype = str(model.dtype).removeprefix("torch.")
    for length in SMALL_LENGTHS if visit.is_small else LENGTHS:
        if length > (model.max_positions or length):
            continue
        ids = random_ids(length - 64, model.vocab_size)
        best: dict[str, GenerationBatch] = {}
        for name, engine in {"single": alone, "kv_runahead": chain}.items():
            visit.say(f"{length:,} tokens, {name}")
            rounds = 2 if engine is alone else ROUNDS
            batches = [
                engine.generate([ids], GenerationOptions(max_new_tokens=16, ignore_eos=True)) for _ in range(rounds)
            ]
            best[name] = min(batches[1:], key=lambda batch: batch.ttft_s)
        ours, one = best["kv_runahead"], best["single"]
        figures.note(f"TTFT of {length:,} tokens, one stage", one.ttft_s * 1e3, "ms")
        figures.note(f"TTFT of {length:,} tokens, {ranks.num_stages} stages", ours.ttft_s * 1e3, "ms")
        figures.note(f"speed-up at {length:,}", one.ttft_s / ours.ttft_s, "speed-up", ranks.num_stages)
        if ours.tpot_s is not None:
            figures.note(f"a token after {length:,}", ours.tpot_s * 1e3, "ms")
        runs: dict[str, Any] = {name: _spoken(batch) for name, batch in best.items()}
        about = {"runs": runs, "length": length, "dtype": dtype}
        for finding in check_exactness(about, ranks.size):
            figures.found(finding)


def _spoken(batch: GenerationBatch) -> dict[str, Any]:
    """What the doctor's check of exactness compares."""
    [generation] = batch.generations
    return {"tokens": generation.new_token_ids, "top5": generation.first_token_logits_top5}
