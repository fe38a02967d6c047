"""Decoding time per token over the prompt's length: retrieving policies against the full cache.

    python -m benchmarks.studies.retrieval.retrieval_decode --lengths 1024 2048 4096 8000
    python -m benchmarks.studies.retrieval.retrieval_decode --filled --lengths 32000 --policies "sparq, 10%"
    python -m benchmarks.studies.retrieval.retrieval_decode --draw-only

The bound is in bytes, since a step of one token reads each of them once: weights and the whole KV cache for the full
cache; weights, what a choice reads of its index, the query projections once more for predictions, and the fetched keys
and values under a policy. Its gain is the ratio of the two, of which the measured gain reaches the printed share.

With `--filled` keys and values are drawn and the weights are random, in SmolLM2's shape: a text longer than its
positions without a prefill. Policies run in turn, a few tokens each, round after round; with `--filled` one after
another, each in turn with the full cache, so that one policy's keys and values are in memory at a time. Appends a JSON
line per length and policy to benchmarks/results/retrieval_decode.jsonl and draws docs/studies/retrieval_decode.png from
these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

from benchmarks.harness.lines import Line
from benchmarks.harness.machine import ROOT, compute_as_a_rank
from benchmarks.harness.pictures import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, legend
from benchmarks.harness.study import Run, Study, option
from benchmarks.harness.text_samples import EXAMPLE, repeated, text_ids
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
from policies.clusterkv import ClusterKV
from policies.exact_topk import ExactTopK
from policies.infinigen import InfiniGen
from policies.infllm import InfLLM
from policies.offload import Offload
from policies.quest import Digest, Quest
from policies.retroinfer import RetroInfer
from policies.shadowkv import ShadowKV
from policies.sparq import SparQ
from policies.squeezed_attention import SqueezedAttention
from runahead import Model, ModelOptions
from runahead.config import ModelName
from runahead.picture_style import ACCENT, INK, MUTED, dress, new_figure, panels, png, set_title, tokens

FULL = "full"
POLICIES: dict[str, Callable[[], Policy]] = {
    "infinigen": InfiniGen,
    "infinigen, predicted": lambda: InfiniGen(ahead=True),
    "quest, 10%": lambda: Quest(fetch=0.1),
    "quest, mean keys, 10%": lambda: Quest(fetch=0.1, digest=Digest.mean),
    "exact top-k, 10%": lambda: ExactTopK(fetch=0.1),
    "offload": Offload,
    "sparq, 10%": lambda: SparQ(fetch=0.1),
    "clusterkv, 10%": lambda: ClusterKV(fetch=0.1),
    "squeezed": SqueezedAttention,
    "retroinfer, 10%": lambda: RetroInfer(fetch=0.1),
    "retroinfer, 2%": lambda: RetroInfer(fetch=0.02),
    "infllm, 10%": lambda: InfLLM(fetch=0.1, block=16, sinks=4, recent=64, clamped=False),
    "shadowkv, 10%": lambda: ShadowKV(fetch=0.1, rank=32, outliers=4),
}
LOOKS = {
    "infinigen": (ACCENT, "D"),
    "quest, 10%": (GREEN, "^"),
    "exact top-k, 10%": (ORANGE, "v"),
    "sparq, 10%": (BLUE, "s"),
    "clusterkv, 10%": (PURPLE, "h"),
    "retroinfer, 10%": (MUTED, "P"),
    "squeezed": (INK, "<"),
    "infllm, 10%": (SKY, "X"),
    "shadowkv, 10%": (VERMILION, "d"),
}
SHAPE = str(ROOT / "benchmarks" / "models" / "smollm2-135m.json")
"""SmolLM2's shape, with positions for a longer text."""


def measure(run: Run) -> Iterator[Line]:
    """Measure one line per length and policy."""
    options = run.options
    compute_as_a_rank()
    given = ModelOptions(name=ModelName.random, config=SHAPE) if options.filled else ModelOptions()
    model = Model.load(given, torch.device("cpu"))
    text = text_ids(Model.load(ModelOptions(), torch.device("cpu")) if options.filled else model, options.text)
    together = [[name] for name in options.policies] if options.filled else [options.policies]
    for length in options.lengths:
        ids = repeated(text, length)  # time does not depend on the text
        prompt = RetrievedPrompt.filled(model, ids) if options.filled else RetrievedPrompt(model, ids)
        full = FullCache.of(prompt.under(Offload()), options.tokens * (options.rounds + 1))
        for names in together:
            full.num_tokens = length  # tokens of the policies before are stored over
            conversations = {name: prompt.under(POLICIES[name]()) for name in names}
            follow = {FULL: full.follow, **{name: each.follow for name, each in conversations.items()}}
            turns = {name: turn_of(each, ids, options.tokens) for name, each in follow.items()}
            seconds = run.in_turn(turns, options.rounds, warmup=1)
            for name in turns:
                line = {"model": model.name, "policy": name, "length": length, "filled": options.filled}
                line |= {"tpot_s": seconds[name], "full_tpot_s": seconds[FULL], "full_bytes": full_bytes(model, length)}
                if name == FULL:
                    yield line | {"bytes": line["full_bytes"]}
                else:
                    cache = conversations[name].cache
                    yield line | {"bytes": sum(retrieved_bytes(model, cache)), "fetched_share": fetched_share(cache)}


def latest(found: list[Line]) -> dict[int, dict[str, Line]]:
    """The last line of each policy by length. Earlier versions, on another machine, have no times of the full cache."""
    of: dict[int, dict[str, Line]] = {}
    for line in found:
        if "full_tpot_s" in line:
            of.setdefault(line["length"], {})[line["policy"]] = line
    return {length: of[length] for length in sorted(of)}


def gain(line: Line) -> float:
    """Ratio of the full cache's time to a policy's, the median over rounds."""
    return median(a / b for a, b in zip(line["full_tpot_s"], line["tpot_s"], strict=True))


def table(found: list[Line]) -> str:
    """Rows of the last lines, one per length and policy."""
    rows: Rows = [("tokens", "policy", "ms a token", "full cache", "gain", "bound", "reached", "fetched")]
    for length, by_policy in latest(found).items():
        for name, line in by_policy.items():
            faster, bound, reached = gain(line), line["full_bytes"] / line["bytes"], "-"
            if name != FULL and bound > 1.1:
                reached = f"{(faster - 1) / (bound - 1):.0%}"
            times = (f"{1e3 * median(line[each]):.1f}" for each in ("tpot_s", "full_tpot_s"))
            of_it = f"{length:,}", name, *times, f"{faster:.2f}", f"{bound:.2f}"
            rows.append((*of_it, reached, f"{line['fetched_share']:.1%}" if "fetched_share" in line else "100%"))
    return text_table(rows, left=(1,))


def picture(found: list[Line]) -> bytes:
    """Draw the gain over the full cache in the same rounds, with its bound: times of different days do not compare."""
    by_length = latest(found)
    figure = new_figure(8.4, 4.6)
    [axes] = panels(figure, 1, 1, 1)
    for name in (name for name in LOOKS if any(name in by_policy for by_policy in by_length.values())):
        colour, marker = LOOKS[name]
        points = [(length, by_policy[name]) for length, by_policy in by_length.items() if name in by_policy]
        x = [length for length, _ in points]
        axes.plot(x, [gain(line) for _, line in points], color=colour, marker=marker, label=name)
        axes.plot(x, [line["full_bytes"] / line["bytes"] for _, line in points], color=colour, linestyle=":")
    axes.axhline(1.0, color=MUTED, linewidth=1, linestyle="--")
    dress(axes, x="tokens in the cache", y="times faster than the full cache; dotted: by bytes alone")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(by_length), [tokens(length) for length in by_length])
    axes.minorticks_off()
    legend(figure, loc="outside right upper")
    some: dict[str, Any] = next(iter(next(iter(by_length.values())).values()))
    set_title(figure, "Decoding with K,V that are retrieved", f"{some['model']}, one CPU thread")
    return png(figure)


STUDY = Study(
    name="retrieval.retrieval_decode",
    text=__doc__,
    has="policy",
    measure=measure,
    table=table,
    options={
        "lengths": option([1024, 2048, 4096, 8000]),
        "tokens": option(8, "of one turn"),
        "rounds": option(7),
        "filled": option(False, "random weights in SmolLM2's shape, drawn keys and values"),
        "policies": option(list(POLICIES), choices=list(POLICIES), metavar="POLICY"),
        "text": option(EXAMPLE, "a text file, or one compressed by gzip"),
    },
    pictures={"retrieval_decode.png": picture},
)

if __name__ == "__main__":
    STUDY.main()
