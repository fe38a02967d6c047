"""Seconds of a plain step, of a verification and of a drafted token at a length, over random keys and values."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from benchmarks.harness.lines import Line
from benchmarks.harness.study import Run
from benchmarks.harness.text_table import Rows
from launch.program.text_table import text_table
from policies.retriever import Retriever
from runahead import GenerationOptions, Model
from runahead.decoding.forward import fastest_form
from runahead.decoding.lanes import Lanes
from runahead.decoding.row import Row, batch_ids
from runahead.decoding.speculative.retrieving_drafts import RetrievingDrafter

NUM_DRAFTED = (1, 2, 4, 8)
"""Tokens of the drafts that are verified."""

REPEATS = 5
RATES = (0.5, 0.7, 0.8, 0.9, 0.95)
"""Acceptance rates for which the table has gains."""


@torch.inference_mode()
def costs(run: Run, model: Model, policy: Retriever, num_tokens: int) -> Line:
    """Seconds of each kind of step of one row, in turn, and of the index."""
    most = max(NUM_DRAFTED)
    cache = model.empty_cache(num_tokens + most + 1)
    for layer in range(model.num_layers):
        cache.layer(layer).slab_TBKX.normal_()
    ids = [number % model.vocab_size for number in range(num_tokens)]
    row = Row(model, ids, GenerationOptions(max_new_tokens=most + 1), seed=0)
    [id], pads = batch_ids(1), [0]
    form = fastest_form(cache, model, pads=pads, num_tokens=num_tokens, apart=True)
    lanes = Lanes.holding(model, [id], form, pads=pads, num_tokens=num_tokens)
    drafter = RetrievingDrafter(model, policy, lanes)
    drafter.join(id, row)
    began_s = time.perf_counter()
    drafter.begin()
    index_s = time.perf_counter() - began_s

    def seconds(of: Callable[[], object], num_stored: int) -> Callable[[int], float]:
        def timed(number: int) -> float:
            began_s = time.perf_counter()
            of()
            seconds = time.perf_counter() - began_s
            lanes.take_back(id, num_stored)
            return seconds

        return timed

    def verify(num: int) -> Callable[[], object]:
        return lambda: lanes.verify({id: range(num + 1)})

    turns = {"plain": seconds(lambda: lanes.plain({id: 5}), 1)}
    turns |= {f"verify {num}": seconds(verify(num), num + 1) for num in NUM_DRAFTED}
    turns["draft"] = seconds(lambda: drafter.draft({id: [*ids, 5]}, {id: most}, {id: row.sampler}), 0)
    found = {name: median(times) for name, times in run.in_turn(turns, REPEATS, warmup=1).items()}
    return {
        "plain_s": found["plain"],
        "verify_s": [found[f"verify {num}"] for num in NUM_DRAFTED],
        "draft_s": found["draft"] / most,
        "index_s": index_s,
    }


def costs_table(lines: Sequence[Line]) -> str:
    """Costs in plain steps, and the largest gain at acceptance rates, with the tokens per draft that give it."""
    rates = (f"gain at {rate:.0%}" for rate in RATES)
    verified = (f"verify {num}" for num in NUM_DRAFTED)
    rows: Rows = [("tokens", "dtype", "policy", "budget", "plain", "drafted token", *verified, "index", *rates)]
    for line in lines:
        plain_s, draft_s, verify_s = line["plain_s"], line["draft_s"], line["verify_s"]
        gains = []
        for rate in RATES:
            gain, num = max(
                (sum(rate**at for at in range(num + 1)) * plain_s / (seconds + num * draft_s), num)
                for num, seconds in zip(NUM_DRAFTED, verify_s, strict=True)
            )
            gains.append(f"{gain:.2f} ({num})")
        rows.append(
            (
                f"{line['tokens']:,}",
                line["dtype"],
                line["policy"],
                f"{line['budget']:g}",
                f"{1000 * plain_s:.0f} ms",
                f"{draft_s / plain_s:.2f}",
                *(f"{seconds / plain_s:.2f}" for seconds in verify_s),
                f"{line['index_s']:.2f} s",
                *gains,
            )
        )
    return text_table(rows)
