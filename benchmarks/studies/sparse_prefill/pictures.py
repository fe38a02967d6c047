"""Pictures of docs/studies/sparse_prefill.md: TTFT over the length by method, and loss over density."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean, median
from typing import Any

from benchmarks.harness.declared import Curves, Panel, from_zero
from benchmarks.harness.lines import Line, read
from benchmarks.harness.machine import RESULTS
from benchmarks.harness.study import newest
from launch.exact.search import ranges

EXACT = "exact"
OTHERS = RESULTS / "speculative_prefill.jsonl"
"""Lines of the study of speculative prefill, whose exact prefill is that of its own rounds."""


def gain(line: Line) -> float:
    """Median over rounds of the exact prefill's time over that of the same round."""
    return median(exact / each for exact, each in zip(line["exact_s"], line["ttft_s"], strict=True))


def density(line: Line) -> float | None:
    """Share of all pairs of blocks that was computed, mean over rounds: of each rank by how many its queries see."""
    found = []
    for shares, ends in zip(line["density"], line["boundaries"], strict=True):
        seen = [end**2 - start**2 for start, end in pairwise(ends)]
        known = [(share, pairs) for share, pairs in zip(shares, seen, strict=True) if share is not None]
        if known:
            found.append(sum(share * pairs for share, pairs in known) / sum(pairs for _, pairs in known))
    return mean(found) if found else None


def loss(line: Line) -> float | None:
    """Mean difference of copy-NLL to the exact prefill's; None if it was not measured."""
    pairs = list(zip(line["nll"], line["exact_nll"], strict=True))
    return mean(each - exact for each, exact in pairs) if pairs else None


def speculative() -> list[Line]:
    """The newest times of speculative prefills, with those of the exact one, as lines of this study."""
    timed = [line for line in read(OTHERS, option=str(OTHERS), kind="measured") if line["measured"] == "time"]
    known = {(line["length"], line["share"], line["way"]): line for line in timed}
    return [
        {
            "way": f"speculative, {way.replace('=', ' ')}, {share:.0%}",
            "tokens": length,
            "ttft_s": line["ttft_s"],
            "exact_s": known[length, share, EXACT]["ttft_s"],
        }
        for (length, share, way), line in known.items()
        if way.startswith("layers") and (length, share, EXACT) in known
    ]


def rule_of(line: Line) -> str:
    """Length, rule and exact layers of a line: those that differ in density alone are alike."""
    options = line["options"]
    exact = f", {ranges(sorted(options['exact_layers']))} exact" if options.get("exact_layers") else ""
    return f"{line['tokens']:,} tokens, {'threshold' if 'threshold' in options else 'density'}{exact}"


def of_text(found: list[Line]) -> list[Line]:
    """The newest lines of SmolLM2 by length and way."""
    return [line for line in newest("model", "tokens", "way")(found) if line["model"] == "smollm2"]


def by_length(found: list[Line]) -> bytes | None:
    """TTFT, and how many times as fast it is as the exact prefill's of the same rounds."""
    drawn = of_text(found) + (speculative() if OTHERS.exists() else [])
    if not drawn:
        return None
    curves = Curves(
        title="TTFT by method",
        subject=lambda _: "SmolLM2, text, two ranks of one thread; medians of rounds in which methods took turns",
        lines=lambda _: drawn,
        curve=lambda line: str(line["way"]),
        x_label="tokens of the prompt",
        x=lambda line: float(line["tokens"]),
        panels=lambda _: [
            Panel(title="TTFT", y_label="seconds", y=lambda line: median(line["ttft_s"])),
            Panel(title="over the exact prefill", y_label="times as fast", y=gain),
        ],
        finish=from_zero,
    )
    return curves(found)


def by_density(found: list[Line]) -> bytes | None:
    """Loss of copies over the share of blocks that were computed, a curve per length and rule."""
    drawn = [line for line in of_text(found) if density(line) is not None and loss(line) is not None]
    if not drawn:
        return None

    def zero(axes: Any, here: list[Line]) -> None:
        axes.axhline(0, color="black", linewidth=0.8, linestyle="--")
        axes.set_xlim(left=0)

    curves = Curves(
        title="What sparse attention loses, by density",
        subject=lambda _: "SmolLM2; the first 512 tokens of a prompt, where they come again after it",
        lines=lambda _: drawn,
        curve=rule_of,
        x_label="blocks of keys that were computed, %",
        x=lambda line: 100 * (density(line) or 0.0),
        panels=lambda _: [Panel(title="", y_label="copy-NLL over the exact prefill's, nats", y=loss)],
        finish=zero,
    )
    return curves(found)
