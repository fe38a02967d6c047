"""Decoding time per token over the prompt's length: retrieving policies against the full cache.

    python -m benchmarks.studies.retrieval_decode --lengths 1024 2048 4096 8192
    python -m benchmarks.studies.retrieval_decode --draw-only

The bound is in bytes, since a step of one token reads each of them once: weights and the whole KV cache for the full
cache; weights, the query projections once more for predictions, partial keys, and the fetched keys and values under a
policy. Its gain is the ratio of the two, of which the measured gain reaches the printed share.

Policies run in turn, a few tokens each, round after round. Appends a JSON line per length and policy to
benchmarks/results/retrieval_decode.jsonl and draws docs/retrieval_decode.png from these lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

from benchmarks.harness.lines import Line
from benchmarks.harness.pictures import BLUE, GREEN, ORANGE, legend
from benchmarks.harness.study import Run, Study, option
from benchmarks.harness.text_samples import EXAMPLE, text_ids
from benchmarks.harness.text_table import Rows
from benchmarks.studies.retrieved_prompt import (
    FullCache,
    RetrievedPrompt,
    fetched_share,
    full_bytes,
    retrieved_bytes,
    turn_of,
)
from launch.program.text_table import text_table
from policies.base import Policy
from policies.exact_topk import ExactTopK
from policies.infinigen import InfiniGen
from policies.offload import Offload
from policies.quest import Quest
from runahead import Model, ModelOptions
from runahead.picture_style import ACCENT, INK, MUTED, dress, new_figure, panels, png, set_title, tokens
from runahead.ranks.devices import keep_freed_memory

FULL = "full"
POLICIES: dict[str, Callable[[], Policy]] = {
    "infinigen": InfiniGen,
    "infinigen, predicted": lambda: InfiniGen(ahead=True),
    "quest, 10%": lambda: Quest(fetch=0.1),
    "exact top-k, 10%": lambda: ExactTopK(fetch=0.1),
    "offload": Offload,
}
LOOKS = {
    FULL: (INK, "o"),
    "infinigen": (ACCENT, "D"),
    "infinigen, predicted": (BLUE, "s"),
    "quest, 10%": (GREEN, "^"),
    "exact top-k, 10%": (ORANGE, "v"),
    "offload": (MUTED, "h"),
}


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per length and policy."""
    options = run.options
    torch.set_num_threads(1)
    keep_freed_memory()  # as the runtime does
    model = Model.load(ModelOptions(), torch.device("cpu"))
    text = text_ids(model, options.text)
    for length in options.lengths:
        ids = (text * (length // len(text) + 1))[:length]  # time does not depend on the text
        prompt = RetrievedPrompt(model, ids)
        conversations = {name: prompt.under(POLICIES[name]()) for name in options.policies}
        full = FullCache.of(prompt.under(Offload()), options.tokens * (options.rounds + 1))
        follow = {FULL: full.follow, **{name: each.follow for name, each in conversations.items()}}
        turns = {name: turn_of(each, ids, options.tokens) for name, each in follow.items()}
        seconds = run.in_turn(turns, options.rounds, warmup=1)
        for name in turns:
            line = {"model": model.name, "policy": name, "length": length, "tpot_s": seconds[name]}
            if name == FULL:
                yield line | {"bytes": full_bytes(model, length)}
            else:
                cache = conversations[name].cache
                yield line | {"bytes": sum(retrieved_bytes(model, cache)), "fetched_share": fetched_share(cache)}


def latest_run(found: list[Line]) -> dict[int, dict[str, Line]]:
    """Lines by length and policy: for every length those of its last run."""
    dates = {line["length"]: line["date"] for line in found}
    latest: dict[int, dict[str, Line]] = {length: {} for length in sorted(dates)}
    for line in found:
        if line["date"] == dates[line["length"]]:
            latest[line["length"]][line["policy"]] = line
    return latest


def gain(full: Line, line: Line) -> float:
    """Ratio of the full cache's time to a policy's, the median over rounds."""
    return median(a / b for a, b in zip(full["tpot_s"], line["tpot_s"], strict=True))


def table(found: list[Line]) -> str:
    """Rows of the last runs, one per length and policy."""
    latest = latest_run(found)
    rows: Rows = [("tokens", "policy", "ms a token", "gain", "bound", "reached", "fetched")]
    for length, by_policy in latest.items():
        full = by_policy[FULL]
        for name, line in by_policy.items():
            faster, bound, reached = gain(full, line), full["bytes"] / line["bytes"], "-"
            if name != FULL and bound > 1.1:
                reached = f"{(faster - 1) / (bound - 1):.0%}"
            of_it = f"{length:,}", name, f"{1e3 * median(line['tpot_s']):.1f}", f"{faster:.2f}", f"{bound:.2f}"
            rows.append((*of_it, reached, f"{line['fetched_share']:.1%}" if "fetched_share" in line else "100%"))
    return text_table(rows, left=(1,))


def picture(found: list[Line]) -> bytes:
    """Draw time per token, and the gain over the full cache with its bound."""
    latest = latest_run(found)
    figure = new_figure(10.4, 4.4)
    left, right = panels(figure, 2, 1, 2)
    names = [name for name in LOOKS if any(name in by_policy for by_policy in latest.values())]
    for name in names:
        colour, marker = LOOKS[name]
        points = [(length, by_policy) for length, by_policy in latest.items() if name in by_policy]
        x = [length for length, _ in points]
        left.plot(x, [1e3 * median(by[name]["tpot_s"]) for _, by in points], color=colour, marker=marker, label=name)
        if name != FULL:
            right.plot(x, [gain(by[FULL], by[name]) for _, by in points], color=colour, marker=marker)
            right.plot(x, [by[FULL]["bytes"] / by[name]["bytes"] for _, by in points], color=colour, linestyle=":")
    right.axhline(1.0, color=MUTED, linewidth=1, linestyle="--")
    dress(left, title="Time per token", x="tokens in the cache", y="ms")
    dress(right, title="Full cache's time over it; dotted: by bytes alone", x="tokens in the cache", y="times faster")
    left.set_ylim(0)
    for axes in (left, right):
        axes.set_xticks(list(latest), [tokens(length) for length in latest])
    legend(left)
    some: dict[str, Any] = next(iter(next(iter(latest.values())).values()))
    set_title(figure, "Decoding with K,V that are retrieved", f"{some['model']}, one CPU thread")
    return png(figure)


STUDY = Study(
    name="retrieval_decode",
    text=__doc__,
    has="policy",
    measure=measure,
    table=table,
    options={
        "lengths": option([1024, 2048, 4096, 8000]),
        "tokens": option(8, "of one turn"),
        "rounds": option(7),
        "policies": option(list(POLICIES), choices=list(POLICIES), metavar="POLICY"),
        "text": option(EXAMPLE, "a text file, or one compressed by gzip"),
    },
    pictures={"retrieval_decode.png": picture},
)

if __name__ == "__main__":
    STUDY.main()
